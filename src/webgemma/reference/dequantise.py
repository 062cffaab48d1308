"""Dequantisation of the supported ggml formats: the bytes of a tensor to float32 weights.

A tensor is a sequence of equal blocks. Each format has one function below: the line above it lists
the fields of a block ("<f2" a float16, "16u1" sixteen bytes), its docstring has the formula of a
weight. Throughout, n is the number of blocks, d the scale of a block, m its offset, and q the small
integer that encodes a weight.
"""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from webgemma.errors import GgufError
from webgemma.gguf.formats import FORMATS, Format

Buffer: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]
Blocks: TypeAlias = NDArray[np.void]  # (n,) records of one layout
Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]
ToWeights: TypeAlias = Callable[[Blocks], Floats]

# Weights dequantised at a time: few enough that the intermediate arrays stay in the CPU's cache.
CHUNK_WEIGHTS = 1 << 16

# By format name: the fields of a block, and the function from blocks to weights.
DEQUANTISERS: dict[str, tuple[np.dtype[np.void], ToWeights]] = {}


def dequantise(
    data: Buffer, format: Format, shape: int | tuple[int, ...], name: str = ""
) -> Floats:
    """Return the weights of a tensor as float32 of a shape in numpy's axis order (width last).

    F32 data is returned as a read-only view of `data`. GgufError, which mentions the tensor's
    `name`, for a format without a definition here, and for data that does not fit the shape."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    nbytes = (data if isinstance(data, np.ndarray) else memoryview(data)).nbytes
    _check(nbytes, format, shape, name)
    fields, to_weights = DEQUANTISERS[format.name]
    blocks = np.frombuffer(data, fields) if nbytes else np.empty(0, fields)
    if format.name == "F32":
        weights = to_weights(blocks)
        weights.flags.writeable = False
        return weights.reshape(shape)
    weights = np.empty((len(blocks), format.block), np.float32)
    step = CHUNK_WEIGHTS // format.block
    # Infinite or NaN scales of a damaged file give such weights; callers check their results.
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            chunk = slice(start, start + step)
            weights[chunk] = to_weights(blocks[chunk]).reshape(-1, format.block)
    return weights.reshape(shape)


def _check(nbytes: int, format: Format, shape: tuple[int, ...], name: str) -> None:
    tensor = f"Tensor {name!r}" if name else "A tensor"
    if not format.usable:
        usable = ", ".join(known.name for known in FORMATS.values() if known.usable)
        raise GgufError(
            f"{tensor} is stored as {format}, which webgemma does not support: "
            f"use a file whose weights are any of {usable}."
        )
    width = shape[-1] if shape else 1
    if min(shape, default=0) < 0 or width % format.block:
        raise GgufError(
            f"{tensor} of shape {shape} cannot be {format}, whose rows are whole blocks of "
            f"{format.block} weights: the file is damaged, download it again."
        )
    expected = math.prod(shape) // format.block * format.nbytes
    if nbytes != expected:
        raise GgufError(
            f"{tensor} of shape {shape} as {format} has {nbytes} of {expected} bytes: "
            "the file is damaged or cut short, download it again."
        )


def layout(**fields: str) -> Callable[[ToWeights], ToWeights]:
    """Register a function in DEQUANTISERS under its name, with the fields of its blocks."""

    def register(to_weights: ToWeights) -> ToWeights:
        DEQUANTISERS[to_weights.__name__.upper()] = np.dtype(list(fields.items())), to_weights
        return to_weights

    return register


def unpack(packed: Bytes, bits: int, run: int) -> Bytes:
    """Return the integers of `bits` bits packed into (n, bytes): (n, integers).

    Every `run` bytes hold first the integers in the lowest bits of each byte, then those in the
    next higher bits, and so on: with 4 bits and a run of 16, byte j holds integer j in its low half
    and integer j + 16 in its high half.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = packed.reshape(len(packed), -1, 1, run) >> shifts  # (n, runs, 8 // bits, run)
    runs &= (1 << bits) - 1
    return runs.reshape(len(packed), -1)


def join_bits(high: Bytes, low: Bytes, low_bits: int) -> Bytes:
    """Return the integers high · 2^low_bits + low."""
    return (high << np.uint8(low_bits)) | low


def centred(q: Bytes, middle: int) -> NDArray[np.int8]:
    """Return q − middle as signed integers."""
    return q.view(np.int8) - np.int8(middle)


