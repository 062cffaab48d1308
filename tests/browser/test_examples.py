"""The example pages, and the wheel as an installer in the tab takes it, from a plain web server."""

import importlib.metadata
import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from browser.serving import serving

import webgemma
from webgemma import Gemma
from webgemma.models import BUNDLED_PATH
from webgemma.web.wheel import NAME, Wheel

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {"tab.html": 20, "pyscript.html": 25}  # and lines at most
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
    files = {name: html, "gemma.gguf": BUNDLED_PATH, **pyscript}
    with visiting(chromium, files, name) as (page, _):
        page.wait_for_function("(text) => reply.textContent === text", arg=texts[-1])
        assert not page.evaluate("crossOriginIsolated")
        seen = page.evaluate("[...seen]")
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
