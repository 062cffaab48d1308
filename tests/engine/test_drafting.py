"""Drafters on the GPU: the reference's drafts, transformers' rounds, and always the same text."""

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import SHARED, needs_shared
from helpers.gpu import device, get, hardware, put
from helpers.sessions import SHORT, open_batch, open_tiny
from helpers.tiny import LARGE, MOE, Tiny
from helpers.tiny_drafter import TinyDrafter, drafter_gguf
from tolerance import GPU_DRAFTS

from webgemma.diagnostics.bench import Task
from webgemma.diagnostics.drafts import ScriptedDrafts, time_drafts
from webgemma.engine.batching import Batch, Generation
from webgemma.engine.session import Session
from webgemma.errors import InputError
from webgemma.gemma.config import Config
from webgemma.gemma.drafter_config import drafter_config
from webgemma.gemma.gpu_sampler import MAX_DRAFTS, MAX_SLOTS, Row
from webgemma.gemma.weights import DrafterModel, Model
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.graph import Recorder
from webgemma.reference.drafter import Draft, DraftModel
from webgemma.reference.text import Cache, TextModel
from webgemma.reference.weights import Weights
from webgemma.settings import Settings, resolve
from webgemma.sync import run_sync

GREEDY = resolve({"temperature": 0})
SAMPLED = resolve({"temperature": 1.2, "top_k": 0, "top_p": 1.0})
PENALISED = resolve(
    {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.4, "recent": 12}
    | {"logit_bias": {31: 3.0, 60: -2.0}, "top_logprobs": 2}
)
PROMPT = [2, *(24 + i * 7 % 280 for i in range(1, 30))]
DRAFTERS = {
    "head": TinyDrafter(SHORT),
    "centroids": TinyDrafter(SHORT, centroids=40),
    "quantised": TinyDrafter(
        replace(SHORT, width=256, head_dims=(64, 128), ffn=256, ple=0),
        width=256,
        ffn=256,
        formats=("Q8_0", "Q4_0", "F16"),
    ),
    "keys are values": TinyDrafter(LARGE),
}


def open_drafter(drafter: TinyDrafter, target: Config) -> tuple[Gguf, Config]:
    source = BytesSource(drafter_gguf(drafter), "drafter.gguf")
    gguf = run_sync(Gguf.aopen(source))
    return gguf, drafter_config(gguf, target)


def load(drafter: TinyDrafter, divided: str = "software") -> Model:
    on = hardware() if divided == "hardware" else device()
    gguf, config = open_tiny(drafter.target)
    model = run_sync(Model.load(gguf, config, on))
    model.drafter = run_sync(DrafterModel.load(*open_drafter(drafter, config), on))
    return model


def drafting(batch: Batch, drafter: str, count: int) -> None:
    """Let every step of a batch have so many drafts, whether or not they pay."""
    chosen = (drafter, count) if count else ("", 0)
    batch.choose_drafts = lambda *_: chosen


def reference_drafts(drafter: TinyDrafter, ids: Sequence[int], count: int) -> list[Draft]:
    """Return the drafts after the ids, of which the last is not read yet."""
    gguf, config = open_tiny(drafter.target)
    target = TextModel(config, Weights(gguf))
    file, own = open_drafter(drafter, config)
    cache, trace = Cache(config), list[Any]()
    target.forward(ids[:-1], cache, trace=trace)
    return DraftModel(own, Weights(file), target).drafts(ids[-1], trace[-1][-1], cache, count)


def device_drafts(
    batch: Batch, ids: Sequence[int], count: int
) -> tuple[list[int], list[int], np.ndarray]:
    """Return some tokens of a conversation, the drafts that follow them, and the next states."""
    session = Session.in_slot(batch, batch.slots.count - 1)
    drafting(batch, "", 0)
    generation = run_sync(session.begin(ids, GREEDY, 3))
    run_sync(generation.next())
    run_sync(batch.settle())
    slots, model = batch.slots, batch.slots.model
    slots.conversations.set_rows([Row(session.index, ahead) for ahead in range(count + 1)])
    assert slots.drafting is not None
    recorder = Recorder(model.device)
    slots.drafting.record(recorder, 8, count + 1)
    inputs = next(call for call in recorder.calls if call.kernel.name.startswith("begin_drafts"))
    u = next(t for t in inputs.tensors if t.allocated is None)
    model.device.run(recorder.plan())
    first = 4 + 3 * MAX_SLOTS + session.index * MAX_DRAFTS
    drafts = get(slots.conversations.tensor, np.uint32)[first : first + count].tolist()
    generation.leave()
    return generation.marks, drafts, get(u)[0, model.config.width :]


