"""The plan of the house: one ordered line of rooms, held by reading every import.

A room imports only what stands left of it, also inside functions and under TYPE_CHECKING."""

import ast
import sys
from pathlib import Path

import pytest

import webgemma

ROOT = Path(webgemma.__file__).parent

ROOMS = (
    *("errors", "sync", "progress", "javascript"),
    *("gguf", "text", "sampler", "denoising", "images", "device"),
    *("kernels", "graph", "gemma", "reference", "media", "engine", "lora"),
    *("models", "defaults", "prompts", "pieces", "rows", "replies", "api"),
    *("convert", "diagnostics", "web", "cli", "__main__"),
)
WAITING = {"engine": {"defaults"}}  # mended when the engine's options are

# Packages from outside, and the only files or rooms that may import them.
GUESTS = {
    "numpy": {"reference", "engine", "media", "convert", "diagnostics", "cli", "api", "rows"},
    "soundfile": {"media/audio_files.py"},
    "rich": {"cli"},
    "typer": {"cli"},
    "PIL": {"media/image_files.py", "cli"},
    "wgpu": {"device/native.py", "device/commands.py"},
    "js": {"javascript.py"},
    "pyodide": {"device/browser.py", "javascript.py"},
}


def modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def imports(path: Path) -> set[str]:
    """Dotted names of everything a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names if node.module == "webgemma" else {str(node.module)}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_only_leftward(path: Path) -> None:
    file = path.relative_to(ROOT).as_posix()
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    left = {*ROOMS[: ROOMS.index(room) + 1], "__version__"} | WAITING.get(room, set())
    for name in imports(path):
        first, _, rest = name.partition(".")
        if first == "webgemma":
            assert rest.split(".")[0] in left, f"{room} imports {name}"
        elif first not in sys.stdlib_module_names:
            assert {room, file} & GUESTS.get(first, set()), f"{file} imports {name}"
