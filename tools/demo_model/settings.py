"""What the demo model is made of: its shape, its data mix, its seeds."""

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "demo-data"  # ignored by git: what travels to the machine that trains
WORK = ROOT / "demo-work"  # ignored by git: what is made on the way
sys.path.insert(0, str(ROOT / "src"))  # that machine has no package installed

NAME = "Webgemma"  # what the model calls itself
SEED = 20261115
VOCABULARY = "vocabulary.json"
ROW = 1024  # tokens of a training row, and the context the model is made for


@dataclass(frozen=True)
class Shape:
    """A Gemma 4 of the E2B kind: per-layer embeddings, sharing layers with a double-wide FFN."""

    pattern: str = "ssfssfsf"  # s: sliding, f: full
    shared: int = 2  # the last layers, which read the keys and values of the last own ones
    width: int = 512
    heads: int = 4
    kv_heads: int = 1
    head_dim_sliding: int = 64
    head_dim: int = 128  # of full layers
    ffn: int = 512  # of own layers; sharing ones have twice as much
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
        """How many."""
        return len(self.pattern)

    def shares(self, layer: int) -> bool:
        """Whether a layer has no keys and values of its own."""
        return layer >= self.layers - self.shared

    def donor(self, layer: int) -> int:
        """The layer whose keys and values it reads: itself, or the last own one of its kind."""
        if not self.shares(layer):
            return layer
        return self.pattern.rindex(self.pattern[layer], 0, self.layers - self.shared)

    def is_full(self, layer: int) -> bool:
        """Whether it sees everything before it."""
        return self.pattern[layer] == "f"

    def dim(self, layer: int) -> int:
        """The size of its heads."""
        return self.head_dim if self.is_full(layer) else self.head_dim_sliding

    def ffn_of(self, layer: int) -> int:
        """The width of its feed-forward."""
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

# Shares of the rows drawn for a step: first the whole mix, at the end chats only.
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
USER_WEIGHT = 0.2  # of the loss on what users say, in the first stage
