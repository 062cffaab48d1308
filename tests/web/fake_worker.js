// A worker that speaks the page's protocol (tab_engine.js) without a model. The text of a message and the names of
// files decide what it does.

const NBYTES = 1000000;
const GPU_NBYTES = Infinity;
const STORAGE_NBYTES = 5000000; // for models in this browser
const stopped = new Set();
let onstop = () => {};
const cancelled = new Set();
const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
// A canvas, the check of a slow copy, and what has "held" in its name end when the test says so (Visitor.release).
const released = new Promise((resolve) => { new BroadcastChannel("release").onmessage = resolve; });

postMessage({ type: "ready", device: "Pretend GPU", software: true });

// By the first word of a name: of files, and of models.
const INSPECTION_FAILURES = {
  broken: ["file", "is not a GGUF file."],
  gone: ["storage", "cannot be read from this browser's storage."],
};
const FAILURES = { huge: ["memory", "needs more than this GPU has."] };
const SHORT_CONTEXT = 2048; // of models whose name begins with "short"

const nameOf = (source) => source.name ?? source.file?.name ?? "bundled";

function failure(failures, name, fields) {
  const [kind, message] = failures[name.match(/^[a-z]*/)[0]] ?? [];
  if (kind) postMessage({ type: "error", kind, message: `${name} ${message}`, ...fields });
  return Boolean(kind);
}

async function inspect({ id, source }) {
  const name = nameOf(source);
  if (failure(INSPECTION_FAILURES, name, { inspect: id })) return;
  if (name.startsWith("waiting")) await released;
  postMessage({ type: "inspected", id, kind: name.startsWith("adapter") ? "adapter" : "model" });
}

let context = 32768; // of the loaded model: here a message takes as many tokens as it has words

async function load({ source, options }) {
  const name = nameOf(source);
  if (failure(FAILURES, name, {})) return;
  for (let loaded = 0; loaded <= NBYTES; loaded += NBYTES / 4) {
    postMessage({ type: "progress", loaded, total: NBYTES });
    const isStuck = name.startsWith("stuck");
    if (isStuck && loaded === NBYTES / 2) return;
    await pause(isStuck ? 400 : 2);
  }
  const device = source.kind === "stored" ? "Pretend GPU, from storage" : "Pretend GPU";
  context = Math.min(options.context ?? 32768, name.startsWith("short") ? SHORT_CONTEXT : Infinity);
  const mmproj = source.mmproj ? ` with ${source.mmproj.file?.name ?? source.mmproj.url}` : "";
  const draft = source.draft ? ` and ${source.draft.url}` : "";
  const abilities = { images: Boolean(source.mmproj), audio: false, thinking: !name.startsWith("gemma3") };
  postMessage({ type: "loaded", name: name + mmproj + draft, context, device, nbytes: NBYTES, ...abilities });
}

/** Describe images and audio in JSON. */
function describe(_, value) {
  if (value instanceof Blob) return { mime: value.type, nbytes: value.size };
  return ArrayBuffer.isView(value) ? { samples: value.length, loudest: value.reduce((a, b) => Math.max(a, Math.abs(b)), 0) } : value;
}

/** Return the text of a message, without the documents or passages before it. */
const textIn = ({ content }) => {
  const text = typeof content === "string" ? content : content.find((part) => part.text)?.text ?? "";
  return text.replace(/^(File: |\[1\] |There are no passages)[^]*\n\n(Question: )?/, "");
};

/** Return the reply to a request. */
function replyTo(request) {
  const results = resultsIn(request.messages);
  if (results.length) return `The tools said: ${results.join(" and ")}`;
  const text = textIn(request.messages.at(-1));
  const json = JSON.stringify(request, describe);
  if (text === "request") return request.settings.schema ? json : `\`\`\`json\n${json}\n\`\`\``;
  return text.startsWith("echo ") ? text.slice(5) : `You said ${text}.`;
}

/** Return the usage of a reply; the oldest turns are left out until half of the context is free. */
function usageOf(messages) {
  const turns = messages.filter(({ role }) => role !== "system").map((message) => [message.role, textIn(message).split(" ").length]);
  const sum = (at) => turns.slice(at).reduce((total, [, words]) => total + words, 0);
  const starts = [...turns.keys()].filter((at) => turns[at][0] === "user");
  const left_out = starts.find((at) => sum(at) <= context / 2) ?? starts.at(-1);
  return { prompt: sum(left_out), reply: 0, context, left_out };
}

/**
 * Call tools for "tool NAME JSON", a call a line, after which the reply says what they have returned; for "loop" the
 * calculator as often as it may be called. Return whether a tool was called.
 */
