// Pyodide with webgemma's wheel. The first visit stores a snapshot of Python's memory after all imports; later
// visits start from the snapshot, which takes a tenth of the time.

const FOLDER = new URL("./", import.meta.url).pathname; // pages in other folders of this address have snapshots, too
const SNAPSHOTS = FOLDER === "/" ? "webgemma-python" : `webgemma-python${FOLDER}`; // a cache with one entry, named after its build
// The modules in a snapshot: imported before it is taken, so they must not use JavaScript on import.
const MODULES = ["webgemma.web.tab", "webgemma.device.browser", "webgemma.javascript"];

const snapshotUrl = (build) => `${FOLDER}python-${build}`;

async function readSnapshot(build) {
  try {
    const stored = await (await caches.open(SNAPSHOTS)).match(snapshotUrl(build));
    return stored && new Uint8Array(await stored.arrayBuffer());
  } catch {
    return undefined; // caches are not available
  }
}

async function storeSnapshot(build, snapshot) {
  try {
    const cache = await caches.open(SNAPSHOTS);
    for (const outdated of await cache.keys()) await cache.delete(outdated);
    await cache.put(snapshotUrl(build), new Response(snapshot));
  } catch { /* the storage is full: the next visit starts without a snapshot */ }
}

/** Return what makes Pyodide's module, with memory for the snapshot: it has grown, and Pyodide does not grow it. */
async function roomyModule(pyodide, snapshot) {
  const { default: create } = await import(`${pyodide}pyodide.asm.mjs`);
  return async (settings) => {
    const module = await create(settings);
    if (snapshot.length > module.HEAP8.length) module.growMemory(snapshot.length);
    return module;
  };
}

/** Start Python, ready to import the wheel; `build` identifies the wheel and Pyodide, which are at whole addresses. */
export async function startPython({ build, pyodide, wheel }) {
  const wheelBytes = fetch(wheel).then((response) => response.arrayBuffer());
  wheelBytes.catch(() => {}); // the error is thrown where it is awaited
  const { loadPyodide } = await import(`${pyodide}pyodide.mjs`).catch(() => {
    throw new Error(`Python cannot be loaded from ${pyodide}: Pyodide's files are not there, or their server does not respond.`);
  });
  const snapshot = await readSnapshot(build);
  if (snapshot) {
    try {
      const createPyodideModule = await roomyModule(pyodide, snapshot);
      const python = await loadPyodide({ indexURL: pyodide, _loadSnapshot: snapshot, createPyodideModule });
      python.unpackArchive(await wheelBytes, "whl"); // a snapshot has no files
      return python;
    } catch (error) {
      console.warn(`the snapshot of Python cannot be used: ${error.message}`);
      await caches.delete(SNAPSHOTS);
    }
  }
  const python = await loadPyodide({ indexURL: pyodide, _makeSnapshot: true });
  python.unpackArchive(await wheelBytes, "whl");
  python.runPython(`import ${MODULES.join(", ")}`);
  storeSnapshot(build, python.makeMemorySnapshot()); // not awaited: the page can start meanwhile
  return python;
}
