"""Training on the GPU against the reference: gradients, steps of AdamW, and falling losses."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
from helpers.gpu import device, get, hardware
from helpers.tiny import GEMMA3, LARGE, MIXED, MOE, SMALL
from helpers.tiny_adapter import LAYER, tiny_adapter, tiny_pairs
from helpers.training import (
    EXAMPLES,
    IDS,
    assert_close,
    close,
    gradients_of,
    open_tiny,
    reference_of,
    trainer_of,
)
from tolerance import GPU_GRADIENTS, GPU_GRADIENTS_OF_ITSELF

from webgemma.errors import InputError
from webgemma.gemma.config import Config
from webgemma.gemma.weights import Model
from webgemma.lora.adapter import HEAD, Adapter, new_adapter
from webgemma.lora.data import Example
from webgemma.lora.estimate import estimate
from webgemma.lora.optimiser import AdamW
from webgemma.lora.trainer import StepResult, Trainer, TrainingOptions
from webgemma.lora.training import Divergence
from webgemma.reference import adamw
from webgemma.reference.backward import Backward
from webgemma.reference.lora import Pair
from webgemma.reference.text import TextModel
from webgemma.reference.weights import Weights
from webgemma.sync import run_sync

MODELS = {
    "small": SMALL,
    "large": replace(LARGE, suppressed=()),  # training does not suppress tokens
    "moe": MOE,
    "unfused": replace(MOE, fused=False),
    "gemma3": GEMMA3,
}


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_those_of_the_reference(kind: str) -> None:
    found = gradients_of(trainer_of(MODELS[kind]), [EXAMPLES])
    assert_close(found, reference_of(MODELS[kind]).gradients(EXAMPLES)[1], GPU_GRADIENTS)


@pytest.mark.parametrize("kind", ["small", "unfused"])
def test_work_divided_as_for_hardware_gives_the_same_gradients(kind: str) -> None:
    found = gradients_of(trainer_of(MODELS[kind], on=hardware()), [EXAMPLES])
    assert_close(found, reference_of(MODELS[kind]).gradients(EXAMPLES)[1], GPU_GRADIENTS)


def test_gradients_pass_through_every_format() -> None:
    names = ("attn_q", "ffn_up", "proj")
    found = gradients_of(trainer_of(MIXED, names), [EXAMPLES])
    assert_close(found, reference_of(MIXED, names).gradients(EXAMPLES)[1], GPU_GRADIENTS)


@pytest.mark.parametrize("kind", ["small", "moe"])
def test_recomputed_layers_give_the_gradients_of_kept_ones(kind: str) -> None:
    recomputed, kept = (
        gradients_of(trainer_of(MODELS[kind], recompute=recompute), [EXAMPLES])
        for recompute in (True, False)
    )
    assert_close(recomputed, kept, GPU_GRADIENTS_OF_ITSELF)


def test_gradients_of_batches_add_up() -> None:
    together = gradients_of(trainer_of(SMALL), [EXAMPLES])
    separate = gradients_of(trainer_of(SMALL), [[example] for example in EXAMPLES])
    assert_close(together, separate, GPU_GRADIENTS_OF_ITSELF)


def test_the_projection_of_per_layer_embeddings_is_trained_alone() -> None:
    name, rng = "per_layer_model_proj.weight", np.random.default_rng(8)
    a, b = (rng.normal(size=s).astype("f4") / 4 for s in ((3, 64), (96, 3)))
    pairs = {name: Pair(a, b, 2.0)}
    gguf = open_tiny(SMALL)
    config = Config.from_gguf(gguf)
    model = run_sync(Model.load(gguf, config, device()))
    trainer = Trainer(model, tiny_adapter(pairs), TrainingOptions(batch_size=2))
    found = gradients_of(trainer, [EXAMPLES])
    reference = Backward(TextModel(config, Weights(gguf)), pairs)
    assert_close(found, reference.gradients(EXAMPLES)[1], GPU_GRADIENTS)


@pytest.mark.parametrize("nbytes", [4096, 40_000, 200_000])
def test_gradients_are_the_same_in_small_buffers(nbytes: int, monkeypatch) -> None:
    """Logits, scores and weights are computed some rows at a time."""
    monkeypatch.setattr("webgemma.lora.backward.attention.SCORES_NBYTES", nbytes)
    monkeypatch.setattr("webgemma.lora.backward.layers.LOGITS_NBYTES", nbytes)
    monkeypatch.setattr("webgemma.lora.optimiser.SLAB_NBYTES", nbytes)
    limited = copy.copy(device())
    limited.limits = replace(limited.limits, binding_nbytes=40_000)
    found = gradients_of(trainer_of(SMALL, on=limited), [EXAMPLES])
    assert_close(found, reference_of(SMALL).gradients(EXAMPLES)[1], GPU_GRADIENTS)


def test_sequences_may_attend_in_several_dispatches(monkeypatch) -> None:
    monkeypatch.setattr("webgemma.gemma.record.loop_limits.attention_prefill_keys", lambda *_: 64)
    tiny, names = replace(MODELS["large"], pattern="sf"), ("attn_q", "attn_v")
    examples = [Example(IDS * 2, (True,) * 80, 1), Example(IDS[1:] * 2, (True,) * 78, 2)]
    found = gradients_of(trainer_of(tiny, names), [examples])
    assert_close(found, reference_of(tiny, names).gradients(examples)[1], GPU_GRADIENTS)


@pytest.mark.parametrize("kind", ["moe", "unfused"])
def test_experts_may_be_bound_in_parts(kind: str) -> None:
    limited = copy.copy(device())
    limited.limits = replace(limited.limits, binding_nbytes=30_000)
    found = gradients_of(trainer_of(MODELS[kind], on=limited), [EXAMPLES])
    assert_close(found, reference_of(MODELS[kind]).gradients(EXAMPLES)[1], GPU_GRADIENTS)


def test_the_table_of_embeddings_may_stay_on_the_host() -> None:
    found = gradients_of(trainer_of(SMALL, table="host"), [EXAMPLES])
    assert_close(found, gradients_of(trainer_of(SMALL), [EXAMPLES]), GPU_GRADIENTS_OF_ITSELF)
    trainer = trainer_of(SMALL, table="host", batch_size=9)
    long = Example(IDS * 2, (True,) * 80, 1)
    with pytest.raises(InputError, match="at most 512 tokens, not 9 times 96"):
        run_sync(trainer.step([[long]], 1e-3))
    close(trainer)


def test_more_tokens_than_a_grid_raise_an_error() -> None:
    trainer = trainer_of(SMALL, ("attn_q",), batch_size=2000)
    with pytest.raises(InputError, match="2000 times 48 tokens are too many"):
        run_sync(trainer.step([EXAMPLES], 1e-3))
    close(trainer)


def test_gradients_end_at_the_lowest_adapted_layer() -> None:
    gguf = open_tiny(SMALL)
    pairs = tiny_pairs(gguf)
    some = {name: pair for name, pair in pairs.items() if name.startswith(("blk.4.", "blk.5."))}
    model = run_sync(Model.load(gguf, Config.from_gguf(gguf), device()))
    trainer = Trainer(model, tiny_adapter(some), TrainingOptions(batch_size=2))
    found = gradients_of(trainer, [EXAMPLES])
    reference = Backward(TextModel(Config.from_gguf(gguf), Weights(gguf)), some)
    assert_close(found, reference.gradients(EXAMPLES)[1], GPU_GRADIENTS)


def test_steps_are_those_of_adamw() -> None:
    names = (*LAYER, HEAD)
    trainer = trainer_of(SMALL, names, optimiser=AdamW(decay=0.1, max_norm=0.5))
    reference = reference_of(SMALL, names)
    pairs = reference.adapter
    weights = [half for pair in pairs.values() for half in (pair.a, pair.b)]
    optimiser = adamw.AdamW(decay=0.1)
    for rate in (1e-2, 5e-3, 1e-2):
        result = run_sync(trainer.step([EXAMPLES], rate))
        loss, sums = reference.gradients(EXAMPLES)
        gradients = [half for halves in sums.values() for half in halves]
        norm = adamw.clip_gradients(gradients, 0.5)
        assert result.loss == pytest.approx(loss, rel=GPU_GRADIENTS)
        assert result.gradient_norm == pytest.approx(norm, rel=GPU_GRADIENTS)
        assert (result.targets, result.tokens) == (37, 46)
        optimiser.update(weights, gradients, rate)
    trained = run_sync(trainer.adapter())
    for name, pair in trained.pairs.items():
        a, b = pairs[name].a, pairs[name].b
        for data, expected in ((pair.a, a), (pair.b, b)):
            error = np.abs(np.frombuffer(data, np.float32) - expected.ravel())
            # The sign of a tiny gradient may differ, and the step that it makes is not tiny.
            assert np.quantile(error, 0.99) <= 1e-4, name
    assert run_sync(trainer.evaluate([EXAMPLES])) < result.loss
    close(trainer)


def losses(trainer: Trainer, count: int, rate: float = 2e-2) -> list[float]:
    return [run_sync(trainer.step([EXAMPLES], rate)).loss for _ in range(count)]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_loss_falls(dropout: float) -> None:
    gguf = open_tiny(SMALL)
    config = Config.from_gguf(gguf)
    model = run_sync(Model.load(gguf, config, device()))
    adapter = new_adapter(config, rank=4, seed=1)
    trainer = Trainer(model, adapter, TrainingOptions(batch_size=2, dropout=dropout))
    before = run_sync(trainer.evaluate([EXAMPLES]))
    first = losses(trainer, 12, 4e-2)[0]
    assert first == pytest.approx(before, abs=1e-4)  # B is zero
    assert run_sync(trainer.evaluate([EXAMPLES])) < 0.6 * before
    close(trainer)


def with_dropout(model: Model, pairs: dict) -> tuple[float, dict[str, list[np.ndarray]]]:
    """Return the loss and the gradients of one batch, always with the same dropout."""
    trainer = Trainer(
        model, tiny_adapter(pairs), TrainingOptions(batch_size=2, dropout=0.4, seed=5)
    )
    trainer._write_step(37, 0, 0.0)
    loss = np.frombuffer(
        run_sync(run_sync(trainer._run(EXAMPLES, backward=True)).bytes()), np.float32
    )
    trained = trainer.parameters.pairs.items()
    gradients = {name: [get(t.a_gradient), get(t.b_gradient)] for name, t in trained}
    trainer.close()
    return float(loss.astype(np.float64).sum()) / 37, gradients


def test_dropout_is_the_same_in_both_passes() -> None:
    """The gradient is the slope of the loss with the same numbers dropped."""
    gguf, names, rng = open_tiny(SMALL), ("attn_v", "ffn_down"), np.random.default_rng(3)
    model = run_sync(Model.load(gguf, Config.from_gguf(gguf), device()))
    pairs = tiny_pairs(gguf, names)
    _, gradients = with_dropout(model, pairs)
    direction = {n: [rng.normal(size=x.shape).astype("f4") for x in pairs[n][:2]] for n in pairs}

    def moved(step: float) -> dict:
        return {
            n: p._replace(a=p.a + step * direction[n][0], b=p.b + step * direction[n][1])
            for n, p in pairs.items()
        }

    slope = sum(
        (g * d.ravel()).sum()
        for n in pairs
        for g, d in zip(gradients[n], direction[n], strict=True)
    )
    difference = with_dropout(model, moved(1e-4))[0] - with_dropout(model, moved(-1e-4))[0]
    assert abs(slope) > 1
    assert difference / 2e-4 == pytest.approx(slope, rel=0.02)
    plain = gradients_of(trainer_of(SMALL, names), [EXAMPLES])
    assert all(np.abs(plain[n][0] - gradients[n][0]).max() > 0.01 for n in pairs)
    model.close()


def test_a_trainer_frees_its_memory() -> None:
    trainer = trainer_of(SMALL)
    model = trainer.model
    trainer.close()
    before = model.device.nbytes
    second = Trainer(model, new_adapter(model.config, rank=2), TrainingOptions(batch_size=2))
    run_sync(second.step([EXAMPLES], 1e-3))
    run_sync(second.evaluate([EXAMPLES[1:]]))
    second.close()
    assert model.device.nbytes == before
    model.close()


def test_the_estimate_is_the_memory_in_use() -> None:
    gguf = open_tiny(SMALL)
    config, options = Config.from_gguf(gguf), TrainingOptions(batch_size=3)
    adapter = new_adapter(config, rank=4)
    start = device().nbytes
    model = run_sync(Model.load(gguf, config, device()))
    trainer = Trainer(model, adapter, options)
    trainer.allocate(3, 48)
    estimated = run_sync(estimate(gguf, config, adapter, options, 48, device()))
    assert estimated.nbytes == device().nbytes - start
    recomputed, kept = (
        run_sync(estimate(gguf, config, adapter, replace(options, recompute=recompute), 512))
        for recompute in (True, False)
    )
    assert kept.scratch_nbytes > 1.5 * recomputed.scratch_nbytes
    close(trainer)


def test_a_loss_that_is_not_finite_changes_nothing() -> None:
    trainer = trainer_of(SMALL, ("attn_q",))
    before = run_sync(trainer.adapter())
    run_sync(trainer.step([EXAMPLES], 1e-2))
    assert run_sync(trainer.adapter()) != before
    damaged = replace(before.pairs["blk.0.attn_q.weight"], a=b"\xff\xff\xff\x7f" * 192)
    bad = Adapter("bad", {**before.pairs, "blk.0.attn_q.weight": damaged})
    second = Trainer(trainer.model, bad, TrainingOptions(batch_size=2))
    result = run_sync(second.step([EXAMPLES], 1e-2))
    assert not np.isfinite(result.loss)
    assert run_sync(second.adapter()).pairs == bad.pairs
    with pytest.raises(InputError, match="is not finite any more"):
        Divergence().check(result)
    second.close()
    close(trainer)


def test_a_loss_that_rises_raises_an_error() -> None:
    divergence = Divergence()
    for _ in range(20):
        divergence.check(StepResult(2.0, 1.0, 1, 1))
    for _ in range(7):
        divergence.check(StepResult(9.0, 1.0, 1, 1))
    with pytest.raises(InputError, match=r"rose from 2\.00 to 7\.60"):
        divergence.check(StepResult(9.0, 1.0, 1, 1))


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "nothing to train on"),
        ([[Example((2, 30), (True, False), 1)]], "nothing to train on"),
        ([EXAMPLES * 2], "1 to 2 examples here, not 4"),
        ([[Example((2, 320), (True, True), 1)]], "id 320 is not a token"),
    ],
)
def test_invalid_batches_raise_an_error(batches: list, message: str) -> None:
    trainer = trainer_of(SMALL, ("attn_q",))
    with pytest.raises(InputError, match=message):
        run_sync(trainer.step(batches, 1e-3))
    close(trainer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ["attn_x"]}, "no target 'attn_x'"),
        ({"layers": [6]}, "layers 0 to 5"),
        ({"targets": ["ffn_gate_inp"]}, "None of these targets"),
        ({"alpha": 0.0}, "alpha is 0.0"),
        ({"alpha": math.nan}, "alpha is nan"),
        ({"rank": 0}, "rank 0"),
    ],
)
def test_invalid_adapters_raise_an_error(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        new_adapter(Config.from_gguf(open_tiny(SMALL)), **options)


def test_new_adapters_change_nothing_and_depend_on_the_seed() -> None:
    config = Config.from_gguf(open_tiny(SMALL))
    one, other = (new_adapter(config, ("attn_k", "output"), rank=3, seed=7) for _ in range(2))
    assert one == other != new_adapter(config, ("attn_k", "output"), rank=3, seed=8)
    assert list(one.pairs) == [*(f"blk.{i}.attn_k.weight" for i in range(3)), HEAD]
    assert all(not any(pair.b) and pair.scale == 2 for pair in one.pairs.values())
    a = np.frombuffer(one.pairs[HEAD].a, np.float32)
    assert 0.9 < np.abs(a).max() * 8 <= 1
