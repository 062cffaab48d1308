"""Files of shapes that no Gemma 4 has: the GPU rejects those that its kernels do not support."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.tiny import SMALL, Tiny, tiny_gguf, tiny_metadata, tiny_tensors

from webgemma import DeviceError, GgufError
from webgemma.device.null import NullDevice
from webgemma.gemma.config import Config
from webgemma.gemma.record.loop_limits import MAX_ROW
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import gguf_bytes
from webgemma.reference.text import TextModel
from webgemma.reference.weights import Weights
from webgemma.sync import run_sync


def opened(data: bytes) -> Gguf:
    """Open the bytes of a file."""
    return run_sync(Gguf.aopen(BytesSource(data, "odd.gguf")))


@pytest.mark.parametrize(
    ("tiny", "message"),
    [
        (replace(SMALL, width=30), "rows of .* have 30 weights"),
        (replace(SMALL, ffn=50), "rows of .*ffn_down.weight have 50 weights"),
        (replace(SMALL, head_dims=(8, 16)), "heads of 16 to 512 dimensions, not 8"),
        (replace(SMALL, head_dims=(16, 48)), "heads of 16 to 512 dimensions, not 48"),
    ],
    ids=["width", "ffn", "small heads", "odd heads"],
)
def test_shapes_without_a_kernel_are_rejected_on_the_gpu_only(tiny: Tiny, message: str) -> None:
    gguf = opened(tiny_gguf(tiny))
    config = Config.from_gguf(gguf)
    with pytest.raises(DeviceError, match=message):
        run_sync(Model.load(gguf, config, NullDevice()))
    assert np.isfinite(TextModel(config, Weights(gguf)).forward([2, 30, 31])).all()


def test_rows_too_long_for_the_loops_of_a_software_gpu() -> None:
    gguf = opened(tiny_gguf(replace(SMALL, pattern="f", shared=0, ple=0, ffn=MAX_ROW + 4)))
    config, device = Config.from_gguf(gguf), NullDevice()
    run_sync(Model.load(gguf, config, device))
    device.software = True
    with pytest.raises(DeviceError, match=r"ffn_down\.weight have 65540 weights.* at most 65536"):
        run_sync(Model.load(gguf, config, device))


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan")])
def test_rope_factors_that_cannot_divide_raise_an_error(factor: float) -> None:
    tensors = [
        replace(t, data=np.full(16, factor, "<f4").tobytes())
        if t.name == "rope_freqs.weight"
        else t
        for t in tiny_tensors(SMALL)
    ]
    gguf = opened(gguf_bytes(tiny_metadata(SMALL), tensors))
    config = Config.from_gguf(gguf)
    with pytest.raises(GgufError, match=r"rope_freqs\.weight"):
        run_sync(Model.load(gguf, config, NullDevice()))
    with pytest.raises(GgufError, match=r"rope_freqs\.weight"):
        TextModel(config, Weights(gguf))
