// Runs beside the page's thread: hands it what the microphone hears.

class Listener extends AudioWorkletProcessor {
  process([[samples]]) {
    if (samples) this.port.postMessage(samples.slice());
    return true;
  }
}

registerProcessor("webgemma-listener", Listener);
