// Files as Python in a browser reads and keeps them. Each has `name`, `size` and `read(begin, end)`, which
// gives a Uint8Array, or a promise of one, that lasts until the next read: Python hands it on to the GPU and
// never holds it.
"use strict";

const SEQUENCE = 2; // so many reads in a row, and an address is read as one long stream
const HIDDEN_NBYTES = 10 * 2 ** 30; // what Chrome says wherever there is so much room or more

class HttpError extends Error {
  constructor(status) {
    super(`the server answers ${status}`);
    this.name = "http";
    this.status = status;
  }
}

/** What is read in long stretches: what follows the last read comes from the same stream. */
class StreamedFile {
  constructor(name, size) {
    this.name = name;
    this.size = size;
    this.at = -1; // where the last read has ended
    this.inRow = 0;
    this.reader = null;
    this.spare = new ArrayBuffer(0);
  }

  async read(begin, end) {
    this.inRow = begin === this.at ? this.inRow + 1 : 0;
    try {
      if (begin !== this.at || !this.reader) {
        this.close();
        this.stop = this.inRow >= SEQUENCE ? this.size : end;
        this.reader = (await this.stream(begin, this.stop)).getReader({ mode: "byob" });
      }
      const bytes = await this.take(end - begin);
      if (end === this.stop) this.close();
      this.at = end;
      return bytes;
    } catch (error) {
      this.close();
      throw error;
    }
  }

  async take(nbytes) {
    let room = this.spare.byteLength === nbytes ? this.spare : new ArrayBuffer(nbytes);
    for (let have = 0; have < nbytes; ) {
      const missing = new Uint8Array(room, have, nbytes - have);
      const { value, done } = await this.reader.read(missing, { min: missing.byteLength });
      room = value?.buffer ?? new ArrayBuffer(nbytes);
      have += value?.byteLength ?? 0;
      if (done && have < nbytes) throw new Error("it was cut");
    }
    this.spare = room;
    return new Uint8Array(room);
  }

  close() {
    this.reader?.cancel().catch(() => {}); // it has failed already
    this.reader = null;
  }
}

/** A file that somebody has chosen, or anything else that the browser has as a Blob. */
class BlobFile extends StreamedFile {
  constructor(blob, name = blob.name ?? "<blob>") {
    super(name, blob.size);
    this.blob = blob;
  }

  stream(begin, stop) {
    return this.blob.slice(begin, stop).stream();
  }
}

/** A file on a server that sends parts. */
class AddressFile extends StreamedFile {
  constructor(url, size, tag) {
    super(decodeURI(new URL(url).pathname.split("/").at(-1)) || url, size);
    this.url = url;
    this.tag = tag; // tells this version of the file from others
  }

  async stream(begin, stop) {
    this.abort = new AbortController();
    const headers = { Range: `bytes=${begin}-${stop - 1}` };
    const answer = await fetch(this.url, { headers, signal: this.abort.signal, cache: "no-store" });
    if (answer.status !== 206) throw new HttpError(answer.status);
    if (tagOf(answer) !== this.tag) throw Object.assign(new Error("it was changed"), { name: "changed" });
    return answer.body;
  }

  close() {
    this.abort?.abort();
    super.close();
  }
}

const tagOf = (answer) => answer.headers.get("ETag") ?? answer.headers.get("Last-Modified");

/** A file on a server; one that sends no parts sends it whole, and the browser keeps it. */
async function openAddress(address) {
  const url = new URL(address, globalThis.location?.href).href;
  const answer = await fetch(url, { headers: { Range: "bytes=0-0" }, cache: "no-store" });
  if (answer.status === 200) return new BlobFile(await answer.blob(), new AddressFile(url).name);
  if (answer.status !== 206) throw new HttpError(answer.status);
  await answer.arrayBuffer();
  const said = answer.headers.get("Content-Range")?.match(/\/(\d+)$/)?.[1];
  const size = said ?? (await fetch(url, { method: "HEAD" })).headers.get("Content-Length"); // of another host
  if (!size) throw new Error("the server does not say how large it is");
  return new AddressFile(url, Number(size), tagOf(answer));
}

