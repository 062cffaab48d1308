"""How often the loops of a kernel turn, at most: a software adapter ends those that turn too often.

Mesa's lavapipe counts the turns of all loops of an invocation, nested ones included, and ends it
silently when there are too many. Compilers unroll some loops; here, all of them count."""

MOST = 65535
LONGEST_ROW = 1 << 16  # up to which tests hold the products of many tokens


def matvec(units: int, fours: int, lanes: int, each: int) -> int:
    """Turns of matvec.wgsl over rows of so many units, of so many fours each."""
    decode = fours if fours > 1 else 0
    return -(-units // lanes) * (1 + decode + each * (1 + 2 * decode)) + 2 * each * (lanes + 1)


def attention_keys(head_dim: int, threads: int) -> int:
    """Keys that one workgroup of attention.wgsl may look at."""
    fours, keys = head_dim // 4, threads // 4
    own = -(-fours // threads)
    turns = keys // max(1, threads // fours)
    tile = 1 + fours // 4 + keys + own + turns * (1 + own)
    around = fours + own * (1 + threads) + threads
    return (MOST - around) // tile * keys


def attention_prefill_keys(head_dim: int, threads: int, queries: int, keys: int) -> int:
    """Keys that one dispatch of attention_prefill.wgsl may look at."""
    fours, quads = head_dim // 4, queries // 4
    slice = min(8, fours) if fours % min(8, fours) == 0 else 6
    split = threads // (keys // 4 * quads)
    parts = min(16, threads // quads)
    own = quads // min(threads // fours, quads)
    load = -(-queries * slice // threads) + -(-keys * slice // threads)
    score = fours // slice * (1 + load + -(-slice // split) * 5) + split * 5
    soften = 2 * -(-keys // parts) + parts
    gather = own * 5 + keys // 4 * (5 + 4 * (1 + own * 5))
    around = own * (parts + 10) + parts
    return (MOST - around) // (1 + score + soften + gather) * keys