def column(halves: NDArray[Any]) -> Floats:
    """Return one float16 per block as a float32 column (n, 1)."""
    return halves.astype(np.float32)[:, None]


def affine(q: NDArray[Any], d: Floats, m: Floats | None = None) -> Floats:
    """Return d · q + m, where each column of d and m applies to an equal group of q's columns."""
    groups = d.shape[1]
    weights = q.reshape(len(q), groups, -1).astype(np.float32)  # (n, groups, q per group)
    weights *= d[:, :, None]
    if m is not None:
        weights += m[:, :, None]
    return weights


# Formats of one weight per block.


@layout(w="<f4")
def f32(blocks: Blocks) -> Floats:
    """Return w."""
    weights: Floats = blocks["w"].astype(np.float32, copy=False)
    return weights


@layout(w="<f2")
def f16(blocks: Blocks) -> Floats:
    """Return w."""
    return blocks["w"].astype(np.float32)


@layout(w="<u2")
def bf16(blocks: Blocks) -> Floats:
    """Return w, the upper half of a float32 whose lower half is zero."""
    return (blocks["w"].astype(np.uint32) << 16).view(np.float32)


# Formats of 32 weights per block: one scale d, and in the "_1" formats an offset m.
# q of 4 bits: byte j holds q[j] in its low half and q[j + 16] in its high half. The fifth bit of
# q[i] is bit i of q_high.


@layout(d="<f2", q="16u1")
def q4_0(blocks: Blocks) -> Floats:
    """Return d · (q − 8)."""
    return affine(centred(unpack(blocks["q"], bits=4, run=16), 8), column(blocks["d"]))


@layout(d="<f2", m="<f2", q="16u1")
def q4_1(blocks: Blocks) -> Floats:
    """Return d · q + m."""
    return affine(unpack(blocks["q"], bits=4, run=16), column(blocks["d"]), column(blocks["m"]))


def _five_bits(blocks: Blocks) -> Bytes:
    high = np.unpackbits(blocks["q_high"], axis=1, bitorder="little")
    return join_bits(high, unpack(blocks["q_low"], bits=4, run=16), low_bits=4)


@layout(d="<f2", q_high="4u1", q_low="16u1")
def q5_0(blocks: Blocks) -> Floats:
    """Return d · (q − 16)."""
    return affine(centred(_five_bits(blocks), 16), column(blocks["d"]))


@layout(d="<f2", m="<f2", q_high="4u1", q_low="16u1")
def q5_1(blocks: Blocks) -> Floats:
    """Return d · q + m."""
    return affine(_five_bits(blocks), column(blocks["d"]), column(blocks["m"]))


@layout(d="<f2", q="32i1")
def q8_0(blocks: Blocks) -> Floats:
    """Return d · q."""
    return affine(blocks["q"], column(blocks["d"]))


# Formats of 256 weights per block: d and m scale small integers, the scale and min of a group of 16
# or 32 weights.


@layout(scales="16u1", q="64u1", d="<f2", m="<f2")
def q2_k(blocks: Blocks) -> Floats:
    """Return d · scale · q − m · min, groups of 16.

    A byte of `scales` holds a group's scale in its low half and its min in its high half. q has 2
    bits: byte j of the first 32 holds q[j], q[j + 32], q[j + 64] and q[j + 96]; the other 32 bytes
    hold the second half of the block likewise.
    """
    scales = blocks["scales"]
    q = unpack(blocks["q"], bits=2, run=32)
    return affine(q, column(blocks["d"]) * (scales & 15), -column(blocks["m"]) * (scales >> 4))


@layout(q_high="32u1", q_low="64u1", scales="12u1", d="<f2")
def q3_k(blocks: Blocks) -> Floats:
    """Return d · (scale − 32) · (q − 4), groups of 16.

    q has two low bits as in Q2_K; bit k of byte j in q_high is the third bit of q[j + 32 k].
    The 16 scales have 6 bits: byte j < 8 holds the low four of scales j and j + 8, byte 8 + j the
    high two of scales j, j + 4, j + 8 and j + 12.
    """
    low, high = blocks["scales"][:, :8], blocks["scales"][:, 8:]
    scales = join_bits(unpack(high, bits=2, run=4), unpack(low, bits=4, run=8), low_bits=4)
    q_high = unpack(blocks["q_high"], bits=1, run=32)
    q = join_bits(q_high, unpack(blocks["q_low"], bits=2, run=32), low_bits=2)
    return affine(centred(q, 4), column(blocks["d"]) * centred(scales, 32))


