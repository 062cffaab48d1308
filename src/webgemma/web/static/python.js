// Python with our wheel in it. The first visit takes a picture of its memory once all is imported; the
// next ones begin with that, which takes a tenth of the time.

const PICTURES = "webgemma-python"; // a cache; its one entry is named after the build it belongs to
// All that a picture has in it: to be imported before it is taken, and without touching JavaScript.
const MODULES = ["webgemma.web.tab", "webgemma.device.browser", "webgemma.javascript"];

const pictureUrl = (build) => `/python-${build}`;

async function keptPicture(build) {
  try {
    const kept = await (await caches.open(PICTURES)).match(pictureUrl(build));
    return kept && new Uint8Array(await kept.arrayBuffer());
  } catch {
    return undefined; // this browser keeps nothing here
  }
}

async function keepPicture(build, picture) {
  try {
    const cache = await caches.open(PICTURES);
    for (const old of await cache.keys()) await cache.delete(old);
    await cache.put(pictureUrl(build), new Response(picture));
  } catch { /* no room: the next visit begins like this one */ }
}

/** Python, ready to import the wheel; `build` names what the wheel and Pyodide are. */
export async function startPython({ build, pyodide, wheel }) {
  const files = fetch(wheel).then((answer) => answer.arrayBuffer());
  files.catch(() => {}); // told when it is awaited
  const { loadPyodide } = await import(`${pyodide}pyodide.mjs`);
  const picture = await keptPicture(build);
  if (picture) {
    try {
      const python = await loadPyodide({ indexURL: pyodide, _loadSnapshot: picture });
      python.unpackArchive(await files, "whl"); // a picture has no files
      return python;
    } catch (error) {
      console.warn(`the picture of Python does not work: ${error.message}`);
      await caches.delete(PICTURES);
    }
  }
  const python = await loadPyodide({ indexURL: pyodide, _makeSnapshot: true });
  python.unpackArchive(await files, "whl");
  python.runPython(`import ${MODULES.join(", ")}`);
  keepPicture(build, python.makeMemorySnapshot()); // nobody waits for that
  return python;
}
