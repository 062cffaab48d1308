// What the worker of the Python tool does: python_tool.js appends this text to Pyodide's modules, which have no other
// way into the worker, and names their two functions `createPyodide` and `loadPyodide`. The worker gets Pyodide's files
// and one program, reports what that prints, and is ended.
//
// What keeps the program in is outside of it: an origin of its own, a policy that forbids every connection and further
// scripts, and the page, which ends the worker. What is removed here is the second line, and the limits are its own.

{
  const MAX_NBYTES = 512 * 2 ** 20; // of Python's memory
  const MAX_FILES_NBYTES = 32 * 2 ** 20; // that it writes to its files, which are in memory
  const MAX_OUTPUT_NBYTES = 40_000;
  const NO_SPACE = 51; // ENOSPC
  const ADDRESS = "https://files.invalid/"; // of Pyodide's files, which are at hand
  const KEPT = new Set([
    ..."Object Function Array Number Boolean String Symbol Date Promise RegExp Map Set WeakMap WeakSet WeakRef Proxy".split(" "),
    ..."Error AggregateError EvalError RangeError ReferenceError SyntaxError TypeError URIError SuppressedError".split(" "),
    ..."JSON Math Intl Reflect BigInt Atomics ArrayBuffer DataView Iterator FinalizationRegistry Temporal".split(" "),
    ..."Int8Array Uint8Array Uint8ClampedArray Int16Array Uint16Array Int32Array Uint32Array".split(" "),
    ..."BigInt64Array BigUint64Array Float16Array Float32Array Float64Array".split(" "),
    ..."Infinity NaN undefined globalThis self constructor parseFloat parseInt isFinite isNaN".split(" "),
    ..."decodeURI decodeURIComponent encodeURI encodeURIComponent escape unescape eval".split(" "),
    ..."WebAssembly TextDecoder TextEncoder crypto performance console setTimeout clearTimeout queueMicrotask".split(" "),
  ]);
  const RUN = `
def run(code):
    """Run a program as __main__, print the value of its last line, and return whether it has failed."""
    import ast, linecache, sys, traceback

    name = "<program>"
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    space = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        tree = ast.parse(code, name)
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = ast.Expression(tree.body.pop().value)
        exec(compile(tree, name, "exec"), space)
        if last is not None:
            value = eval(compile(last, name, "eval"), space)
            if value is not None:
                print(repr(value))
    except SystemExit as end:
        return end.code not in (None, 0)
    except BaseException as error:
        inner = error.__traceback__.tb_next
        while inner and inner.tb_frame.f_code.co_filename != name:
            inner = inner.tb_next
        lines = traceback.format_exception(type(error), error, inner, limit=-8)
        print("".join(lines)[-8000:])
        return True
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return False

def enclose():
    """Remove the ways from Python to JavaScript."""
    import sys

    hidden = [name for name in sys.modules if name.split(".")[0] in ("js", "pyodide_js", "pyodide", "_pyodide", "_pyodide_core")]
    for name in {*hidden, "js", "pyodide_js", "pyodide", "_pyodide", "_pyodide_core"}:
        sys.modules[name] = None
    sys.meta_path[:] = [finder for finder in sys.meta_path if "Js" not in type(finder).__name__]
    sys.setrecursionlimit(1000)

enclose()
run
`;

  /** Let no memory of WebAssembly grow beyond the limit: Python then raises a MemoryError. */
  function limitMemory() {
    const { grow } = WebAssembly.Memory.prototype;
    WebAssembly.Memory.prototype.grow = function limited(pages) {
      if (this.buffer.byteLength + pages * 65_536 > MAX_NBYTES) throw new RangeError("too much memory");
      return grow.call(this, pages);
    };
  }

  /** Let all files together take no more than the limit: Python then raises an OSError. */
  function limitFiles(FS) {
    let written = 0;
    const count = (nbytes) => {
      written += nbytes;
      if (written > MAX_FILES_NBYTES) throw new FS.ErrnoError(NO_SPACE);
    };
    const { write, truncate, ftruncate } = FS;
    FS.write = (stream, buffer, offset, length, ...rest) => {
      if (FS.isFile(stream.node.mode)) count(length); // not its output
      return write(stream, buffer, offset, length, ...rest);
    };
    FS.truncate = (path, length, ...rest) => {
      count(length);
      return truncate(path, length, ...rest);
    };
    FS.ftruncate = (fd, length, ...rest) => {
      count(length);
      return ftruncate(fd, length, ...rest);
    };
  }

  /** Remove what browsers offer to workers, and Python does not need. */
  function enclose() {
    for (let scope = globalThis; scope !== Object.prototype; scope = Object.getPrototypeOf(scope)) {
      for (const name of Object.getOwnPropertyNames(scope)) if (!KEPT.has(name)) Reflect.deleteProperty(scope, name);
    }
  }

  /** What the program prints, up to the limit. */
  class Output {
    constructor() {
      this.chunks = [];
      this.nbytes = 0;
      this.isCut = false;
    }

    write(bytes) {
      const room = MAX_OUTPUT_NBYTES - this.nbytes;
      if (bytes.length > room) this.isCut = true;
      const kept = bytes.slice(0, Math.max(0, room)); // a copy: the memory is Python's
      if (kept.length) this.chunks.push(kept);
      this.nbytes += kept.length;
      return bytes.length;
    }

    get text() {
      const decoder = new TextDecoder();
      return this.chunks.map((chunk) => decoder.decode(chunk, { stream: true })).join("") + decoder.decode();
    }
  }

  async function start(files, info) {
    limitMemory();
    const types = { wasm: "application/wasm", zip: "application/zip" };
    globalThis.fetch = async (address) => {
      const name = String(address).replace(ADDRESS, "");
      return new Response(files[name], { headers: { "Content-Type": types[name.split(".").at(-1)] } });
    };
    const options = { indexURL: ADDRESS, packageBaseUrl: ADDRESS, lockFileContents: { info, packages: {} } };
    return loadPyodide({ ...options, createPyodideModule: createPyodide, jsglobals: Object.create(null) });
  }

  globalThis.onmessage = async ({ data: { port, files, task } }) => {
    try {
      const python = await start(files, task.info);
      const output = new Output();
      for (const stream of ["setStdout", "setStderr"]) python[stream]({ write: (bytes) => output.write(bytes), isatty: false });
      python.setStdin({ error: true });
      limitFiles(python.FS);
      const run = python.runPython(RUN);
      enclose();
      port.postMessage({ isStarted: true });
      const hasFailed = run(task.code);
      port.postMessage({ hasFailed, output: output.text, isCut: output.isCut });
    } catch (error) {
      port.postMessage({ problem: String(error?.message ?? error).slice(0, 2000) });
    }
  };
  globalThis.postMessage("ready");
}
