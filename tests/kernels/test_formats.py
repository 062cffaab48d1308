"""Every weight format on the GPU: its weights, products, split matrices, a model of all formats."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.gpu import device, hardware, put
from helpers.matrices import (
    assert_product,
    embedded,
    load,
    matrix,
    product,
    recorder,
    result,
    truth,
)
from helpers.tiny import MIXED, tiny_gguf
from tolerance import DECODED, GPU_LOGITS

import webgemma.kernels
from webgemma.device.native import NativeDevice
from webgemma.gemma.config import Config
from webgemma.gemma.kv_cache import LayerCache
from webgemma.gemma.weights import Model
from webgemma.gguf.formats import FORMATS
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import NewTensor
from webgemma.kernels import unit
from webgemma.reference.dequantise import DEQUANTISERS
from webgemma.reference.text import TextModel
from webgemma.reference.weights import Weights
from webgemma.sync import run_sync

USABLE = [name for name, fmt in FORMATS.items() if fmt.usable]
EVERY_FORMAT = pytest.mark.parametrize("name", USABLE)


def test_there_is_a_file_for_every_usable_format() -> None:
    folder = Path(webgemma.kernels.__file__).parent / "wgsl" / "formats"
    assert {path.stem for path in folder.glob("*.wgsl")} == {name.lower() for name in USABLE}


@EVERY_FORMAT
def test_a_unit_is_a_part_of_a_block_or_four_floats(name: str) -> None:
    block = FORMATS[name].block
    assert unit(name) == 4 if block == 1 else block % unit(name) == 0


@EVERY_FORMAT
def test_embed_returns_the_weights_of_the_reference(name: str) -> None:
    tensor = matrix(name, 768, 67)
    ids = [66, 0, 31, 7, 66]
    expected = truth(tensor)[ids]
    found = embedded(load(tensor), tensor.name, ids)
    np.testing.assert_allclose(found, expected, rtol=DECODED, atol=0)


def test_embed_scales() -> None:
    tensor = matrix("Q4_K", 768, 67)
    found = embedded(load(tensor), tensor.name, [5], 12.5)
    np.testing.assert_allclose(found, 12.5 * truth(tensor)[[5]], rtol=DECODED)


def test_exponents_at_the_edge_of_float32() -> None:
    blocks = np.frombuffer(matrix("MXFP4", 32, 6).data, DEQUANTISERS["MXFP4"][0]).copy()
    blocks["e"] = [0, 1, 2, 3, 250, 251]
    tensor = NewTensor("w", (32, 6), "MXFP4", blocks.tobytes())
    found, expected = embedded(load(tensor), "w", list(range(6))), truth(tensor)
    np.testing.assert_array_equal(found[2:], expected[2:])
    # many devices have no subnormal numbers
    assert ((found[:2] == expected[:2]) | (found[:2] == 0)).all()


@EVERY_FORMAT
@pytest.mark.parametrize("on", [device, hardware])
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (37, 3)])
def test_product_over_one_block_of_256(
    name: str, rows: int, tokens: int, on: Callable[[], NativeDevice]
) -> None:
    tensor = matrix(name, 256, rows)
    assert_product(tensor, load(tensor, on()), tokens)


@pytest.mark.parametrize("name", [name for name in USABLE if FORMATS[name].block < 256])
def test_product_over_a_single_unit(name: str) -> None:
    tensor = matrix(name, unit(name), 19)
    assert_product(tensor, load(tensor), 2)


@EVERY_FORMAT
def test_a_matrix_in_parts_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, fmt = 45, FORMATS[name]
    tensor = matrix(name, 256, rows)
    whole = load(tensor)
    limit = 20 * fmt.row_nbytes(256)
    monkeypatch.setattr(device(), "limits", replace(device().limits, binding_nbytes=limit))
    in_parts = load(tensor)
    parts = in_parts.matrices[name].parts
    each = 16 if fmt.planes else 19  # a plane's chunk begins at a whole word
    firsts = range(0, rows, each)
    assert [part.first_row for part in parts] == list(firsts)
    assert [part.rows for part in parts] == [min(each, rows - first) for first in firsts]
    assert all(part.data.nbytes <= limit for part in parts)
    ids = [44, 0, 15, 16, 31, 32]
    np.testing.assert_array_equal(embedded(in_parts, name, ids), embedded(whole, name, ids))
    x = np.random.default_rng(3).standard_normal((2, 256)).astype(np.float32)
    np.testing.assert_array_equal(product(in_parts, name, x), product(whole, name, x))


def test_a_model_of_all_formats_has_the_logits_of_the_reference() -> None:
    ids = [2, *range(30, 41)]
    gguf = run_sync(Gguf.aopen(BytesSource(tiny_gguf(MIXED))))
    config = Config.from_gguf(gguf)
    model = run_sync(Model.load(gguf, config, device()))
    text = recorder(model, ids)
    for layer in config.layers:
        empty = np.zeros((32, layer.kv_heads, layer.head_dim), np.float32)
        text.inputs.caches[layer.index] = LayerCache(put(empty), put(empty), 32)
    found = result(text, text.softcap(text.head(text.body())))
    expected = TextModel(config, Weights(gguf)).forward(ids)
    assert np.abs(found - expected).max() <= GPU_LOGITS * np.abs(expected).max()
    np.testing.assert_array_equal(found.argmax(1), expected.argmax(1))
