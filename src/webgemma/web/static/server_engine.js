// The engine on the server that this page comes from: replies of its route /v1/chat/completions, whose stream of events
// becomes the events that chat.js describes.

import { asDataUrl, samplesOf } from "./attachments.js";
import { humanSize } from "./dom.js";
import { t } from "./language.js";
import { problemOf, request } from "./server_access.js";
import { wavOf } from "./wav.js";

const CHAT_URL = "../v1/chat/completions";
const LOST = t("The connection to the server was lost while it wrote this reply.");
const LEAVING_MILLISECONDS = 2000;
const RATE = 16000; // samples per second of the audio encoders

// Files that the server reads as they are; what else this browser can decode is sent in another form.
const AS_THEY_ARE = [
  "image/jpeg", "image/png", "image/webp", "image/gif", "image/bmp",
  "audio/wav", "audio/x-wav", "audio/mpeg", "audio/ogg", "audio/flac", "audio/x-flac",
];
const MAX_PIXELS = 2 ** 22; // far more than a vision encoder reads: larger images only take longer to send

/** Return an image as the server reads it: one of another type or of too many pixels is drawn anew. */
async function sentImage(blob) {
  const bitmap = await createImageBitmap(blob);
  try {
    const scale = Math.min(1, Math.sqrt(MAX_PIXELS / (bitmap.width * bitmap.height)));
    return scale === 1 && AS_THEY_ARE.includes(blob.type) ? blob : await drawn(bitmap, scale, blob.type);
  } finally {
    bitmap.close();
  }
}

async function drawn(bitmap, scale, type) {
  const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(scale * side)));
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, width, height);
  return canvas.convertToBlob(type === "image/jpeg" ? { type, quality: 0.95 } : { type: "image/png" });
}

/** Return audio as the server reads it. */
async function sentAudio(attachment) {
  if (AS_THEY_ARE.includes(attachment.blob.type)) return attachment.blob;
  const samples = await samplesOf(attachment);
  return wavOf([samples], samples.length, RATE);
}

const parts = new WeakMap(); // promises of what was sent, by blob: a conversation is sent with every message

async function partOf(attachment) {
  if (attachment.kind === "image") {
    return { type: "image_url", image_url: { url: await asDataUrl(await sentImage(attachment.blob)) } };
  }
  const url = await asDataUrl(await sentAudio(attachment));
  return { type: "input_audio", input_audio: { data: url.slice(url.indexOf(",") + 1) } };
}

/** Yield the data of the server-sent events of a response. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}

/** Whether an error is the browser's, of a connection that was cut, and not a sentence for the user. */
const isOfBrowser = (error) => [TypeError, SyntaxError, DOMException].some((type) => error instanceof type);

/** Return which kinds of media messages have. */
function mediaIn(messages) {
  const types = new Set(messages.flatMap(({ content }) => content).map(({ type }) => type));
  return [types.has("image_url") && "image", types.has("input_audio") && "audio"].filter(Boolean);
}

/** A reply that is being read: dispatches its events by `tell(type, detail)`. */
class Reply {
  constructor(media, tell) {
    this.media = media;
    this.tell = tell;
    this.finish = null;
    this.tokens = 0;
    this.tokensPerSecond = 0;
    this.usage = null;
  }

  /** Read all events; throw an Error with a message for the user if the reply fails. */
  async read(response) {
    for await (const data of eventsOf(response)) {
      if (data === "[DONE]") return;
      const { error, ...chunk } = JSON.parse(data);
      if (error) throw new Error(error.message);
      this.add(chunk);
    }
    throw new Error(LOST);
  }

