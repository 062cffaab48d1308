// Files that Python in a browser reads and stores. Each has `name`, `size` and `read(begin, end)`, which returns
// a Uint8Array, or a promise of one, that stays valid until the next read: Python passes it on to the GPU without
// copying it.
"use strict";

const SEQUENTIAL_READS = 2; // after this many consecutive reads, the rest of a file is read as one stream
const MAX_MEMORY_NBYTES = 2 ** 30; // of a file that is downloaded whole and kept in memory; larger ones go to disk
const HIDDEN_NBYTES = 10 * 2 ** 30; // what Chrome reports whenever this much storage or more is available

class HttpError extends Error {
  constructor(status) {
    super(`the server answers ${status}`);
    this.name = "http";
    this.status = status;
  }
}

/** A file read from streams: a read that follows the last one continues the same stream. */
class StreamedFile {
  constructor(name, size) {
    this.name = name;
    this.size = size;
    this.position = -1; // end of the last read
    this.consecutive = 0; // reads that continued the one before
    this.reader = null;
    this.spare = new ArrayBuffer(0); // reused if the next read has the same size
  }

  async read(begin, end) {
    this.consecutive = begin === this.position ? this.consecutive + 1 : 0;
    try {
      if (begin !== this.position || !this.reader) {
        this.close();
        this.stop = this.consecutive >= SEQUENTIAL_READS ? this.size : end;
        this.reader = (await this.stream(begin, this.stop)).getReader({ mode: "byob" });
      }
      const bytes = await this.take(end - begin);
      if (end === this.stop) this.close();
      this.position = end;
      return bytes;
    } catch (error) {
      this.close();
      throw error;
    }
  }

  async take(nbytes) {
    let buffer = this.spare.byteLength === nbytes ? this.spare : new ArrayBuffer(nbytes);
    for (let filled = 0; filled < nbytes; ) {
      const missing = new Uint8Array(buffer, filled, nbytes - filled);
      const { value, done } = await this.reader.read(missing, { min: missing.byteLength });
      buffer = value?.buffer ?? new ArrayBuffer(nbytes);
      filled += value?.byteLength ?? 0;
      if (done && filled < nbytes) throw new Error("the stream ended too early");
    }
    this.spare = buffer;
    return new Uint8Array(buffer);
  }

  close() {
    this.reader?.cancel().catch(() => {}); // a stream that has failed cannot be cancelled
    this.reader = null;
  }
}

/** A file chosen by the user, or any other Blob. */
class BlobFile extends StreamedFile {
  constructor(blob, name = blob.name ?? "<blob>") {
    super(name, blob.size);
    this.blob = blob;
  }

  stream(begin, stop) {
    return this.blob.slice(begin, stop).stream();
  }
}

/** A file in the memory of this page. */
class BytesFile {
  constructor(bytes, name) {
    this.name = name;
    this.size = bytes.byteLength;
    this.bytes = bytes;
  }

  read(begin, end) {
    return this.bytes.subarray(begin, end);
  }

  close() {} // it can be read again, as other files can
}

/** A file on a server that supports range requests. */
class AddressFile extends StreamedFile {
  constructor(url, size, tag) {
    super(nameOf(url), size);
    this.url = url;
    this.tag = tag; // identifies this version of the file
  }

  async stream(begin, stop) {
    this.abort = new AbortController();
    const headers = { Range: `bytes=${begin}-${stop - 1}` };
    const response = await fetch(this.url, { headers, signal: this.abort.signal, cache: "no-store" });
    if (response.status !== 206) throw new HttpError(response.status);
    if (tagOf(response) !== this.tag) throw Object.assign(new Error("the file was changed"), { name: "changed" });
    return response.body;
  }

  close() {
    this.abort?.abort();
    super.close();
  }
}

/** Return the name of the file at an address. */
function nameOf(url) {
  const name = new URL(url).pathname.split("/").at(-1) || url;
  try {
    return decodeURI(name);
  } catch {
    return name; // with a % that encodes nothing
  }
}

const tagOf = (response) => response.headers.get("ETag") ?? response.headers.get("Last-Modified");

/** Open a file on a server; one without range requests sends the whole file, which then stays in the browser. */
async function openAddress(address) {
  const url = new URL(address, globalThis.location?.href).href;
  const response = await fetch(url, { headers: { Range: "bytes=0-0" }, cache: "no-store" });
  if (response.status === 200) return download(response, new AddressFile(url).name);
  if (response.status !== 206) throw new HttpError(response.status);
  await response.arrayBuffer();
  const total = response.headers.get("Content-Range")?.match(/\/(\d+)$/)?.[1];
  // Servers of other origins may hide Content-Range from the page.
  const size = total ?? (await fetch(url, { method: "HEAD" })).headers.get("Content-Length");
  if (!size) throw new Error("the server does not report its size");
  return new AddressFile(url, Number(size), tagOf(response));
}

