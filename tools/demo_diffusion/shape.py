"""Settings of the small DiffusionGemma: its shape, its canvas, its seed, its data file."""

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in ("src", "tools", "tools/demo_model"):  # the last for its modules' own imports
    sys.path.append(str(ROOT / folder))

SEED = 20261115
BUNDLED = ROOT / "src/webgemma/demo/webgemma-demo-Q8_0.gguf"  # this model has its vocabulary
DATA = ROOT / "demo-data" / "canvases.npz"  # ignored by git
PROMPT = 32  # tokens of the longest prompt
CANVASES = 2  # of the longest story


@dataclass(frozen=True)
class Shape:
    """A DiffusionGemma: experts in every layer, a value projection on sliding layers only."""

    pattern: str = "ssfssf"  # s: sliding, f: full
    width: int = 384
    heads: int = 4
    kv_heads: int = 1  # of full layers
    kv_heads_sliding: int = 2
    head_dim: int = 128  # of full layers
    head_dim_sliding: int = 64
    ffn: int = 448
    experts: int = 4
    used: int = 2
    expert_ffn: int = 128
    condition_ffn: int = 512
    window: int = 96
    canvas: int = 128
    vocab: int = 8192
    context: int = 1024
    rope_base: float = 1e6
    rope_base_sliding: float = 1e4
    eps: float = 1e-6
    softcap: float = 30.0
    t_min: float = 0.4
    t_max: float = 0.8

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self.pattern)

    @property
    def before(self) -> int:
        """The most tokens before the last canvas of a story."""
        return PROMPT + (CANVASES - 1) * self.canvas

    def is_full(self, layer: int) -> bool:
        """Return whether a layer attends to all earlier positions."""
        return self.pattern[layer] == "f"

    def dim(self, layer: int) -> int:
        """Return the dimensions of a layer's heads."""
        return self.head_dim if self.is_full(layer) else self.head_dim_sliding

    def kv_heads_of(self, layer: int) -> int:
        """Return the number of a layer's key-value heads."""
        return self.kv_heads if self.is_full(layer) else self.kv_heads_sliding


DEMO = Shape()
SMOKE = Shape(
    pattern="sf",
    width=128,
    head_dim=64,
    head_dim_sliding=32,
    ffn=128,
    expert_ffn=64,
    condition_ffn=128,
)
SHAPES = {"demo": DEMO, "smoke": SMOKE}
