// Speaks the page's protocol without a model: what the user says decides what happens.

const NBYTES = 1000000;
const stopped = new Set();
const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

postMessage({ type: "ready", device: "Pretend GPU", software: true });

async function load({ source, options }) {
  const name = source.name ?? source.file?.name ?? "bundled";
  if (name.startsWith("broken")) {
    postMessage({ type: "error", kind: "file", sentence: `${name} is not a GGUF file.` });
    return;
  }
  for (let loaded = 0; loaded <= NBYTES; loaded += NBYTES / 4) {
    postMessage({ type: "progress", loaded, total: NBYTES });
    const isStuck = name.startsWith("stuck");
    if (isStuck && loaded === NBYTES / 2) return;
    await pause(isStuck ? 150 : 2);
  }
  postMessage({ type: "loaded", name, context: options.context ?? 32768, device: "Pretend GPU", nbytes: NBYTES });
}

/** What the fake says to a message. */
function replyTo(request) {
  const text = request.messages.at(-1).content;
  if (text === "request") return `\`\`\`json\n${JSON.stringify(request)}\n\`\`\``;
  return text.startsWith("echo ") ? text.slice(5) : `You said ${text}.`;
}

async function chat(request) {
  const { id, messages, settings } = request;
  const text = messages.at(-1).content;
  if (settings.think) postMessage({ type: "piece", id, text: "Let me see.", thinking: true });
  if (text === "lose the device" || text === "fail") {
    postMessage({ type: "piece", id, text: "Half a", thinking: false });
    const lost = text !== "fail";
    const sentence = lost ? "The GPU was lost." : "The prompt is too long.";
    postMessage({ type: "error", id, kind: lost ? "device-lost" : "other", sentence });
    return;
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

addEventListener("message", ({ data }) => {
  if (data.type === "load") load(data);
  if (data.type === "chat") chat(data);
  if (data.type === "stop") stopped.add(data.id);
});