function callTools({ id, messages, settings }, usage) {
  const text = textIn(messages.findLast(({ role }) => role === "user"));
  const isFirst = messages.at(-1).role === "user";
  const lines = text === "loop" ? ['tool calculator {"expression": "1"}'] : isFirst && text.startsWith("tool ") ? text.split("\n") : [];
  if (!settings.tools || settings.tool_choice === "none" || !lines.length) return false;
  if (isFirst) postMessage({ type: "piece", id, text: "I calculate.", thinking: false, usage });
  for (const line of lines) {
    const [, name, json] = line.match(/^tool (\w+) (.*)$/);
    postMessage({ type: "tool_call", id, name, arguments: JSON.parse(json) });
  }
  postMessage({ type: "done", id, finish: "stop", tokens: 5, tokens_per_second: 12.34, usage });
  return true;
}

/** Return the results of tools with which messages end. */
function resultsIn(messages) {
  const at = messages.findLastIndex(({ role }) => role !== "tool");
  return messages.slice(at + 1).map(({ content }) => content);
}

async function chat(request) {
  const { id, messages, settings, continue_last } = request;
  const text = textIn(messages.at(-1));
  const usage = usageOf(messages);
  const parts = messages.map(({ content }) => content).filter(Array.isArray).flat().filter(({ type }) => type !== "text");
  const encoding = { type: "encoding", id, media: [...new Set(parts.map(({ type }) => type))], total: 100 };
  if (parts.length) for (const done of [0, 40]) postMessage({ ...encoding, done });
  if (parts.length && text === "encode long") await new Promise((resolve) => { onstop = resolve; });
  if (parts.length && text === "no encoder") {
    postMessage({ type: "error", id, kind: "no-encoder", message: "bundled has no vision encoder in its file." });
    return;
  }
  if (settings.think) postMessage({ type: "piece", id, text: "Let me see.", thinking: true });
  if (text === "lose the device" || text === "fail") {
    postMessage({ type: "piece", id, text: "Half a", thinking: false });
    const lost = text !== "fail";
    const message = lost ? "The GPU was lost." : "The prompt is too long.";
    postMessage({ type: "error", id, kind: lost ? "device-lost" : "other", message });
    return;
  }
  if (text === "diffuse") {
    for (let step = 1; step <= 3; step += 1) {
      const runs = [["<b>Half</b>", true], [" noise↵", false]].slice(0, step);
      postMessage({ type: "canvas", id, runs, number: 1, step, accepted: 2 * step, size: 8 });
      await pause(5);
    }
    await released;
  }
  if (text === "call") {
    postMessage({ type: "tool_call", id, name: "get_weather", arguments: { city: "<b>Bern</b>", days: 3 } });
    postMessage({ type: "done", id, finish: "stop", tokens: 9, tokens_per_second: 12.34, usage });
    return;
  }
  if (callTools(request, usage)) return;
  if (text === "draft") Object.assign(usage, { drafted: 5, accepted: 4 });
  if (text === "die") setTimeout(() => { throw new Error("dead"); });
  let tokens = 0;
  const reply = continue_last ? " and the rest." : replyTo(request);
  const pieces = ["forever", "die"].includes(text) ? Array(10000).fill("on and ") : reply.match(/[\s\S]{1,7}/g);
  for (const piece of pieces) {
    if (stopped.has(id)) break;
    tokens += 1;
    usage.reply = tokens;
    postMessage({ type: "piece", id, text: piece, thinking: false, usage });
    await pause(text === "forever" ? 10 : 1);
  }
  const finish = stopped.has(id) ? "stopped" : text.startsWith("cut") && !continue_last ? "length" : "stop";
  postMessage({ type: "done", id, finish, tokens, tokens_per_second: 12.34, usage });
  if (text === "lose the device afterwards") postMessage({ type: "error", kind: "device-lost", message: "The GPU was lost." });
}

// Stored models outlive the page: they are JSON in a cache of the browser.

async function storedModels(change = (models) => models) {
  const cache = await caches.open("fake");
  const entry = await cache.match("/fake");
  const models = change(entry ? await entry.json() : []);
  await cache.put("/fake", Response.json(models));
  return models;
}

async function reportStored(change) {
  const models = await storedModels(change);
  const free_nbytes = STORAGE_NBYTES - models.reduce((sum, { stored_nbytes }) => sum + stored_nbytes, 0);
  postMessage({ type: "stored_models", models, free_nbytes });
}

