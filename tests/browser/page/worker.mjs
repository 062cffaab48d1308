// Python with webgemma's wheel in a worker, which runs the programs that it is sent.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const ready = (async () => {
  const python = await loadPyodide({ indexURL: new URL("./pyodide/", self.location).href });
  const wheel = await (await fetch("webgemma.whl")).arrayBuffer();
  python.unpackArchive(wheel, "whl");
  return python;
})();

self.onmessage = async ({ data }) => {
  try {
    const python = await ready;
    self.postMessage({ result: await python.runPythonAsync(data) });
  } catch (error) {
    self.postMessage({ error: String(error) });
  }
};
