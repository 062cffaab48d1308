"""Path of the recipe's scripts, which import each other by their plain names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "demo_model"))