/** Download a small file at once: the service worker can then provide it without the server. */
async function openWhole(address) {
  const response = await fetch(address);
  if (!response.ok) throw new HttpError(response.status);
  return download(response, address.split("/").at(-1));
}

/** Receive a whole file: browsers write a Blob to the disk, which may be full, but not an ArrayBuffer. */
async function download(response, name) {
  const nbytes = Number(response.headers.get("Content-Length") ?? Infinity);
  try {
    if (nbytes > MAX_MEMORY_NBYTES) return new BlobFile(await response.blob(), name);
    return new BytesFile(new Uint8Array(await response.arrayBuffer()), name);
  } catch ({ message }) {
    throw Object.assign(new Error(message), { name: "body" }); // the server has responded
  }
}

// The origin-private file system (OPFS). Paths are relative to its root.

/** Return the folder of a path and the last name of the path. */
async function folderOf(path, create) {
  let folder = await navigator.storage.getDirectory();
  const names = path.split("/");
  for (const name of names.slice(0, -1)) folder = await folder.getDirectoryHandle(name, { create });
  return [folder, names.at(-1)];
}

/** An OPFS file opened by a worker, read and written synchronously; `reopen` returns a new handle of it. */
class StoredFile {
  constructor(path, handle, writable, reopen) {
    this.name = path.split("/").at(-1);
    this.handle = handle;
    this.writable = writable;
    this.reopen = reopen;
    this.size = handle.getSize();
    this.buffer = new Uint8Array(0);
  }

  read(begin, end) {
    if (!this.handle) return this.readReopened(begin, end);
    if (this.buffer.byteLength < end - begin) this.buffer = new Uint8Array(end - begin);
    const bytes = this.buffer.subarray(0, end - begin);
    return bytes.subarray(0, this.handle.read(bytes, { at: begin }));
  }

  /** Read after close(): the file is opened again, as streamed files are. */
  async readReopened(begin, end) {
    this.handle = await this.reopen();
    return this.read(begin, end);
  }

  /** Write a Python bytes object or a Uint8Array. */
  write(bytes, at) {
    const view = ArrayBuffer.isView(bytes) ? undefined : bytes.getBuffer("u8");
    try {
      const data = view?.data ?? bytes;
      const written = this.handle.write(data, { at });
      this.size = this.handle.getSize();
      if (written < data.byteLength) {
        throw Object.assign(new Error("the storage is full"), { name: "QuotaExceededError" });
      }
    } finally {
      view?.release();
    }
  }

  truncate(size) {
    this.handle.truncate(size);
    this.size = size;
  }

  flush() {
    if (this.writable) this.handle.flush();
  }

  close() {
    this.handle?.close();
    this.handle = null;
  }
}

/** Open an OPFS file; with `write` it is created if missing. Only a worker can write. */
async function openStored(path, write) {
  const [folder, name] = await folderOf(path, write);
  const entry = await folder.getFileHandle(name, { create: write });
  if (write) return new StoredFile(path, await entry.createSyncAccessHandle(), true);
  try {
    const open = () => entry.createSyncAccessHandle({ mode: "read-only" });
    return new StoredFile(path, await open(), false, open);
  } catch {
    return new BlobFile(await entry.getFile()); // not in a worker, or another tab reads the file
  }
}

/** Return [name, size] of each file in a folder; a missing folder is empty. */
async function listStored(path) {
  const entries = [];
  try {
    const [folder] = await folderOf(`${path}/`, false);
    for await (const [name, entry] of folder.entries()) {
      if (entry.kind === "file") entries.push([name, (await entry.getFile()).size]);
    }
  } catch (error) {
    if (error.name !== "NotFoundError") throw error;
  }
  return entries;
}

async function removeStored(path) {
  const [folder, name] = await folderOf(path, false);
  await folder.removeEntry(name);
}

/** Return how many bytes may still be stored, or undefined where the browser does not report it. */
async function availableNbytes() {
  const { quota, usage } = await navigator.storage.estimate();
  return quota === undefined || quota - usage === HIDDEN_NBYTES ? undefined : quota - usage;
}

// Pyodide converts Error, but not Chromium's QuotaExceededError: a Python await of a promise rejected with that
// never returns. So every error is rethrown as a plain Error of the same name.
const withPlainErrors = (open) => async (...given) => {
  try {
    return await open(...given);
  } catch ({ name, message, status }) {
    throw Object.assign(new Error(message), { name, status });
  }
};

globalThis.webgemmaFiles = {
  blob: withPlainErrors(async (file) => new BlobFile(file.getFile ? await file.getFile() : file)),
  address: withPlainErrors(openAddress),
  whole: withPlainErrors(openWhole),
  stored: withPlainErrors(openStored),
  list: withPlainErrors(listStored),
  remove: withPlainErrors(removeStored),
  available: withPlainErrors(availableNbytes),
};
