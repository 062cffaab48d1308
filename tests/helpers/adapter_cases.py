"""Adapters and texts whose logits and gradients are recorded in tests/fixtures/lora."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from conftest import SHARED

from helpers.tiny import MOE, SMALL, Tiny, tiny_gguf
from helpers.tiny_adapter import ENDS, EXPERTS, LAYER


@dataclass(frozen=True)
class Case:
    """Model (tiny, or the path of a shared file), targets of its adapter, and a text."""

    model: Tiny | str
    targets: tuple[str, ...]
    ids: Sequence[int]
    supervised: Sequence[bool]
    first_logits: int = 0  # position of the first recorded logits
    kept_gradients: str = ""  # regular expression of the PEFT names whose gradients are recorded

    def path(self, folder: Path) -> Path:
        """Return the path of the model's file; a tiny one is written into the folder."""
        if isinstance(self.model, str):
            return SHARED / self.model
        (folder / "tiny.gguf").write_bytes(tiny_gguf(self.model))
        return folder / "tiny.gguf"


def random_ids(low: int, high: int, count: int) -> list[int]:
    """Return `count` ids: <bos>, then random ones from `low` to below `high`."""
    return [2, *np.random.RandomState(7).randint(low, high, count - 1).tolist()]


CASES = {
    "small": Case(
        SMALL,
        LAYER + ENDS,
        random_ids(24, 310, 20),
        [t >= 6 for t in range(20)],
        12,
        r"layers\.[025]|embed|head",
    ),
    "moe": Case(
        MOE,
        LAYER + EXPERTS + ENDS,
        random_ids(24, 310, 20),
        [t % 3 == 1 for t in range(20)],
        12,
        r"layers\.[02]|embed|head",
    ),
    "shared_e2b": Case(
        "e2b/e2b-Q4_K_M.gguf",
        LAYER,
        random_ids(300, 2000, 72),  # more than twice the window
        [t >= 20 for t in range(72)],
        70,
        r"1.self_attn.q|2.self_attn.k|3.self_attn.[kv]|7.mlp.down|4.self_attn.o_proj"
        r"|5.per_layer_input|0.per_layer_proj",
    ),
    "shared_moe": Case(
        "moe/moe-Q4_K_M.gguf",
        LAYER + EXPERTS[:1],
        random_ids(300, 2000, 72),
        [t >= 20 for t in range(72)],
        70,
        r"1.self_attn.q|3.self_attn.k|0.self_attn.v|2.mlp.up|1.router|0.mlp.down",
    ),
}

# Targets that llama.cpp applies as PEFT does: not the head of a tied model, nor the embedding, nor
# the experts' down projection, whose update it adds after the experts' scales.
LLAMA_CASES = {"small": LAYER, "moe": LAYER + EXPERTS[:-1]}
