"""Training on the GPU against the reference: gradients, steps, and what a little model learns."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.gpu import device, get, hardware
from helpers.tiny import LARGE, MIXED, MOE, SMALL, Tiny, tiny_gguf
from helpers.tiny_adapter import LAYER, tiny_adapter, tiny_pairs
from tolerance import GPU_GRADIENTS, GPU_GRADIENTS_OF_ITSELF

from webgemma.device import Device
from webgemma.errors import GgufError, InputError
from webgemma.gemma.config import Config
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.lora.adapter import EMBEDDING, HEAD, Adapter
from webgemma.lora.data import Example
from webgemma.lora.estimate import estimate
from webgemma.lora.fresh import new_adapter
from webgemma.lora.optimiser import AdamW
from webgemma.lora.trainer import Guard, Options, Step, Trainer
from webgemma.reference import adamw
from webgemma.reference.backward import Backward
from webgemma.reference.lora import Pair
from webgemma.reference.text import TextModel
from webgemma.reference.weights import Weights
from webgemma.sync import run_sync

MODELS = {
    "small": SMALL,
    "large": replace(LARGE, suppressed=()),  # training knows no suppressed tokens
    "moe": MOE,
    "parted": replace(MOE, fused=False),
}
NAMES = (*LAYER, "ffn_gate_inp", EMBEDDING, HEAD)
IDS = (2, *np.random.default_rng(4).integers(24, 310, 39).tolist())
EXAMPLES = [
    Example(IDS, tuple(t >= 6 for t in range(40)), 1),  # longer than the window of 8
    Example(IDS[4:10], tuple(t in (1, 2, 5) for t in range(6)), 2),
]


def opened(tiny: Tiny) -> Gguf:
    return run_sync(Gguf.aopen(BytesSource(tiny_gguf(tiny), "tiny.gguf")))


def trainer_of(
    tiny: Tiny,
    names: tuple[str, ...] = NAMES,
    on: Device | None = None,
    table: str = "device",
    **options: object,
) -> Trainer:
    gguf = opened(tiny)
    model = run_sync(Model.load(gguf, Config.from_gguf(gguf), on or device(), table=table))
    adapter = tiny_adapter(tiny_pairs(gguf, names))
    return Trainer(model, adapter, Options(**({"sequences": 2} | options)))


def gradients_of(trainer: Trainer, batches: list[list[Example]]) -> dict[str, list[np.ndarray]]:
    """What a step would move the adapter by, before AdamW sees it."""
    targets = sum(example.targets for batch in batches for example in batch)
    for number, batch in enumerate(batches):
        trainer._write_pace(targets, number, 0.0)
        run_sync(trainer._run(batch, back=True))
    pairs = trainer.parameters.pairs.items()
    found = {name: [get(t.a_gradient), get(t.b_gradient)] for name, t in pairs}
    closed(trainer)
    return found


def closed(trainer: Trainer) -> None:
    trainer.close()
    trainer.model.close()


def reference_of(tiny: Tiny, names: tuple[str, ...] = NAMES) -> Backward:
    gguf = opened(tiny)
    model = TextModel(Config.from_gguf(gguf), Weights(gguf))
    return Backward(model, tiny_pairs(gguf, names))


def assert_close(found: dict, wanted: dict, bound: float) -> None:
    for name, halves in found.items():
        for half, (one, other) in enumerate(zip(halves, wanted[name], strict=True)):
            error = np.abs(one - np.ravel(other)).max() / np.abs(other).max()
            assert error <= bound, f"{name} {'AB'[half]}: {error}"


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_the_references(kind: str) -> None:
    found = gradients_of(trainer_of(MODELS[kind]), [EXAMPLES])
    assert_close(found, reference_of(MODELS[kind]).gradients(EXAMPLES)[1], GPU_GRADIENTS)


@pytest.mark.parametrize("kind", ["small", "parted"])
def test_gradients_with_work_cut_as_for_hardware(kind: str) -> None:
    found = gradients_of(trainer_of(MODELS[kind], on=hardware()), [EXAMPLES])
    assert_close(found, reference_of(MODELS[kind]).gradients(EXAMPLES)[1], GPU_GRADIENTS)


def test_gradients_through_every_format() -> None:
    names = ("attn_q", "ffn_up", "proj")
    found = gradients_of(trainer_of(MIXED, names), [EXAMPLES])
    assert_close(found, reference_of(MIXED, names).gradients(EXAMPLES)[1], GPU_GRADIENTS)


@pytest.mark.parametrize("kind", ["small", "moe"])
def test_keeping_all_or_computing_again_is_the_same(kind: str) -> None:
    again, kept = (
        gradients_of(trainer_of(MODELS[kind], checkpoint=checkpoint), [EXAMPLES])
        for checkpoint in (True, False)
    )
    assert_close(again, kept, GPU_GRADIENTS_OF_ITSELF)


def test_batches_add_up() -> None:
    together = gradients_of(trainer_of(SMALL), [EXAMPLES])
    parts = gradients_of(trainer_of(SMALL), [[example] for example in EXAMPLES])
    assert_close(together, parts, GPU_GRADIENTS_OF_ITSELF)


def test_the_projection_of_per_layer_embeddings() -> None:
    """Alone, and with nothing else that is trained."""
    name, rng = "per_layer_model_proj.weight", np.random.default_rng(8)
    a, b = (rng.normal(size=s).astype("f4") / 4 for s in ((3, 64), (96, 3)))
    pairs = {name: Pair(a, b, 2.0)}
    gguf = opened(SMALL)
    config = Config.from_gguf(gguf)
    model = run_sync(Model.load(gguf, config, device()))
    found = gradients_of(Trainer(model, tiny_adapter(pairs), Options(sequences=2)), [EXAMPLES])
    reference = Backward(TextModel(config, Weights(gguf)), pairs)
    assert_close(found, reference.gradients(EXAMPLES)[1], GPU_GRADIENTS)


@pytest.mark.parametrize("nbytes", [4096, 40_000, 200_000])
def test_everything_in_parts_that_fit_a_binding(nbytes: int, monkeypatch) -> None:
    """Logits of some rows at a time, probabilities of some tokens, weights of some rows."""
    monkeypatch.setattr("webgemma.lora.backward.attention.SCORES_NBYTES", nbytes)
    monkeypatch.setattr("webgemma.lora.backward.layers.LOGITS_NBYTES", nbytes)
    monkeypatch.setattr("webgemma.lora.parameters.SLAB_NBYTES", nbytes)
    limited = copy.copy(device())
    limited.limits = replace(limited.limits, binding_nbytes=40_000)
    found = gradients_of(trainer_of(SMALL, on=limited), [EXAMPLES])
    assert_close(found, reference_of(SMALL).gradients(EXAMPLES)[1], GPU_GRADIENTS)


@pytest.mark.parametrize("kind", ["moe", "parted"])
def test_experts_whose_weights_are_in_parts(kind: str) -> None:
    limited = copy.copy(device())
    limited.limits = replace(limited.limits, binding_nbytes=30_000)
    found = gradients_of(trainer_of(MODELS[kind], on=limited), [EXAMPLES])
    assert_close(found, reference_of(MODELS[kind]).gradients(EXAMPLES)[1], GPU_GRADIENTS)


def test_a_table_on_the_host() -> None:
    found = gradients_of(trainer_of(SMALL, table="host"), [EXAMPLES])
    assert_close(found, gradients_of(trainer_of(SMALL), [EXAMPLES]), GPU_GRADIENTS_OF_ITSELF)
    trainer = trainer_of(SMALL, table="host", sequences=9)
    long = Example(IDS * 2, (True,) * 80, 1)
    with pytest.raises(InputError, match="at most 512 tokens, not 9 times 96"):
        run_sync(trainer.step([[long]], 1e-3))
    closed(trainer)


def test_more_tokens_than_a_grid_has() -> None:
    trainer = trainer_of(SMALL, ("attn_q",), sequences=2000)
    with pytest.raises(InputError, match="2000 times 48 tokens are too many"):
        run_sync(trainer.step([EXAMPLES], 1e-3))
    closed(trainer)


def test_only_what_lies_above_an_adapter_is_computed_back() -> None:
    gguf = opened(SMALL)
    pairs = tiny_pairs(gguf)
    some = {name: pair for name, pair in pairs.items() if name.startswith(("blk.4.", "blk.5."))}
    model = run_sync(Model.load(gguf, Config.from_gguf(gguf), device()))
    trainer = Trainer(model, tiny_adapter(some), Options(sequences=2))
    found = gradients_of(trainer, [EXAMPLES])
    reference = Backward(TextModel(Config.from_gguf(gguf), Weights(gguf)), some)
    assert_close(found, reference.gradients(EXAMPLES)[1], GPU_GRADIENTS)


def test_steps_are_adamws() -> None:
    names = (*LAYER, HEAD)
    trainer = trainer_of(SMALL, names, optimiser=AdamW(decay=0.1, longest=0.5))
    reference = reference_of(SMALL, names)
    pairs = reference.adapter
    weights = [half for pair in pairs.values() for half in (pair.a, pair.b)]
    optimiser = adamw.AdamW(decay=0.1)
    for rate in (1e-2, 5e-3, 1e-2):
        found = run_sync(trainer.step([EXAMPLES], rate))
        loss, sums = reference.gradients(EXAMPLES)
        gradients = [half for halves in sums.values() for half in halves]
        length = adamw.clip(gradients, 0.5)
        assert found.loss == pytest.approx(loss, rel=GPU_GRADIENTS)
        assert found.length == pytest.approx(length, rel=GPU_GRADIENTS)
        assert (found.targets, found.tokens) == (37, 46)
        optimiser.update(weights, gradients, rate)
    learnt = run_sync(trainer.adapter())
    for name, pair in learnt.pairs.items():
        a, b = pairs[name].a, pairs[name].b
        for data, wanted in ((pair.a, a), (pair.b, b)):
            moved = np.abs(np.frombuffer(data, np.float32) - wanted.ravel())
            # where a gradient is next to nothing, its sign may differ, and each step is as long
            assert np.quantile(moved, 0.99) <= 1e-4, name
    assert run_sync(trainer.evaluate([EXAMPLES])) < found.loss
    closed(trainer)


def losses(trainer: Trainer, count: int, rate: float = 2e-2) -> list[float]:
    return [run_sync(trainer.step([EXAMPLES], rate)).loss for _ in range(count)]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_little_model_learns(dropout: float) -> None:
    gguf = opened(SMALL)
    config = Config.from_gguf(gguf)
    model = run_sync(Model.load(gguf, config, device()))
    adapter = new_adapter(config, rank=4, seed=1)
    trainer = Trainer(model, adapter, Options(sequences=2, dropout=dropout))
    before = run_sync(trainer.evaluate([EXAMPLES]))
    found = losses(trainer, 12, 4e-2)
    assert found[0] == pytest.approx(before, abs=1e-4)  # B is zero
    assert run_sync(trainer.evaluate([EXAMPLES])) < 0.6 * before
    closed(trainer)


def dropped(model: Model, pairs: dict) -> tuple[float, dict[str, list[np.ndarray]]]:
    """The loss and the gradients of one batch, always with the same dropout."""
    trainer = Trainer(model, tiny_adapter(pairs), Options(sequences=2, dropout=0.4, seed=5))
    trainer._write_pace(37, 0, 0.0)
    loss = np.frombuffer(run_sync(run_sync(trainer._run(EXAMPLES, back=True)).bytes()), np.float32)
    every = trainer.parameters.pairs.items()
    found = {name: [get(t.a_gradient), get(t.b_gradient)] for name, t in every}
    trainer.close()
    return float(loss.astype(np.float64).sum()) / 37, found


def test_dropout_is_the_same_on_the_way_back() -> None:
    """The gradient is the slope of the loss with the very same numbers dropped."""
    gguf, names, rng = opened(SMALL), ("attn_v", "ffn_down"), np.random.default_rng(3)
    model = run_sync(Model.load(gguf, Config.from_gguf(gguf), device()))
    pairs = tiny_pairs(gguf, names)
    _, gradients = dropped(model, pairs)
    along = {n: [rng.normal(size=x.shape).astype("f4") for x in pairs[n][:2]] for n in pairs}

    def moved(step: float) -> dict:
        return {
            n: p._replace(a=p.a + step * along[n][0], b=p.b + step * along[n][1])
            for n, p in pairs.items()
        }

    slope = sum(
        (g * d.ravel()).sum() for n in pairs for g, d in zip(gradients[n], along[n], strict=True)
    )
    difference = dropped(model, moved(1e-4))[0] - dropped(model, moved(-1e-4))[0]
    assert abs(slope) > 1
    assert difference / 2e-4 == pytest.approx(slope, rel=0.02)
    plain = gradients_of(trainer_of(SMALL, names), [EXAMPLES])
    assert all(np.abs(plain[n][0] - gradients[n][0]).max() > 0.01 for n in pairs)
    model.close()


def test_going_on_later_is_going_on(tmp_path: Path) -> None:
    names = ("attn_q", "ffn_down")
    whole = trainer_of(SMALL, names)
    wanted = losses(whole, 4)
    closed(whole)
    first = trainer_of(SMALL, names)
    begun = losses(first, 2)
    run_sync(first.save_state(tmp_path / "state.safetensors"))
    learnt = run_sync(first.adapter())
    second = Trainer(first.model, learnt, Options(sequences=2))
    second.restore_state(tmp_path / "state.safetensors")
    assert [*begun, *losses(second, 2)] == pytest.approx(wanted, rel=1e-5)
    other = Trainer(first.model, new_adapter(first.model.config, rank=2), Options())
    with pytest.raises(GgufError, match="belongs to another adapter"):
        other.restore_state(tmp_path / "state.safetensors")
    for trainer in (first, second, other):
        trainer.close()
    first.model.close()


def test_memory_comes_back() -> None:
    trainer = trainer_of(SMALL)
    model = trainer.model
    trainer.close()
    held = model.device.nbytes
    again = Trainer(model, new_adapter(model.config, rank=2), Options(sequences=2))
    run_sync(again.step([EXAMPLES], 1e-3))
    run_sync(again.evaluate([EXAMPLES[1:]]))
    again.close()
    assert model.device.nbytes == held
    model.close()


def test_the_estimate_is_what_it_takes() -> None:
    gguf = opened(SMALL)
    config, options = Config.from_gguf(gguf), Options(sequences=3)
    adapter = new_adapter(config, rank=4)
    start = device().nbytes
    model = run_sync(Model.load(gguf, config, device()))
    trainer = Trainer(model, adapter, options)
    trainer.reserve(3, 48)
    told = run_sync(estimate(gguf, config, adapter, options, 48, device()))
    assert told.nbytes == device().nbytes - start
    again, kept = (
        run_sync(estimate(gguf, config, adapter, replace(options, checkpoint=checkpoint), 512))
        for checkpoint in (True, False)
    )
    assert kept.work_nbytes > 1.5 * again.work_nbytes
    closed(trainer)


def test_a_loss_that_is_no_number_moves_nothing() -> None:
    trainer = trainer_of(SMALL, ("attn_q",))
    before = run_sync(trainer.adapter())
    found = run_sync(trainer.step([EXAMPLES], 1e-2))
    assert run_sync(trainer.adapter()) != before
    poisoned = replace(before.pairs["blk.0.attn_q.weight"], a=b"\xff\xff\xff\x7f" * 192)
    bad = Adapter("bad", {**before.pairs, "blk.0.attn_q.weight": poisoned})
    second = Trainer(trainer.model, bad, Options(sequences=2))
    found = run_sync(second.step([EXAMPLES], 1e-2))
    assert not np.isfinite(found.loss)
    assert run_sync(second.adapter()) == bad
    with pytest.raises(InputError, match="no longer a number"):
        Guard().watch(found)
    second.close()
    closed(trainer)


def test_a_loss_that_only_grows_is_noticed() -> None:
    guard = Guard()
    for _ in range(20):
        guard.watch(Step(2.0, 1.0, 1, 1))
    for _ in range(7):
        guard.watch(Step(9.0, 1.0, 1, 1))
    with pytest.raises(InputError, match=r"went up from 2\.00 to 7\.60"):
        guard.watch(Step(9.0, 1.0, 1, 1))


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ([], "nothing to learn"),
        ([[Example((2, 30), (True, False), 1)]], "nothing to learn"),
        ([EXAMPLES * 2], "1 to 2 examples here, not 4"),
        ([[Example((2, 320), (True, True), 1)]], "id 320 is none"),
    ],
)
def test_batches_that_cannot_be_learnt(batches: list, said: str) -> None:
    trainer = trainer_of(SMALL, ("attn_q",))
    with pytest.raises(InputError, match=said):
        run_sync(trainer.step(batches, 1e-3))
    closed(trainer)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"parts": ["attn_x"]}, "no part 'attn_x'"),
        ({"layers": [6]}, "layers 0 to 5"),
        ({"parts": ["ffn_gate_inp"]}, "None of these parts"),
        ({"rank": 0}, "rank 0"),
    ],
)
def test_adapters_that_cannot_be_made(options: dict, said: str) -> None:
    with pytest.raises(InputError, match=said):
        new_adapter(Config.from_gguf(opened(SMALL)), **options)


def test_fresh_adapters_change_nothing_yet_and_repeat() -> None:
    config = Config.from_gguf(opened(SMALL))
    one, other = (new_adapter(config, ("attn_k", "output"), rank=3, seed=7) for _ in range(2))
    assert one == other != new_adapter(config, ("attn_k", "output"), rank=3, seed=8)
    assert list(one.pairs) == [*(f"blk.{i}.attn_k.weight" for i in range(3)), HEAD]
    assert all(not any(pair.b) and pair.scale == 2 for pair in one.pairs.values())
    a = np.frombuffer(one.pairs[HEAD].a, np.float32)
    assert 0.9 < np.abs(a).max() * 8 <= 1
