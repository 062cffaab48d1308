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


def linear_back(steps: Steps, dy: Tensor, weight: Weight, first: int = 0) -> Tensor:
    """dy W: [batch, width], from the columns of dy from `first` on."""
    dx = steps.recorder.scratch(steps.batch, weight.width)
    name = weight.format.name
    threads = TILE_WIDTH * TILE_TOKENS // 16
    kernel = steps.link("matmul_back", name, ("state",), THREADS=threads)
    grid = (-(-weight.width // TILE_WIDTH), -(-steps.batch // TILE_TOKENS))
    blocks, units = weight.width // weight.format.block, weight.width // unit_of(name)
    add = 0
    for part in weight.parts:
        for row in range(0, part.rows, MOST_ROWS):
            rows = min(MOST_ROWS, part.rows - row)
            column = first + part.first_row + row
            params = [blocks, *part.planes, row, rows, units, dy.shape[1], column, add]
            steps.recorder.call(kernel, grid, params, part.data, steps.state, dy, dx)
            add = 1
    return dx


def rms_back(
    steps: Steps, x: Tensor, dy: Tensor, weight: Tensor | None, size: int, dx: Tensor | None = None
) -> Tensor:
    """Of x / √(mean(x²) + eps) · w, each `size` values of a row by themselves; added to `dx`."""
    out = dx or steps.recorder.scratch(*x.shape)
    rows = x.shape[1] // size
    params = [size, steps.eps, rows, int(weight is not None), int(dx is not None)]
    steps.call(
        "norm_back",
        (rows, steps.batch),
        params,
        *(steps.state, x, weight or steps.weights.one, dy, out),
        pieces=("sum", "state"),
        THREADS=steps.row_threads(ROW_THREADS),
    )
    return out


def geglu_back(steps: Steps, both: Tensor, dh: Tensor) -> Tensor:
    """dgate and dup side by side, as gate and up are in `both`: [batch, 2 * width]."""
    width = both.shape[1] // 2
    out = steps.recorder.scratch(*both.shape)
    grid = (-(-width // THREADS), steps.batch)
    steps.call("geglu_back", grid, [width], steps.state, both, dh, out, pieces=("state",))
    return out


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
    steps: Steps, z: Tensor, targets: Tensor, losses: Tensor, cap: float, weight: float
) -> None:
    """Losses of raw logits z; in their place then what they owe, times the weight."""
    steps.call(
        "cross_entropy",
        (steps.batch,),
        [z.shape[1], float(cap), float(weight)],
        *(steps.state, targets, z, losses),
        pieces=("sum", "state"),
        THREADS=ROW_THREADS,
    )


def outer(
    steps: Steps, a: tuple[Tensor, int, int], b: tuple[Tensor, int, int], scale: float, out: Tensor
) -> None:
    """out += scale · aᵀ b over all tokens; of each a tensor, its first column and how many."""
    (left, left_first, rows), (right, right_first, columns) = a, b
    params = [rows, columns, left.shape[1], left_first, right.shape[1], right_first, float(scale)]
    grid = (-(-columns // OUTER_TILE), -(-rows // OUTER_TILE))
    tensors = (steps.state, left, right, out)
    threads = OUTER_TILE**2 // 16
    steps.call("outer", grid, params, *tensors, pieces=("state",), THREADS=threads)
