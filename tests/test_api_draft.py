"""Drafters through the public API: named or from Ollama's store, the same text, and reported."""

from pathlib import Path

import pytest
from helpers.sessions import SHORT
from helpers.store import add_model
from helpers.tiny import LARGE, tiny_gguf
from helpers.tiny_drafter import TinyDrafter, drafter_gguf

from webgemma import Gemma, GgufError, InputError, ModelNotFoundError
from webgemma.engine.speculation import StepCosts
from webgemma.models import find_model, with_draft
from webgemma.server.offered import offered_model

IDS = [2, 30, 31, 32, 33]
SETTINGS = {"temperature": 1.0, "seed": 4, "max_tokens": 40}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    model, draft = tmp_path / "model.gguf", tmp_path / "draft.gguf"
    model.write_bytes(tiny_gguf(SHORT))
    draft.write_bytes(drafter_gguf(TinyDrafter(SHORT)))
    return model, draft


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let drafts cost nothing, so that they are made whatever becomes of them."""
    monkeypatch.setattr(StepCosts, "knows", lambda *_: True)
    monkeypatch.setattr(StepCosts, "relative", lambda *_: 0.1)


def reply(gemma: Gemma, **settings: object) -> tuple[list[int], int]:
    pieces = list(gemma.generate(IDS, **SETTINGS, **settings))
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.accepted <= pieces[-1].usage.drafted
    return [piece.token for piece in pieces], pieces[-1].usage.drafted


def test_the_text_is_the_same_and_drafts_are_reported(files: tuple[Path, Path]) -> None:
    model, draft = files
    with Gemma.load(model, "gpu", context=128) as gemma:
        expected, drafted = reply(gemma, speculate="off")
        assert drafted == 0
        with pytest.raises(InputError, match="was loaded without a drafter"):
            reply(gemma, speculate="mtp")
        nbytes = gemma.memory_nbytes
    with Gemma.load(model, "gpu", context=128, draft=draft) as gemma:
        assert gemma.memory_nbytes > nbytes
        for kind in ("mtp", "auto"):
            tokens, drafted = reply(gemma, speculate=kind)
            assert tokens == expected
            assert drafted > 0
        assert reply(gemma, speculate="off") == (expected, 0)
        fork = gemma.fork()
        assert reply(fork, speculate="mtp")[0] == expected
        fork.close()
    with Gemma.load(model, "cpu", context=128, draft=draft) as gemma:
        assert reply(gemma) == reply(gemma, speculate="mtp")  # there are none there


def test_progress_counts_both_files(files: tuple[Path, Path]) -> None:
    model, draft = files
    seen: list[tuple[int, int]] = []
    Gemma.load(
        model,
        "gpu",
        context=64,
        draft=draft,
        progress=lambda done, total: seen.append((done, total)),
    ).close()
    assert {total for _, total in seen} == {model.stat().st_size + draft.stat().st_size}


def test_ollamas_drafter_is_used_unless_it_is_declined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    layers = [("draft", drafter_gguf(TinyDrafter(SHORT)))]
    add_model(tmp_path, "gemma4:tiny", gguf=tiny_gguf(SHORT), layers=layers)
    add_model(tmp_path, "gemma4:plain", gguf=tiny_gguf(SHORT))
    with Gemma.load("gemma4:tiny", "gpu", context=128) as gemma:
        assert reply(gemma, speculate="mtp")[1] > 0
    with (
        Gemma.load("gemma4:tiny", "gpu", context=128, draft=False) as gemma,
        pytest.raises(InputError, match="without a drafter"),
    ):
        reply(gemma, speculate="mtp")
    # A server counts it before it loads the model.
    sizes = [
        offered_model(f"gemma4:{tag}").memory_budget({}).weights_nbytes for tag in ("tiny", "plain")
    ]
    assert sizes[0] > sizes[1]
    assert with_draft(find_model("gemma4:plain"), None).draft() is None


def test_a_drafter_that_is_not_there_or_does_not_fit(files: tuple[Path, Path]) -> None:
    model, draft = files
    with pytest.raises(ModelNotFoundError, match="There is no file"):
        Gemma.load(model, draft=draft.with_name("other.gguf"))
    draft.write_bytes(drafter_gguf(TinyDrafter(LARGE)))
    with pytest.raises(GgufError, match="not the drafter of this model"):
        Gemma.load(model, "gpu", draft=draft)
    draft.write_bytes(draft.read_bytes()[:-100])
    with pytest.raises(GgufError):
        Gemma.load(model, "gpu", draft=draft)
