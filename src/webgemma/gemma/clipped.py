"""Clipped linears: products that hold what goes in and what comes out between bounds of a file."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from webgemma.gemma.matrices import Matrices
from webgemma.gemma.record.ops import THREADS, Steps
from webgemma.gemma.tensors import read_floats
from webgemma.gguf.reader import Gguf, TensorInfo
from webgemma.graph import Recorder, Tensor

EPS = 1e-6  # of every rms in a tower
SIDES = ("input_min", "input_max", "output_min", "output_max")
LARGEST = 3.4e38  # a bound that bounds nothing

Limits = tuple[float, float]  # the lowest and the highest value
UNLIMITED: Limits = (-LARGEST, LARGEST)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Between which values a clipped linear keeps what goes in and what comes out."""

    input: Limits = UNLIMITED
    output: Limits = UNLIMITED

    @classmethod
    def of(cls, values: Iterable[float]) -> "Bounds":
        """From four numbers in the order of SIDES; WGSL has no infinity."""
        numbers = [max(-LARGEST, min(LARGEST, value)) for value in values]
        return cls((numbers[0], numbers[1]), (numbers[2], numbers[3]))


async def read_bounds(
    gguf: Gguf, names: Iterable[str], tensors: Mapping[str, TensorInfo]
) -> dict[str, Bounds]:
    """Of each of these linears, by its name: what the file says beside its weight."""
    found = {}
    for name in names:
        values = [*UNLIMITED, *UNLIMITED]
        for at, side in enumerate(SIDES):
            if f"{name}.{side}" in tensors:
                (values[at],) = await read_floats(gguf, tensors[f"{name}.{side}"])
        found[name] = Bounds.of(values)
    return found


class ClippedSteps(Steps):
    """Steps of a tower, some of whose linears are clipped."""

    def __init__(
        self,
        tower: Matrices,
        bounds: Mapping[str, Bounds],
        recorder: Recorder,
        state: Tensor,
        batch: int,
    ) -> None:
        super().__init__(tower, recorder, state, batch, EPS)
        self.bounds = bounds

    def bounds_of(self, name: str) -> Bounds:
        """Those of a linear; most of them bound nothing in models that do not clip."""
        return self.bounds.get(name, Bounds())

    def clipped(self, x: Tensor, name: str) -> Tensor:
        """W x; a clipped linear keeps what goes in and what comes out between its bounds."""
        bounds = self.bounds_of(name)
        between = None if bounds.output == UNLIMITED else bounds.output
        weight = self.weights.matrices[name + ".weight"]
        return self.linear(self.clip(x, bounds.input), weight, between=between)

    def clip(self, x: Tensor, limits: Limits) -> Tensor:
        """x held between two values; x itself where they bound nothing."""
        if limits == UNLIMITED:
            return x
        h = self.recorder.scratch(*x.shape)
        params = [x.shape[1], *limits]
        pieces = ("state", "put_float")
        self.call("clip", self.fours(x.shape[1]), params, self.state, x, h, pieces=pieces)
        return h

    def fours(self, width: int) -> tuple[int, int]:
        """The grid in which a thread takes four values of a row."""
        return -(-width // (4 * THREADS)), self.batch
