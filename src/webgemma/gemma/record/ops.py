"""The steps that every part of a model is made of, over a Recorder: products, norms, sums."""

from collections.abc import Sequence
from dataclasses import replace

from webgemma.device import Kernel
from webgemma.gemma.lora_weights import narrow, widen
from webgemma.gemma.matrices import Matrices, Weight
from webgemma.gemma.moe import Branches
from webgemma.gemma.record.quantised import Integers, multiplies_integers, pieces_of
from webgemma.gemma.record.tiling import FEW_TOKENS, Cut, Team, Tile
from webgemma.gguf.formats import FORMATS
from webgemma.graph import Recorder, Tensor
from webgemma.kernels import link
from webgemma.kernels import unit as unit_of

THREADS = 64
UNPACKED_TOKENS = 256  # from which on it pays to unpack a matrix of this size at most
UNPACKED_NBYTES = 256 << 20
ROW_THREADS = 256  # where one workgroup handles a whole row
# In software, a barrier costs more than all else; among eight threads, lavapipe needs none.
SOFTWARE_THREADS, SOFTWARE_TILE = 8, 32


class Steps:
    """Records steps for at most `batch` rows; how many there are stands in `state`."""

    def __init__(
        self,
        model: Matrices,
        recorder: Recorder,
        state: Tensor,
        batch: int,
        eps: float,
        precision: str = "exact",
    ) -> None:
        self.weights = model
        self.recorder = recorder
        self.state = state
        self.batch = batch
        self.eps = eps
        self.features = model.device.features
        # Where packed dots are made of other instructions, a batch is slower with them.
        self.precision = precision if batch == 1 or "packed-dots" in self.features else "exact"
        self.software = model.device.software

    def rows_of(self, weight: Weight, ids: Tensor, scale: float = 1.0) -> Tensor:
        """Rows of a table, times a scale: [batch, width]."""
        x = self.recorder.scratch(self.batch, weight.width)
        kernel = self.link("embed", weight.format.name, pieces=("state",))
        units = weight.width // unit_of(weight.format.name)
        for part in weight.parts:
            blocks = weight.width // weight.format.block
            params = [blocks, *part.planes, part.first_row, part.rows, units, float(scale)]
            tensors = (part.data, self.state, ids, x)
            self.recorder.call(kernel, (self.batch,), params, *tensors)
        return x

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        out: Tensor | None = None,
        first: int = 0,
        up: tuple[Tensor, int, int] | None = None,
        between: tuple[float, float] | None = None,
    ) -> Tensor:
        """x Wᵀ: [tokens, rows], or into the columns from `first` on of a wider `out`.

        With `up` (a tensor, its stride, its first column) the result is gelu(x Wᵀ) * up; or it is
        held `between` two values."""
        tokens = x.shape[0]
        low = self.weights.low.get(weight.name)
        assert not (between and (low or up))
        if low and up:
            return self.geglu(self.linear(x, weight), weight.rows, *up, weight.rows, out)
        inner = narrow(self, x, low) if low else None
        # In a batch, finishing every value of a tile by itself would unroll into a monster.
        fused = low if tokens <= FEW_TOKENS and not self.software else None
        others: tuple[Tensor, ...] = (up[0],) if up else ()
        if fused and inner:
            others = (fused.b, inner)
        if tokens > FEW_TOKENS:
            x = self._as_integers(x, weight)
        if not isinstance(x, Integers):
            weight = self.unpacked(weight, tokens)
        y = out or self.recorder.scratch(tokens, weight.rows)
        finish = ("linear", "gelu", "finish_gated") if up else ("linear", "finish_plain")
        finish = ("linear", "finish_held") if between else finish
        finish = ("linear", "finish_adapted") if fused else finish
        kernel, rows_at_once, tokens_at_once = self._multiplier(x, weight, finish)
        units = weight.width // unit_of(weight.format.name)
        for part in weight.parts:
            params = [
                *(weight.width // weight.format.block, *part.planes),
                *(first + part.first_row, part.rows, units, y.shape[1]),
                *(up[1:] if up else (0, 0)),
                tokens,
                *(fused.product_params(part.first_row) if fused else (0,) * 5),
                *(between or ()),
            ]
            columns, layers = self.fold(-(-part.rows // rows_at_once))
            grid = (columns, layers, tokens)
            if tokens_at_once:
                grid = (columns, -(-tokens // tokens_at_once), layers)
            self.recorder.call(kernel, grid, params, part.data, self.state, x, y, *others)
        if low and inner and not fused:
            widen(self, y, first, low, inner)
        return y

    def unpacked(self, weight: Weight, tokens: int) -> Weight:
        """The same matrix in float32, where so many tokens are multiplied faster with that."""
        most = max(part.rows for part in weight.parts) * 4 * weight.width
        room = min(UNPACKED_NBYTES, self.weights.device.limits.binding_nbytes)
        few = tokens < UNPACKED_TOKENS or most > room
        if few or self.software or unit_of(weight.format.name) == 4:
            return weight
        kernel = self.link("unpack", weight.format.name)
        blocks, units = (
            weight.width // weight.format.block,
            weight.width // unit_of(weight.format.name),
        )
        parts = []
        for part in weight.parts:
            out = self.recorder.scratch(part.rows, weight.width)
            params = [blocks, *part.planes, part.rows, units]
            self.recorder.call(kernel, self.flat(part.rows * units), params, part.data, out)
            parts.append(replace(part, data=out, planes=(0, 0)))
        return replace(weight, format=FORMATS["F32"], parts=tuple(parts))

    def _multiplier(
        self, x: Tensor, weight: Weight, finish: tuple[str, ...]
    ) -> tuple[Kernel, int, int]:
        """A kernel for x Wᵀ, and how many rows and tokens a workgroup of it computes.

        No tokens: they are layers of the grid."""
        tokens, name, integers = x.shape[0], weight.format.name, isinstance(x, Integers)
        cut = None if integers else Cut.for_tokens(tokens, self.features, self.software)
        if cut is not None:
            kernel = self.link("matmul_lanes", name, ("state", *finish), **cut.constants)
            return kernel, cut.threads * cut.rows_each, cut.tokens
        room = self.weights.device.limits.workgroup_nbytes
        fours = not integers and unit_of(name) == 4
        tile = Tile.of_fours(weight.rows, tokens, room) if fours else None
        if tile is not None:
            parts = ("state", "tile", "tile_four", *finish)
            return self.link("matmul", name, parts, **tile.constants), tile.rows, tile.tokens
        tile = Tile.for_product(weight.rows, tokens, integers)
        if tile is not None:
            parts = ("state", "tile", *pieces_of("tile", x), *finish)
            return self.link("matmul", name, parts, **tile.constants), tile.rows, tile.tokens
        team = Team.for_weight(weight, self.features, self.software)
        parts = ("state", "lanes", "row_products", *pieces_of("x", x), *finish)
        return self.link("matvec", name, parts, **team.constants), team.rows, 0

    def room(self, width: int, *readers: str) -> Tensor:
        """Where to put what these matrices read: integers if all of them can multiply those."""
        weights = [self.weights.matrices[name] for name in readers if name in self.weights.matrices]
        if self.precision == "exact" or not all(multiplies_integers(w.format) for w in weights):
            return self.recorder.scratch(self.batch, width)
        return Integers.of((self.batch, width), self.precision)

    def _as_integers(self, x: Tensor, weight: Weight) -> Tensor:
        """x as this weight is best multiplied with it."""
        floats = self.precision == "exact" or not multiplies_integers(weight.format)
        if floats or isinstance(x, Integers):
            return x
        tokens, width = x.shape
        h = Integers.of((tokens, width), self.precision)
        grid = (-(-width // (4 * THREADS)), tokens)
        pieces = ("state", *pieces_of("put", h))
        self.call("quantise", grid, [width], self.state, x, h, pieces=pieces)
        return h

    def norm(self, x: Tensor, name: str, out: Tensor | None = None) -> Tensor:
        """rms(x) * w."""
        h = out or self.recorder.scratch(*x.shape)
        params = [x.shape[1], self.eps]
        self.call(
            "norm",
            (self.batch,),
            params,
            self.state,
            x,
            self.weights.vector(name),
            h,
            pieces=("sum", "state", *pieces_of("put", h)),
            THREADS=self.row_threads(ROW_THREADS),
        )
        return h

    def residual(
        self,
        x: Tensor,
        y: Tensor | Branches,
        post: str,
        following: str = "",
        scale: str = "",
        out: Tensor | None = None,
    ) -> Tensor:
        """x = (x + rms(y) * post) * scale, in place; gives rms(x) * next, if there is one."""
        h = out or self.recorder.scratch(*(x.shape if following else (4,)))
        put = ("next_weights", "next_one", *pieces_of("put", h)) if following else ("next_none",)
        vector = self.weights.vector
        added = (y,) if isinstance(y, Tensor) else y
        form = "y_one" if len(added) == 1 else "y_two"
        self.call(
            "residual",
            (self.batch,),
            [self.eps, 0, 0],
            *(x, h, vector(post), vector(scale), vector(following), *added),
            pieces=("sum", form, *put),
            THREADS=SOFTWARE_TILE if self.software else ROW_THREADS,
            WIDTH=x.shape[1],
        )
        return h

    def geglu(
        self,
        gate: Tensor,
        gate_stride: int,
        up: Tensor,
        up_stride: int,
        up_first: int,
        width: int,
        out: Tensor | None = None,
        rows: int = 1,
    ) -> Tensor:
        """gelu(gate) * up, each the first `width` columns (up: from `up_first` on) of its rows.

        A token has so many `rows`."""
        h = out or self.recorder.scratch(self.batch, rows * width)
        grid = (-(-width // (4 * THREADS)), self.batch, rows)
        params = [width, gate_stride, up_stride, up_first]
        pieces = ("state", "gelu", *pieces_of("put", h))
        self.call("geglu", grid, params, self.state, gate, up, h, pieces=pieces)
        return h

    def row_threads(self, usual: int) -> int:
        """Of a workgroup that adds up a row."""
        return SOFTWARE_THREADS if self.software else usual

    def flat(self, count: int) -> tuple[int, int]:
        return self.fold(-(-count // THREADS))

    def fold(self, groups: int) -> tuple[int, int]:
        """More workgroups than one axis allows, over two."""
        return min(groups, 32768), -(-groups // 32768)

    def link(
        self, op: str, format: str = "", pieces: tuple[str, ...] = (), **constants: int
    ) -> Kernel:
        numbers = {"THREADS": THREADS, **constants}
        return link(op, self.features, format=format, constants=numbers, pieces=pieces)

    def call(
        self,
        op: str,
        grid: tuple[int, ...],
        params: Sequence[int | float],
        *tensors: Tensor,
        pieces: tuple[str, ...] = (),
        **constants: int,
    ) -> None:
        kernel = self.link(op, "", pieces, **constants)
        self.recorder.call(kernel, grid, params, *tensors)
