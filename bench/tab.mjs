// Times a model in the browser's stack (V8, Pyodide, Dawn) without a browser, on a hardware GPU.
//
//   node bench/tab.mjs MODEL.gguf [PRECISIONS [DEPTHS [PROMPT]]]        e.g. int16,int8 0,4088
//
// WEBGPU and PYODIDE name the folders of the npm packages `webgpu` and `pyodide`, by default those in
// node_modules; DAWN may hold options of Dawn, e.g. enable-dawn-features=disable_robustness. The
// figures are those of `webgemma bench`; to compare, measure the native engine in the same run.
import { openAsBlob, readdirSync, readFileSync } from "node:fs";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";

const ROOT = resolve(dirname(fileURLToPath(import.meta.url)), "..");
const packageFolder = (name) => resolve(process.env[name.toUpperCase()] ?? join(ROOT, "node_modules", name));
const [, , path, precisions = "int16", depths = "0", prompt = "512"] = process.argv;
if (!path || path === "--help") {
  console.error("No .gguf file is named; usage: node bench/tab.mjs MODEL.gguf [PRECISIONS [DEPTHS [PROMPT]]]");
  process.exit(2);
}

const { loadPyodide } = await import(pathToFileURL(join(packageFolder("pyodide"), "pyodide.mjs")));
const python = await loadPyodide({ indexURL: packageFolder("pyodide") });
const dawn = process.env.DAWN?.split(" ") ?? [];
const { create, globals } = await import(pathToFileURL(join(packageFolder("webgpu"), "index.js")));
Object.assign(globalThis, globals);
Object.defineProperty(globalThis, "navigator", { value: { gpu: create(dawn) }, configurable: true });

const copyFolder = (folder, to) => {
  python.FS.mkdirTree(to);
  for (const entry of readdirSync(folder, { withFileTypes: true })) {
    if (entry.isDirectory()) copyFolder(join(folder, entry.name), `${to}/${entry.name}`);
    else python.FS.writeFile(`${to}/${entry.name}`, readFileSync(join(folder, entry.name)));
  }
};
copyFolder(join(ROOT, "src"), "/src");

const blob = await openAsBlob(path);
python.globals.set("file", blob);
python.globals.set("precisions", precisions);
python.globals.set("depths", depths);
python.globals.set("prompt", Number(prompt));
const program = `
import sys, time
sys.path.insert(0, "/src")
from webgemma.diagnostics.bench import Task, copy_rate, time_gpu
from webgemma.device import aopen_device
from webgemma.gemma.config import Config
from webgemma.gemma.weights import Model
from webgemma.gguf.browser import open_file
from webgemma.gguf.reader import Gguf

device = await aopen_device()
print(device.name, " ".join(sorted(device.features)))
gguf = await Gguf.aopen(await open_file(file))
start = time.perf_counter()
model = await Model.load(gguf, Config.from_gguf(gguf), device)
await device.read(model.one.buffer, 0, 4).bytes()
seconds = time.perf_counter() - start
print(f"loaded in {seconds:.1f} s, {gguf.nbytes / seconds / 1e9:.2f} GB/s")
print(f"copy {await copy_rate(device) / 1e12:.2f} TB/s")
for precision in precisions.split(","):
    for depth in map(int, depths.split(",")):
        speed, step = await time_gpu(model, Task(prompt, 128, depth, 3), "f16", precision)
        print(
            f"{precision:6} depth {depth}: prompt {speed.prompt:.0f} tok/s, "
            f"decode {speed.decode:.1f} tok/s, {step.dispatches} dispatches, "
            f"host {step.host_seconds * 1e3:.2f} ms"
        )
`;
try {
  await python.runPythonAsync(program);
} catch (error) {
  console.error(error.message); // the stack would show Pyodide first
  process.exit(1);
}
process.exit(0);