@pytest.mark.parametrize("divided", ["software", "hardware"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_are_those_of_the_reference(name: str, divided: str) -> None:
    model, count = load(DRAFTERS[name], divided), 4
    for slots in (1, 3):
        batch, _ = open_batch(model, slots, kv="f32")
        ids, drafts, state = device_drafts(batch, PROMPT, count)
        expected = reference_drafts(DRAFTERS[name], ids, count)
        assert drafts == [draft.token for draft in expected]
        within = GPU_DRAFTS * np.abs(expected[-2].state).max()
        np.testing.assert_allclose(state, expected[-2].state, rtol=0, atol=within)
        batch.close()
    model.close()


@needs_shared
@pytest.mark.parametrize(
    ("name", "head"), [("e2b", "centroid"), ("e2b", "full"), ("large", "full")]
)
def test_rounds_of_transformers(name: str, head: str) -> None:
    """Whole rounds, of recorded weights: the drafts of each, and the tokens of the target."""
    folder = SHARED / "mtp" / name
    gguf, file = (Gguf.open(folder / f"{part}-F16.gguf") for part in ("target", "assistant"))
    config = Config.from_gguf(gguf)
    own = drafter_config(file, config)
    assert own.drafter is not None
    if head == "full":
        own = replace(own, drafter=replace(own.drafter, centroids=0))
    model = run_sync(Model.load(gguf, config, device()))
    model.drafter = run_sync(DrafterModel.load(file, own, device()))
    ids, greedy = (
        [int(t) for t in (folder / f).read_text().split()] for f in ("ids.txt", "greedy.txt")
    )
    rounds = json.loads((folder / "truth.json").read_text())["clean"][f"llama_{head}"]["rounds"]
    batch, (session,) = open_batch(model, kv="f32")
    drafting(batch, "mtp", 4)
    generation, accepted = run_sync(session.begin(ids, GREEDY, 3)), list[int]()
    generation.speculation.note = lambda *counts: accepted.append(counts[2])  # type: ignore[method-assign]
    assert [each.token for each in taken(generation, len(greedy))] == greedy
    whole = [each["accepted"] for each in rounds if len(each["drafts"]) == 4]
    assert accepted[: len(whole)] == whole
    batch.close()
    model.close()


# The same text


def taken(generation: Generation, count: int) -> list[Any]:
    tokens = []
    while len(tokens) < count and (token := run_sync(generation.next())) is not None:
        tokens.append(token)
    generation.leave()
    return tokens


def bits(tokens: Sequence[Any]) -> list[object]:
    return [(each.token, struct.pack("<f", each.logprob), each.top) for each in tokens]


def scripted(batch: Batch, script: Sequence[int], share: float) -> None:
    """Let the drafts of a batch be the tokens of a script, so often."""
    model = batch.slots.model
    held = put(np.array(script, np.uint32), model.device)
    drafter = batch.slots.plans.drafters.get("mtp")
    made = ScriptedDrafts(batch.slots.conversations.tensor, held, share, 320, drafter)
    batch.slots.plans.drafters["scripted"] = made.record


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    loaded = load(TinyDrafter(SHORT, centroids=40))
    yield loaded
    loaded.close()


def check_same_text(
    model: Model, settings: Settings, precision: str, shares: Sequence[float], counts: Sequence[int]
) -> None:
    batch, (session,) = open_batch(model, precision=precision)
    drafting(batch, "", 0)
    expected = taken(run_sync(session.begin(PROMPT, settings, 3)), 60)
    batch.close()
    script = [*PROMPT, *(each.token for each in expected)]
    for share in shares:
        batch, (session,) = open_batch(model, precision=precision)
        scripted(batch, script, share)
        for count in counts:
            drafting(batch, "scripted", count)
            session.rewind(0)
            generation = run_sync(session.begin(PROMPT, settings, 3))
            assert bits(taken(generation, 60)) == bits(expected), (share, count)
            noted = generation.speculation.counts
            assert noted.checked > 0
            assert (noted.remained > 0) == (share > 0)
        batch.close()


@pytest.mark.parametrize(
    ("divided", "precision"), [("software", "exact"), ("software", "int16"), ("hardware", "int16")]
)
def test_tokens_are_the_same_with_a_drafter(divided: str, precision: str) -> None:
    model = load(TinyDrafter(SHORT, centroids=40), divided)
    check_same_text(model, SAMPLED, precision, (0.7,), range(1, 8))
    model.close()


@pytest.mark.parametrize("settings", [GREEDY, PENALISED], ids=["greedy", "penalised"])
def test_other_settings(model: Model, settings: Settings) -> None:
    check_same_text(model, settings, "int16", (0.0, 1.0), (3, 7))


@pytest.mark.parametrize("tiny", [LARGE, MOE], ids=["keys are values", "experts"])
@pytest.mark.parametrize("precision", ["exact", "int16"])
def test_other_models(tiny: Tiny, precision: str) -> None:
    model = load(TinyDrafter(tiny))
    check_same_text(model, SAMPLED, precision, (0.7,), (2, 4))
    model.close()


def test_conversations_side_by_side(model: Model) -> None:
    prompts = [PROMPT, [2, 50, 51, 52], [2, 60, 61, 62, 63, 64]]

    def together(drafter: str, count: int) -> list[object]:
        batch, sessions = open_batch(model, len(prompts))
        drafting(batch, drafter, count)
        generations = [
            run_sync(session.begin(ids, settings, 3))
            for session, ids, settings in zip(
                sessions, prompts, (GREEDY, SAMPLED, PENALISED), strict=True
            )
        ]
        found: list[list[Any]] = [[] for _ in prompts]
        for _ in range(24):
            for tokens, generation in zip(found, generations, strict=True):
                tokens.append(run_sync(generation.next()))
        batch.close()
        return [bits(tokens) for tokens in found]

    assert together("mtp", 1) == together("", 0)


def test_more_slots_keep_the_states(model: Model) -> None:
    """Where memory grows, the next drafts are those that would have come without it."""
    found = []
    for grows in (False, True):
        batch, (session,) = open_batch(model, kv="f32")
        drafting(batch, "mtp", 3)
        generation, accepted = run_sync(session.begin(PROMPT, GREEDY, 3)), list[int]()
        tokens = [run_sync(generation.next()) for _ in range(5)]
        if grows:
            run_sync(batch.grow(3, [session]))
            drafting(batch, "mtp", 3)
        assert batch.slots.drafting is not None
        run_sync(batch.settle())
        states = get(batch.slots.drafting.states)[0]
        tokens += taken(generation, 5)
        found.append((bits(tokens), states.tobytes(), accepted))
        batch.close()
    assert found[0] == found[1]


def test_a_drafter_must_be_there() -> None:
    gguf, config = open_tiny(SHORT)
    model = run_sync(Model.load(gguf, config, device()))
    batch, (session,) = open_batch(model)
    with pytest.raises(InputError, match="was loaded without a drafter"):
        run_sync(session.begin(PROMPT, resolve({"speculate": "mtp"}), 3))
    batch.close()
    model.close()


# How fast


def test_what_drafts_are_worth_is_measured(model: Model) -> None:
    task = Task(prompt=16, decode=24, repetitions=1)
    plain, found = run_sync(time_drafts(model, task, "f16", "exact", (0.5, 1.0), (1, 3)))
    assert plain > 0
    assert [(each.share, each.drafts) for each in found] == [(0.5, 1), (0.5, 3), (1.0, 1), (1.0, 3)]
    assert [each.accepted for each in found[2:]] == [1, 3]
    assert 0 < found[0].accepted < 1
    assert all(each.rate > 0 for each in found)
