"""A real model, Gemma 3 270M, against what transformers computes for it, and its tokenizer.

Its file is fetched with pip, as `webgemma fetch gemma3-270m` does, unless it is there already.
Where that is not possible, these tests are skipped; WEBGEMMA_OFFLINE=1 does not even try."""

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import FIXTURES
from tolerance import (
    GPU_LOGITS_OF_TRANSFORMERS,
    INT16_LOGITS_OF_TRANSFORMERS,
    LOGITS_OF_TRANSFORMERS,
)

from webgemma import Gemma, Gguf, Tokenizer
from webgemma.errors import InputError
from webgemma.gemma.config import Config
from webgemma.packages import PACKAGED, fetch, read_terms
from webgemma.reference.text import Cache, TextModel
from webgemma.reference.weights import Weights

FOLDER = FIXTURES / "gemma3-270m"
MODEL = PACKAGED["gemma3-270m"]


@pytest.fixture(scope="module")
def path() -> Path:
    """The model's file."""
    if not MODEL.is_fetched and os.environ.get("WEBGEMMA_OFFLINE", "") not in ("", "0"):
        pytest.skip("Gemma 3 270M is not on this machine: webgemma fetch gemma3-270m")
    if MODEL.is_fetched:
        return MODEL.path
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_RETRIES", "0")
        try:
            return fetch(MODEL, read_terms(MODEL))
        except InputError as error:  # pip, or the folder; a damaged model is a failure
            pytest.skip(f"Gemma 3 270M cannot be fetched: {error}")


@cache
def recorded(name: str) -> tuple[dict[str, Any], Any]:
    """Return a text with its ids and 40 greedy ids; and the 20 likeliest ids at each position."""
    facts = json.loads((FOLDER / f"{name}.json").read_text())
    assert facts["model_sha256"] == MODEL.sha256
    return facts, np.load(FOLDER / f"{name}.npz")


def check_logits(found: np.ndarray, name: str, at: np.ndarray, within: float) -> None:
    """Compare the logits at some positions with those of transformers."""
    likeliest = recorded(name)[1]
    ids = likeliest["top_ids"][at].astype(int)
    np.testing.assert_allclose(
        np.take_along_axis(found, ids, axis=1), likeliest["top_logits"][at], rtol=0, atol=within
    )
    total = np.log(np.exp(found.astype(np.float64)).sum(axis=1))
    np.testing.assert_allclose(total, likeliest["logsumexp"][at], rtol=0, atol=within)


@pytest.fixture(scope="module")
def reference(path: Path) -> TextModel:
    gguf = Gguf.open(path)
    return TextModel(Config.from_gguf(gguf), Weights(gguf))


@pytest.mark.parametrize("name", ["short", "long"])
def test_the_reference_computes_what_transformers_does(reference: TextModel, name: str) -> None:
    """The long text goes beyond the window."""
    facts, _ = recorded(name)
    ids, cache = facts["ids"], Cache(reference.config)
    at = np.unique([*range(0, len(ids), 1 + len(ids) // 60), len(ids) - 1])
    h = reference.forward(ids, cache, head=False)
    check_logits(reference.head(h[at]), name, at, LOGITS_OF_TRANSFORMERS)
    tokens = [int(reference.head(h[-1:]).argmax())]
    while len(tokens) < len(facts["greedy"]):
        tokens.append(int(reference.forward(tokens[-1:], cache).argmax()))
    assert tokens == facts["greedy"]


@pytest.fixture(scope="module")
def gemma(path: Path) -> Iterator[Gemma]:
    with Gemma.load(path, "gpu", context=1024, kv="f32", precision="exact") as loaded:
        yield loaded


@pytest.mark.parametrize("name", ["short", "long"])
def test_the_gpu_writes_what_transformers_does(gemma: Gemma, name: str) -> None:
    facts, _ = recorded(name)
    pieces = list(gemma.generate(facts["ids"], temperature=0, max_tokens=len(facts["greedy"])))
    assert [piece.token for piece in pieces] == facts["greedy"]
    assert "".join(piece.text for piece in pieces) == facts["greedy_text"]


def test_logits_on_the_gpu(gemma: Gemma) -> None:
    facts, _ = recorded("short")
    at = np.arange(len(facts["ids"]))
    check_logits(np.asarray(gemma.logits(facts["ids"])), "short", at, GPU_LOGITS_OF_TRANSFORMERS)


def test_logits_with_activations_as_integers(path: Path) -> None:
    facts, _ = recorded("short")
    with Gemma.load(path, "gpu", context=64, precision="int16") as gemma:
        found = np.asarray(gemma.logits(facts["ids"]))
    check_logits(found, "short", np.arange(len(facts["ids"])), INT16_LOGITS_OF_TRANSFORMERS)


def test_ids_of_texts(path: Path) -> None:
    """By sentencepiece, llama.cpp and tokenizers, which agree on them."""
    with Gguf.open(path) as gguf:
        tokenizer = Tokenizer.from_gguf(gguf)
    cases = [json.loads(line) for line in (FOLDER / "tokenizer.jsonl").read_text().splitlines()]
    assert len(cases) == 312
    for case in cases:
        assert tokenizer.encode(case["text"], case["parse_special"]) == case["ids"], case["text"]
        assert tokenizer.decode(case["ids"]) == case["decodes_to"]
    for name in ("short", "long"):
        facts, _ = recorded(name)
        assert [tokenizer.bos, *tokenizer.encode(facts["text"])] == facts["ids"]