async function store({ source: { kind, file, digest, ...source } }) {
  const { name, nbytes } = kind === "file" ? { name: file.name, nbytes: file.size } : source;
  const id = digest ?? `${name} ${nbytes}`;
  cancelled.delete(id);
  const partial = (await storedModels()).find((other) => other.id === id);
  const model = {
    id, name, nbytes, stored_nbytes: partial?.stored_nbytes ?? 0, complete: false, digest: digest ?? null, mmproj: null,
    gpu_nbytes: nbytes, gpu_min_nbytes: nbytes,
  };
  const isSlow = name.startsWith("slow"); // stops at half, and is completed when it is resumed and released
  const report = () => reportStored((models) => [...models.filter((other) => other.id !== id), { ...model }]);
  while (model.stored_nbytes < nbytes) {
    postMessage({ type: "storing", id, name, stage: "copying", done: model.stored_nbytes, total: nbytes });
    await pause(isSlow && !partial ? 150 : 20);
    if (cancelled.has(id)) {
      postMessage({ type: "store_cancelled", id, name });
      return;
    }
    if (isSlow && !partial && model.stored_nbytes >= nbytes / 2) continue;
    model.stored_nbytes = Math.min(nbytes, model.stored_nbytes + Math.ceil(nbytes / 10));
    await report();
    if (name.startsWith("full") && model.stored_nbytes > nbytes / 2) {
      if (name.includes("held")) await released;
      postMessage({ type: "error", store: id, kind: "storage", message: "The storage of this browser is full." });
      return;
    }
  }
  postMessage({ type: "storing", id, name, stage: "checking", done: nbytes / 2, total: nbytes });
  await pause(20);
  if (isSlow || name.includes("held")) await released;
  if (name.startsWith("bad")) {
    postMessage({ type: "error", store: id, kind: "file", message: `${name} is damaged: its SHA-256 differs.` });
    return;
  }
  model.complete = true;
  await report();
  postMessage({ type: "stored", id, name });
}

// Fine-tuning: the name of the examples' file decides what happens.

let isTuningStopped = false;
let adapters = [];
const reportAdapters = () => postMessage({ type: "adapters", adapters });

function examine({ data, options: { name, epochs } }) {
  if (name.startsWith("bad")) {
    postMessage({ type: "error", tune: "examine", kind: "other", message: `${name} has no row to train on; line 1: it is not JSON.` });
    return;
  }
  const rows = data.trim().split("\n");
  const skipped = rows.flatMap((row, at) => (row.startsWith("{") ? [] : [[at + 1, "it is not JSON."]]));
  const counts = { rows: rows.length, examples: rows.length - skipped.length, tokens: 100, targets: 40 };
  const free_nbytes = name.startsWith("large") ? 1e9 : 3e9;
  postMessage({
    type: "examined", ...counts, truncated: 0, skipped, skipped_count: skipped.length, batch: 4, steps: 4 * epochs, nbytes: 3e9, free_nbytes,
  });
}

async function tune({ options }) {
  isTuningStopped = false;
  postMessage({ type: "adapter_applied", id: null, name: null });
  const [name] = options.name.split(".");
  const steps = name === "slow" ? 1000 : 4 * options.epochs;
  let step = 0;
  while (step < steps && !isTuningStopped) {
    step += 1;
    await pause(10);
    if (name === "diverging" && step === 3) {
      postMessage({ type: "error", tune: "tune", kind: "other", message: "The loss is not a number: use a smaller learning rate." });
      return;
    }
    const held_out_loss = options.held_out && step % 4 === 0 ? 5 / step : null;
    postMessage({ type: "tuning", step, steps, learning_rate: options.learning_rate, loss: 4 / step, held_out_loss, tokens_per_second: 123.4 });
  }
  if (name === "held") await released;
  const id = `${name} ${adapters.length}`;
  const facts = { id, name, steps: step, loss: 4 / step };
  postMessage({ type: "tuned", ...facts, stopped: isTuningStopped });
  adapters = [...adapters, { ...facts, nbytes: 2000000, base: "bundled", stored: name !== "full" }];
  reportAdapters();
}

function addAdapter({ source: { file } }) {
  const name = file.name.replace(".gguf", "");
  adapters = [...adapters, { id: name, name, nbytes: file.size, base: "bundled", stored: true }];
  postMessage({ type: "adapter_added", id: name, name });
  reportAdapters();
}

const HANDLERS = {
  inspect,
  load,
  chat,
  stop({ id }) {
    stopped.add(id);
    onstop();
  },
  store,
  cancel_store: ({ id }) => cancelled.add(id),
  delete: (request) => reportStored((models) => models.filter(({ id }) => id !== request.id)),
  list_stored: () => reportStored(),
  probe_gpu_memory: ({ nbytes }) => postMessage({ type: "gpu_memory", nbytes: Math.min(GPU_NBYTES, nbytes) }),
  examine,
  tune,
  stop_tuning() { isTuningStopped = true; },
  apply_adapter: (request) => postMessage({ type: "adapter_applied", id: request.id, name: adapters.find(({ id }) => id === request.id).name }),
  detach_adapter: () => postMessage({ type: "adapter_applied", id: null, name: null }),
  list_adapters: reportAdapters,
  add_adapter: addAdapter,
  read_adapter: ({ id }) => postMessage({ type: "adapter_file", id, blob: new Blob([`GGUF of ${id}`]) }),
  delete_adapter(request) {
    adapters = adapters.filter(({ id }) => id !== request.id);
    reportAdapters();
  },
};

addEventListener("message", ({ data }) => HANDLERS[data.type]?.(data));
