"""Trains the small DiffusionGemma on demo-data/canvases.npz for as many minutes as given.

usage: train.py OUT_FOLDER --minutes 4
"""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from data import canvases
from denoise import print_samples
from model import DiffusionGemma, Sees, biases
from shape import SEED, SHAPES
from torch import Tensor

from demo_model.checkpoint import save
from demo_model.muon import Muon
from webgemma.denoising import Denoising

MATRIX_RATE, TABLE_RATE, VECTOR_RATE = 0.02, 0.002, 0.004
MOMENTUM, DECAY = 0.95, 0.01
WARM_UP_STEPS, HOLD = 100, 0.40  # until the rate is full; share of the time until it falls
BLANK_SHARE = 0.15  # of the canvases, which are nothing but noise
REPORT_S, CHECKPOINT_S = 10.0, 60.0
TABLES = ("token_embd.weight", "ffn_gate_inp.weight")  # for AdamW, as are vectors


class Training:
    """One run: the model, its optimisers, its canvases and its clock."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.began = time.monotonic()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        torch.manual_seed(SEED)
        torch.set_float32_matmul_precision("high")
        self.shape = SHAPES[options.shape]
        self.model = DiffusionGemma(self.shape).to(self.device)
        named = list(self.model.named_tensors())
        tables = [p for name, p in named if name.endswith(TABLES)]
        vectors = [p for _, p in named if p.dim() == 1]
        rest = [p for name, p in named if p.dim() > 1 and not name.endswith(TABLES)]
        self.muon = Muon(rest, MOMENTUM, DECAY)
        self.adam = torch.optim.AdamW(
            [{"params": tables, "rate": TABLE_RATE}, {"params": vectors, "rate": VECTOR_RATE}],
            lr=1.0,
            betas=(0.9, 0.95),
            eps=1e-10,
            weight_decay=0.0,
            fused=self.device == "cuda",
        )
        known = slice(options.canvases)
        self.data = [torch.from_numpy(array[known]).to(self.device) for array in canvases()]
        self.passes = self.forward, self.loss
        if options.compile:
            self.passes = tuple(torch.compile(f, dynamic=False) for f in self.passes)
        self.log = (options.out / "log.jsonl").open("w")

    def run(self) -> None:
        """Train until the time is up, leaving checkpoints on the way."""
        rows = len(self.data[0])
        size = sum(p.numel() for p in self.model.parameters())
        self.note(parameters=size, shape=asdict(self.shape), canvases=rows, seed=SEED)
        step, reported, saved, total = 0, 0.0, self.seconds(), torch.zeros((), device=self.device)
        counted = 0
        while self.seconds() < self.options.minutes * 60:
            total += self.step(step)
            step, counted = step + 1, counted + 1
            if step % 10 and step > 2:
                continue
            loss = total.item() / counted  # waits for the device, so that the clock is right
            now = self.seconds()
            if now - reported > REPORT_S or step < 3:
                self.note(
                    step=step,
                    loss=round(loss, 4),
                    seconds=round(now, 1),
                    rate=round(self.rate(step), 3),
                    passes=step * self.options.batch // rows,
                )
                reported, counted = now, 0
                total.zero_()
            if now - saved > CHECKPOINT_S:
                saved = now
                save(self.model, self.options.out)
        save(self.model, self.options.out)
        self.note(steps=step, seconds=round(self.seconds(), 1))
        print_samples(self.model, self.dtype, Denoising(), self.options.samples)

    def step(self, step: int) -> Tensor:
        """One update of all weights."""
        while True:
            try:
                loss = self.gradients()
                break
            except Exception as error:  # the compiler's or a kernel's: go on without it
                if self.passes == (self.forward, self.loss):
                    raise
                print(f"without compiler: {type(error).__name__}: {error}"[:2000], flush=True)
                self.model.zero_grad(set_to_none=True)
                self.passes = self.forward, self.loss
        rate = self.rate(step)
        self.muon.step(MATRIX_RATE * rate)
        for group in self.adam.param_groups:
            group["lr"] = group["rate"] * rate
        self.adam.step()
        self.model.zero_grad(set_to_none=True)
        return loss.detach()

    def gradients(self) -> Tensor:
        """The loss of a batch; the first half of it has seen a noisier canvas before."""
        forward, loss_of = self.passes
        count, shape, device = self.options.batch, self.shape, self.device
        rows = torch.randint(len(self.data[0]), (count,), device=device)
        before, empty, clean = (array[rows] for array in self.data)
        level = torch.rand(count, 1, device=device)
        level = torch.where(torch.rand_like(level) < BLANK_SHARE, 1.0, level)
        earlier = level + (1 - level) * torch.rand_like(level)
        order = torch.rand(clean.shape, device=device)  # a position is noise above its own level
        now, then = (self.noised(clean, order < level), self.noised(clean, order < earlier))
        sees = biases(shape, empty, before.shape[1] + shape.canvas, self.dtype)
        half = count // 2
        with torch.no_grad():
            temperature = shape.t_min + (shape.t_max - shape.t_min) * earlier[:half, :, None]
            first = {kind: bias[:half] for kind, bias in sees.items()}
            expected = forward(torch.cat((before, then), 1)[:half], temperature, first)
        expected = F.pad(expected, (0, 0, 0, 0, 0, count - half))
        loss = loss_of(torch.cat((before, now), 1), expected, sees, clean)
        loss.backward()
        return loss

    def noised(self, clean: Tensor, noisy: Tensor) -> Tensor:
        """Random tokens in the place of some."""
        return torch.where(noisy, torch.randint_like(clean, self.shape.vocab), clean)

    def forward(self, ids: Tensor, temperature: Tensor, sees: Sees) -> Tensor:
        """What a first look at a canvas makes one expect."""
        nothing = torch.zeros(
            (len(ids), self.shape.canvas, self.shape.width), device=ids.device, dtype=self.dtype
        )
        z = self.model(ids, nothing, sees, self.dtype) / temperature
        return self.model.expect(z, self.dtype)

    def loss(self, ids: Tensor, expected: Tensor, sees: Sees, clean: Tensor) -> Tensor:
        """Mean cross-entropy of all positions of the canvas."""
        logits = self.model(ids, expected, sees, self.dtype)
        return F.cross_entropy(logits.flatten(0, 1), clean.flatten())

    def rate(self, step: int) -> float:
        """Up by steps; level, then down to zero by the clock."""
        left = 1 - self.seconds() / (self.options.minutes * 60)
        return max(0.0, min(1.0, (step + 1) / WARM_UP_STEPS, left / (1 - HOLD)))

    def seconds(self) -> float:
        """Since the begin, compiler included."""
        return time.monotonic() - self.began

    def note(self, **values: object) -> None:
        """Into the log and onto the screen."""
        self.log.write(json.dumps(values) + "\n")
        self.log.flush()
        print(json.dumps(values), flush=True)


def main() -> None:
    """Read the options, run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--shape", choices=SHAPES, default="demo")
    parser.add_argument("--canvases", type=int, help="to learn only the first of them")
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    Training(options).run()


if __name__ == "__main__":
    main()
