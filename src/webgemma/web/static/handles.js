// The handles of the files of the last visit's model, in IndexedDB: with them the next visit can read the files
// again. Only Chromium has them, and only of files that are dropped.

import { scoped } from "./scope.js";

const DATABASE = scoped("webgemma-handles");
const STORE = "handles";
const KEY = "model";

const dropped = new WeakMap(); // promises of handles, by file

/** Return the files of a drop, and note their handles; to be called before its event ends. */
export function droppedFiles({ items }) {
  return [...items].filter(({ kind }) => kind === "file").map((item) => {
    const file = item.getAsFile();
    if (file && item.getAsFileSystemHandle) dropped.set(file, item.getAsFileSystemHandle().catch(() => null));
    return file;
  }).filter(Boolean);
}

/** Run one request on the store. */
async function request(mode, make) {
  const opening = indexedDB.open(DATABASE, 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore(STORE);
  const settled = (pending) => new Promise((resolve, reject) => {
    pending.onsuccess = () => resolve(pending.result);
    pending.onerror = () => reject(pending.error);
  });
  const database = await settled(opening);
  try {
    return await settled(make(database.transaction(STORE, mode).objectStore(STORE)));
  } finally {
    database.close();
  }
}

/** Keep the handles of a file source for the next visit; of any other source, keep none. */
export async function keepHandles({ kind, file, mmproj }) {
  try {
    const handles = kind === "file" ? await Promise.all([dropped.get(file), mmproj && dropped.get(mmproj.file)]) : [];
    if (handles[0]) await request("readwrite", (store) => store.put(handles.map((handle) => handle ?? null), KEY));
    else await request("readwrite", (store) => store.delete(KEY));
  } catch { /* the storage is full or forbidden: the file has to be chosen again */ }
}

/**
 * Return {isAllowed, open} of the kept handles if they are of a file of this name, else null. `open()` returns
 * [file, mmproj or undefined]; unless it is allowed, it must be called by a click: the browser asks the user.
 */
export async function keptHandles(name) {
  try {
    const handles = (await request("readonly", (store) => store.get(KEY)))?.filter(Boolean) ?? [];
    if (handles[0]?.name !== name) return null;
    const states = await Promise.all(handles.map((handle) => handle.queryPermission({ mode: "read" })));
    const open = async () => {
      const files = [];
      for (const handle of handles) {
        if (await handle.requestPermission({ mode: "read" }) !== "granted") throw new Error("it was not allowed");
        files.push(await handle.getFile());
        dropped.set(files.at(-1), Promise.resolve(handle));
      }
      return files;
    };
    return { isAllowed: states.every((state) => state === "granted"), open };
  } catch {
    return null;
  }
}
