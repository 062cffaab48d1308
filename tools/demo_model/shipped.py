"""Read a demo model's GGUF file back: its weights to continue from, and its vocabulary.

Run as a script, it writes `vocabulary.json` and compares the training model with the reference."""

import argparse
import json
from pathlib import Path

import numpy as np
from settings import DATA, DEMO, ROOT, VOCABULARY

from webgemma.gguf.reader import Gguf
from webgemma.reference.weights import Weights

SHIPPED = ROOT / "src" / "webgemma" / "demo" / "webgemma-demo-Q8_0.gguf"
NOT_LEARNT = "rope_freqs.weight"  # written by export.py


def main() -> None:
    """Write the vocabulary, and check that the training model computes what the reference does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", default=SHIPPED)
    path = parser.parse_args().model
    DATA.mkdir(exist_ok=True)
    (DATA / VOCABULARY).write_text(json.dumps(vocabulary(path), ensure_ascii=False))
    from compare import difference  # needs the vocabulary

    difference(DEMO, tensors(path))


def tensors(path: Path) -> dict[str, np.ndarray]:
    """Return the learnt tensors of a file as float32."""
    with Gguf.open(path) as gguf:
        weights = Weights(gguf)
        names = [tensor.name for tensor in gguf.tensors.values() if tensor.name != NOT_LEARNT]
        return {name: np.array(weights[name]) for name in names}


def vocabulary(path: Path) -> dict[str, object]:
    """Return the vocabulary of a file, as vocabulary.py writes it."""
    with Gguf.open(path) as gguf:
        stored = {key: gguf.metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "merges")}
        kinds = gguf.metadata["tokenizer.ggml.token_type"]
    return {**{key: list(values) for key, values in stored.items()}, "token_type": list(kinds)}


if __name__ == "__main__":
    main()
