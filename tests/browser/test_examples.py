"""The example pages, the JavaScript module, and the wheel as an installer in the tab takes it.

All from a plain web server."""

import importlib.metadata
import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser.serving import serving
from helpers.tiny import EMBEDDING, tiny_gguf
from tolerance import GPU_VECTORS

import webgemma
from webgemma import Gemma
from webgemma.gguf.sources import BytesSource
from webgemma.models import BUNDLED_PATH
from webgemma.web.npm_package import package_files
from webgemma.web.wheel import NAME, Wheel

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {"module.html": 10, "tab.html": 20, "pyscript.html": 25}  # and lines at most
SLOW_MS = 120_000  # a GPU in software compiles for a while
WATCH = """
addEventListener("DOMContentLoaded", () => {
  window.seen = new Set();
  new MutationObserver(() => seen.add(reply.textContent)).observe(reply, { childList: true });
});
"""
INSTALL = """
async (code) => {
  const { loadPyodide } = await import("/pyodide/pyodide.mjs");
  const python = await loadPyodide();
  python.unpackArchive(await (await fetch("/micropip.zip")).arrayBuffer(), "zip");
  return await python.runPythonAsync(code);
}
"""


def folder(path: Path, name: str) -> dict[str, bytes | Path]:
    """The files of a folder of node_modules as files of the server."""
    return {f"{name}/{file.name}": file for file in path.iterdir() if file.is_file()}


def whole_wheel() -> bytes:
    """As `make wheel` makes it: with the bundled model, which the page's own is without."""
    made = io.BytesIO(Wheel().data())
    with zipfile.ZipFile(made, "a") as archive:
        archive.write(BUNDLED_PATH, f"webgemma/demo/{BUNDLED_PATH.name}")
    return made.getvalue()


def micropip() -> bytes:
    """The installer of Pyodide, which is not in its npm package, and what it needs."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name in ("micropip", "packaging"):
            for file in importlib.metadata.files(name) or ():
                if ".." not in file.parts and "__pycache__" not in file.parts:
                    archive.write(file.locate(), file.as_posix())
    return made.getvalue()


def module() -> dict[str, bytes | Path]:
    """The npm package, as `webgemma web --export-module` writes it."""
    return {f"webgemma/{name}": data for name, data in package_files().items()}


@contextmanager
def visiting(chromium: Any, files: dict[str, bytes | Path], name: str) -> Iterator[tuple[Any, Any]]:
    """A page of a server that sends no special headers, and what it asks for; others refuse."""
    node_modules = ROOT / "node_modules"
    files |= {NAME: whole_wheel(), **folder(node_modules / "pyodide", "pyodide")}
    with serving(files, headers={}) as origin:
        context, asked = chromium.new_context(), []
        context.on("request", lambda request: asked.append(request.url))
        context.route(lambda url: not url.startswith(origin), lambda route: route.abort())
        context.add_init_script(WATCH)
        page = context.new_page()
        page.set_default_timeout(SLOW_MS)
        page.goto(f"{origin}/{name}")
        yield page, asked
        assert [url for url in asked if not url.startswith((f"{origin}/", "blob:"))] == []
        context.close()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_replies_as_natively_piece_by_piece(chromium: Any, name: str) -> None:
    html = ROOT / "examples" / name
    assert len(html.read_text().splitlines()) <= EXAMPLES[name]
    with Gemma.load(device="gpu") as gemma:
        pieces = gemma.chat("What are you?", temperature=0, max_tokens=40)
        texts = list(accumulate(piece.text for piece in pieces))
    pyscript = folder(ROOT / "node_modules" / "@pyscript" / "core" / "dist", "pyscript")
    files = {name: html, "gemma.gguf": BUNDLED_PATH, **pyscript, **module()}
    with visiting(chromium, files, name) as (page, _):
        page.wait_for_function("(text) => reply.textContent === text", arg=texts[-1])
        assert not page.evaluate("crossOriginIsolated")
        seen = page.evaluate("[...seen]")
        assert page.inner_text("body").split() == texts[-1].split()  # and nothing else
    assert set(seen) <= set(texts)
    assert len(seen) > len(set(texts)) // 2  # two may come in one frame


def test_micropip_installs_the_wheel_and_asks_for_nothing_else(chromium: Any) -> None:
    code = f"""
