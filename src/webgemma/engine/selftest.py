"""Three tiny kernels with known answers: a GPU that fails them is not trusted with a model."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, sqrt

from webgemma.device import Device
from webgemma.errors import DeviceError
from webgemma.gguf.formats import FORMATS
from webgemma.graph import Recorder, Tensor
from webgemma.kernels import link, unit

TOLERANCE = 1e-4  # of the sum of what is added up; a wrong value is off by far more
THREADS = 64
SUBNORMAL = 38 * 2.0**-24  # of float16: small scales and values are, and must not become zero


@dataclass(frozen=True, slots=True)
class _Probe:
    """What a kernel leaves in `made`, what it should be, and the scale each value is judged by."""

    what: str
    made: Tensor
    wanted: list[float]
    scales: list[float]


async def selftest(device: Device) -> None:
    """Return when the device computes as it should; else DeviceError says what it got wrong."""
    prober = _Prober(device)
    try:
        probes = [
            prober.matvec("Q8_0", [_q8_0(d) for d in (0.75, SUBNORMAL, -2.0)]),
            prober.matvec("Q4_K", [_q4_k(d) for d in (0.75, SUBNORMAL, -2.0)]),
            *prober.attention(),
        ]
        await prober.run()
        for probe in probes:
            data = await device.read(probe.made.buffer, 0, probe.made.nbytes).bytes()
            _judge(device.name, probe, struct.unpack(f"<{len(data) // 4}f", data))
    finally:
        prober.close()


def _judge(name: str, probe: _Probe, values: Sequence[float]) -> None:
    for value, wanted, scale in zip(values, probe.wanted, probe.scales, strict=True):
        if not abs(value - wanted) <= TOLERANCE * scale:  # NaN is wrong, too
            raise DeviceError(
                f"{name} computes wrong values ({probe.what}: {value:.6g} instead of "
                f"{wanted:.6g}): update its driver or use --device cpu."
            )


class _Prober:
    """Records the probes; what it puts on the device it takes off again."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.recorder = Recorder(device)
        self.tensors: list[Tensor] = []

    async def run(self) -> None:
        plan = self.recorder.plan()
        await self.device.compiled()
        self.device.run(plan)
        plan.close(self.device)

    def put(self, data: bytes) -> Tensor:
        buffer = self.device.buffer(len(data), "self-test")
        self.device.write(buffer, data)
        self.tensors.append(Tensor((len(data) // 4,), len(data), buffer))
        return self.tensors[-1]

    def close(self) -> None:
        for tensor in self.tensors:
            self.device.free(tensor.buffer)

    def matvec(self, name: str, rows: list[tuple[bytes, list[float]]]) -> _Probe:
        """W x, where a row of W is one block of the format: its bytes and its values."""
        fmt = FORMATS[name]
        data, starts = b"", []
        for offset, nbytes in fmt.planes or ((0, fmt.nbytes),):
            starts.append(len(data) // 4)
            data += b"".join(block[offset : offset + nbytes] for block, _ in rows)
            data += bytes(-len(data) % 16)
        x = [(i * 5 % 17 - 4) / 4 for i in range(fmt.block)]
        y = self.put(bytes(4 * len(rows)))
        pieces = ("state", "linear", "lanes", "row_products", "x_float", "finish_plain")
        constants = {"THREADS": THREADS, "LANES": 4, "EACH": 1}
        kernel = link(
            "matvec", self.device.features, format=name, constants=constants, pieces=pieces
        )
        params = [1, *(*starts[1:], 0, 0)[:2], 0, len(rows), fmt.block // unit(name), len(rows)]
        state = self.put(struct.pack("<4I", 0, 1, 0, 0))
        given = (self.put(data), state, self.put(_floats(x)))
        self.recorder.call(kernel, (1,), [*params, 0, 0], *given, y)
        products = [[w * value for w, value in zip(values, x, strict=True)] for _, values in rows]
        wanted = [sum(row) for row in products]
        scales = [sum(map(abs, row)) for row in products]
        return _Probe(f"a product with {name}", y, wanted, scales)

    def attention(self) -> list[_Probe]:
        """softmax(q kᵀ) v of one query over three positions: the values, then maximum and sum."""
        size, positions, eps = 16, 3, 1e-6
        raw = [float(i * 3 % 7 - 3) for i in range(size)]
        root = sqrt(sum(a * a for a in raw) / size + eps)
        q = [a / root / 8 for a in raw]
        k = [[(i * (p + 2) % 5 - 2) / 2 for i in range(size)] for p in range(positions)]
        v = [[SUBNORMAL, *((i + p * 3) % 9 - 4.5 for i in range(1, size))] for p in range(3)]
        scores = [sum(a * b for a, b in zip(q, key, strict=True)) for key in k]
        best = max(scores)
        shares = [exp(score - best) for score in scores]
        wanted = [sum(s * row[i] for s, row in zip(shares, v, strict=True)) for i in range(size)]
        scales = [
            sum(s * abs(row[i]) for s, row in zip(shares, v, strict=True)) for i in range(size)
        ]
        parts, sums = self.put(bytes(4 * size)), self.put(bytes(8))
        pieces = ("sum", "state", "rope", "kv_f16")
        constants = {"THREADS": THREADS, "HEAD_DIM": size, "OWN_CACHE": 0}
        kernel = link("attention", self.device.features, constants=constants, pieces=pieces)
        state = self.put(struct.pack("<4I", positions - 1, 1, 0, 0))
        norms, turns = self.put(_floats([1 / 8] * 2 * size)), self.put(bytes(4 * size))
        given = (state, self.put(_floats(raw)), norms, turns)
        caches = (self.put(_halves(k)), self.put(_halves(v)))
        params = [1, 1, 1, positions, 1 << 30, eps]
        self.recorder.call(kernel, (1, 1), params, *given, *caches, parts, sums)
        total = sum(shares)
        return [
            _Probe("attention", parts, wanted, scales),
            _Probe("a softmax", sums, [best, total], [abs(best), total]),
        ]


def _q8_0(d: float) -> tuple[bytes, list[float]]:
    """A block of Q8_0 and its values."""
    q = [i * 37 % 256 - 128 for i in range(32)]
    return struct.pack("<e32b", d, *q), [d * value for value in q]


def _q4_k(d: float) -> tuple[bytes, list[float]]:
    """A block of Q4_K and its values: see formats/q4_k.wgsl."""
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


def _floats(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def _halves(rows: list[list[float]]) -> bytes:
    values = [value for row in rows for value in row]
    return struct.pack(f"<{len(values)}e", *values)
