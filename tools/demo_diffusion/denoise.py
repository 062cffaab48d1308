"""Generation in PyTorch, by the rules of webgemma.denoising."""

import torch
from data import prompt, tokenizer
from model import DiffusionGemma, biases
from shape import CANVASES
from torch import Tensor

from webgemma.denoising import Denoising

TOPICS = [
    *("a black cat", "a frog", "a boat", "a bear", "a cat and a dog", "a train", "Lily and Ben"),
    *("a bunny", "a tree", "a little bird"),
    *("a brave mouse", "a robot and a flower"),  # no story of the data has these topics
]


@torch.no_grad()
def print_samples(
    model: DiffusionGemma, dtype: torch.dtype, denoising: Denoising, count: int
) -> None:
    """Print a story about each topic, and the steps of its canvases."""
    for topic in TOPICS[:count]:
        ids, steps = generate(model, prompt(topic), dtype, denoising)
        print(f"> {topic} {steps}\n{tokenizer().decode(ids)}\n", flush=True)


def generate(
    model: DiffusionGemma, ids: list[int], dtype: torch.dtype, denoising: Denoising
) -> tuple[list[int], list[int]]:
    """Return the tokens of a reply before its end, and the steps of each canvas."""
    device, first = model.token_embd.device, len(ids)
    steps: list[int] = []
    for _ in range(CANVASES):
        best, taken = denoise_canvas(model, torch.tensor(ids, device=device), dtype, denoising)
        steps.append(taken)
        ids = ids + best
        ends = [at for at in range(first, len(ids)) if ids[at] in tokenizer().ends]
        if ends:
            return ids[first : ends[0]], steps
    return ids[first:], steps


def denoise_canvas(
    model: DiffusionGemma, before: Tensor, dtype: torch.dtype, denoising: Denoising
) -> tuple[list[int], int]:
    """Return the likeliest tokens of the last step, and the number of steps."""
    shape, device = model.shape, before.device
    size = (1, shape.canvas)
    empty = torch.zeros(1, dtype=torch.long, device=device)
    masks = biases(shape, empty, len(before) + shape.canvas, dtype)
    canvas = torch.randint(shape.vocab, size, device=device)
    expected = torch.zeros(*size, shape.width, device=device)
    best, stable = torch.full(size, -1, device=device), 0
    for step in range(1, denoising.steps + 1):
        logits = model(torch.cat((before[None], canvas), 1), expected, masks, dtype)
        z = logits / denoising.temperature(step)
        p = torch.softmax(z, -1)
        h = torch.special.entr(p).sum(-1)
        drawn = torch.multinomial(p[0], 1).T
        noise = torch.randint(shape.vocab, size, device=device)
        canvas = torch.where(accept(h[0], denoising.entropy_bound), drawn, noise)
        last, best = best, z.argmax(-1)
        stable = stable + 1 if torch.equal(last, best) else 0
        if stable >= denoising.stability_threshold and h.mean() < denoising.confidence_threshold:
            break
        expected = model.expected_embedding(z, dtype)
    return best[0].tolist(), step


def accept(h: Tensor, bound: float) -> Tensor:
    """Return which positions are accepted: those of least entropy, up to a sum of the bound."""
    ordered, order = h.sort(stable=True)
    accepted = torch.empty_like(h, dtype=torch.bool)
    accepted[order] = ordered.cumsum(0) - ordered <= bound
    return accepted
