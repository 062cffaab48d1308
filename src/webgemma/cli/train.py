"""`webgemma train`: a low-rank adapter learns from examples."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from webgemma.cli.loading import load_model
from webgemma.cli.options import AdapterOption, JsonOption, ModelArgument
from webgemma.cli.plot import bars, check_plot, draw_losses
from webgemma.cli.terminal import err, human_count, human_nbytes, out, sentences, write_json
from webgemma.defaults import chat_size
from webgemma.device import Device, open_device
from webgemma.errors import InputError
from webgemma.gemma.config import Config
from webgemma.gguf.reader import Gguf
from webgemma.lora.adapter import Adapter
from webgemma.lora.course import Course, Progress, Training
from webgemma.lora.data import Example, Report, Texts, bucket, split
from webgemma.lora.estimate import Memory, estimate
from webgemma.lora.fresh import GROUPS, PARTS, new_adapter
from webgemma.lora.gguf_file import write_gguf_adapter
from webgemma.lora.optimiser import AdamW
from webgemma.lora.peft_folder import write_peft_folder
from webgemma.lora.schedule import Shape
from webgemma.lora.trainer import Options, Trainer
from webgemma.models import FoundModel, find_model
from webgemma.sync import iterate_sync, run_sync
from webgemma.text.chat import Chat
from webgemma.text.tokenizer import Tokenizer

STATE_FILE, GGUF_FILE = "training.safetensors", "adapter.gguf"


@dataclass(slots=True)
class _Task:
    """What is to be trained on what."""

    found: FoundModel
    gguf: Gguf
    config: Config
    adapter: Adapter
    examples: list[Example]
    judges: list[Example]
    report: Report
    options: Options
    course: Course
    folder: Path
    as_gguf: bool
    losses: list[float] = field(default_factory=list)
    judged: list[float] = field(default_factory=list)
    began: float | None = None  # when the first step, which compiles, was done
    seconds: float = 0.0  # since then
    tokens: int = 0

    @property
    def length(self) -> int:
        """Of the longest batch."""
        return bucket(max(len(example.ids) for example in (*self.examples, *self.judges)))


def train(
    model: ModelArgument,
    data: Annotated[Path, typer.Argument(help="JSON lines of chats, questions or texts; or .txt.")],
    folder: Annotated[Path, typer.Option("--out", help="The folder of the adapter.")],
    rank: Annotated[int, typer.Option(help="Of A and B.")] = 16,
    alpha: Annotated[float | None, typer.Option(help="Twice the rank, if not given.")] = None,
    parts: Annotated[
        str, typer.Option(help="all, attention, feed-forward, or names: attn_q,attn_v,output,…")
    ] = "all",
    layers: Annotated[
        str | None, typer.Option(help="Only these layers: 0-5,9; all, if not given.")
    ] = None,
    rate: Annotated[float, typer.Option(help="The highest learning rate.")] = 2e-4,
    epochs: Annotated[int, typer.Option(help="How often every example is seen.")] = 3,
    steps: Annotated[int | None, typer.Option(help="So many, in place of epochs.")] = None,
    batch: Annotated[int, typer.Option(help="Examples that go through together.")] = 4,
    accumulate: Annotated[int, typer.Option(help="Batches that make one step.")] = 1,
    max_length: Annotated[int, typer.Option(help="Tokens of an example; longer are cut.")] = 512,
    schedule: Annotated[str, typer.Option(help="cosine, linear or constant.")] = "cosine",
    warmup: Annotated[float, typer.Option(help="Share of the steps.")] = 0.03,
    dropout: Annotated[float, typer.Option(help="Of what the adapter reads.")] = 0.0,
    decay: Annotated[float, typer.Option(help="Of the weights.")] = 0.0,
    evaluation: Annotated[float, typer.Option(help="Share of the rows to judge by.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep what layers compute: faster, more memory.")
    ] = False,
    as_gguf: Annotated[
        bool, typer.Option("--gguf", help="Write adapter.gguf, too, for llama.cpp and Ollama.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="A picture of the loss, to be written at the end.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the folder's.")] = False,
    only_estimate: Annotated[
        bool, typer.Option("--estimate", help="Say what memory it takes, and stop.")
    ] = False,
    adapter: AdapterOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a low-rank adapter on examples, here. Ctrl-C saves what has been learnt.

    Examples:
      webgemma train gemma4:e2b chats.jsonl --out adapter/
      webgemma train gemma4:e2b chats.jsonl --out adapter/ --layers 20-34 --plot loss.png
      webgemma run gemma4:e2b --lora adapter/
    """
    with sentences():
        if plot is not None:
            check_plot(plot)
        found = find_model(model)
        options = Options(batch, dropout, seed, AdamW(decay=decay), checkpoint=not keep)
        course = Course(rate, epochs, accumulate, warmup, cast(Shape, schedule), seed, steps)
        with found.open() as gguf:
            config = trainable_config(gguf)
            texts = Texts(Tokenizer.from_gguf(gguf), Chat(chat_size(found, config)), max_length)
            examples, report = texts.read(data)
            learn, judges = split(examples, evaluation, seed)
            if resume:
                pairs = Adapter.open(folder)
            else:
                pairs = new_adapter(
                    config,
                    _parts(parts),
                    rank=rank,
                    alpha=alpha,
                    layers=_layers(layers),
                    seed=seed,
                )
            task = _Task(
                *(found, gguf, config, pairs, learn, judges, report, options, course, folder),
                as_gguf,
            )
            with closing(open_device(adapter)) as device:
                memory = run_sync(estimate(gguf, config, pairs, options, task.length, device))
                facts = {"model": found.label, "device": device.name, **memory._asdict()}
                if not as_json:
                    _introduce(task, device, memory)
                if not only_estimate:
                    facts |= _train(task, device, resume=resume, quiet=as_json)
                if plot is not None and task.losses:
                    draw_losses(task.losses, plot)
        if as_json:
            write_json(facts)


