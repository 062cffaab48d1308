"""The loops of every kernel that grows with the model stay below what a software GPU allows."""

import pytest
from helpers.blank import a4b, e2b

from webgemma.device.null import NullDevice
from webgemma.gemma.attention import Attention
from webgemma.gemma.config import Config, Layer
from webgemma.gemma.kv_cache import LayerCache
from webgemma.gemma.matrices import Weight
from webgemma.gemma.record import loop_limits
from webgemma.gemma.record.tiling import MatvecTiling
from webgemma.gemma.text import Inputs, TextRecorder
from webgemma.gemma.weights import Model
from webgemma.gguf.formats import FORMATS
from webgemma.graph import Recorder, Tensor
from webgemma.kernels import unit

USABLE = [name for name, fmt in FORMATS.items() if fmt.usable]
LONGEST = 21_504


def software(config: Config, layer: Layer, ring: int, rows: int) -> Attention:
    """Return a layer's attention, recorded as for a software GPU."""
    device = NullDevice()
    device.software = True
    model = Model(config, device)
    one = model.head_norms[layer.index] = model.rotations[layer.sliding] = model.one
    cache = LayerCache(one, one, ring)
    inputs = Inputs(one, one, {layer.kv_donor: cache})
    ops = TextRecorder(model, Recorder(device), inputs, rows, "f16")
    return Attention(ops, model, layer, cache, "f16")


@pytest.mark.parametrize("name", USABLE)
@pytest.mark.parametrize("width", [256, LONGEST, loop_limits.MAX_ROW])
def test_threads_share_long_rows(name: str, width: int) -> None:
    weight = Weight(name, FORMATS[name], width, 64, ())
    tiling = MatvecTiling.for_weight(weight, frozenset(), software=True)
    iterations = loop_limits.matvec(width // unit(name), unit(name) // 4, tiling.lanes, tiling.each)
    assert iterations <= loop_limits.MAX_ITERATIONS
    assert tiling.lanes == 1 or width > LONGEST


@pytest.mark.parametrize("config", [e2b(), a4b()], ids=lambda c: c.name)
@pytest.mark.parametrize("context", [512, 8192, 131_072, 262_144, 1_048_576])
def test_attention_at_any_context(config: Config, context: int) -> None:
    for layer in (config.layers[0], config.layers[-1]):
        ring = min(context, config.window + 512) if layer.sliding else context
        attended = min(ring, config.window) if layer.sliding else ring
        tensor = Tensor((1, layer.head_dim), 4)
        one, many = software(config, layer, ring, 1), software(config, layer, ring, 512)
        one.decode(tensor)
        splits = one.ops.recorder.calls[0].grid[1] - (not layer.shares_kv)
        assert splits * loop_limits.attention_decode_keys(layer.head_dim, 32) >= attended
        many.prefill(tensor, "causal")
        names = [call.kernel.name.split()[0] for call in many.ops.recorder.calls]
        dispatches = names.count("attention_prefill")
        keys = loop_limits.attention_prefill_keys(layer.head_dim, 256, 32, 64)
        assert keys % 64 == 0
        assert dispatches * keys >= attended
        assert dispatches == 1 or not layer.sliding
