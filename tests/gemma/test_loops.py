"""The loops of every kernel that grows with the model stay below what a software adapter allows."""

import pytest
from blank import a4b, e2b

from webgemma.device.null import NullDevice
from webgemma.gemma import loops
from webgemma.gemma.config import Config
from webgemma.gemma.text import Inputs, TextRecorder
from webgemma.gemma.weights import Model, Weight
from webgemma.gguf.formats import FORMATS
from webgemma.graph import Recorder, Tensor
from webgemma.kernels import unit

USABLE = [name for name, fmt in FORMATS.items() if fmt.usable]
LONGEST = 21_504


def software(config: Config | None = None, batch: int = 1) -> TextRecorder:
    """Records for a software adapter that is none."""
    device = NullDevice()
    device.software = True
    model = Model(config, device)
    return TextRecorder(
        model, Recorder(device), Inputs(model.one, model.one, {}, {}), batch, "kv_f16"
    )


@pytest.mark.parametrize("name", USABLE)
@pytest.mark.parametrize("width", [256, LONGEST, loops.LONGEST_ROW])
def test_long_rows_are_shared_by_threads(name: str, width: int) -> None:
    weight = Weight(name, FORMATS[name], width, 64, ())
    lanes, units = software()._lanes(weight, 64, 4)
    assert loops.matvec(units, unit(name) // 4, lanes, 4) <= loops.MOST
    assert lanes == 1 or width > LONGEST


@pytest.mark.parametrize("config", [e2b(), a4b()], ids=lambda c: c.name)
@pytest.mark.parametrize("context", [512, 8192, 131_072, 262_144, 1_048_576])
def test_attention_at_any_context(config: Config, context: int) -> None:
    for layer in (config.layers[0], config.layers[-1]):
        ring = min(context, config.window + 512) if layer.sliding else context
        tensor = Tensor((1,), 4)
        one, many = software(config), software(config, 512)
        one._attend_one(layer, tensor, tensor, tensor, ring)
        shares = one.recorder.calls[0].grid[2]
        seen = min(ring, config.window) if layer.sliding else ring
        assert shares * loops.attention_keys(layer.head_dim, 32) >= seen
        many._attend_many(layer, tensor, tensor, tensor, ring)
        keys = loops.attention_prefill_keys(layer.head_dim, 256, 32, 64)
        assert keys % 64 == 0
        assert len(many.recorder.calls) * keys >= seen
        assert len(many.recorder.calls) == 1 or not layer.sliding
