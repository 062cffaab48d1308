// The microphone: a button that records, a level and a clock meanwhile, and a WAV file in the end.

import { clock } from "./attachments.js";
import { byId } from "./dom.js";

const MOST_SECONDS = 600;
const RATE = 16000; // what models hear; a browser that cannot record so records as it can
const PROBLEMS = {
  NotAllowedError: "The microphone is not allowed here: allow it beside the address of this page, then try again.",
  NotFoundError: "There is no microphone on this device.",
  NotReadableError: "The microphone cannot be used: another program may have it.",
};

/** Someone speaking: `samples` grow until it is closed. */
class Recording {
  static async start() {
    const stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
    const recording = new Recording();
    recording.stream = stream;
    try {
      await recording.listen(new AudioContext({ sampleRate: RATE }));
    } catch {
      await recording.context?.close();
      await recording.listen(new AudioContext()).catch((error) => {
        recording.close();
        throw error;
      });
    }
    return recording;
  }

  async listen(context) {
    Object.assign(this, { context, chunks: [], count: 0, level: 0 });
    await context.audioWorklet.addModule("/listener.js");
    const listener = new AudioWorkletNode(context, "webgemma-listener");
    listener.port.onmessage = ({ data }) => {
      this.chunks.push(data);
      this.count += data.length;
      for (const value of data) this.level = Math.max(this.level, Math.abs(value));
    };
    context.createMediaStreamSource(this.stream).connect(listener).connect(context.destination); // silent
  }

  get seconds() {
    return this.count / this.context.sampleRate;
  }

  /** The loudest sample since this was last asked for, 0 to 1. */
  takeLevel() {
    const { level } = this;
    this.level = 0;
    return level;
  }

  close() {
    for (const track of this.stream.getTracks()) track.stop();
    this.context?.close();
  }
}

/** A WAV file of 16 bits. */
function wavOf(chunks, count, rate) {
  const view = new DataView(new ArrayBuffer(44 + 2 * count));
  const write = (at, text) => [...text].forEach((letter, i) => view.setUint8(at + i, letter.charCodeAt(0)));
  write(0, "RIFF");
  view.setUint32(4, 36 + 2 * count, true);
  write(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true); // whole numbers
  view.setUint16(22, 1, true); // channels
  view.setUint32(24, rate, true);
  view.setUint32(28, 2 * rate, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  write(36, "data");
  view.setUint32(40, 2 * count, true);
  let at = 44;
  for (const chunk of chunks) {
    for (const value of chunk) {
      view.setInt16(at, Math.max(-32768, Math.min(32767, Math.round(value * 32768))), true);
      at += 2;
    }
  }
  return view.buffer;
}

/** `take(file)` gets what was recorded, `tell(sentence)` what went wrong. */
export class Microphone {
  constructor(take, tell) {
    this.take = take;
    this.tell = tell;
    this.recording = null;
    this.count = 0; // of recordings, for their names
    this.button = byId("microphone");
    this.button.hidden = !navigator.mediaDevices?.getUserMedia; // only a secure page has it
    this.button.addEventListener("click", () => this.start());
    byId("recording-cancel").addEventListener("click", () => this.end(false));
    byId("recording-done").addEventListener("click", () => this.end(true));
    addEventListener("pagehide", () => this.end(false));
  }

  async start() {
    this.button.disabled = true;
    try {
      this.recording = await Recording.start();
    } catch (error) {
      this.tell(PROBLEMS[error.name] ?? `The microphone cannot be used (${error.message}).`);
      return;
    } finally {
      this.button.disabled = false;
    }
    this.timer = setInterval(() => this.show(), 100);
    this.show();
    byId("recording").hidden = false;
    byId("writing").hidden = true;
    byId("recording-done").focus();
  }

  show() {
    const { seconds } = this.recording;
    byId("recording-level").value = Math.sqrt(this.recording.takeLevel()); // as loud as it seems
    byId("recording-time").textContent = clock(seconds);
    if (seconds >= MOST_SECONDS) {
      this.end(true);
      this.tell(`A recording has at most ${MOST_SECONDS / 60} minutes: this one ends here.`);
    }
  }

  /** Stop; what was said is taken or forgotten. Whether there was something to stop. */
  end(isTaken) {
    const { recording } = this;
    if (!recording) return false;
    this.recording = null;
    clearInterval(this.timer);
    recording.close();
    byId("recording").hidden = true;
    byId("writing").hidden = false;
    byId("prompt").focus();
    if (!isTaken) return true;
    if (!recording.count) {
      this.tell("Nothing was recorded: the microphone gave no sound.");
      return true;
    }
    this.count += 1;
    const wav = wavOf(recording.chunks, recording.count, recording.context.sampleRate);
    this.take(new File([wav], `Recording ${this.count}.wav`, { type: "audio/wav" }));
    return true;
  }
}