  add({ progress, timings, choices: [choice] }) {
    if (progress) this.tellStage(progress);
    if (timings) this.note(timings);
    if (!choice) return;
    const { reasoning, content, canvas, tool_calls: calls = [] } = choice.delta;
    if (canvas) this.tell("canvas", canvas);
    if (reasoning) this.tell("piece", { text: reasoning, thinking: true, usage: this.usage });
    if (content) this.tell("piece", { text: content, thinking: false, usage: this.usage });
    for (const { function: call } of calls) this.tell("tool_call", { name: call.name, arguments: JSON.parse(call.arguments) });
    if (choice.finish_reason) this.finish = choice.finish_reason === "length" ? "length" : "stop";
  }

  tellStage({ stage, done = 0, total = 1 }) {
    const isEncoding = stage === "encoding" || (stage === "reading" && this.media.length && !this.isEncoded);
    this.isEncoded ||= stage === "encoding"; // the encoders are loaded before that
    if (isEncoding) this.tell("encoding", { media: this.media, done, total });
    else this.tell("waiting", { reason: stage });
  }

  note({ cache_n: cached, prompt_n: read, predicted_n: written, predicted_per_second: speed, n_ctx: context, left_out, draft_n: drafted, draft_n_accepted: accepted }) {
    this.tokens = written;
    this.tokensPerSecond = speed;
    this.usage = { prompt: cached + read, reply: written, context, left_out, drafted, accepted };
  }

  tellDone(finish = this.finish ?? "stop") {
    this.tell("done", { finish, tokens: this.tokens, tokens_per_second: this.tokensPerSecond, usage: this.usage });
  }
}

/** Replies of the server's `model`. */
export class ServerEngine extends EventTarget {
  constructor() {
    super();
    this.model = null; // its name
    this.maxNbytes = Infinity; // of a request
    this.replies = new Map(); // AbortControllers by id
    this.isLeaving = false;
    addEventListener("beforeunload", () => { this.isLeaving = true; });
  }

  mediaPart(attachment) {
    if (!parts.has(attachment.blob)) parts.set(attachment.blob, partOf(attachment));
    return parts.get(attachment.blob);
  }

  async chat(id, messages, settings, continueLast = false) {
    const ending = new AbortController();
    this.replies.set(id, ending);
    const reply = new Reply(mediaIn(messages), (type, detail) => this.tell(type, { id, ...detail }));
    try {
      const response = await this.request(messages, settings, continueLast, ending.signal);
      if (!response.ok) throw new Error(await problemOf(response));
      await reply.read(response);
      reply.tellDone();
    } catch (error) {
      // The browser cuts the connection of a page that it leaves, which is no error: soon the page is gone, or stays.
      if (this.isLeaving) await new Promise((resolve) => setTimeout(resolve, LEAVING_MILLISECONDS));
      if (ending.signal.aborted) reply.tellDone("stopped");
      else this.tell("error", { id, kind: "other", message: isOfBrowser(error) ? LOST : error.message });
    } finally {
      this.replies.delete(id);
    }
  }

  /** Request a reply, whose stream also says what it waits for, and counts its tokens. */
  async request(messages, { schema, ...settings }, continueLast, signal) {
    const given = Object.fromEntries(Object.entries(settings).filter(([, value]) => value !== null));
    if (schema !== undefined) given.response_format = { type: "json_schema", json_schema: { name: "reply", schema, strict: true } };
    const { model } = this;
    const options = { stream: true, progress: true, timings_per_token: true, watch: true, continue_final_message: continueLast };
    const body = JSON.stringify({ model, messages, ...given, ...options });
    const { size } = new Blob([body]);
    if (size > this.maxNbytes) {
      throw new Error(t("This conversation has {size} with its images and audio, but the server takes {most} at a time: begin another one, or attach less.", {
        size: humanSize(size), most: humanSize(this.maxNbytes),
      }));
    }
    return request(CHAT_URL, { method: "POST", body, headers: { "Content-Type": "application/json" }, signal });
  }

  /** Stop a reply: the server ends it when its connection is closed. */
  stop(id) {
    this.replies.get(id)?.abort();
  }

  tell(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail: { type, ...detail } }));
  }
}
