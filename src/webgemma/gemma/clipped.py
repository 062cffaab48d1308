"""Clipped linears of the encoders: products whose inputs and outputs are clamped to bounds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from webgemma.gemma.matrices import Weight
from webgemma.gemma.record.matmul import UNBOUNDED, Clamp
from webgemma.gemma.record.ops import Ops
from webgemma.gemma.record.quantised import HalfTensor
from webgemma.gemma.record.rounding import round_rows
from webgemma.gemma.record.staged_plan import EncoderWeights
from webgemma.gemma.tensors import (
    BOUNDS,
    bound_tensors,
    check_bounds,
    check_tensors,
    read_floats,
)
from webgemma.gguf.reader import Gguf, TensorInfo
from webgemma.graph import Argument, Recorder, Tensor

EPS = 1e-6  # of every RMS norm in an encoder


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of a clipped linear's input and output."""

    input: Clamp = UNBOUNDED
    output: Clamp = UNBOUNDED

    @classmethod
    def of(cls, gguf: Gguf, linear: str, values: Sequence[float]) -> "Bounds":
        """Return the bounds of four numbers in the order of BOUNDS; GgufError for damaged ones."""
        check_bounds(gguf, linear, values)
        return cls(Clamp(values[0], values[1]), Clamp(values[2], values[3]))


async def read_bounds(
    gguf: Gguf, names: Iterable[str], tensors: Mapping[str, TensorInfo]
) -> dict[str, Bounds]:
    """Read the bounds of each of these linears, which the file has beside its weight."""
    names, found = list(names), {}
    check_tensors(gguf, bound_tensors(names), tensors)
    for name in names:
        values = [*UNBOUNDED, *UNBOUNDED]
        for at, bound in enumerate(BOUNDS):
            if f"{name}.{bound}" in tensors:
                (values[at],) = await read_floats(gguf, tensors[f"{name}.{bound}"])
        found[name] = Bounds.of(gguf, name, values)
    return found


class EncoderOps(Ops):
    """Records the ops of an encoder, some of whose linears are clipped."""

    def __init__(
        self,
        weights: EncoderWeights,
        bounds: Mapping[str, Bounds],
        recorder: Recorder,
        batch: Tensor,
        rows: int,
    ) -> None:
        super().__init__(weights, recorder, batch, rows, EPS, weights.precision)
        self.bounds = bounds

    def bounds_of(self, name: str) -> Bounds:
        """Return the bounds of a linear; in models that do not clip, they bound nothing."""
        return self.bounds.get(name, Bounds())

    def clipped_linear(self, x: Tensor, name: str) -> Tensor:
        """Record W x with input and output clamped."""
        return self.product(self.clipped(x, name), name)

    def product(self, x: Tensor, name: str) -> Tensor:
        """Record W x, where x is clamped already; the output is clamped."""
        output = self.bounds_of(name).output
        clamp = None if output == UNBOUNDED else output
        return self.linear(x, self.weight(name), clamp=clamp)

    def weight(self, name: str) -> Weight:
        """Return the matrix of a linear."""
        return self.weights.matrices[name + ".weight"]

    def reads_halves(self, name: str) -> bool:
        """Return whether a linear's input is rounded to float16, for matrix units."""
        return self.matmul.on_units(self.weight(name), self.rows)

    def input_of(self, width: int, names: Sequence[str]) -> tuple[Tensor, Clamp]:
        """Return a scratch tensor for what these linears read, and the bounds that it is kept to.

        In float32, they clamp it themselves."""
        bounds = {self.bounds_of(name).input for name in names}
        if len(bounds) == 1 and all(map(self.reads_halves, names)):
            return HalfTensor.scratch(self.rows, width), bounds.pop()
        return self.scratch(self.rows, width), UNBOUNDED

    def clipped(self, x: Tensor, name: str) -> Tensor:
        """Record x as a linear reads it: clamped, and rounded for matrix units.

        What is in float16 already was clamped before."""
        if isinstance(x, HalfTensor):
            return x
        return self.clipped_to(x, self.bounds_of(name).input, halves=self.reads_halves(name))

    def clipped_to(self, x: Tensor, bounds: Clamp, *, halves: bool) -> Tensor:
        """Record x clamped, and rounded where it is read in `halves`."""
        if not halves:
            return self.clamp(x, bounds)
        if bounds == UNBOUNDED:
            return self.matmul.rounded(x)
        return self.rounded(x.shape[1], row_source="clamped", x=x, **bounds._asdict())

    def rounded(self, width: int, **source: Argument) -> HalfTensor:
        """Record rows in float16 of what a provider of lib/row_source computes."""
        h = HalfTensor.scratch(self.rows, width)
        return round_rows(self.recorder, self.batch, h, source)

    def clamp(self, x: Tensor, bounds: Clamp) -> Tensor:
        """Record x clamped to bounds; x itself where they bound nothing."""
        if bounds == UNBOUNDED:
            return x
        h, width = self.scratch(*x.shape), x.shape[1]
        self.recorder.call(
            "clamp",
            self.vec4_grid(width),
            batch=self.batch,
            x=x,
            h=h,
            width=width,
            store="float",
            low=bounds.low,
            high=bounds.high,
        )
        return h


class ClippedInput:
    """What several linears read, clamped and rounded once for all that do it alike."""

    def __init__(self, ops: EncoderOps, x: Tensor) -> None:
        self.ops = ops
        self.x = x
        self._made: dict[tuple[Clamp, bool], Tensor] = {}

    def of(self, name: str) -> Tensor:
        """Return it as a linear reads it."""
        if isinstance(self.x, HalfTensor):
            return self.x
        key = (self.ops.bounds_of(name).input, self.ops.reads_halves(name))
        if key not in self._made:
            self._made[key] = self.ops.clipped_to(self.x, key[0], halves=key[1])
        return self._made[key]
