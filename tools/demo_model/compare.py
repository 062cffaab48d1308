"""Compare the training model with webgemma's reference on its own exported file, in float32."""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from checkpoint import load
from data import writer
from export import export
from model import Gemma4, biases
from settings import Shape

from webgemma.gemma.config import Config
from webgemma.gguf.reader import Gguf
from webgemma.reference.text import TextModel
from webgemma.reference.weights import Weights

LIMIT = 1e-3  # of the logits' standard deviation
CHATS = [
    [["u", "Tell me a story about a small fox."], ["a", "Once upon a time, there was a fox." * 40]],
    [
        ["u", "What is 3 + 4?"],
        ["a", "3 plus 4 is 7."],
        ["u", "And who are you?"],
        ["a", "A tiny model."],
    ],
]


def main() -> None:
    """Print the largest difference of every chat."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", type=Path, help="the folder that train.py wrote")
    shape, tensors = load(parser.parse_args().weights)
    difference(shape, tensors)


def difference(shape: Shape, tensors: dict[str, np.ndarray]) -> float:
    """Return the largest difference of logits, in their standard deviations."""
    model = Gemma4(shape)
    model.load_state_dict(
        {name.removesuffix(".weight"): torch.from_numpy(values) for name, values in tensors.items()}
    )
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        export(path, shape, tensors, "F32")
        gguf = Gguf.open(path)
        reference = TextModel(Config.from_gguf(gguf), Weights(gguf))
        for chat in CHATS:
            ids = writer().conversation(chat, None)[0][: shape.context]
            with torch.no_grad():
                tokens = torch.tensor([ids])
                masks = biases(torch.zeros_like(tokens), shape.window, torch.float32)
                ours = model.logits(model(tokens, masks))[0].numpy()
            theirs = reference.forward(ids)
            apart = float(np.abs(ours - theirs).max() / theirs.std())
            same = float((ours.argmax(1) == theirs.argmax(1)).mean())
            print(f"{len(ids)} tokens: {apart:.1e} deviations apart, same best token {same:.1%}")
            worst = max(worst, apart)
        gguf.close()
    assert worst < LIMIT, f"The training model and the reference differ by {worst}."
    return worst


if __name__ == "__main__":
    main()
