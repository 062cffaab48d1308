// Speaks the page's protocol without a model: what the user says, and what files are called, decides.

const NBYTES = 1000000;
const ROOM = Infinity; // bytes of the GPU
const STORAGE = 5000000; // bytes for models in this browser
const stopped = new Set();
let onstop = () => {};
const left = new Set();
const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

postMessage({ type: "ready", device: "Pretend GPU", software: true });

const FAILURES = {
  broken: ["file", "is not a GGUF file."],
  huge: ["memory", "needs more than this GPU has."],
  gone: ["storage", "cannot be read from this browser's storage."],
};

async function load({ source, options }) {
  const name = source.name ?? source.file?.name ?? "bundled";
  const failure = FAILURES[name.match(/^[a-z]*/)[0]];
  if (failure) {
    postMessage({ type: "error", kind: failure[0], sentence: `${name} ${failure[1]}` });
    return;
  }
  for (let loaded = 0; loaded <= NBYTES; loaded += NBYTES / 4) {
    postMessage({ type: "progress", loaded, total: NBYTES });
    const isStuck = name.startsWith("stuck");
    if (isStuck && loaded === NBYTES / 2) return;
    await pause(isStuck ? 400 : 2);
  }
  const device = source.kind === "stored" ? "Pretend GPU, from storage" : "Pretend GPU";
  const eyes = source.eyes ? ` with ${source.eyes.file?.name ?? source.eyes.url}` : "";
  postMessage({ type: "loaded", name: name + eyes, context: options.context ?? 32768, device, nbytes: NBYTES });
}

/** Pictures and sounds as JSON. */
function described(_, value) {
  if (value instanceof Blob) return { mime: value.type, nbytes: value.size };
  return ArrayBuffer.isView(value) ? { samples: value.length, loudest: value.reduce((a, b) => Math.max(a, Math.abs(b)), 0) } : value;
}

/** What is written in a message. */
const textIn = ({ content }) => (typeof content === "string" ? content : content.find(({ text }) => text)?.text ?? "");

/** What the fake says to a message. */
function replyTo(request) {
  const text = textIn(request.messages.at(-1));
  if (text === "request") return `\`\`\`json\n${JSON.stringify(request, described)}\n\`\`\``;
  return text.startsWith("echo ") ? text.slice(5) : `You said ${text}.`;
}

async function chat(request) {
  const { id, messages, settings } = request;
  const text = textIn(messages.at(-1));
  const media = messages.map(({ content }) => content).filter(Array.isArray).flat().filter(({ type }) => type !== "text");
  const sensing = { type: "sensing", id, senses: [...new Set(media.map(({ type }) => type))], total: 100 };
  if (media.length) for (const done of [0, 40]) postMessage({ ...sensing, done });
  if (media.length && text === "look long") await new Promise((resolve) => { onstop = resolve; });
  if (media.length && text === "blind") {
    postMessage({ type: "error", id, kind: "senses", sentence: "bundled cannot see: there is no vision tower in its file." });
    return;
  }
  if (settings.think) postMessage({ type: "piece", id, text: "Let me see.", thinking: true });
  if (text === "lose the device" || text === "fail") {
    postMessage({ type: "piece", id, text: "Half a", thinking: false });
    const lost = text !== "fail";
    const sentence = lost ? "The GPU was lost." : "The prompt is too long.";
    postMessage({ type: "error", id, kind: lost ? "device-lost" : "other", sentence });
    return;
  }
  if (text === "focus") {
    for (let step = 1; step <= 3; step += 1) {
      const runs = [["<b>Half</b>", true], [" noise↵", false]].slice(0, step);
      postMessage({ type: "canvas", id, runs, block: 1, step, settled: 2 * step, size: 8 });
      await pause(step === 3 ? 500 : 5);
    }
  }
  if (text === "die") setTimeout(() => { throw new Error("dead"); });
  let tokens = 0;
  const pieces = ["forever", "die"].includes(text) ? Array(10000).fill("on and ") : replyTo(request).match(/[\s\S]{1,7}/g);
  for (const piece of pieces) {
    if (stopped.has(id)) break;
    postMessage({ type: "piece", id, text: piece, thinking: false });
    tokens += 1;
    await pause(text === "forever" ? 10 : 1);
  }
  postMessage({ type: "done", id, finish: stopped.has(id) ? "stopped" : "stop", tokens, tokens_per_second: 12.34 });
}

// What is stored outlives the page: it lies in a cache of the browser, as JSON.

async function stored(change = (models) => models) {
  const cache = await caches.open("fake");
  const kept = await cache.match("/fake");
  const models = change(kept ? await kept.json() : []);
  await cache.put("/fake", Response.json(models));
  return models;
}

async function tellStored(change) {
  const models = await stored(change);
  const free_nbytes = STORAGE - models.reduce((sum, { have }) => sum + have, 0);
  postMessage({ type: "stored", models, free_nbytes });
}

async function keep({ source: { kind, file, digest, ...source } }) {
  const { name, nbytes } = kind === "file" ? { name: file.name, nbytes: file.size } : source;
  const id = digest ?? `${name} ${nbytes}`;
  left.delete(id);
  const old = (await stored()).find((model) => model.id === id);
  const model = { id, name, nbytes, have: old?.have ?? 0, digest: digest ?? null, gpu_nbytes: nbytes, gpu_least_nbytes: nbytes, isChecked: false };
  const isSlow = name.startsWith("slow"); // comes to its half, and goes on when it is asked for again
  const note = () => tellStored((models) => [...models.filter((other) => other.id !== id), { ...model, whole: model.isChecked }]);
  while (model.have < nbytes) {
    postMessage({ type: "keeping", id, name, stage: "copying", done: model.have, total: nbytes });
    await pause(isSlow && !old ? 150 : 20);
    if (left.has(id)) {
      postMessage({ type: "left", id, name });
      return;
    }
    if (isSlow && !old && model.have >= nbytes / 2) continue;
    model.have = Math.min(nbytes, model.have + Math.ceil(nbytes / 10));
    await note();
    if (name.startsWith("full") && model.have > nbytes / 2) {
      postMessage({ type: "error", keep: id, kind: "storage", sentence: "This browser has no room left." });
      return;
    }
  }
  postMessage({ type: "keeping", id, name, stage: "checking", done: nbytes / 2, total: nbytes });
  await pause(isSlow ? 1000 : 20);
  if (name.startsWith("bad")) {
    postMessage({ type: "error", keep: id, kind: "file", sentence: `${name} is damaged: its SHA-256 is another.` });
    return;
  }
  model.isChecked = true;
  await note();
  postMessage({ type: "kept", id, name });
}

addEventListener("message", ({ data }) => {
  if (data.type === "load") load(data);
  if (data.type === "chat") chat(data);
  if (data.type === "stop") {
    stopped.add(data.id);
    onstop();
  }
  if (data.type === "keep") keep(data);
  if (data.type === "leave") left.add(data.id);
  if (data.type === "forget") tellStored((models) => models.filter(({ id }) => id !== data.id));
  if (data.type === "stored") tellStored();
  if (data.type === "room") postMessage({ type: "room", nbytes: Math.min(ROOM, data.nbytes) });
});
