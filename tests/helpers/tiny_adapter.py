"""Tiny LoRA adapters for any matrix of a tiny model; seed and tensor name set their numbers."""

import numpy as np

from helpers.tiny import uniform
from webgemma.gguf.reader import Gguf
from webgemma.lora.adapter import Adapter
from webgemma.lora.adapter import Pair as StoredPair
from webgemma.reference.lora import EMBEDDING, HEAD, Pair

RANK, ALPHA = 3, 6.0
LAYER = (
    *("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
    *("inp_gate", "proj"),
)
EXPERTS = ("ffn_gate_inp", "ffn_gate_up_exps", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
ENDS = (EMBEDDING, HEAD)


def tiny_pairs(
    gguf: Gguf,
    names: tuple[str, ...] = LAYER + EXPERTS + ENDS,
    *,
    seed: int = 1,
    rank: int = RANK,
    strength: float = 0.3,
    dtype: type = np.float32,
) -> dict[str, Pair]:
    """Return pairs for every matrix of these names; the embedding's A is [vocab, rank]."""
    pairs = {}

    def numbers(name: str, *shape: int, spread: float) -> np.ndarray:
        values = uniform(seed, name, int(np.prod(shape))).reshape(shape)
        return (spread * values).astype(np.float32).astype(dtype)

    def add(name: str, a: tuple[int, ...], b: tuple[int, ...], size: float) -> None:
        pairs[name] = Pair(
            numbers(name + ".a", *a, spread=1.7 * size),
            numbers(name + ".b", *b, spread=strength),
            ALPHA / rank,
        )

    vocab, width = gguf.tensors[EMBEDDING].rows, gguf.tensors[EMBEDDING].width
    for name, tensor in gguf.tensors.items():
        if name.startswith("blk.") and name.endswith(".weight") and name.split(".")[2] in names:
            inputs, outputs, *experts = tensor.shape
            add(name, (*experts, rank, inputs), (*experts, outputs, rank), inputs**-0.5)
    if EMBEDDING in names:
        add(EMBEDDING, (vocab, rank), (width, rank), 0.2 * width**-0.5)
    if HEAD in names:
        add(HEAD, (rank, width), (vocab, rank), width**-0.5)
    return pairs


def tiny_adapter(pairs: dict[str, Pair], name: str = "tiny") -> Adapter:
    """Return the pairs as an adapter of the engine."""
    stored = {}
    for tensor, (a, b, scale) in pairs.items():
        experts = len(a) if a.ndim == 3 else 1
        rank, inputs = a.shape[-2:][::-1] if tensor == EMBEDDING else a.shape[-2:]
        a_bytes, b_bytes = (x.astype("<f4").tobytes() for x in (a, b))
        stored[tensor] = StoredPair(
            a_bytes, b_bytes, int(rank), int(inputs), b.shape[-2], scale, experts
        )
    return Adapter(name, stored)