def _scales_and_mins(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Return 8 scales and 8 mins of 6 bits, packed into 12 bytes.

    Byte j < 4 holds scale j in its low 6 bits, byte 4 + j min j. Byte 8 + j holds the low four
    bits of scale 4 + j in its low half and those of min 4 + j in its high half; their high two bits
    are the top bits of bytes j and 4 + j.
    """
    first, rest = packed[:, :8], packed[:, 8:]
    low = first & np.uint8(63)  # scales 0–3, mins 0–3
    high = join_bits(first >> np.uint8(6), unpack(rest, bits=4, run=4), low_bits=4)  # both, 4–7
    scales = np.concatenate([low[:, :4], high[:, :4]], axis=1)
    mins = np.concatenate([low[:, 4:], high[:, 4:]], axis=1)
    return scales, mins


@layout(d="<f2", m="<f2", scales="12u1", q="128u1")
def q4_k(blocks: Blocks) -> Floats:
    """Return d · scale · q − m · min, groups of 32.

    q has 4 bits: of every 32 bytes, byte j holds q[j] in its low half and q[j + 32] in its high
    half.
    """
    scales, mins = _scales_and_mins(blocks["scales"])
    q = unpack(blocks["q"], bits=4, run=32)
    return affine(q, column(blocks["d"]) * scales, -column(blocks["m"]) * mins)


@layout(d="<f2", m="<f2", scales="12u1", q_high="32u1", q_low="128u1")
def q5_k(blocks: Blocks) -> Floats:
    """Return d · scale · q − m · min, groups of 32.

    As Q4_K, with a fifth bit of q: bit k of byte j in q_high is that of q[j + 32 k].
    """
    scales, mins = _scales_and_mins(blocks["scales"])
    q_high = unpack(blocks["q_high"], bits=1, run=32)
    q = join_bits(q_high, unpack(blocks["q_low"], bits=4, run=32), low_bits=4)
    return affine(q, column(blocks["d"]) * scales, -column(blocks["m"]) * mins)


@layout(q_low="128u1", q_high="64u1", scales="16i1", d="<f2")
def q6_k(blocks: Blocks) -> Floats:
    """Return d · scale · (q − 32), groups of 16.

    Four low bits: of every 64 bytes, byte j holds q[j] and q[j + 64]. Two high bits: of every 32
    bytes, byte j holds q[j], q[j + 32], q[j + 64] and q[j + 96]. Scales are signed bytes.
    """
    q_high = unpack(blocks["q_high"], bits=2, run=32)
    q = join_bits(q_high, unpack(blocks["q_low"], bits=4, run=64), low_bits=4)
    return affine(centred(q, 32), column(blocks["d"]) * blocks["scales"])


# Formats with a table of values: q of 4 bits, laid out as in Q4_0, is an index into it.

# Sixteen values, spaced more closely near zero, where most weights are.
_NONLINEAR = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
# Float4 (1 sign, 2 exponent, 1 fraction bit), doubled to integers; minus zero is zero.
_FLOAT4_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


@layout(d="<f2", q="16u1")
def iq4_nl(blocks: Blocks) -> Floats:
    """Return d · value[q]."""
    return affine(_NONLINEAR[unpack(blocks["q"], bits=4, run=16)], column(blocks["d"]))


@layout(d="<f2", scales_high="2u1", scales_low="4u1", q="128u1")
def iq4_xs(blocks: Blocks) -> Floats:
    """Return d · (scale − 32) · value[q], 8 groups of 32, each laid out as IQ4_NL.

    Scales have 6 bits: nibble k of scales_low, bits 2 k and 2 k + 1 of scales_high.
    """
    scales_high = unpack(blocks["scales_high"], bits=2, run=1)
    scales = join_bits(scales_high, unpack(blocks["scales_low"], bits=4, run=1), low_bits=4)
    q = unpack(blocks["q"], bits=4, run=16)
    return affine(_NONLINEAR[q], column(blocks["d"]) * centred(scales, 32))


@layout(e="u1", q="16u1")
def mxfp4(blocks: Blocks) -> Floats:
    """Return 2^(e − 127) · float4[q].

    e = 255, NaN in the MX standard, is an exponent like any other in ggml.
    """
    d = np.ldexp(np.float32(1), blocks["e"].astype(np.int32) - 128)  # half, as the table is doubled
    return affine(_FLOAT4_DOUBLED[unpack(blocks["q"], bits=4, run=16)], column(d))
