"""Dequantisation against the gguf package, bit for bit."""

import gguf
import numpy as np
import pytest

from webgemma.errors import GgufError
from webgemma.gguf.formats import FORMATS, Format
from webgemma.reference import dequantise as module
from webgemma.reference.dequantise import DEQUANTISERS, dequantise

USABLE = [fmt for fmt in FORMATS.values() if fmt.usable]
SCALES = [(fmt, key) for fmt in USABLE for key in "dm" if key in DEQUANTISERS[fmt.name][0].names]
QUANTISABLE = [FORMATS[name] for name in ("BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")]
# Zeros, subnormals, the largest, infinities, quiet and signalling NaN, of both signs.
UNUSUAL_HALVES = np.array(
    [half | sign for half in (0, 1, 0x3FF, 0x400, 0x7BFF, 0x7C00, 0x7E00, 0x7C01, 0x7FFF)
     for sign in (0, 0x8000)],
    "<u2",
)  # fmt: skip


def expected_weights(raw: np.ndarray, fmt: Format) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[fmt.name])


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    """Assert that all bits are equal, except for the sign and payload of a NaN."""
    assert got.dtype == want.dtype == np.float32
    assert got.shape == want.shape
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(np.uint32)[~nan], want.view(np.uint32)[~nan])


def random_rows(rng: np.random.Generator, fmt: Format, rows: int, width: int) -> np.ndarray:
    return rng.integers(0, 256, (rows, fmt.row_nbytes(width)), np.uint8)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(4)


def test_every_usable_format_has_a_layout_of_its_block_size():
    sizes = {name: fields.itemsize for name, (fields, _) in DEQUANTISERS.items()}
    assert sizes == {fmt.name: fmt.nbytes for fmt in USABLE}


@pytest.mark.parametrize("fmt", USABLE, ids=str)
def test_random_bytes_are_dequantised_exactly(fmt, rng):
    raw = random_rows(rng, fmt, rows=67, width=1024)
    assert_same_bits(dequantise(raw, fmt, (67, 1024)), expected_weights(raw, fmt))


@pytest.mark.parametrize(("fmt", "scale"), SCALES, ids=str)
def test_unusual_scales_are_dequantised_exactly(fmt, scale, rng):
    raw = random_rows(rng, fmt, rows=len(UNUSUAL_HALVES), width=256)
    blocks = raw.view(DEQUANTISERS[fmt.name][0])
    blocks[scale] = UNUSUAL_HALVES.view("<f2")[:, None]
    raw = blocks.view(np.uint8)
    assert_same_bits(dequantise(raw, fmt, (len(UNUSUAL_HALVES), 256)), expected_weights(raw, fmt))


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_all_16_bit_floats_are_converted_exactly(name):
    raw = np.arange(1 << 16, dtype="<u2").view(np.uint8)
    assert_same_bits(dequantise(raw, FORMATS[name], 1 << 16), expected_weights(raw, FORMATS[name]))


def test_all_exponents_of_mxfp4_are_dequantised_exactly():
    blocks = np.zeros(256, DEQUANTISERS["MXFP4"][0])
    blocks["e"] = np.arange(256)
    blocks["q"] = np.arange(16) * 17
    raw = blocks.view(np.uint8).reshape(256, -1)
    assert_same_bits(
        dequantise(raw, FORMATS["MXFP4"], (256, 32)), expected_weights(raw, FORMATS["MXFP4"])
    )


@pytest.mark.parametrize("fmt", QUANTISABLE, ids=str)
def test_quantised_weights_are_dequantised_exactly(fmt, rng):
    weights = rng.standard_normal((9, 256)).astype(np.float32)
    weights[3] = 0
    raw = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[fmt.name])
    assert_same_bits(dequantise(raw, fmt, weights.shape), expected_weights(raw, fmt))


@pytest.mark.parametrize("fmt", USABLE, ids=str)
def test_chunks_give_the_same_weights(fmt, rng, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_WEIGHTS", 3 * fmt.block)
    width = 7 * max(fmt.block, 2)  # the last chunk is short
    raw = random_rows(rng, fmt, rows=1, width=width)
    assert_same_bits(dequantise(raw, fmt, (1, width)), expected_weights(raw, fmt))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, np.frombuffer])
def test_any_buffer_type_and_alignment_is_accepted(kind):
    raw = np.arange(1, 1 + 2 * 34, dtype=np.uint8)
    buffer = kind(raw.tobytes()) if kind is not np.frombuffer else raw
    assert_same_bits(
        dequantise(buffer, FORMATS["Q8_0"], 64), expected_weights(raw, FORMATS["Q8_0"])
    )
    odd = memoryview(b"x" + raw.tobytes())[1:]
    assert_same_bits(dequantise(odd, FORMATS["F32"], 17), expected_weights(raw, FORMATS["F32"]))


def test_f32_is_a_read_only_view():
    data = bytearray(8)
    weights = dequantise(data, FORMATS["F32"], (2, 1))
    data[3] = 0x80
    assert np.signbit(weights[0, 0])
    assert not weights.flags.writeable


@pytest.mark.parametrize("fmt", USABLE, ids=str)
@pytest.mark.parametrize("shape", [0, (0, 256), (3, 0), (2, 1, 512)])
def test_the_result_has_the_requested_shape(fmt, shape, rng):
    count = int(np.prod(shape))
    weights = dequantise(random_rows(rng, fmt, 1, count), fmt, shape)
    assert weights.shape == (shape if isinstance(shape, tuple) else (shape,))


def test_a_scalar_has_an_empty_shape():
    assert dequantise(np.float32(2.5).tobytes(), FORMATS["F32"], ()) == 2.5


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS.values() if not fmt.usable], ids=str)
def test_unsupported_formats_are_named_in_the_error(fmt):
    with pytest.raises(GgufError, match=rf"'blk\.3\.ffn_up\.weight'.*{fmt.name}.*Q4_K"):
        dequantise(bytes(fmt.nbytes), fmt, fmt.block, "blk.3.ffn_up.weight")


@pytest.mark.parametrize(
    ("nbytes", "shape", "message"),
    [
        (17, (1, 32), "has 17 of 18 bytes"),
        (36, (1, 32), "has 36 of 18 bytes"),
        (0, (1, 32), "has 0 of 18 bytes"),
        (18, (2, 16), "whole blocks of 32 weights"),
        (18, (-1, -32), "whole blocks of 32 weights"),
        (18, (1 << 40, 1 << 40), "has 18 of "),
    ],
)
def test_bytes_and_shape_must_agree(nbytes, shape, message):
    with pytest.raises(GgufError, match=f"Tensor 'x'.*{message}"):
        dequantise(bytes(nbytes), FORMATS["Q4_0"], shape, "x")
