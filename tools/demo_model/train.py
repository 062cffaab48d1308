"""Step 4: train the demo model for some minutes, or for a number of steps."""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from checkpoint import save
from data import held_out_stories, writer
from model import Gemma4, Masks, biases, block_masks
from muon import Muon
from packing import MODEL, OTHER, pack
from rows import Rows
from samples import print_samples
from settings import CHAT_MIX, CHAT_STAGE, MIX, SEED, SHAPES, USER_WEIGHT
from torch import Tensor

MATRIX_RATE, TABLE_RATE, VECTOR_RATE = 0.02, 0.002, 0.004
MOMENTUM, DECAY = 0.95, 0.02
WARM_UP, HOLD = 0.02, 0.40  # shares of the steps: until the rate is at its peak, until it falls
MEASURED_S = 30.0  # of training, after which the number of steps is computed
CHECKPOINT_S = 120.0
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
MATRICES += ("inp_gate", "proj", "per_layer_model_proj")


class Training:
    """One run: the model, its optimisers, its rows and its clock."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        torch.manual_seed(SEED)
        torch.set_float32_matmul_precision("high")
        self.shape = SHAPES[options.shape]
        self.model = Gemma4(self.shape).to(self.device)
        named = list(self.model.named_tensors())
        is_matrix = {name: name.split(".")[-2] in MATRICES for name, _ in named}
        self.muon = Muon([p for name, p in named if is_matrix[name]], MOMENTUM, DECAY)
        tables = [p for name, p in named if name.endswith("token_embd.weight")]
        vectors = [p for _, p in named if p.dim() == 1]
        self.adam = torch.optim.AdamW(
            [{"params": tables, "rate": TABLE_RATE}, {"params": vectors, "rate": VECTOR_RATE}],
            lr=1.0,
            betas=(0.9, 0.95),
            eps=1e-10,
            weight_decay=0.0,
            fused=self.device == "cuda",
        )
        self.rows = Rows(options.rows, list(MIX), self.device, SEED)
        self.bos = writer().tokenizer.bos
        self.attention = options.attention
        self.loss = torch.compile(self._loss, dynamic=False) if options.compile else self._loss
        self.log_file = (options.out / "log.jsonl").open("w")
        self.steps: int | None = options.steps

    def run(self) -> None:
        """Train to the end, with checkpoints."""
        size = sum(p.numel() for p in self.model.parameters())
        self.write_log(
            parameters=size,
            shape=asdict(self.shape),
            mix=MIX,
            chat_mix=CHAT_MIX,
            rows=self.rows.describe(),
            batch=self.options.batch,
            seed=SEED,
            torch=torch.__version__,
        )
        self.held_out_batch = self.held_out()
        start = began = saved = time.monotonic()
        if self.attention == "auto":
            self.choose_attention()
        step = first = 0
        while self.steps is None or step < self.steps:
            loss = self.step(step)
            if step == 0:
                loss.item()  # waits for the compiler
                print(f"first step: {time.monotonic() - start:.1f} s, {self.attention}", flush=True)
            now = time.monotonic()
            if step == 5:
                began, first = now, step
            step += 1
            if self.steps is None and step > 10 and now - began > self.options.measured:
                loss.item()
                each = (time.monotonic() - began) / (step - 1 - first)
                left = self.options.minutes * 60 - (time.monotonic() - start)
                self.steps = step + max(10, int(left / each))
                self.write_log(steps=self.steps, seconds_each=each)
            if step % 100 == 0 or step == self.steps or step in (1, 10, 30):
                self.report(step, loss, time.monotonic() - start)
            if now - saved > CHECKPOINT_S:
                saved = now
                save(self.model, self.options.out)
        save(self.model, self.options.out)
        self.report(step, loss, time.monotonic() - start)
        print_samples(self.model, self.dtype)

    def step(self, step: int) -> Tensor:
        """Update all weights once; return the loss."""
        chat = self.steps is not None and step >= (1 - CHAT_STAGE) * self.steps
        loss = self.gradients(*self.batch(chat), 0.0 if chat else USER_WEIGHT)
        rate = self.rate(step)
        self.muon.step(MATRIX_RATE * rate)
        for group in self.adam.param_groups:
            group["lr"] = group["rate"] * rate
        self.adam.step()
        self.model.zero_grad(set_to_none=True)
        return loss.detach()

    def batch(self, chat: bool) -> tuple[Tensor, Tensor]:
        """Return the rows of a step, as long as the context."""
        ids, kinds = self.rows.batch(CHAT_MIX if chat else MIX, self.options.batch)
        return ids[:, : self.shape.context], kinds[:, : self.shape.context]

    def choose_attention(self) -> None:
        """Time both kinds of attention and choose the faster."""
        seconds = {}
        for self.attention in ("sdpa", "flex"):
            requested = self.attention
            for turn in range(12):
                if turn == 6:
                    self.wait()
                    began = time.monotonic()
                self.gradients(*self.batch(False), USER_WEIGHT)
                self.model.zero_grad(set_to_none=True)
            self.wait()
            seconds[self.attention if self.attention == requested else f"{requested} failed"] = (
                time.monotonic() - began
            ) / 6
            self.write_log(attention=requested, used=self.attention, seconds_each=seconds)
        self.attention = min(("sdpa", "flex"), key=lambda kind: seconds.get(kind, 1e9))

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, relative to the peak: up, level, down to zero."""
        if self.steps is None:
            return min(1.0, (step + 1) / 150)
        up = (step + 1) / max(150 if self.options.steps is None else 1, WARM_UP * self.steps)
        down = (self.steps - step) / ((1 - HOLD) * self.steps)
        return min(1.0, up, down)

    def gradients(self, ids: Tensor, kinds: Tensor, user_weight: float) -> Tensor:
        """Compute the loss and its gradients; if the compiler or a kernel fails, do without it."""
        while True:
            try:
                loss = self.loss_of(ids, kinds, user_weight)
                loss.backward()
                return loss
            except Exception as error:
                if self.attention == "sdpa" and self.loss == self._loss:
                    raise
                self.model.zero_grad(set_to_none=True)
                print(
                    f"{self.attention} failed: {type(error).__name__}: {error}"[:3000], flush=True
                )
                if self.attention == "flex":
                    self.attention = "sdpa"
                else:
                    self.loss = self._loss

    def loss_of(self, ids: Tensor, kinds: Tensor, user_weight: float) -> Tensor:
        """Return the weighted mean loss over tokens."""
        weights = (kinds == MODEL).float() + user_weight * (kinds == OTHER).float()
        weights = torch.where(ids == self.bos, 0.0, weights)[:, 1:].contiguous()
        documents = (ids == self.bos).cumsum(1, dtype=torch.int32)
        return self.loss(ids, weights, self.masks(documents))

    def masks(self, documents: Tensor) -> Masks:
        """Return masks with which each token attends to its own document only."""
        if self.attention == "flex":
            return block_masks(documents, self.shape.window)
        return biases(documents, self.shape.window, self.dtype)

    def _loss(self, ids: Tensor, weights: Tensor, masks: Masks) -> Tensor:
        h = self.model(ids, masks, self.dtype)[:, :-1]
        logits = self.model.logits(h)
        each = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        return (each * weights.flatten()).sum() / weights.sum()

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Return stories that are not trained on, as a batch."""
        stories = held_out_stories(self.options.corpus)
        documents = [writer().text(story) for story in stories]
        tokens, kinds = pack(documents, self.shape.context, 0)
        rows = self.options.batch  # of a training batch: another number would compile again
        both = [torch.from_numpy(x[:rows]).to(self.device) for x in (tokens, kinds)]
        ids, kinds = (F.pad(x, (0, 0, 0, rows - len(x))) for x in both)
        return ids.long(), kinds

    def report(self, step: int, loss: Tensor, seconds: float) -> None:
        """Log a point of the loss curve; sometimes with the loss on held-out stories."""
        values = {"step": step, "loss": round(loss.item(), 4), "seconds": round(seconds, 1)}
        values["rate"] = round(self.rate(step), 4)
        values["tokens"] = step * self.options.batch * self.shape.context
        if step % 500 == 0 or step == self.steps:
            with torch.no_grad():
                values["held_out"] = round(self.loss_of(*self.held_out_batch, 1.0).item(), 4)
        self.write_log(**values)

    def write_log(self, **values: object) -> None:
        """Write values to the log and print them."""
        self.log_file.write(json.dumps(values) + "\n")
        self.log_file.flush()
        print(json.dumps(values)[:600], flush=True)


def main() -> None:
    """Parse the options and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, help="the folder that data.py and teacher.py wrote")
    parser.add_argument("corpus", type=Path, help="the folder of the unpacked text.tar.xz")
    parser.add_argument("out", type=Path, help="the folder for weights and log")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--steps", type=int, help="instead of --minutes: repeats a run exactly")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--shape", choices=SHAPES, default="demo")
    parser.add_argument("--attention", choices=("flex", "sdpa", "auto"), default="flex")
    parser.add_argument(
        "--measured",
        type=float,
        default=MEASURED_S,
        help="seconds after which the number of steps is computed",
    )
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    Training(options).run()


if __name__ == "__main__":
    main()
