"""Train the small DiffusionGemma on demo-data/canvases.npz for some minutes."""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from data import canvases
from denoise import print_samples
from model import DiffusionGemma, Masks, biases
from shape import SEED, SHAPES
from torch import Tensor

from demo_model.checkpoint import save
from demo_model.muon import Muon
from webgemma.denoising import Denoising

MATRIX_RATE, TABLE_RATE, VECTOR_RATE = 0.02, 0.002, 0.004
MOMENTUM, DECAY = 0.95, 0.01
WARM_UP_STEPS, HOLD = 100, 0.40  # until the rate is at its peak; share of the time until it falls
NOISE_SHARE = 0.15  # of the canvases, which are only noise
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
        used = slice(options.canvases)
        self.data = [torch.from_numpy(array[used]).to(self.device) for array in canvases()]
        self.passes = self.first_pass, self.loss
        if options.compile:
            self.passes = tuple(torch.compile(f, dynamic=False) for f in self.passes)
        self.log_file = (options.out / "log.jsonl").open("w")

    def run(self) -> None:
        """Train until the time is up, with checkpoints."""
        rows = len(self.data[0])
        size = sum(p.numel() for p in self.model.parameters())
        self.write_log(parameters=size, shape=asdict(self.shape), canvases=rows, seed=SEED)
        step, reported, saved, total = 0, 0.0, self.seconds(), torch.zeros((), device=self.device)
        counted = 0
        while self.seconds() < self.options.minutes * 60:
            total += self.step(step)
            step, counted = step + 1, counted + 1
            if step % 10 and step > 2:
                continue
            loss = total.item() / counted  # waits for the device, so that the time is right
            now = self.seconds()
            if now - reported > REPORT_S or step < 3:
                self.write_log(
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
        self.write_log(steps=step, seconds=round(self.seconds(), 1))
        print_samples(self.model, self.dtype, Denoising(), self.options.samples)

    def step(self, step: int) -> Tensor:
        """Update all weights once; return the loss."""
        while True:
            try:
                loss = self.gradients()
                break
            except Exception as error:  # of the compiler or a kernel: continue without it
                if self.passes == (self.first_pass, self.loss):
                    raise
                print(f"without compiler: {type(error).__name__}: {error}"[:2000], flush=True)
                self.model.zero_grad(set_to_none=True)
                self.passes = self.first_pass, self.loss
        rate = self.rate(step)
        self.muon.step(MATRIX_RATE * rate)
        for group in self.adam.param_groups:
            group["lr"] = group["rate"] * rate
        self.adam.step()
        self.model.zero_grad(set_to_none=True)
        return loss.detach()

    def gradients(self) -> Tensor:
        """Compute the loss of a batch and its gradients.

        The first half is conditioned on a first pass over a noisier canvas."""
        first_pass, loss_of = self.passes
        count, shape, device = self.options.batch, self.shape, self.device
        rows = torch.randint(len(self.data[0]), (count,), device=device)
        before, empty, clean = (array[rows] for array in self.data)
        level = torch.rand(count, 1, device=device)
        level = torch.where(torch.rand_like(level) < NOISE_SHARE, 1.0, level)
        earlier = level + (1 - level) * torch.rand_like(level)
        order = torch.rand(clean.shape, device=device)  # the level from which a token is noise
        noisy = self.noised(clean, order < level)
        noisier = self.noised(clean, order < earlier)
        masks = biases(shape, empty, before.shape[1] + shape.canvas, self.dtype)
        half = count // 2
        with torch.no_grad():
            temperature = shape.t_min + (shape.t_max - shape.t_min) * earlier[:half, :, None]
            first = {kind: bias[:half] for kind, bias in masks.items()}
            expected = first_pass(torch.cat((before, noisier), 1)[:half], temperature, first)
        expected = F.pad(expected, (0, 0, 0, 0, 0, count - half))
        loss = loss_of(torch.cat((before, noisy), 1), expected, masks, clean)
        loss.backward()
        return loss

    def noised(self, clean: Tensor, is_noise: Tensor) -> Tensor:
        """Return the tokens with random ones at some positions."""
        return torch.where(is_noise, torch.randint_like(clean, self.shape.vocab), clean)

    def first_pass(self, ids: Tensor, temperature: Tensor, masks: Masks) -> Tensor:
        """Return the expected embedding of a canvas without self-conditioning."""
        zero = torch.zeros(
            (len(ids), self.shape.canvas, self.shape.width), device=ids.device, dtype=self.dtype
        )
        z = self.model(ids, zero, masks, self.dtype) / temperature
        return self.model.expected_embedding(z, self.dtype)

    def loss(self, ids: Tensor, expected: Tensor, masks: Masks, clean: Tensor) -> Tensor:
        """Return the mean cross-entropy over all positions of the canvas."""
        logits = self.model(ids, expected, masks, self.dtype)
        return F.cross_entropy(logits.flatten(0, 1), clean.flatten())

    def rate(self, step: int) -> float:
        """Return the learning rate, relative to the peak: up by steps, down to zero by time."""
        left = 1 - self.seconds() / (self.options.minutes * 60)
        return max(0.0, min(1.0, (step + 1) / WARM_UP_STEPS, left / (1 - HOLD)))

    def seconds(self) -> float:
        """Return the seconds since the start, compiler included."""
        return time.monotonic() - self.began

    def write_log(self, **values: object) -> None:
        """Write values to the log and print them."""
        self.log_file.write(json.dumps(values) + "\n")
        self.log_file.flush()
        print(json.dumps(values), flush=True)


def main() -> None:
    """Parse the options and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the folder for weights and log")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--shape", choices=SHAPES, default="demo")
    parser.add_argument("--canvases", type=int, help="train on only so many canvases")
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    Training(options).run()


if __name__ == "__main__":
    main()
