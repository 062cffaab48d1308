"""The derivative of each step over a Recorder: from what an output owes, dy, to its input's.

The names are those of reference/gradients.py. Rows are the tokens of several texts one after the
other; `spans` has for each the rows at which its text begins and ends, and (0, 0) beyond the last.
"""

from webgemma.gemma.attention import Heads
from webgemma.gemma.matrices import Weight
from webgemma.gemma.steps import ROW_THREADS, THREADS, Steps
from webgemma.graph import Tensor
from webgemma.kernels import unit as unit_of

TILE_WIDTH, TILE_TOKENS = 64, 32  # as matmul_back.wgsl has them
MOST_ROWS = 32768  # of a call of it: lavapipe ends long loops
OUTER_TILE = 32  # as outer.wgsl has it
KEY_THREADS = 128  # as many as the largest head has fours


def linear_back(
    steps: Steps,
    dy: Tensor,
    weight: Weight,
    first: int = 0,
    dx: Tensor | None = None,
    *,
    rows: tuple[int, int] | None = None,
    scale: float = 1.0,
) -> Tensor:
    """scale · dy W: [batch, width], from the columns of dy from `first` on; added to `dx`.

    Of a weight in one part only some `rows` (the first, and the end) may be meant."""
    name = weight.format.name
    threads = TILE_WIDTH * TILE_TOKENS // 16
    kernel = steps.link("matmul_back", name, ("state",), THREADS=threads)
    grid = (-(-weight.width // TILE_WIDTH), -(-steps.batch // TILE_TOKENS))
    blocks, units = weight.width // weight.format.block, weight.width // unit_of(name)
    add, dx = int(dx is not None), dx or steps.recorder.scratch(steps.batch, weight.width)
    for part in weight.parts:
        begin, end = rows or (0, part.rows)
        for row in range(begin, end, MOST_ROWS):
            column = first + part.first_row + row - begin
            some = [row, min(MOST_ROWS, end - row), units, dy.shape[1], column]
            params = [blocks, *part.planes, *some, add, float(scale)]
            steps.recorder.call(kernel, grid, params, part.data, steps.state, dy, dx)
            add = 1
    return dx


def rms_back(
    steps: Steps,
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    size: int,
    dx: Tensor | None = None,
    *,
    first: int = 0,
    add: bool = True,
    weight_first: int = 0,
) -> Tensor:
    """Of x / √(mean(x²) + eps) · w, each `size` values of a row by themselves; added to `dx`.

    Of x and dx those from the `first` on are meant that dy has. Without `add`, dx is set."""
    out = dx or steps.recorder.scratch(*x.shape)
    rows, x_rows = dy.shape[1] // size, x.shape[1] // size
    weighted, adds = int(weight is not None), int(dx is not None and add)
    params = [size, steps.eps, rows, x_rows, first, weighted, weight_first, adds]
    steps.call(
        "norm_back",
        (rows, steps.batch),
        params,
        *(steps.state, x, weight or steps.weights.one, dy, out),
        pieces=("sum", "state"),
        THREADS=steps.row_threads(ROW_THREADS),
    )
    return out


def geglu_back(steps: Steps, gate: Tensor, up: Tensor, up_first: int, dh: Tensor) -> Tensor:
    """dgate and dup side by side: [batch, 2 * width]; up are the columns from `up_first` on."""
    width = dh.shape[1]
    out = steps.recorder.scratch(steps.batch, 2 * width)
    grid = (-(-width // THREADS), steps.batch)
    params = [width, gate.shape[1], up.shape[1], up_first]
    steps.call("geglu_back", grid, params, steps.state, gate, up, dh, out, pieces=("state",))
    return out


def rescale(steps: Steps, x: Tensor, scale: Tensor) -> None:
    """x *= scale[0], in place."""
    fours = x.nbytes // 16
    steps.call("rescale", steps.flat(fours), [fours], scale, x)


def rope_back(steps: Steps, x: Tensor, spans: Tensor, turns: Tensor, size: int) -> None:
    """Turn heads back, in place."""
    heads = x.shape[1] // size
    steps.call(
        "turn_back",
        (heads, steps.batch),
        [heads],
        *(spans, turns, x),
        pieces=("rope",),
        HEAD_DIM=size,
        THREADS=steps.row_threads(THREADS),
    )


def attend_back(
    steps: Steps,
    heads: Heads,
    window: int,
    spans: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    owed: tuple[Tensor, Tensor],
) -> Tensor:
    """dq; dk and dv are added to what the keys and values are `owed` already."""
    q, k, v = inputs
    dq = steps.recorder.scratch(*q.shape)
    sums = steps.recorder.scratch(steps.batch, heads.queries, 2)
    params = [heads.queries, heads.keys, window]
    queries, keys = (heads.queries, steps.batch), (heads.keys, steps.batch)
    for op, grid, tensors, pieces in (
        ("attention_back_query", queries, (spans, q, k, v, dout, dq, sums), ("sum",)),
        ("attention_back_key", keys, (q, k, v, dout, sums, spans, *owed), ()),
    ):
        steps.call(
            op, grid, params, *tensors, pieces=pieces, HEAD_DIM=heads.size, THREADS=KEY_THREADS
        )
    return dq


def cross_entropy(
    steps: Steps, z: Tensor, targets: Tensor, weights: Tensor, losses: Tensor, cap: float
) -> None:
    """Losses of raw logits z; in their place then what they owe, times each row's weight."""
    steps.call(
        "cross_entropy",
        (steps.batch,),
        [z.shape[1], float(cap)],
        *(steps.state, targets, weights, z, losses),
        pieces=("sum", "state"),
        THREADS=ROW_THREADS,
    )


def outer(
    steps: Steps,
    a: tuple[Tensor, int, int],
    b: tuple[Tensor, int, int],
    scale: float,
    out: Tensor,
    first: int = 0,
) -> None:
    """out += scale · aᵀ b over all tokens; of each a tensor, its first column and how many.

    The sums go into the rows of out from `first` on."""
    (left, left_first, rows), (right, right_first, columns) = a, b
    params = [rows, columns, left.shape[1], left_first, right.shape[1], right_first, float(scale)]
    params.append(first)
    grid = (-(-columns // OUTER_TILE), -(-rows // OUTER_TILE))
    tensors = (steps.state, left, right, out)
    threads = OUTER_TILE**2 // 16
    steps.call("outer", grid, params, *tensors, pieces=("state",), THREADS=threads)
