"""The drafter of the reference against transformers: its drafts, their logits and whole rounds."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import SHARED, needs_shared
from tolerance import DRAFTS_OF_TRANSFORMERS, HIDDEN_OF_TRANSFORMERS

from webgemma.gemma.config import Config
from webgemma.gemma.drafter_config import drafter_config
from webgemma.gguf.reader import Gguf
from webgemma.reference.drafter import DraftModel
from webgemma.reference.text import Cache, TextModel
from webgemma.reference.weights import Weights

FOLDER = SHARED / "mtp"
POSITIONS = (24, 40, 71)  # below the window, and past it
DRAFTS = 4
# With centroids as the file has them, and with the whole head.
CASES = [("e2b", "centroid"), ("e2b", "full"), ("large", "full")]

pytestmark = [needs_shared, pytest.mark.parametrize(("name", "head"), CASES)]


def opened(name: str, head: str) -> tuple[TextModel, DraftModel]:
    gguf = Gguf.open(FOLDER / name / "target-F16.gguf")
    target = TextModel(Config.from_gguf(gguf), Weights(gguf))
    file = Gguf.open(FOLDER / name / "assistant-F16.gguf")
    config = drafter_config(file, target.config)
    assert config.drafter is not None
    if head == "full":
        config = replace(config, drafter=replace(config.drafter, centroids=0))
    return target, DraftModel(config, Weights(file), target)


def sequence(name: str) -> list[int]:
    texts = ((FOLDER / name / file).read_text() for file in ("ids.txt", "greedy.txt"))
    return [int(token) for text in texts for token in text.split()]


def test_drafts_logits_and_states(name: str, head: str) -> None:
    target, drafter = opened(name, head)
    truth, ids = np.load(FOLDER / name / "chain.npz"), sequence(name)
    for position in POSITIONS:
        cache, trace = Cache(target.config), list[Any]()
        target.forward(ids[:position], cache, trace=trace)
        state, key = trace[-1][-1], f"p{position}.llama_{head}"
        np.testing.assert_allclose(
            state, truth[f"p{position}.h"], rtol=0, atol=HIDDEN_OF_TRANSFORMERS
        )
        drafts = drafter.drafts(ids[position], state, cache, DRAFTS)
        assert [draft.token for draft in drafts] == truth[key + ".ids"].tolist()
        for draft, logits, following in zip(
            drafts, truth[key + ".logits"], truth[key + ".h_next"], strict=True
        ):
            within = DRAFTS_OF_TRANSFORMERS * np.abs(logits).max()
            np.testing.assert_allclose(draft.logits, logits, rtol=0, atol=within)
            np.testing.assert_allclose(draft.state, following, rtol=0, atol=within)


def test_whole_rounds(name: str, head: str) -> None:
    target, drafter = opened(name, head)
    clean = json.loads((FOLDER / name / "truth.json").read_text())["clean"]
    ids, cache, trace = sequence(name), Cache(target.config), list[Any]()
    for each in clean[f"llama_{head}"]["rounds"]:
        position = each["position"]
        cache.truncate(position)
        if cache.length < position:
            target.forward(ids[cache.length : position], cache, trace=trace)
        found = drafter.drafts(ids[position], trace[-1][-1], cache, len(each["drafts"]))
        assert [draft.token for draft in found] == each["drafts"]
