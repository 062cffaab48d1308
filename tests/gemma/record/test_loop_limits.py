"""The loops of every kernel that grows with the model stay below what a software adapter allows."""

import pytest
from helpers.blank import a4b, e2b

from webgemma.device.null import NullDevice
from webgemma.gemma.attention import Attention
from webgemma.gemma.config import Config, Layer
from webgemma.gemma.matrices import Weight
from webgemma.gemma.record import loop_limits as loops
from webgemma.gemma.record.tiling import Team
from webgemma.gemma.text import Inputs, TextRecorder
from webgemma.gemma.weights import Model
from webgemma.gguf.formats import FORMATS
from webgemma.graph import Recorder, Tensor
from webgemma.kernels import unit

USABLE = [name for name, fmt in FORMATS.items() if fmt.usable]
LONGEST = 21_504


def software(config: Config, layer: Layer, ring: int, batch: int) -> Attention:
    """Records for a software adapter that is none."""
    device = NullDevice()
    device.software = True
    model = Model(config, device)
    one = model.head_norms[layer.index] = model.turns[layer.sliding] = model.one
    inputs = Inputs(one, one, {layer.kv_donor: (one, one)}, {layer.kv_donor: ring})
    return Attention(TextRecorder(model, Recorder(device), inputs, batch, "kv_f16"), layer)


@pytest.mark.parametrize("name", USABLE)
@pytest.mark.parametrize("width", [256, LONGEST, loops.LONGEST_ROW])
def test_long_rows_are_shared_by_threads(name: str, width: int) -> None:
    weight = Weight(name, FORMATS[name], width, 64, ())
    team, units = Team.for_weight(weight, frozenset(), software=True), width // unit(name)
    assert loops.matvec(units, unit(name) // 4, team.lanes, team.each) <= loops.MOST
    assert team.lanes == 1 or width > LONGEST


@pytest.mark.parametrize("config", [e2b(), a4b()], ids=lambda c: c.name)
@pytest.mark.parametrize("context", [512, 8192, 131_072, 262_144, 1_048_576])
def test_attention_at_any_context(config: Config, context: int) -> None:
    for layer in (config.layers[0], config.layers[-1]):
        ring = min(context, config.window + 512) if layer.sliding else context
        seen = min(ring, config.window) if layer.sliding else ring
        tensor = Tensor((1, layer.head_dim), 4)
        one, many = software(config, layer, ring, 1), software(config, layer, ring, 512)
        one.attend_one(tensor)
        shares = one.text.recorder.calls[0].grid[1] - (not layer.shares_kv)
        assert shares * loops.attention_keys(layer.head_dim, 32) >= seen
        many.attend_many(tensor)
        names = [call.kernel.name for call in many.text.recorder.calls]
        dispatches = names.count("attention_prefill")
        keys = loops.attention_prefill_keys(layer.head_dim, 256, 32, 64)
        assert keys % 64 == 0
        assert dispatches * keys >= seen
        assert dispatches == 1 or not layer.sliding
