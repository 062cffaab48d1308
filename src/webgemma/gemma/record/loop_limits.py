"""Upper bounds of loop iterations in kernels: a software GPU silently ends a long invocation.

Mesa's lavapipe counts the iterations of all loops of an invocation, nested ones included, and ends
it without an error when there are too many. Compilers unroll some loops; here, all count."""

MAX_ITERATIONS = 65535
MAX_ROW = 1 << 16  # weights of a row for which products of many tokens are tested


def matvec(units: int, unit_vec4s: int, lanes: int, each: int) -> int:
    """Return the iterations of matvec over rows of so many units, of so many vec4s each."""
    decode = unit_vec4s if unit_vec4s > 1 else 0
    row = -(-units // lanes) * (1 + decode + each * (1 + 2 * decode)) + 2 * each * (lanes + 1)
    return 1 + row  # of one round


def attention_decode_keys(head_dim: int, threads: int) -> int:
    """Return how many keys one workgroup of attention_decode may cover."""
    vec4s, keys = head_dim // 4, threads // 4
    own = -(-vec4s // threads)
    turns = keys // max(1, threads // vec4s)
    tile = 1 + vec4s // 4 + keys + own + turns * (1 + own)
    around = vec4s + own * (1 + threads) + threads
    return (MAX_ITERATIONS - around) // tile * keys


def attention_prefill_keys(head_dim: int, threads: int, queries: int, keys: int) -> int:
    """Return how many keys one dispatch of attention_prefill may cover."""
    vec4s, quads = head_dim // 4, queries // 4
    slice = min(8, vec4s) if vec4s % min(8, vec4s) == 0 else 6
    split = threads // (keys // 4 * quads)
    parts = min(16, threads // quads)
    own = quads // min(threads // vec4s, quads)
    load = -(-queries * slice // threads) + -(-keys * slice // threads)
    score = vec4s // slice * (1 + load + -(-slice // split) * 5) + split * 5
    soften = 2 * -(-keys // parts) + parts
    accumulate = own * 5 + keys // 4 * (5 + 4 * (1 + own * 5))
    around = own * (parts + 10) + parts
    return (MAX_ITERATIONS - around) // (1 + score + soften + accumulate) * keys
