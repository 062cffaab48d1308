"""Settings of the demo model: its shape, its data mix, its seed."""

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "demo-data"  # ignored by git: files for the training machine
WORK = ROOT / "demo-work"  # ignored by git: intermediate files
sys.path.insert(0, str(ROOT / "src"))  # the package is not installed on the training machine

NAME = "Webgemma"  # of the model, in its chats
SEED = 20261115
SEED_2 = 20261118  # of the second training, which continues from the first
VOCABULARY = "vocabulary.json"
ROW = 1024  # tokens of a training row, and the context of the model
ROW_2 = 512  # of the second training


@dataclass(frozen=True)
class Shape:
    """A Gemma 4 of the E2B kind: per-layer embeddings, sharing layers with a double-wide FFN."""

    pattern: str = "ssfssfsf"  # s: sliding, f: full
    shared: int = 2  # last layers, which read the keys and values of earlier ones
    width: int = 512
    heads: int = 4
    kv_heads: int = 1
    head_dim_sliding: int = 64
    head_dim: int = 128  # of full layers
    ffn: int = 512  # of layers with own keys and values; the sharing ones have twice as much
    ple: int = 32
    window: int = 256
    vocab: int = 8192
    context: int = ROW
    rope_base: float = 1e6
    rope_base_sliding: float = 1e4
    eps: float = 1e-6
    softcap: float = 30.0

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self.pattern)

    def shares(self, layer: int) -> bool:
        """Return whether a layer has no keys and values of its own."""
        return layer >= self.layers - self.shared

    def donor(self, layer: int) -> int:
        """Return the layer whose keys and values a layer reads.

        That is the layer itself, or the last one of its kind that does not share."""
        if not self.shares(layer):
            return layer
        return self.pattern.rindex(self.pattern[layer], 0, self.layers - self.shared)

    def is_full(self, layer: int) -> bool:
        """Return whether a layer attends to all earlier positions."""
        return self.pattern[layer] == "f"

    def dim(self, layer: int) -> int:
        """Return the dimensions of a layer's heads."""
        return self.head_dim if self.is_full(layer) else self.head_dim_sliding

    def ffn_of(self, layer: int) -> int:
        """Return the width of a layer's feed-forward."""
        return self.ffn * (2 if self.shares(layer) else 1)


DEMO = Shape()
SMOKE = Shape(
    pattern="sfsf",
    width=128,
    heads=2,
    head_dim_sliding=32,
    head_dim=64,
    ffn=128,
    window=64,
    context=256,
)
SHAPES = {"demo": DEMO, "smoke": SMOKE}

# Shares of the rows drawn for a step: of all sources first, of chats only at the end.
MIX = {
    "stories_chat": 0.33,
    "stories": 0.19,
    "synth": 0.34,
    "dialogue": 0.04,
    "tinystories": 0.03,
    "tinystories_chat": 0.02,
    "prose": 0.02,
    "tatoeba": 0.014,
    "storybooks": 0.006,
    "definitions": 0.006,
    "chitchat": 0.004,
}
CHAT_MIX = {"synth": 0.60, "stories_chat": 0.35, "tinystories_chat": 0.04, "chitchat": 0.01}
CHAT_STAGE = 0.15  # of the steps
USER_WEIGHT = 0.2  # of the loss on user turns, in the first stage

# The second training continues from the shipped weights, on a CPU.
MIX_2 = {"talk": 0.76, "stories_chat": 0.12, "stories": 0.12}
