"""What the engine says on the page: for people who have neither Python nor a command line."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import webgemma
from webgemma import errors
from webgemma.web.reports import kind_of

PACKAGE = Path(webgemma.__file__).parent
# What a tab never runs: other front ends, the server of the page, and what is native.
ELSEWHERE = (
    *("cli", "convert", "diagnostics", "distributed", "llm_plugin.py", "reference", "search"),
    *("server", "packages.py", "models.py", "constraints/native.py", "gguf/ollama.py"),
    *("device/calls.py", "device/commands.py", "device/dawn.py", "device/native.py"),
    *("device/opening.py", "device/wgpu_native.py"),
    *("web/export.py", "web/server.py", "web/site.py"),
)
NAMES = {name for name in vars(errors) if name.endswith("Error")}
# Options of a command line, keywords of Python, code; the page itself names `webgemma web`.
PROGRAMMERS = re.compile(r"(?<!\w)--\w|\b\w+=|\w\(\)|`(?!webgemma web`)[^`]*`")


def spelt(node: ast.AST) -> str:
    """Return the text of a literal, … for what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(spelt, node.values))
    if isinstance(node, ast.BinOp):
        return spelt(node.left) + spelt(node.right)
    return "…"


def sentences(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and sentence of each error that a module makes, without its advice."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in NAMES and node.args:
            yield node.lineno, spelt(node.args[0])


def test_no_sentence_for_the_page_speaks_of_programs() -> None:
    found, count = [], 0
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not any(name == each or name.startswith(f"{each}/") for each in ELSEWHERE):
            for line, sentence in sentences(path):
                count += 1
                if PROGRAMMERS.search(sentence):
                    found.append(f"{name}:{line}: {sentence}")
    assert count > 300
    assert found == []


@pytest.mark.parametrize(
    "sentence", ["use --context 8192", "load it with context=8192", "run `pip install x`", "fork()"]
)
def test_what_programmers_write_is_found(sentence: str) -> None:
    assert PROGRAMMERS.search(sentence)


def test_advice_for_programs_stands_apart() -> None:
    error = errors.DeviceMemoryError("It is too large", 7, "use fewer slots")
    assert str(error) == "It is too large; use fewer slots."
    assert (error.reason, error.held_nbytes) == ("It is too large.", 7)
    assert errors.InputError("Whole.").reason == str(errors.InputError("Whole.")) == "Whole."


def test_every_kind_has_its_words_on_the_page() -> None:
    notice = (PACKAGE / "web" / "static" / "notice.js").read_text("utf-8")
    kinds = {
        kind_of(error)
        for error in (
            *(errors.StorageError("x"), errors.PromptLengthError("x"), errors.GgufError("x")),
            *(errors.DeviceMemoryError("x", 0), errors.DeviceLostError("x")),
            *(errors.MissingEncoderError("x"), errors.MissingPackageError("x")),
            errors.DeviceError("x"),
        )
    }
    assert len(kinds) == 8
    for kind in kinds:
        assert re.search(rf'^  "?{kind}"?: t\(', notice, re.MULTILINE), kind
