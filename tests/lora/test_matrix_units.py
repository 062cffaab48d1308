"""Training on matrix units: gradients, as precise as those of float32 or rounded on request."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.gpu import device, hardware
from helpers.matrix_units import small_tiles, use_tiles
from helpers.tiny import LARGE, MIXED, MOE, SMALL
from helpers.training import (
    EXAMPLES,
    NAMES,
    assert_close,
    close,
    gradients_of,
    open_tiny,
    reference_of,
    trainer_of,
)
from tolerance import F16_GRADIENTS, GPU_GRADIENTS

from webgemma.errors import InputError
from webgemma.gemma.record.matrix_tiling import MatrixUnits
from webgemma.graph import Recorder
from webgemma.lora.estimate import estimate
from webgemma.lora.trainer import TrainingOptions
from webgemma.sync import run_sync

# F16 is exact in one half; Q8_0, Q4_K and Q6_K are not.
MODELS = {
    "small": replace(SMALL, ple=32, formats=("F16", "Q8_0")),
    "large": replace(LARGE, pattern="sf", suppressed=(), formats=("Q8_0",)),
    "experts": replace(MOE, pattern="sf", formats=("F16",)),
    "Q4_K and Q6_K": replace(MIXED, pattern="sf", formats=("Q4_K", "Q6_K")),
}


@pytest.fixture(autouse=True)
def calls(matrix_units: MatrixUnits, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each op was recorded with factors in so many halves."""
    use_tiles(monkeypatch, *small_tiles(matrix_units))
    counts: Counter[str] = Counter()
    call = Recorder.call

    def counted(self: Recorder, op: str, grid: Any, **arguments: Any) -> Any:
        halves = 1 + arguments["SPLIT_X"] if "SPLIT_X" in arguments else 0
        counts[f"{op} {halves}" if halves else op] += 1
        return call(self, op, grid, **arguments)

    monkeypatch.setattr(Recorder, "call", counted)
    return counts


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_those_of_the_reference(kind: str, calls: Counter[str]) -> None:
    """Within the bound of float32: only the gradients of logits are one float16."""
    found = gradients_of(trainer_of(MODELS[kind], on=hardware()), [EXAMPLES])
    assert_close(found, reference_of(MODELS[kind]).gradients(EXAMPLES)[1], GPU_GRADIENTS)
    assert calls["matmul 2"] > 0
    assert calls["matmul 1"] == 0
    assert calls["matmul_backward_matrix_units 2"] > 0
    assert calls["matmul_backward_matrix_units 1"] == 1
    assert (calls["expert_matmul 2"] > 0) == (kind == "experts")
    assert calls["dequantise"] == 0


def test_a_rounded_model_is_trained_on_request(calls: Counter[str]) -> None:
    """All factors are one float16; its gradients point where those of the reference do."""
    found = gradients_of(trainer_of(MODELS["small"], precision="f16"), [EXAMPLES])
    expected = reference_of(MODELS["small"]).gradients(EXAMPLES)[1]
    for name in found:
        for one, other in zip(found[name], expected[name], strict=True):
            error = np.linalg.norm(one - np.ravel(other)) / np.linalg.norm(other)
            assert error <= F16_GRADIENTS, name
    assert calls["matmul 1"] > 0
    assert calls["matmul_backward_matrix_units 1"] > 0
    assert calls["matmul 2"] == calls["matmul_backward_matrix_units 2"] == 0


@pytest.mark.parametrize(("precision", "software"), [("exact", False), ("auto", True)])
def test_nothing_is_rounded_on_request_and_in_software(
    precision: str, software: bool, calls: Counter[str]
) -> None:
    on = device() if software else hardware()
    if not device().software:
        pytest.skip("needs a software GPU")
    trainer = trainer_of(MODELS["small"], ("attn_q",), on=on, precision=precision)
    trainer.allocate(2, 48)
    close(trainer)
    assert calls["round_f16"] == 0


def test_steps_on_matrix_units_lower_the_loss() -> None:
    trainer = trainer_of(MODELS["small"], NAMES, on=hardware())
    before = run_sync(trainer.evaluate([EXAMPLES]))
    for _ in range(3):
        run_sync(trainer.step([EXAMPLES], 1e-2))
    assert run_sync(trainer.evaluate([EXAMPLES])) < 0.9 * before
    close(trainer)


@pytest.mark.parametrize("precision", ["auto", "f16"])
def test_the_estimate_counts_what_is_rounded(precision: str) -> None:
    on, options = hardware(), TrainingOptions(batch_size=2, precision=precision)
    start, gguf = on.nbytes, open_tiny(MODELS["small"])
    trainer = trainer_of(MODELS["small"], on=on, precision=precision)
    adapter = run_sync(trainer.adapter())
    trainer.allocate(2, 48)
    memory = run_sync(estimate(gguf, trainer.model.config, adapter, options, 48, on))
    assert memory.nbytes == on.nbytes - start
    close(trainer)


@pytest.mark.parametrize("precision", ["int16", "split", "", 16])
def test_other_precisions_are_refused(precision: object) -> None:
    with pytest.raises(InputError, match="use auto, exact or f16"):
        TrainingOptions(precision=precision)  # type: ignore[arg-type]
