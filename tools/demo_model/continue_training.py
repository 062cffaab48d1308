"""Step 3 of the second training: continue from a model's file on a CPU, for some minutes.

Each process computes with one thread on its own rows; gradients are averaged after every step.
(Two threads of one process wait for each other at every small operation, which is much slower
when other programs need the cores.)"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from checkpoint import save
from data import held_out_stories, writer
from model import Gemma4, biases
from packing import MODEL, pack
from rows import Rows, load
from settings import DEMO, MIX_2, ROW_2, SEED_2
from shipped import SHIPPED, tensors
from torch import Tensor

RATE = 4e-4
WARM_UP, HOLD = 0.03, 0.35  # shares of the time: until the rate is at its peak, until it falls
ROWS = 4  # of a process in a step
CLIP = 1.0
STORIES = 60  # held out, as in evaluate.py
DTYPE = torch.bfloat16


class Training:
    """One process of a run."""

    def __init__(self, rank: int, options: argparse.Namespace) -> None:
        self.rank, self.options = rank, options
        self.model = Gemma4(DEMO)
        weights = {n.removesuffix(".weight"): v for n, v in tensors(options.model).items()}
        self.model.load_state_dict({name: torch.from_numpy(v) for name, v in weights.items()})
        self.parameters = list(self.model.parameters())
        self.adam = torch.optim.AdamW(
            self.parameters, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.rows = Rows(options.rows, list(MIX_2), "cpu", SEED_2 + rank)
        self.bos = writer().tokenizer.bos
        self.log_file = (options.out / "log_2.jsonl").open("w") if rank == 0 else None

        model = self.model

        def hidden(ids: Tensor, masks: dict[str, Tensor]) -> Tensor:
            return model(ids, masks, DTYPE)

        def loss(h: Tensor, table: Tensor, wanted: Tensor) -> Tensor:
            logits = F.linear(h, table.to(h.dtype))
            return F.cross_entropy(DEMO.softcap * torch.tanh(logits.float() / DEMO.softcap), wanted)

        self.hidden = torch.compile(hidden, dynamic=False)
        self.loss = torch.compile(loss, dynamic=True)

    def run(self) -> None:
        """Train until the time is over."""
        options = self.options
        self.write_log(
            continues=options.model.name,
            mix=MIX_2,
            rows=self.rows.describe(),
            rate=RATE,
            tokens_of_step=options.processes * ROWS * ROW_2,
            seed=SEED_2,
            torch=torch.__version__,
        )
        held_out = self.held_out() if self.rank == 0 else {}
        self.report(0, 0.0, 0.0, held_out)
        dist.barrier()
        began = saved = time.monotonic()
        step, losses = 0, []
        while (done := self.share_of_time(began)) < 1.0:
            rate = min(1.0, (done + 1e-3) / WARM_UP, (1.0 - done) / (1.0 - HOLD))
            losses.append(self.step(rate * RATE))
            step += 1
            now = time.monotonic()
            if self.rank == 0 and step % 10 == 0:
                self.report(step, sum(losses[-10:]) / 10, now - began, {})
            if self.rank == 0 and now - saved > options.every:
                saved = now
                self.keep(step)
                self.report(step, losses[-1], time.monotonic() - began, held_out)
        if self.rank == 0:
            self.keep(step)
            self.report(step, sum(losses[-10:]) / 10, time.monotonic() - began, held_out)

    def share_of_time(self, began: float) -> float:
        """Return how much of the time is over, the same in every process."""
        share = torch.tensor([(time.monotonic() - began) / (60 * self.options.minutes)])
        dist.broadcast(share, 0)
        return float(share)

    def step(self, rate: float) -> float:
        """Update the weights once; return this process's loss."""
        ids, kinds = self.rows.batch(MIX_2, ROWS)
        loss = self.loss_of(ids, kinds)
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in self.parameters])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        flat *= min(1.0, CLIP / float(flat.norm()))
        for p, grad in zip(
            self.parameters, flat.split([p.numel() for p in self.parameters]), strict=True
        ):
            p.grad.copy_(grad.view_as(p))
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        self.model.zero_grad(set_to_none=True)
        return loss.item()

    def loss_of(self, ids: Tensor, kinds: Tensor) -> Tensor:
        """Return the mean loss over the model's tokens."""
        masks = biases((ids == self.bos).cumsum(1), DEMO.window, DTYPE)
        h = self.hidden(ids, masks)[:, :-1]
        wanted = ids[:, 1:]
        learnt = (kinds[:, 1:] == MODEL) & (wanted != self.bos)
        return self.loss(h[learnt], self.model.token_embd, wanted[learnt])

    def held_out(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return rows that are not trained on: TinyStories, and chats of another seed."""
        stories = [writer().text(s) for s in held_out_stories(self.options.corpus)[:STORIES]]
        tokens, kinds = map(torch.from_numpy, pack(stories, ROW_2, 0))
        folder = self.options.rows
        chats = [load(folder, "held_out", kind, "cpu") for kind in ("tokens", "kinds")]
        return {"stories": (tokens.long(), kinds), "chats": (chats[0].long(), chats[1])}

    def report(self, step: int, loss: float, seconds: float, held_out: dict) -> None:
        """Log a point of the loss curve, with the losses on held-out rows."""
        if self.rank:
            return
        values = {"step": step, "loss": round(loss, 4), "seconds": round(seconds, 1)}
        values["tokens"] = step * self.options.processes * ROWS * ROW_2
        for name, (ids, kinds) in held_out.items():
            total = count = 0.0
            for at in range(0, len(ids) - ROWS + 1, ROWS):
                rows = slice(at, at + ROWS)
                number = int((kinds[rows] == MODEL).sum())
                # With gradients, though unused: without them, the compiler would begin anew.
                total += self.loss_of(ids[rows], kinds[rows]).item() * number
                count += number
            values[f"held_out_{name}"] = round(total / count, 4)
        self.write_log(**values)

    def keep(self, step: int) -> None:
        """Store a checkpoint."""
        folder = self.options.out / f"step-{step}"
        folder.mkdir(exist_ok=True)
        save(self.model, folder)

    def write_log(self, **values: object) -> None:
        """Write values to the log and print them."""
        if self.log_file:
            self.log_file.write(json.dumps(values) + "\n")
            self.log_file.flush()
            print(json.dumps(values)[:400], flush=True)


def work(rank: int, options: argparse.Namespace) -> None:
    """Run one process."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED_2)
    link = f"file://{options.out.resolve() / 'processes'}"
    dist.init_process_group("gloo", link, rank=rank, world_size=options.processes)
    Training(rank, options).run()
    dist.destroy_process_group()


def main() -> None:
    """Parse the options and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, help="the folder that data_2.py wrote")
    parser.add_argument("corpus", type=Path, help="the folder of the unpacked text.tar.xz")
    parser.add_argument("out", type=Path, help="the folder for checkpoints and log")
    parser.add_argument("--model", type=Path, default=SHIPPED, help="the file to continue from")
    parser.add_argument("--minutes", type=float, default=45.0)
    parser.add_argument("--every", type=float, default=300.0, help="seconds between checkpoints")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "processes").unlink(missing_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    mp.spawn(work, (options,), options.processes)


if __name__ == "__main__":
    main()
