"""`webgemma run --schema`, `--choices`, `--regex` and `--grammar`: what keeps to them, and what
is refused before a model is loaded."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from helpers.command import answer, refused, webgemma
from helpers.tiny import DIFFUSION, tiny_gguf

from webgemma import Gemma
from webgemma.cli.chat import TerminalChat
from webgemma.cli.reading import Typed
from webgemma.cli.structure import read_structure

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "warm": {"type": "boolean"}},
    "required": ["city"],
}
ASK = ("run", "-", "Is it warm in Rome?", "--device", "cpu", "--seed", 1)


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    path = tmp_path / "city.json"
    path.write_text(json.dumps(SCHEMA), "utf-8-sig")  # as Windows writes it
    return path


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a model is loaded."""

    def load(*_: object, **__: object) -> None:
        pytest.fail("a model is loaded")

    monkeypatch.setattr("webgemma.cli.run.Gemma.load", load)


def text_of(*options: object) -> str:
    result = webgemma(*ASK, *options)
    assert result.exit_code == 0, result.output
    return result.stdout.removesuffix("\n")


def test_a_schema_and_its_value(schema: Path) -> None:
    for raw in ((), ("--raw",)):
        facts = answer(*ASK, "--schema", schema, *raw)
        assert facts["finish"] == "stop"
        assert facts["value"] == json.loads(facts["text"])
        jsonschema.validate(facts["value"], SCHEMA)
        assert facts["value"].keys() <= {"city", "warm"}  # no others, as at Ollama's
    assert answer(*ASK, "--schema", schema, "--max-tokens", 2)["value"] is None
    assert json.loads(text_of("--schema", schema))["city"] in ("Rome", "Oslo")


def test_choices_a_pattern_and_grammars(tmp_path: Path) -> None:
    facts = answer(*ASK, "--choices", "yes, no")
    assert facts["text"] in ("yes", "no")
    assert "value" not in facts
    assert re.fullmatch("[a-c]{3}", text_of("--regex", "[a-c]{3}", "--raw"))
    for name, grammar in (("a.gbnf", 'root ::= "moo" | "miaow"'), ("b", 'start: "moo" | "miaow"')):
        (tmp_path / name).write_text(grammar)
        assert text_of("--grammar", tmp_path / name) in ("moo", "miaow")


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    ("options", "content", "sentence"),
    [
        (["--schema", "FILE"], None, "There is no file FILE."),
        (["--schema", "."], None, ". is a folder."),
        (["--schema", os.devnull], None, f"{os.devnull} is no regular file."),
        (["--schema", "FILE"], b"{", "FILE is not JSON: Expecting"),
        (["--schema", "FILE"], b"[" * 100_000, "FILE is not JSON: maximum recursion"),
        (["--schema", "FILE"], b"[1]", "FILE is no JSON Schema"),
        (["--schema", "FILE"], b"\xff", "FILE is not UTF-8"),
        (
            ["--schema", "FILE"],
            b'{"properties": {"a": {"format": "iri"}}}',
            "FILE at #/properties/a: format 'iri' is not supported: use pattern.",
        ),
        (["--grammar", "FILE"], b"", "FILE: grammar must be a text"),
        (["--grammar", "FILE"], b"root ::= nope", "FILE: grammar cannot be used: there is no rule"),
        (["--grammar", "FILE"], b"start: (", "FILE: The grammar cannot be used"),
        (["--choices", "a,,b"], None, "--choices has ''; each must be"),
        (["--regex", "("], None, "--regex cannot be used: "),
        (["--regex", "a", "--choices", "a"], None, "--choices and --regex say what"),
        (["--schema", "FILE", "--grammar", "FILE"], b"{}", "--schema and --grammar say what"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(
    tmp_path: Path, options: list[str], content: bytes | None, sentence: str
) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    given = [option.replace("FILE", str(file)) for option in options]
    assert f"error: {sentence.replace('FILE', str(file))}" in refused(*ASK, *given)


@pytest.mark.usefixtures("no_loading")
def test_without_llguidance_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert "webgemma[json]" in refused(*ASK, "--choices", "yes,no")


@pytest.mark.usefixtures("no_loading")
def test_a_model_that_denoises_keeps_to_nothing(tmp_path: Path) -> None:
    path = tmp_path / "diffusion.gguf"
    path.write_bytes(tiny_gguf(DIFFUSION))
    sentence = refused("run", path, "in", "--choices", "yes,no")
    assert "denoises whole canvases: it cannot keep to --choices" in sentence


def test_every_reply_of_a_chat_keeps_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    class Lines:
        def __init__(self, *lines: str) -> None:
            self.lines = iter(lines)

        def read(self) -> Typed | None:
            line = next(self.lines, None)
            return None if line is None else Typed(line)

    structure = read_structure(None, None, "[0-9]{4}", None)
    with Gemma.load(device="cpu") as gemma:
        settings: Any = {"temperature": 0}
        chat = TerminalChat(gemma, settings, structure=structure, history=False)
        chat.loop(Lines("How many?", "And now?", "/set max_tokens 1", "And then?", "/continue"))
    replies = [message["content"] for message in chat.conversation.messages[1::2]]
    assert all(re.fullmatch("[0-9]{4}", reply) for reply in replies[:2])
    assert re.fullmatch("[0-9]{1,3}", replies[2])
    said = capsys.readouterr().err.replace("\n", " ")
    assert "The reply was cut at 1 tokens: /set max_tokens changes that." in said
    assert "error: A reply that keeps to --regex is written as a whole; /regenerate" in said
