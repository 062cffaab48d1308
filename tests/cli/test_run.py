"""`webgemma run`: what is refused before a model is loaded, hints, and what is printed where."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.store import add_model
from helpers.tiny import LARGE, SMALL, tiny_gguf
from helpers.tiny_drafter import TinyDrafter, drafter_gguf
from typer.testing import CliRunner

from webgemma import Gemma, Piece, Usage
from webgemma.cli.program import app
from webgemma.cli.reply import Received

DATA = tiny_gguf(SMALL)


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a model is loaded."""

    def load(*_: object, **__: object) -> None:
        pytest.fail("a model is loaded")

    monkeypatch.setattr("webgemma.cli.run.Gemma.load", load)


def run(*args: object, stdin: str = "") -> tuple[int, str, str]:
    """Return the exit code, the output and the errors of `webgemma run`."""
    result = CliRunner().invoke(app, ["run", *map(str, args)], input=stdin)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr.replace("\n", " ")


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["in", "--temperature", "-1"], "temperature is -1.0"),
        (["in", "--top-p", "2"], "top_p is 2.0"),
        (["in", "--stop", ""], "stop string"),
        (["in", "--steps", "3"], "steps does not apply"),
        (["in", "--context", "0"], "A context of 0 is not possible"),
        (["in", "--context", "513"], "this model's is 1 to 512"),
        (["in", "--image", "none.png"], "There is no file none.png"),
        (["in", "--image", __file__], "is not an image"),
        (["in", "--audio", __file__], "test_run.py"),
        (["in", "--image", __file__, "--image-budget", "71"], "must be one of 70, 140"),
        (["in", "--quiet", "--stats"], "choose one"),
        (["in", "--quiet", "--verbose"], "choose one"),
        (["in", "--draft", "none.gguf"], "There is no file none.gguf"),
        (["in", "--draft", __file__], "is not a GGUF file"),
        (["in", "--draft", "none.gguf", "--no-draft"], "choose one"),
        (["in", "--max-drafts", "9"], "max_drafts is 9"),
        (["no " * 600], "tokens, but the context holds 512"),
        (["no " * 600, "--raw"], "tokens, but the context holds 512"),
        (["in", "--system", "no " * 600], "tokens, but the context holds 512"),
        (["no " * 40, "--context", "32"], "tokens, but the context holds 32"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_work_is_refused_before_the_model_is_loaded(
    model: Path, args: list[str], sentence: str
) -> None:
    code, shown, error = run(model, *args)
    assert code == 1
    assert shown == ""
    assert error.startswith("error: ")
    assert sentence in error


def test_a_long_prompt_that_fits_is_answered(model: Path) -> None:
    """Text of more bytes than the context has positions is counted in tokens, not guessed."""
    text = "the" * 160
    code, shown, _ = run(model, text, "--raw", "--max-tokens", 1, "--json", "--context", 400)
    assert code == 0
    assert json.loads(shown)["usage"]["prompt"] < 400 < len(text)


@pytest.mark.usefixtures("no_loading")
def test_a_message_in_the_models_place_gets_the_command_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    for message in ("What is ice?", "Hi there", "why?"):
        code, _, error = run(message)
        assert code == 1
        assert f"The model comes before the message: webgemma run - '{message}' asks" in error
    add_model(tmp_path, "gemma4:tiny", gguf=DATA)
    assert "gemma4:tiny in place of -" in run("What is ice?")[2]
    assert "message: webgemma run gemma4:tiny 'Is it [/x]?'" in run("Is it [/x]?", "gemma4:tiny")[2]
    assert "webgemma run - '…'" in run("Why\nis it " + "so " * 100)[2]
    for path in ("./my model", "/no where/x", "my model.gguf"):
        assert "There is no file" in run(path, "in")[2]
    assert "is on a server" in run("https://example.org/x?y", "in")[2]


def test_a_cut_reply_says_so_beside_standard_output(model: Path) -> None:
    options = (model, "in", "--temperature", 0, "--max-tokens", 3)
    code, shown, quiet = run(*options)
    assert code == 0
    assert "The reply was cut at 3 tokens: --max-tokens allows no more." in quiet
    assert run(*options, "--quiet") == (0, shown, "")
    silent = run(*options, "--json")
    assert json.loads(silent[1])["finish"] == "length"
    assert silent[2] == ""
    context = run(model, "in", "--temperature", 0, "--context", 24)
    assert "because the context of 24 tokens is full: a larger --context" in context[2]


@pytest.mark.parametrize("option", ["--stats", "--verbose"])
def test_stats_say_what_a_reply_took(model: Path, option: str) -> None:
    options = (model, "in", "--temperature", 0, "--max-tokens", 3)
    _, shown, quiet = run(*options, option)
    facts = json.loads(run(*options, "--json")[1])
    prompt = facts["usage"]["prompt"]
    zero = dict.fromkeys(("left_out", "cached", "drafted", "accepted"), 0)
    assert facts["usage"] == {"prompt": prompt, "reply": 3, "context": 512, **zero}
    assert f"prompt {prompt} tokens (0 cached), " in quiet
    assert "drafts" not in quiet
    assert "reply 3 tokens, " in quiet
    assert f"context {prompt + 3} of 512 used, {512 - prompt - 3} left" in quiet
    assert "tokens/s" in quiet
    assert "tokens/s" not in shown


def test_stats_say_how_many_drafts_were_right() -> None:
    received = Received()
    usages = [Usage(9, 1, 64, cached=4), Usage(9, 2, 64, 0, 4, drafted=8, accepted=6)]
    for usage in usages:
        received.add(Piece(5, "in", 0.0, usage=usage))
    line = received.statistics()
    assert line.startswith("prompt 9 tokens (4 cached), ")
    assert " · drafts 8 checked, 6 accepted (75%) · context 11 of 64 used" in line
    facts = received.facts()["usage"]
    assert (facts["cached"], facts["drafted"], facts["accepted"]) == (4, 8, 6)


def test_a_drafter_is_loaded_or_left_out(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = tmp_path / "draft.gguf"
    draft.write_bytes(drafter_gguf(TinyDrafter(LARGE)))
    assert "not the drafter of this model" in run(model, "in", "--draft", draft)[2]
    draft.write_bytes(drafter_gguf(TinyDrafter(SMALL)))
    given: list[object] = []
    real = Gemma.load

    def load(*args: Any, **options: Any) -> Gemma:
        given.append(options["draft"])
        return real(*args, **options)

    monkeypatch.setattr("webgemma.cli.run.Gemma.load", load)
    for options in ((), ("--draft", draft), ("--no-draft",)):
        code, _, _ = run(model, "in", "--device", "cpu", "--max-tokens", 2, *options)
        assert code == 0
    assert given == [None, draft, False]


def test_only_a_person_waits_for_the_editor() -> None:
    """It takes a while to import."""
    code = "import sys, webgemma.cli; sys.exit('prompt_toolkit' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
