// The audio worklet of microphone.js: sends recorded samples from the audio thread to the page.

class Recorder extends AudioWorkletProcessor {
  process([[samples]]) {
    if (samples) this.port.postMessage(samples.slice());
    return true;
  }
}

registerProcessor("webgemma-recorder", Recorder);