/** A small file on a server, all at once: the service worker has that also without the server. */
async function openWhole(address) {
  const answer = await fetch(address);
  if (!answer.ok) throw new HttpError(answer.status);
  return new BlobFile(await answer.blob(), address.split("/").at(-1));
}

// The origin's private file system. Paths are relative to its root.

async function folderOf(path, create) {
  let folder = await navigator.storage.getDirectory();
  const names = path.split("/");
  for (const name of names.slice(0, -1)) folder = await folder.getDirectoryHandle(name, { create });
  return [folder, names.at(-1)];
}

/** A file of ours that a worker holds open; it is read and written without waiting. `again` opens it. */
class StoredFile {
  constructor(path, handle, writes, again) {
    this.name = path.split("/").at(-1);
    this.handle = handle;
    this.writes = writes;
    this.again = again;
    this.size = handle.getSize();
    this.room = new Uint8Array(0);
  }

  read(begin, end) {
    if (!this.handle) return this.readAgain(begin, end);
    if (this.room.byteLength < end - begin) this.room = new Uint8Array(end - begin);
    const bytes = this.room.subarray(0, end - begin);
    return bytes.subarray(0, this.handle.read(bytes, { at: begin }));
  }

  /** What is read after it was closed is opened once more, as addresses and chosen files are. */
  async readAgain(begin, end) {
    this.handle = await this.again();
    return this.read(begin, end);
  }

  // Bytes of Python's, or a Uint8Array.
  write(bytes, at) {
    const view = ArrayBuffer.isView(bytes) ? undefined : bytes.getBuffer("u8");
    try {
      const data = view?.data ?? bytes;
      const written = this.handle.write(data, { at });
      this.size = this.handle.getSize();
      if (written < data.byteLength) throw Object.assign(new Error("it is full"), { name: "QuotaExceededError" });
    } finally {
      view?.release();
    }
  }

  truncate(size) {
    this.handle.truncate(size);
    this.size = size;
  }

  flush() {
    if (this.writes) this.handle.flush();
  }

  close() {
    this.handle?.close();
    this.handle = null;
  }
}

/** A file of ours; to be written, it is made where there is none. Only a worker can write. */
async function openStored(path, write) {
  const [folder, name] = await folderOf(path, write);
  const entry = await folder.getFileHandle(name, { create: write });
  if (write) return new StoredFile(path, await entry.createSyncAccessHandle(), true);
  try {
    const open = () => entry.createSyncAccessHandle({ mode: "read-only" });
    return new StoredFile(path, await open(), false, open);
  } catch {
    return new BlobFile(await entry.getFile()); // no worker, or another tab reads it
  }
}

async function listStored(path) {
  const found = [];
  try {
    const [folder] = await folderOf(`${path}/`, false);
    for await (const [name, entry] of folder.entries()) {
      if (entry.kind === "file") found.push([name, (await entry.getFile()).size]);
    }
  } catch (error) {
    if (error.name !== "NotFoundError") throw error;
  }
  return found;
}

async function removeStored(path) {
  const [folder, name] = await folderOf(path, false);
  await folder.removeEntry(name);
}

/** How many bytes may still be stored, or undefined. */
async function storedRoom() {
  const { quota, usage } = await navigator.storage.estimate();
  return quota === undefined || quota - usage === HIDDEN_NBYTES ? undefined : quota - usage;
}

// Pyodide knows errors, but not Chromium's QuotaExceededError: whoever awaits that waits for ever.
const plainly = (open) => async (...given) => {
  try {
    return await open(...given);
  } catch ({ name, message, status }) {
    throw Object.assign(new Error(message), { name, status });
  }
};

globalThis.webgemmaFiles = {
  blob: plainly(async (file) => new BlobFile(file.getFile ? await file.getFile() : file)),
  address: plainly(openAddress),
  whole: plainly(openWhole),
  stored: plainly(openStored),
  list: plainly(listStored),
  remove: plainly(removeStored),
  room: plainly(storedRoom),
};
