"""Self-test of a GPU: tiny kernels with known results, before it computes a model."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, sqrt

from webgemma.device import Device
from webgemma.errors import DeviceError, DeviceLostError
from webgemma.gemma.matrices import packed_floats
from webgemma.gemma.record.matrix_tiling import (
    MATRIX_TILES,
    AttentionTiling,
    MatrixTiling,
    MatrixUnits,
)
from webgemma.gemma.record.quantised import HalfTensor
from webgemma.gguf.formats import FORMATS
from webgemma.graph import BufferPool, Recorder, Tensor
from webgemma.kernels import unit

TOLERANCE = 1e-4  # of the sum of absolute terms; a wrong value is off by far more
HALF_TOLERANCE = 1e-3  # with float16
THREADS = 64
SUBNORMAL = 38 * 2.0**-24  # of float16: small scales and values are, and must not become zero


@dataclass(frozen=True, slots=True)
class _Probe:
    """What a kernel computes, the right values, and the scale for its error."""

    what: str
    computed: Tensor
    expected: list[float]
    scales: list[float]
    tolerance: float = TOLERANCE


async def selftest(device: Device) -> None:
    """Raise DeviceError, with what was wrong, unless the device computes as it should."""
    with BufferPool(device) as memory:
        prober = _Prober(memory, Recorder(device))
        probes = [
            prober.matvec("Q8_0", [_q8_0(d) for d in (0.75, SUBNORMAL, -2.0)]),
            prober.matvec("Q4_K", [_q4_k(d) for d in (0.75, SUBNORMAL, -2.0)]),
            *prober.attention(),
        ]
        await _check(device, prober.recorder, probes)


async def check_matrix_units(device: Device) -> str | None:
    """Give up a device's matrix units if they compute wrongly, and return what is wrong.

    The programs are those that a model uses most, so that they are compiled for it, too. A software
    GPU, which uses such units only on request, is not tried: it compiles them for seconds."""
    units = MatrixUnits.of(device)
    if units is None or device.software:
        return None
    try:
        with BufferPool(device) as memory:
            prober = _Prober(memory, Recorder(device))
            probes = [*prober.matrix_product(units), *prober.matrix_attention(units)]
            await _check(device, prober.recorder, probes)
    except DeviceLostError:
        raise
    except DeviceError as error:
        device.features -= {"subgroup-matrix"}
        return str(error)
    return None


async def _check(device: Device, recorder: Recorder, probes: list[_Probe]) -> None:
    """Run what was recorded, and raise DeviceError for a wrong value."""
    plan = recorder.plan()
    await device.compiled()
    device.run(plan)
    plan.close(device)
    for probe in probes:
        data = await device.read(probe.computed.buffer, 0, probe.computed.nbytes).bytes()
        _judge(device.name, probe, struct.unpack(f"<{len(data) // 4}f", data))


def _judge(name: str, probe: _Probe, values: Sequence[float]) -> None:
    for value, expected, scale in zip(values, probe.expected, probe.scales, strict=True):
        if not abs(value - expected) <= probe.tolerance * scale:  # NaN is wrong, too
            raise DeviceError(
                f"{name} computes wrong values ({probe.what}: {value:.6g} instead of "
                f"{expected:.6g})",
                "update its driver or use --device cpu",
            )


class _Prober:
    """Records the probes."""

    def __init__(self, memory: BufferPool, recorder: Recorder) -> None:
        self.memory = memory
        self.recorder = recorder

    def upload(self, data: bytes) -> Tensor:
        return self.memory.upload(data, len(data) // 4, label="self-test")

    def matvec(self, name: str, rows: list[tuple[bytes, list[float]]]) -> _Probe:
        """Record W x, where a row of W is one block of the format: its bytes and its values."""
        fmt = FORMATS[name]
        data, planes = b"", dict[str, int]()
        for number, (offset, nbytes) in enumerate(fmt.planes or ((0, fmt.nbytes),)):
            if number:
                planes[f"plane{number}"] = len(data) // 4
            data += b"".join(block[offset : offset + nbytes] for block, _ in rows)
            data += bytes(-len(data) % 16)
        x = [(i * 5 % 17 - 4) / 4 for i in range(fmt.block)]
        y = self.upload(bytes(4 * len(rows)))
        self.recorder.call(
            "matvec",
            (1,),
            **planes,
            format=name,
            input="float",
            operand="buffer",
            live="counted",
            row_products="two_units",
            epilogue="none",
            W=self.upload(data),
            batch=self.upload(struct.pack("<4I", 0, 1, 0, 0)),
            x=self.upload(packed_floats(x)),
            y=y,
            row_blocks=1,
            units=fmt.block // unit(name),
            rows=len(rows),
            first_row=0,
            stride=len(rows),
            THREADS=THREADS,
            LANES=4,
            EACH=1,
        )
        products = [[w * value for w, value in zip(values, x, strict=True)] for _, values in rows]
        expected = [sum(row) for row in products]
        scales = [sum(map(abs, row)) for row in products]
        return _Probe(f"a product with {name}", y, expected, scales)

    def attention(self) -> list[_Probe]:
        """Record softmax(q kᵀ) v of one query and three positions: values, then maximum and sum."""
        size, positions, eps = 16, 3, 1e-6
        raw = [float(i * 3 % 7 - 3) for i in range(size)]
        root = sqrt(sum(a * a for a in raw) / size + eps)
        q = [a / root / 8 for a in raw]
        k = [[(i * (p + 2) % 5 - 2) / 2 for i in range(size)] for p in range(positions)]
        v = [[SUBNORMAL, *((i + p * 3) % 9 - 4.5 for i in range(1, size))] for p in range(3)]
        scores = [sum(a * b for a, b in zip(q, key, strict=True)) for key in k]
        best = max(scores)
        weights = [exp(score - best) for score in scores]
        expected = [sum(w * row[i] for w, row in zip(weights, v, strict=True)) for i in range(size)]
        scales = [
            sum(w * abs(row[i]) for w, row in zip(weights, v, strict=True)) for i in range(size)
        ]
        parts, sums = self.upload(bytes(4 * size)), self.upload(bytes(8))
        self.recorder.call(
            "attention_decode",
            (1, 1),
            kv="f16",
            place="chunk",
            batch=self.upload(struct.pack("<4I", positions - 1, 1, 0, 0)),
            raw=self.upload(packed_floats(raw)),
            norms=self.upload(packed_floats([1 / 8] * 2 * size)),
            rotations=self.upload(bytes(4 * size)),
            k_cache=self.upload(_halves(k)),
            v_cache=self.upload(_halves(v)),
            parts=parts,
            sums=sums,
            heads=1,
            kv_heads=1,
            raw_heads=1,
            ring=positions,
            window=1 << 30,
            eps=eps,
            THREADS=THREADS,
            HEAD_DIM=size,
            OWN_CACHE=0,
        )
        total = sum(weights)
        return [
            _Probe("attention", parts, expected, scales),
            _Probe("a softmax", sums, [best, total], [abs(best), total]),
        ]

    def matrix_product(self, units: MatrixUnits) -> list[_Probe]:
        """Record x Wᵀ of a few tokens and rows, in the largest tile that fits."""
        limits = self.recorder.device.limits
        tilings = [MatrixTiling.sized(units, tile) for tile in MATRIX_TILES]
        tiling = next((t for t in tilings if t.fits(limits)), None)
        if tiling is None:
            return []
        blocks = [[_q4_k(d) for d in pair] for pair in ((0.75, -2.0), (0.5, 1.0), (-0.25, 0.125))]
        rows = [[value for _, values in row for value in values] for row in blocks]
        tokens, width = 5, len(rows[0])
        x = [[(i * (t + 5) % 17 - 4) * 2.0 ** (8 * t) for i in range(width)] for t in range(tokens)]
        batch = self.upload(struct.pack("<4I", 0, tokens, 0, 0))
        h = HalfTensor.scratch(tokens, width)
        self.recorder.call(
            "round_f16",
            (tokens,),
            row_source="plain",
            batch=batch,
            x=self.upload(packed_floats([value for row in x for value in row])),
            h=h,
            width=width,
            stride=width,
            rows=tokens,
            token_rows=1,
            THREADS=THREADS,
            SPLIT=False,
        )
        y = self.upload(bytes(4 * tokens * len(rows)))
        self.recorder.call(
            "matmul",
            (1, 1),
            format="Q4_K",
            tiled_product="matrix_units",
            epilogue="none",
            W=self.upload(b"".join(block for row in blocks for block, _ in row)),
            batch=batch,
            y=y,
            row_blocks=len(blocks[0]),
            units=width // unit("Q4_K"),
            rows=len(rows),
            tokens=tokens,
            split_slices=tiling.split_slices(width),
            first_row=0,
            stride=len(rows),
            **tiling.constants | h.arguments(FORMATS["Q4_K"]),
        )
        terms = [[[a * b for a, b in zip(w, row, strict=True)] for w in rows] for row in x]
        expected = [sum(products) for token in terms for products in token]
        scales = [sum(map(abs, products)) for token in terms for products in token]
        return [_Probe("a product of matrices", y, expected, scales, HALF_TOLERANCE)]

    def matrix_attention(self, units: MatrixUnits) -> list[_Probe]:
        """Record softmax(q kᵀ) v of one token, whose keys are more than a tile, with two heads."""
        size, positions, heads = 256, 70, 2
        tiling = AttentionTiling.for_heads(units, size, self.recorder.device.limits)
        if tiling is None:
            return []
        q = [[((i + h) % 7 - 3) / 16 for i in range(size)] for h in range(heads)]
        k = [[(i * (p + 2) % 5 - 2) / 8 for i in range(size)] for p in range(positions)]
        v = [[(i + p * 3) % 9 - 4.5 for i in range(size)] for p in range(positions)]
        out = self.upload(bytes(4 * heads * size))
        self.recorder.call(
            "attention_matrix_units",
            (1, 1),
            mask="causal",
            pair="f32",
            ROUNDED=False,
            batch=self.upload(struct.pack("<4I", positions - 1, 1, 0, 0)),
            q=self.upload(packed_floats([value for row in q for value in row])),
            k_cache=self.upload(_halves(k)),
            v_cache=self.upload(_halves(v)),
            out=out,
            heads=heads,
            kv_heads=1,
            ring=positions,
            window=1 << 30,
            tokens=1,
            HEAD_DIM=size,
            **tiling.constants,
        )
        expected = []
        for query in q:
            scores = [sum(a * b for a, b in zip(query, key, strict=True)) for key in k]
            weights = [exp(score - max(scores)) for score in scores]
            total = sum(weights)
            for column in zip(*v, strict=True):
                terms = zip(weights, column, strict=True)
                expected.append(sum(weight * value for weight, value in terms) / total)
        return [
            _Probe("attention of matrices", out, expected, [4.5] * len(expected), HALF_TOLERANCE)
        ]


def _q8_0(d: float) -> tuple[bytes, list[float]]:
    """Return a block of Q8_0 and its values."""
    q = [i * 37 % 256 - 128 for i in range(32)]
    return struct.pack("<e32b", d, *q), [d * value for value in q]


def _q4_k(d: float) -> tuple[bytes, list[float]]:
    """Return a block of Q4_K and its values: see formats/q4_k.wgsl."""
    m = d / 2
    scales = [j * 9 % 64 for j in range(1, 9)]
    minima = [j * 23 % 64 for j in range(1, 9)]
    q = [[(i * 7 + j) % 16 for i in range(32)] for j in range(8)]  # of the groups
    packed = [
        *(
            a | b >> 4 << 6
            for part in (scales, minima)
            for a, b in zip(part, part[4:], strict=False)
        ),
        *(a & 15 | (b & 15) << 4 for a, b in zip(scales[4:], minima[4:], strict=True)),
    ]
    for low, high in zip(q[::2], q[1::2], strict=True):
        packed += [a | b << 4 for a, b in zip(low, high, strict=True)]
    values = [
        d * scale * value - m * minimum
        for scale, minimum, group in zip(scales, minima, q, strict=True)
        for value in group
    ]
    return struct.pack("<2e", d, m) + bytes(packed), values


def _halves(rows: list[list[float]]) -> bytes:
    values = [value for row in rows for value in row]
    return struct.pack(f"<{len(values)}e", *values)
