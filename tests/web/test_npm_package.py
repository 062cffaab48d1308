"""The npm package: its files, its types, and that it is made bit for bit anew."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import get_args

import pytest
from helpers.command import answer, refused

from webgemma.embeddings import Task
from webgemma.models import BUNDLED_PATH
from webgemma.settings import SETTINGS
from webgemma.web import libraries, wheel
from webgemma.web.npm_package import package_files
from webgemma.web.site import STATIC
from webgemma.web.tab import OPTIONS

NOT_OFFERED = {"logit_bias", "top_logprobs", "watch"}  # no message of the worker has them
FILES = {
    *("LICENSE", "MODEL_CARD.md", "README.md", "STORY_CREDITS.tsv", "package.json"),
    *("webgemma.js", "webgemma.d.ts", "worker.js", "python.js", "api/about"),
    *("package/constraints/xgrammar.js", "package/device/replay.js", "package/gguf/files.js"),
    *("package/media/browser.js", f"package/demo/{BUNDLED_PATH.name}", f"wheel/{wheel.NAME}"),
    *("lib/pyodide/pyodide.mjs", "lib/pyodide/pyodide.asm.mjs", "lib/pyodide/pyodide.asm.wasm"),
    *("lib/pyodide/pyodide-lock.json", "lib/pyodide/python_stdlib.zip", "lib/pyodide/LICENSE"),
    *("lib/pyodide/LICENSE-PYTHON", "lib/xgrammar/index.js", "lib/xgrammar/LICENSE"),
}
needs_libraries = pytest.mark.skipif(
    "pyodide/pyodide.mjs" not in libraries.library_files(), reason="needs npm's packages"
)


@needs_libraries
@pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm")
def test_npm_packs_all_that_the_module_needs(tmp_path: Path) -> None:
    folder = tmp_path / "webgemma"
    nbytes = answer("web", "--export-module", folder)["nbytes"]
    command = ["npm", "pack", "--dry-run", "--json"]
    packed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    (listing,) = json.loads(packed.stdout)
    assert {file["path"] for file in listing["files"]} == FILES
    assert listing["unpackedSize"] == nbytes < 40e6
    about = json.loads((folder / "api" / "about").read_text())
    assert {about["wheel"], f"{about['pyodide']}pyodide.mjs", about["xgrammar"]} <= FILES
    manifest = json.loads((folder / "package.json").read_text())
    assert {path.removeprefix("./") for path in manifest["exports"]["."].values()} <= FILES
    assert "is not empty" in refused("web", "--export-module", folder)


@needs_libraries
def test_the_package_is_made_anew_bit_for_bit() -> None:
    assert package_files() == package_files()


@needs_libraries
def test_scripts_import_only_what_the_package_has() -> None:
    files = package_files()
    scripts = {name: data.decode() for name, data in files.items() if name.count("/") == 0}
    imported = {
        name
        for script, text in scripts.items()
        if script.endswith(".js")
        for name in re.findall(r'(?:from|import\(?|URL\() ?"\./([^"]+)"', text)
    }
    assert {"python.js", "worker.js", "package/media/browser.js"} <= imported <= {*files}


def test_a_package_without_libraries_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(libraries, "library_files", dict)
    assert "libraries of the page are missing" in refused("web", "--export-module", tmp_path / "x")
    assert not (tmp_path / "x").exists()


# Types


def names_in(interface: str) -> set[str]:
    """Return the names of an interface of webgemma.d.ts."""
    types = (STATIC / "webgemma.d.ts").read_text("utf-8")
    (body,) = re.findall(rf"export interface {interface}\b.*?\{{\n(.*?)\n\}}", types, re.DOTALL)
    return set(re.findall(r"^  (?:readonly )?(\w+)[?(:]", body, re.MULTILINE))


def test_the_types_export_what_the_module_exports() -> None:
    types, script = ((STATIC / f"webgemma.{end}").read_text("utf-8") for end in ("d.ts", "js"))
    values = set(re.findall(r"^export (?:class|function) (\w+)", types, re.MULTILINE))
    exports = re.findall(r"^export (?:async )?(?:class|function) (\w+)", script, re.MULTILINE)
    assert values == {*exports} == {"load", "WebgemmaError"}
    for interface in ("Model", "Reply", "Piece"):
        assert [name for name in names_in(interface) if name not in script] == []


def test_the_types_name_every_setting_option_and_task() -> None:
    own = {"signal", "progress", "continue_last"}
    assert names_in("Settings") == {*SETTINGS} - NOT_OFFERED
    assert names_in("ChatOptions") == own | {*OPTIONS}
    types = (STATIC / "webgemma.d.ts").read_text("utf-8")
    (tasks,) = re.findall(r"task\?:(.*?);", types, re.DOTALL)
    assert set(re.findall(r'"(\w+)"', tasks)) == {*get_args(Task)}
    (kinds,) = re.findall(r"readonly kind:(.*?);", types, re.DOTALL)
    protocol = (STATIC / "tab_engine.js").read_text("utf-8")
    (reported,) = re.findall(r"kind: (\"no-webgpu\".*?);", protocol, re.DOTALL)
    kinds_of = [set(re.findall(r'"([\w-]+)"', text)) for text in (kinds, reported)]
    assert kinds_of[0] == kinds_of[1] | {"closed"}
