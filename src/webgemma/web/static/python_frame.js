// The script of the sandboxed frame in which Python runs: python_tool.js writes this text into the frame, and
// web/server.py allows it by its hash. It starts the worker that it is sent, and leaves it alone with the page's port.
// A worker of a data: address has an origin of its own, which shares nothing with the page, nor with the frame.

addEventListener("message", ({ source, data: { script, task, files }, ports: [port] }) => {
  if (source !== parent) return;
  const worker = new Worker(`data:text/javascript,${encodeURIComponent(script)}`, { type: "module" });
  worker.onerror = () => port.postMessage({ problem: "its worker has ended" });
  worker.onmessage = () => worker.postMessage({ port, task, files }, [port, ...Object.values(files)]);
}, { once: true });