import importlib.metadata, js, micropip
await micropip.install(f"{{js.location.origin}}/{NAME}")
import webgemma
" ".join([importlib.metadata.version("webgemma"), *micropip.list()])
"""
    files: dict[str, bytes | Path] = {"blank.html": b"<!doctype html>", "micropip.zip": micropip()}
    with visiting(chromium, files, "blank.html") as (page, asked):
        installed = page.evaluate(INSTALL, code).split()
        after = asked[[url.endswith("/micropip.zip") for url in asked].index(True) + 1 :]
    assert installed[0] == webgemma.__version__
    assert {"webgemma"} <= set(installed[1:]) <= {"micropip", "packaging", "webgemma"}
    assert [Path(url).name for url in after] == [NAME]


MODULE = """
async (name) => {
  const { load, WebgemmaError } = await import("/webgemma/webgemma.js");
  const failure = async (act) => {
    try {
      await act();
      return "nothing";
    } catch (error) {
      if (!(error instanceof WebgemmaError) && !(error instanceof DOMException)) throw error;
      return `${error.kind ?? error.name}: ${error.message}`;
    }
  };
  const found = {};
  found.damaged = await failure(() => load(new File(["no model"], "mine.gguf")));
  found.address = await failure(() => load("https://"));
  found.nowhere = await failure(() => load(null, { pyodide: "nowhere" }));
  const model = await load("100%.gguf", { pyodide: "pyodide" });
  const greedy = { temperature: 0, max_tokens: 12 };
  const whole = (text) => model.chat(text, greedy).text();
  found.model = [model.name, model.context];
  found.texts = await Promise.all(["What are you?", "Hello!"].map(whole)); // at once
  const pieces = [];
  const seven = { ...greedy, schema: { enum: [7] } };
  const count = [{ role: "user", content: "Count." }];
  for await (const piece of model.chat(count, seven)) pieces.push(piece);
  found.last = pieces.at(-1);
  const controller = new AbortController();
  found.aborted = await failure(async () => {
    const reply = model.chat("Tell a long story.", { signal: controller.signal });
    for await (const piece of reply) controller.abort();
  });
  for await (const piece of model.chat("Tell a long story.")) break;
  found.unknown = await failure(() => model.chat("Hi", { temprature: 1 }).text());
  found.nan = await failure(() => model.chat("Hi", { temperature: NaN }).text());
  found.writes = await failure(() => model.embed(["in"]));
  const content = [{ type: "image", image: "cat.png" }];
  found.image = await failure(() => model.chat([{ role: "user", content }]).text());
  found.again = await whole("What are you?");
  const last = model.chat("Tell a long story.");
  const closed = failure(async () => { for await (const piece of last) model.close(); });
  found.closed = [await closed, await failure(() => whole("Hi"))];
  const embedder = await load("embedder.gguf", { precision: "exact" });
  const vectors = await embedder.embed(["the inner", "there"], { task: "query", size: 16 });
  found.vectors = vectors.map((vector) => [...vector]);
  found.text = await failure(() => embedder.chat("Hi").text());
  embedder.close();
  return found;
}
"""


def test_the_module_chats_embeds_stops_and_says_what_is_wrong(chromium: Any) -> None:
    embedder = tiny_gguf(EMBEDDING)
    files = {"blank.html": b"<!doctype html>", "100%.gguf": BUNDLED_PATH, **module()}
    with visiting(chromium, {**files, "embedder.gguf": embedder}, "blank.html") as (page, _):
        found = page.evaluate(MODULE)
    greedy: Any = {"temperature": 0, "max_tokens": 12}
    with Gemma.load(device="gpu") as gemma:
        texts = [
            "".join(piece.text for piece in gemma.chat(text, **greedy))
            for text in ("What are you?", "Hello!")
        ]
        assert found["model"] == ["100%.gguf", gemma.context]
    with Gemma.load(BytesSource(embedder, "e.gguf"), "gpu", precision="exact") as model:
        vectors = model.embed(["the inner", "there"], task="query", size=16)
    assert found["texts"] == texts
    assert found["again"] == texts[0]
    np.testing.assert_allclose(found["vectors"], vectors, rtol=0, atol=GPU_VECTORS["exact"])
    last = found["last"]
    assert (last["finish"], last["value"]) == ("stop", 7)
    assert last["usage"]["prompt"] > last["usage"]["reply"] > 0
    starts = {
        "damaged": "file: mine.gguf is ",
        "address": "other: https:// is not an address.",
        "nowhere": "other: Python cannot be loaded from http",
        "aborted": "AbortError: ",
        "unknown": "other: There is no setting 'temprature'",
        "nan": "other: temperature is NaN, not a number.",
        "writes": "other: ",
        "image": "other: An image in a message is a Blob",
        "text": "other: embedder.gguf is an embedding model",
    }
    wrong = {
        name: found[name] for name, start in starts.items() if not found[name].startswith(start)
    }
    assert wrong == {}
    assert found["closed"] == ["closed: This model is closed: load it again."] * 2
