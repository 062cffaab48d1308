"""The plan of the house: one ordered line of rooms, checked by reading every import.

A room imports only what stands left of it; imports inside functions and for types count."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import webgemma

ROOT = Path(webgemma.__file__).parent
TESTS = Path(__file__).parent

ROOMS = (
    *("errors", "values", "fair_lock", "turns", "sync", "faces", "progress", "javascript"),
    *("gguf", "text", "settings", "sampler", "denoising", "images", "device"),
    *("kernels", "graph", "gemma", "reference", "media", "engine", "constraints", "lora"),
    *(
        "packages",
        "models",
        "replies",
        "notebook",
        "batches",
        "embeddings",
        "structured",
        "calling",
        "api",
    ),
    *("convert", "diagnostics", "search", "web", "server", "llm_plugin", "distributed", "cli"),
)
LOOSE = {  # modules beside the folders
    *("__init__", "__main__", "api", "models", "settings", "replies", "sampler", "denoising"),
    *("images", "graph", "errors", "values", "progress", "javascript", "sync", "faces", "turns"),
    *("fair_lock", "notebook", "batches", "embeddings", "llm_plugin", "packages", "structured"),
}

# The files of the native device.
DRIVER = ("calls", "library", "wgpu_native", "dawn", "commands", "native")

# Packages from outside, and the only rooms or files that may import them.
PACKAGES = {
    "llguidance": {"constraints/native.py"},
    "llm": {"llm_plugin.py"},
    "IPython": {"notebook.py"},
    "numpy": {
        *("reference", "engine/cpu.py", "media", "convert", "diagnostics", "cli", "api"),
        *("embeddings", "search"),
    },
    "soundfile": {"media/audio_files.py"},
    "prompt_toolkit": {"cli/prompt.py"},
    "pypdf": {"search/pdf.py"},
    "pydantic": {"llm_plugin.py"},  # which `llm` has for options
    "rich": {"cli"},
    "sqlite_vec": {"search/index.py"},
    "threadpoolctl": {"reference/blas.py"},
    "starlette": {"server/app.py", "server/http.py", "distributed/ingress.py"},
    "ray": {"distributed/routing.py"},
    "pyarrow": {"distributed/rows.py", "distributed/jobs.py", "distributed/worker.py"},
    "typer": {"cli"},
    "uvicorn": {"server/listening.py"},
    "PIL": {"media/image_files.py", "cli/plot.py"},
    "wgpu": {f"device/{name}.py" for name in DRIVER},
    "cffi": {"device/dawn.py"},
    "js": {"javascript.py"},
    "pyodide": {"device/browser.py", "javascript.py"},
}


def modules() -> dict[str, Path]:
    """Return the files of all modules, by their dotted names."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(path: Path) -> Iterator[str]:
    """Yield the dotted name of everything that a file imports."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else str(node.module)


def room_of(module: str) -> str:
    """Return the room of a module; the package itself re-exports the api."""
    return [*module.split("."), "api"][1]


@pytest.mark.parametrize("module", [name for name in MODULES if name.count(".")])
def test_a_room_imports_only_what_stands_left_of_it(module: str) -> None:
    room = room_of(module)
    if room == "__main__":
        room = ROOMS[-1]
    file = MODULES[module].relative_to(ROOT).as_posix()
    for name in imports(MODULES[module]):
        package = name.split(".")[0]
        if name in MODULES:
            assert ROOMS.index(room_of(name)) <= ROOMS.index(room), f"{room} imports {name}"
        elif package not in sys.stdlib_module_names:
            assert {room, file} & PACKAGES.get(package, set()), f"{file} imports {name}"


def test_no_module_imports_itself_over_others() -> None:
    """There is no cycle of modules, also not by types."""
    edges = {
        module: {name for name in imports(path) if name in MODULES and name != module}
        for module, path in MODULES.items()
    }
    finished: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in finished:
            for name in sorted(edges[module]):
                visit(name, [*path, module])
            finished.add(module)

    for module in edges:
        visit(module, [])


def test_nothing_is_loose_but_the_modules_of_the_plan() -> None:
    assert {path.stem for path in ROOT.glob("*.py")} == LOOSE
    folders = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    assert folders | LOOSE - {"__init__", "__main__"} == set(ROOMS)


def test_the_tests_are_in_the_same_tree() -> None:
    folders = {path.name for path in TESTS.iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders <= {*ROOMS, "helpers", "browser", "judges", "fixtures", "tools"}


def test_importing_webgemma_does_not_import_numpy() -> None:
    """A browser has none, and natively it takes longer to import than all the rest."""
    code = "import sys, webgemma; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_paths_through_the_house_exist() -> None:
    text = (TESTS.parent / "CONTRIBUTING.md").read_text()
    named = re.findall(r"(?<![\w/])([a-z_]+(?:/[a-z_]+)*)\.([A-Z_]\w+|[a-z_]+)(?:\.(\w+))?", text)
    paths = [(ROOT / f"{module}.py", names) for module, *names in named]
    found = [(path, names) for path, names in paths if path.is_file() and names[0] != "py"]
    assert len(found) >= 20
    for path, names in found:
        scope: list[ast.stmt] = ast.parse(path.read_text()).body
        for name in filter(None, names):
            inside = [node for node in scope if getattr(node, "name", "") == name]
            assert inside, f"CONTRIBUTING.md: {path.relative_to(ROOT)} has no {'.'.join(names)}"
            scope = getattr(inside[0], "body", [])