def _parts(names: str) -> tuple[str, ...]:
    """The parts of a group, or those that are named."""
    listed = tuple(name.strip() for name in names.split(",") if name.strip())
    if unknown := [name for name in listed if name not in (*GROUPS, *PARTS)]:
        known = ", ".join((*GROUPS, *PARTS))
        raise InputError(f"There is no part {unknown[0]!r} to adapt; take of {known}.")
    return tuple(part for name in listed for part in GROUPS.get(name, (name,)))


def _layers(ranges: str | None) -> set[int] | None:
    """The layers that are named: "0-5,9"."""
    if ranges is None:
        return None
    found: set[int] = set()
    for part in ranges.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:\s*-\s*(\d{1,4}))?\s*", part, re.ASCII)
        if match is None:
            raise InputError(f"{part!r} names no layers; write them like 0-5,9.")
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def _introduce(task: _Task, device: Device, memory: Memory) -> None:
    """What will be done, and what it takes."""
    count = human_count(task.adapter.nbytes // 4)
    pairs = f"{count} numbers in {len(task.adapter.pairs)} matrices"
    err.print(f"{task.found.label} on {device.name}: {pairs}", markup=False, soft_wrap=True)
    err.print(f"  data    {task.report}", markup=False, soft_wrap=True)
    parts = [
        f"{human_nbytes(memory.nbytes)}: model {human_nbytes(memory.model_nbytes)}",
        f"adapter and moments {human_nbytes(memory.adapter_nbytes)}",
        f"batches of {task.options.sequences} x {task.length} {human_nbytes(memory.work_nbytes)}",
    ]
    err.print("  memory  " + ", ".join(parts), markup=False, soft_wrap=True)


def _train(task: _Task, device: Device, *, resume: bool, quiet: bool) -> dict[str, Any]:
    """Train, save, and say how it went."""
    stopped = False
    with (
        load_model(task.gguf, task.config, device) as model,
        closing(Trainer(model, task.adapter, task.options)) as trainer,
    ):
        if resume:
            trainer.restore_state(task.folder / STATE_FILE)
        training = Training(trainer, task.examples, task.judges, task.course)
        try:
            with _bar(quiet) as show:
                for progress in iterate_sync(training.run()):
                    _note(task, trainer, progress)
                    show(progress)
        except KeyboardInterrupt:
            stopped = True
        finally:
            steps = trainer.steps
            if steps:
                _save(trainer, task)
    if not quiet:
        _conclude(task, steps, stopped)
    speed = task.tokens / task.seconds if task.seconds else 0.0
    told = {"steps": steps, "stopped": stopped, "tokens_per_second": speed}
    return {**told, "losses": task.losses, "judged": task.judged, "out": str(task.folder)}


def _note(task: _Task, trainer: Trainer, progress: Progress) -> None:
    """Keep a step's figures, and the best adapter there was."""
    now = time.perf_counter()
    if task.began is None:
        task.began = now
    else:
        task.seconds = now - task.began
        task.tokens += progress.found.tokens
    task.losses.append(progress.found.loss)
    if progress.judged is not None:
        task.judged.append(progress.judged)
    if progress.best:
        write_peft_folder(run_sync(trainer.adapter()), task.folder / "best")


def _save(trainer: Trainer, task: _Task) -> None:
    """The adapter as it is now, and what is needed to go on."""
    learnt = run_sync(trainer.adapter())
    write_peft_folder(learnt, task.folder)
    if task.as_gguf:
        write_gguf_adapter(learnt, task.folder / GGUF_FILE)
    run_sync(trainer.save_state(task.folder / STATE_FILE))


def trainable_config(gguf: Gguf) -> Config:
    """The blueprint of a model that can be trained."""
    config = Config.from_gguf(gguf)
    if config.diffusion:
        raise InputError(f"{gguf.name}: DiffusionGemma cannot be trained here.")
    return config


@contextmanager
def _bar(quiet: bool) -> Iterator[Any]:
    """A bar with the loss; gives the function that moves it."""
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn())
    said = TextColumn("{task.description}")
    hidden = quiet or not err.is_terminal
    with Bars(*columns, said, TimeRemainingColumn(), console=err, disable=hidden) as bars:
        task = bars.add_task("", total=None)

        def show(progress: Progress) -> None:
            words = f"loss {progress.found.loss:.3f}, rate {progress.rate:.1e}"
            if progress.judged is not None:
                words += f", judged {progress.judged:.3f}"
            bars.update(task, completed=progress.step, total=progress.steps, description=words)

        yield show


def _conclude(task: _Task, steps: int, stopped: bool) -> None:
    if task.losses:
        line = f"{bars(task.losses)}  loss {task.losses[0]:.3f} to {task.losses[-1]:.3f}"
        out.print(line, markup=False, soft_wrap=True)
    for judged in task.judged[-1:]:
        best = min(task.judged)
        out.print(f"judged {judged:.3f}, at best {best:.3f} ({task.folder / 'best'})", markup=False)
    speed = f", {task.tokens / task.seconds:.0f} tokens/s" if task.seconds else ""
    how = "stopped" if stopped else "done"
    said = f"{how} after {steps} steps{speed}: {task.folder}"
    out.print(said + ("; --resume goes on" if stopped else ""), markup=False, soft_wrap=True)
