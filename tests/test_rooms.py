"""Who may import whom: the plan of the house, held by reading every import."""

import ast
import sys
from pathlib import Path

import pytest

import webgemma

ROOT = Path(webgemma.__file__).parent

# Each room and the rooms it may import; those of OPEN_TO_ALL anybody.
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "blocking": set(),
    "javascript": set(),
    "progress": set(),
    "gguf": set(),
    "convert": {"gguf"},
    "text": set(),
    "sampler": set(),
    "denoising": {"sampler"},
    "pictures": set(),
    "picture_files": {"pictures"},
    "device": set(),
    "kernels": {"device"},
    "graph": {"device", "kernels"},
    "gemma": {"gguf", "device", "kernels", "graph", "sampler", "denoising", "pictures"},
    "sounds": {"gemma"},
    "browser_media": {"gemma", "pictures", "sounds"},
    "session_memory": {"device", "graph", "gemma"},
    "session": {"gguf", "device", "graph", "gemma", "sampler", "session_memory"},
    "blocks": {"device", "graph", "gemma", "denoising", "session"},
    "lora": {"gguf", "text", "device", "kernels", "graph", "gemma"},
    "selftest": {"gguf", "device", "kernels", "graph"},
    "models": {"gguf"},
    "rows": set(),
    "senses": {"gguf", "gemma", "pictures"},
    "gpu_senses": {"gguf", "device", "gemma", "pictures", "senses"},
    "media": {"text", "gemma", "pictures", "picture_files", "sounds", "browser_media", "senses"},
    "reference": {"gguf", "gemma", "sampler", "denoising", "pictures", "senses"},
    "pieces": {"text", "denoising"},
    "defaults": {"gemma", "models", "denoising"},
    "prompts": {"text", "defaults"},
    "engines": {
        *("gguf", "device", "sampler", "gemma", "defaults", "selftest", "session", "reference"),
        *("senses", "gpu_senses", "denoising", "blocks"),
    },
    "replies": {
        *("text", "gemma", "defaults", "denoising", "engines", "pieces", "sampler", "senses"),
    },
    "api": {
        "prompts",
        "replies",
        "gguf",
        "text",
        "pictures",
        "senses",
        "media",
        "rows",
        "gemma",
        "session",
        "defaults",
        "engines",
        "models",
        "pieces",
        "lora",
    },
    "merge": {"gguf", "gemma", "lora", "reference"},
    "check": {"gguf", "device", "kernels", "graph", "gemma", "session", "reference"},
    "bench": {"gguf", "device", "kernels", "graph", "gemma", "session", "sampler", "reference"},
    "web": {
        *("gguf", "device", "gemma", "denoising", "lora", "engines", "models", "pieces", "api"),
        "__version__",
    },
    "cli": {
        *("gguf", "text", "device", "gemma", "selftest", "models", "pieces", "pictures"),
        "denoising",
        *("defaults", "api", "check", "bench", "lora", "merge", "web", "convert", "__version__"),
    },
    "__main__": {"cli"},
}
OPEN_TO_ALL = {"errors", "blocking", "javascript", "progress"}

# Outside packages, and the only rooms that may import them.
GUESTS = {
    "numpy": {"reference", "check", "merge", "cli", "api", "sounds", "convert", "rows"},
    "soundfile": {"sounds"},
    "rich": {"cli"},
    "typer": {"cli"},
    "PIL": {"picture_files", "cli"},
    "wgpu": {"device"},
    "js": {"javascript"},
    "pyodide": {"device", "javascript"},
}
# And the only files of a room that may.
GUEST_FILES = {
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
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    for name in imports(path):
        first, _, rest = name.partition(".")
        if first == "webgemma":
            other = rest.split(".")[0]
            assert other in ROOMS[room] | OPEN_TO_ALL | {room}, f"{room} imports {name}"
        elif first not in sys.stdlib_module_names:
            assert room in GUESTS.get(first, set()), f"{room} imports {name}"


@pytest.mark.parametrize("guest", GUEST_FILES)
def test_guests_of_a_few_files(guest: str) -> None:
    files = {
        path.relative_to(ROOT).as_posix()
        for path in modules()
        if any(name.split(".")[0] == guest for name in imports(path))
    }
    assert files == GUEST_FILES[guest]


def test_reference_sees_nothing_of_gemma_but_its_blueprint() -> None:
    for path in (ROOT / "reference").glob("*.py"):
        seen = {name for name in imports(path) if name.startswith("webgemma.gemma")}
        blueprint = {f"webgemma.gemma.{part}" for part in ("config", "tensors", "towers")}
        assert seen <= blueprint, path.name


def test_only_the_reference_engine_needs_numpy_at_import() -> None:
    """`import webgemma` must work where there is no numpy (Pyodide)."""
    for path in modules():
        if path.relative_to(ROOT).parts[0] in ("reference", "check.py", "merge.py", "cli"):
            continue
        tree = ast.parse(path.read_text("utf-8"))
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [a.name for a in node.names] + [getattr(node, "module", "") or ""]
                assert not any(n.startswith(("numpy", "webgemma.reference")) for n in names), (
                    path.name
                )
