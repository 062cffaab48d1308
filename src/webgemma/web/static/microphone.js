// The microphone: a record button, the level and the time while recording, and a WAV file at the end.

import { clock } from "./attachments.js";
import { byId } from "./dom.js";
import { t } from "./language.js";
import { wavOf } from "./wav.js";

const MAX_SECONDS = 600;
const RATE = 16000; // samples per second of the audio encoders; a browser may record at another rate
const PROBLEMS = {
  NotAllowedError: t("The microphone is not allowed: allow it next to the address of this page, then try again."),
  NotFoundError: t("This device has no microphone."),
  NotReadableError: t("The microphone cannot be used: another program may be using it."),
};

/** A recording in progress: `chunks` of samples are added until it is closed. */
class Recording {
  static async start() {
    const stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
    const recording = new Recording();
    recording.stream = stream;
    try {
      await recording.connect(new AudioContext({ sampleRate: RATE }));
    } catch {
      await recording.context?.close();
      await recording.connect(new AudioContext()).catch((error) => {
        recording.close();
        throw error;
      });
    }
    return recording;
  }

  async connect(context) {
    Object.assign(this, { context, chunks: [], count: 0, level: 0 });
    await context.audioWorklet.addModule("microphone_worklet.js");
    const recorder = new AudioWorkletNode(context, "webgemma-recorder");
    recorder.port.onmessage = ({ data }) => {
      this.chunks.push(data);
      this.count += data.length;
      for (const value of data) this.level = Math.max(this.level, Math.abs(value));
    };
    context.createMediaStreamSource(this.stream).connect(recorder).connect(context.destination); // the worklet outputs silence
  }

  get seconds() {
    return this.count / this.context.sampleRate;
  }

  /** Return the peak level since the last call, 0 to 1. */
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

/** The record button; calls `use(file)` with a recording, and `notify(message)` with a problem. */
export class Microphone {
  constructor(use, notify) {
    this.use = use;
    this.notify = notify;
    this.recording = null;
    this.count = 0; // recordings so far, for their names
    this.button = byId("microphone");
    this.button.hidden = !navigator.mediaDevices?.getUserMedia; // available on secure pages only
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
      this.notify(PROBLEMS[error.name] ?? t("The microphone cannot be used ({problem}).", { problem: error.message }));
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
    byId("recording-level").value = Math.sqrt(this.recording.takeLevel()); // roughly the perceived loudness
    byId("recording-time").textContent = clock(seconds);
    if (seconds >= MAX_SECONDS) {
      this.end(true);
      this.notify(t("A recording is limited to {count} minutes: this one has ended.", { count: MAX_SECONDS / 60 }));
    }
  }

  /** Stop recording and use the recording or discard it; return whether one was in progress. */
  end(isUsed) {
    const { recording } = this;
    if (!recording) return false;
    this.recording = null;
    clearInterval(this.timer);
    recording.close();
    byId("recording").hidden = true;
    byId("writing").hidden = false;
    byId("prompt").focus();
    if (!isUsed) return true;
    if (!recording.count) {
      this.notify(t("Nothing was recorded: the microphone sent no audio."));
      return true;
    }
    this.count += 1;
    const wav = wavOf(recording.chunks, recording.count, recording.context.sampleRate);
    this.use(new File([wav], `${t("Recording {number}", { number: this.count })}.wav`, { type: wav.type }));
    return true;
  }
}
