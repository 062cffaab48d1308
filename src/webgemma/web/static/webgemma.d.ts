// The types of webgemma.js. Names of settings and of what pieces hold are those of webgemma in Python.

/** A model: the address of a .gguf, or a file. Without any, it is the bundled one. */
export type Source = string | URL | Blob | FileSystemFileHandle;

export interface LoadOptions {
  /** Called with the bytes that are loaded and their total. */
  progress?: (loaded: number, total: number) => void;
  /** Ends loading, which rejects with the signal's reason. */
  signal?: AbortSignal;
  /** The folder of Pyodide's files, if they are not in lib/pyodide/ beside webgemma.js. */
  pyodide?: string | URL;
  /** Positions of prompt and reply together; by default 32768, or as many as the model was trained for. */
  context?: number;
  /** Of activations on the GPU; by default what fits the GPU. */
  precision?: "auto" | "exact" | "int16" | "int8" | "f16";
  /** The file of the vision and audio encoders, if it is not the model's own. */
  mmproj?: Source;
  /** The file of the model's drafter (gemma4-assistant). */
  draft?: Source;
}

/**
 * Load a model in a worker of its own. The first load of a page also starts Python, which takes seconds on the first
 * visit and less than one later. Fails with a WebgemmaError.
 */
export function load(source?: Source | null, options?: LoadOptions): Promise<Model>;

/** A loaded model. Several calls at once are computed side by side. */
export interface Model {
  readonly name: string;
  /** Positions of prompt and reply together. */
  readonly context: number;
  /** The GPU. */
  readonly device: string;
  /** GPU memory that it takes. */
  readonly nbytes: number;
  /** Reply to a conversation, or to one text. It begins when it is iterated over, or by text(). */
  chat(messages: string | readonly Message[], options?: ChatOptions): Reply;
  /** Return a vector of length 1 for each text; the model has to be an EmbeddingGemma. */
  embed(texts: Iterable<string> & object, options?: EmbedOptions): Promise<Float32Array[]>;
  /** End the worker, which frees all memory, on the GPU too. What is being written fails with kind "closed". */
  close(): void;
}

/** Pieces of a reply, as they are written: leaving the loop stops it. It can be iterated over once. */
export interface Reply extends AsyncIterable<Piece> {
  /** Return the whole text, without the thoughts. */
  text(): Promise<string>;
}

export interface Message {
  role: "system" | "user" | "assistant" | "tool";
  content?: string | readonly Part[];
  /** Of an assistant: what it thought before its calls of tools. */
  thinking?: string;
  /** Of an assistant. */
  tool_calls?: readonly { function: ToolCall }[];
  /** Of a tool: its name. */
  name?: string;
}

export type Part =
  | { type: "text"; text: string }
  | { type: "image"; image: Blob; budget?: 70 | 140 | 280 | 560 | 1120 }
  /** A file, or samples at 16 kHz. */
  | { type: "audio"; audio: Blob | Float32Array };

export interface Piece {
  /** Of the reply. */
  text: string;
  /** Of the thought before it. */
  thinking: string;
  tool_calls: ToolCall[];
  /** Of the last piece, why it is the last; "length": by max_tokens, or the context is full. */
  finish: "" | "stop" | "length" | "stopped";
  usage: Usage | null;
  /** Of the last piece of a complete reply to which `schema` was given. */
  value?: unknown;
  /** Of the last piece. */
  tokens_per_second?: number;
  /** DiffusionGemma's canvas after a step; such a piece has nothing else. */
  canvas?: Canvas;
}

export interface ToolCall {
  name: string;
  arguments: Record<string, unknown>;
}

/** Tokens of a conversation. */
export interface Usage {
  prompt: number;
  reply: number;
  context: number;
  /** Messages at the beginning that did not fit. */
  left_out: number;
  /** Of the prompt, those that had been read before. */
  cached: number;
  drafted: number;
  accepted: number;
}

export interface Canvas {
  /** Texts in order, each with whether it is kept. */
  runs: [text: string, isKept: boolean][];
  number: number;
  step: number;
  /** How many of its `size` tokens are kept. */
  accepted: number;
  size: number;
}

/** Settings of generation: null or left out, they are the model's defaults. */
export interface Settings {
  /** The longest reply, in tokens. */
  max_tokens?: number | null;
  /** End the reply before this text; may repeat. */
  stop?: string | readonly string[] | null;
  /** The same seed gives the same text. */
  seed?: number | null;
  /** 0: always the likeliest token. */
  temperature?: number | null;
  /** Choose among the k likeliest tokens; 0: all. */
  top_k?: number | null;
  /** Choose among the tokens whose surprisal is typical. */
  typical_p?: number | null;
  /** Choose among the tokens that hold this probability. */
  top_p?: number | null;
  /** Drop tokens below this share of the likeliest one's. */
  min_p?: number | null;
  /** Above 1: avoid recent tokens, by a factor. */
  repetition_penalty?: number | null;
  /** Above 0: avoid recent tokens, by a difference. */
  presence_penalty?: number | null;
  /** Above 0: avoid recent tokens, by a difference for each time. */
  frequency_penalty?: number | null;
  /** Tokens back that the penalties cover; 0: none, -1: all. */
  recent?: number | null;
  /** Check drafts of the next tokens: auto, lookup (of what was said before), mtp (of the model's drafter), off. It changes the speed only. */
  speculate?: "auto" | "lookup" | "mtp" | "off" | null;
  /** Drafts that a step checks, at most. */
  max_drafts?: number | null;
  /** DiffusionGemma only. Denoising steps of a canvas, at most. */
  steps?: number | null;
  /** DiffusionGemma only. Entropy that a step may accept, in nats. */
  entropy_bound?: number | null;
  /** DiffusionGemma only. Temperature of a canvas's last step. */
  t_min?: number | null;
  /** DiffusionGemma only. Temperature of a canvas's first step. */
  t_max?: number | null;
}

export interface ChatOptions extends Settings {
  /** Stops the reply, whose iteration rejects with the signal's reason. */
  signal?: AbortSignal;
  /** Called while images and audio are encoded. */
  progress?: (done: number, total: number) => void;
  /** Let the model think first. */
  think?: boolean;
  /** Continue the last message instead of replying to it. */
  continue_last?: boolean;
  /** A JSON Schema that the reply keeps to. One of these four may be given. */
  schema?: object;
  /** A pattern that matches the whole reply. */
  regex?: string;
  /** A grammar in llama.cpp's GBNF. */
  grammar?: string;
  /** The texts that the reply may be. */
  choices?: readonly string[];
  /** Functions that the model may call, as OpenAI declares them. */
  tools?: readonly object[];
  /** "auto", "required", "none" or the name of a tool. */
  tool_choice?: string;
  parallel_tool_calls?: boolean;
}

export interface EmbedOptions {
  /** What the texts are for, which goes before them. */
  task?:
    | "query" | "document" | "question" | "fact" | "classification" | "clustering" | "similarity" | "code" | "summary"
    | null;
  /** Cut the vectors to so many numbers: 512, 256 or 128, say. */
  size?: number | null;
  signal?: AbortSignal;
}

/** An error whose message is a sentence for people. */
export class WebgemmaError extends Error {
  readonly kind:
    | "no-webgpu" | "device-lost" | "device" | "memory" | "storage" | "file" | "no-encoder" | "prompt" | "no-model"
    | "no-schemas" | "no-server" | "no-pyodide" | "closed" | "other";
}
