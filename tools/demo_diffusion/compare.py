"""Compare the training model with webgemma's reference on its own exported file, in float32."""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from data import prompt, tokenizer
from export import export
from model import DiffusionGemma, biases, gguf_name
from shape import SEED, Shape

from demo_model.checkpoint import load
from webgemma.gemma.config import Config
from webgemma.gguf.reader import Gguf
from webgemma.reference.diffusion import DiffusionModel
from webgemma.reference.text import Cache
from webgemma.reference.weights import Weights

LIMIT = 1e-3  # of the logits' standard deviation
TEMPERATURE = 0.6
EMPTY = 5  # positions without a token in front of the prompt, as in training
STORY = "Once upon a time, there was a frog who wanted to see the sea. " * 12


def main() -> None:
    """Compare two steps of a canvas, after a short prompt and one longer than the window."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", type=Path, help="the folder that train.py wrote")
    shape, tensors = load(parser.parse_args().weights, Shape)
    model = DiffusionGemma(shape)
    names = {gguf_name(name): name for name, _ in model.named_parameters()}
    model.load_state_dict({names[name]: torch.from_numpy(a) for name, a in tensors.items()})
    short = prompt("a frog")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        export(path, shape, tensors, "F32")
        with Gguf.open(path) as gguf:
            reference = DiffusionModel(Config.from_gguf(gguf), Weights(gguf))
            worst = max(
                difference(model, reference, ids)
                for ids in (short, short + tokenizer().encode(STORY)[: shape.canvas])
            )
    assert worst < LIMIT, f"The training model and the reference differ by {worst}."


@torch.no_grad()
def difference(model: DiffusionGemma, reference: DiffusionModel, ids: list[int]) -> float:
    """Return the largest difference of logits, in their standard deviations."""
    shape, worst = model.shape, 0.0
    noise = np.random.default_rng(SEED).integers(shape.vocab, size=shape.canvas).tolist()
    tokens = torch.tensor([[0] * EMPTY + ids + noise])
    masks = biases(shape, torch.tensor([EMPTY]), tokens.shape[1], torch.float32)
    ours_expected, theirs_expected = torch.zeros(1, shape.canvas, shape.width), None
    cache = Cache(reference.config)
    reference.encode(ids, cache)
    for step in (1, 2):
        ours = model(tokens, ours_expected, masks)
        theirs = reference.logits(noise, cache, theirs_expected)
        apart = float(np.abs(ours[0].numpy() - theirs).max() / theirs.std())
        print(f"{len(ids)} tokens, step {step}: {apart:.1e} deviations apart", flush=True)
        worst = max(worst, apart)
        ours_expected = model.expected_embedding(ours / TEMPERATURE)
        theirs_expected = reference.expected_embedding(theirs / np.float32(TEMPERATURE))
    return worst


if __name__ == "__main__":
    main()
