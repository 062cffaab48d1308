"""Clipped linears of the encoders: products whose inputs and outputs are clamped to bounds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from webgemma.gemma.record.matmul import UNBOUNDED, Clamp
from webgemma.gemma.record.ops import Ops
from webgemma.gemma.record.staged_plan import EncoderWeights
from webgemma.gemma.tensors import (
    BOUNDS,
    bound_tensors,
    check_bounds,
    check_tensors,
    read_floats,
)
from webgemma.gguf.reader import Gguf, TensorInfo
from webgemma.graph import Recorder, Tensor

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

    def clipped_linear(self, x: Tensor, name: str, input: Clamp | None = None) -> Tensor:
        """Record W x with input and output clamped; `input` are bounds instead of its own."""
        bounds = self.bounds_of(name)
        output = None if bounds.output == UNBOUNDED else bounds.output
        weight = self.weights.matrices[name + ".weight"]
        return self.linear(self.clamp(x, input or bounds.input), weight, clamp=output)

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
