"""`webgemma train`: train a LoRA adapter on examples."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from webgemma.cli.loading import load_model
from webgemma.cli.options import GpuOption, JsonOption, ModelArgument
from webgemma.cli.plot import bars, check_plot, draw_losses
from webgemma.cli.terminal import (
    err,
    format_count,
    format_nbytes,
    out,
    reported_errors,
    write_json,
)
from webgemma.device import Device, open_device
from webgemma.errors import InputError
from webgemma.gemma.config import Config
from webgemma.gguf.reader import Gguf
from webgemma.lora.adapter import TARGET_GROUPS, TARGETS, Adapter, new_adapter
from webgemma.lora.data import Example, ExampleReader, Report, bucket, split
from webgemma.lora.estimate import TrainingMemory, estimate
from webgemma.lora.gguf_file import write_gguf_adapter
from webgemma.lora.loading import open_adapter
from webgemma.lora.optimiser import AdamW
from webgemma.lora.peft_folder import write_peft_folder
from webgemma.lora.schedule import Schedule, Shape
from webgemma.lora.trainer import Trainer, TrainingOptions, TrainingProgress
from webgemma.lora.trainer import train as train_adapter
from webgemma.models import FoundModel, find_model
from webgemma.sync import iterate_sync, run_sync
from webgemma.text.chat import Chat
from webgemma.text.tokenizer import Tokenizer

STATE_FILE, GGUF_FILE = "training.safetensors", "adapter.gguf"


@dataclass(slots=True)
class _Training:
    """What is trained on what, and how it goes."""

    found: FoundModel
    gguf: Gguf
    config: Config
    adapter: Adapter
    examples: list[Example]
    held_out: list[Example]
    report: Report
    options: TrainingOptions
    schedule: Schedule
    folder: Path
    as_gguf: bool
    losses: list[float] = field(default_factory=list)
    held_out_losses: list[float] = field(default_factory=list)
    started: float | None = None  # when the first step, which compiles, was done
    seconds: float = 0.0  # since then
    tokens: int = 0

    @property
    def length(self) -> int:
        """Tokens of the longest sequences, padded."""
        return bucket(max(len(example.ids) for example in (*self.examples, *self.held_out)))


def train(
    model: ModelArgument,
    data: Annotated[Path, typer.Argument(help="JSON lines of chats, questions or texts; or .txt.")],
    folder: Annotated[Path, typer.Option("--out", help="The folder of the adapter.")],
    rank: Annotated[int, typer.Option(help="The rank of A and B.")] = 16,
    alpha: Annotated[float | None, typer.Option(help="By default twice the rank.")] = None,
    targets: Annotated[
        str, typer.Option(help="all, attention, feed-forward, or names: attn_q,attn_v,output,…")
    ] = "all",
    layers: Annotated[
        str | None, typer.Option(help="Only these layers: 0-5,9; by default all.")
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="The highest learning rate.")] = 2e-4,
    epochs: Annotated[int, typer.Option(help="How often every example is read.")] = 3,
    steps: Annotated[int | None, typer.Option(help="So many steps instead of epochs.")] = None,
    batch: Annotated[int, typer.Option(help="Examples of a batch.")] = 4,
    accumulate: Annotated[int, typer.Option(help="Batches of a step.")] = 1,
    max_length: Annotated[
        int, typer.Option(help="Tokens of an example; longer ones are truncated.")
    ] = 512,
    schedule: Annotated[str, typer.Option(help="cosine, linear or constant.")] = "cosine",
    warmup: Annotated[float, typer.Option(help="The share of the steps that warm up.")] = 0.03,
    dropout: Annotated[float, typer.Option(help="Dropout of the adapter's input.")] = 0.0,
    decay: Annotated[float, typer.Option(help="Weight decay.")] = 0.0,
    held_out: Annotated[
        float, typer.Option(help="The share of the rows to evaluate on, not to train on.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="The seed of everything random.")] = 0,
    keep_activations: Annotated[
        bool,
        typer.Option("--keep-activations", help="Keep what layers compute: faster, more memory."),
    ] = False,
    as_gguf: Annotated[
        bool, typer.Option("--gguf", help="Write adapter.gguf, too, for llama.cpp and Ollama.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Write an image of the loss here, at the end.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the training of the folder.")
    ] = False,
    only_estimate: Annotated[
        bool, typer.Option("--estimate", help="Print the memory it takes, and stop.")
    ] = False,
    gpu: GpuOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a LoRA adapter on examples, on this machine. Ctrl-C stops and saves.

    Examples:
      webgemma train gemma4:e2b chats.jsonl --out adapter/
      webgemma train gemma4:e2b chats.jsonl --out adapter/ --layers 20-34 --plot loss.png
      webgemma run gemma4:e2b --lora adapter/
    """
    with reported_errors():
        if plot is not None:
            check_plot(plot)
        found = find_model(model)
        optimiser = AdamW(decay=decay)
        options = TrainingOptions(batch, dropout, seed, optimiser, not keep_activations)
        shape = cast(Shape, schedule)
        course = Schedule(learning_rate, epochs, accumulate, warmup, shape, seed, steps)
        with found.open() as gguf:
            config = trainable_config(gguf)
            chat = Chat(found.chat_size(config))
            reader = ExampleReader(Tokenizer.from_gguf(gguf), chat, max_length)
            examples, report = reader.read(data)
            train_examples, held_out_examples = split(examples, held_out, seed)
            if resume:
                adapter = open_adapter(folder)
            else:
                chosen = {"rank": rank, "alpha": alpha, "layers": _layers(layers), "seed": seed}
                adapter = new_adapter(config, _targets(targets), **cast(Any, chosen))
            training = _Training(
                found,
                gguf,
                config,
                adapter,
                train_examples,
                held_out_examples,
                report,
                options,
                course,
                folder,
                as_gguf,
            )
            with closing(open_device(gpu)) as device:
                memory = run_sync(estimate(gguf, config, adapter, options, training.length, device))
                facts = {"model": found.label, "device": device.name, **memory._asdict()}
                if not as_json:
                    _print_plan(training, device, memory)
                if not only_estimate:
                    facts |= _train(training, device, resume=resume, quiet=as_json)
                if plot is not None and training.losses:
                    draw_losses(training.losses, plot)
        if as_json:
            write_json(facts)


def _targets(names: str) -> tuple[str, ...]:
    """Return the targets that are named, or those of a group."""
    listed = tuple(name.strip() for name in names.split(",") if name.strip())
    known = (*TARGET_GROUPS, *TARGETS)
    if unknown := [name for name in listed if name not in known]:
        raise InputError(f"There is no target {unknown[0]!r}; there are: {', '.join(known)}.")
    return tuple(target for name in listed for target in TARGET_GROUPS.get(name, (name,)))


def _layers(ranges: str | None) -> set[int] | None:
    """Return the layers of a text like "0-5,9"."""
    if ranges is None:
        return None
    found: set[int] = set()
    for part in ranges.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:\s*-\s*(\d{1,4}))?\s*", part, re.ASCII)
        if match is None:
            raise InputError(f"{part!r} is not a range of layers; write them like 0-5,9.")
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def _print_plan(training: _Training, device: Device, memory: TrainingMemory) -> None:
    """Print what will be trained, and the memory it takes."""
    count, pairs = format_count(training.adapter.nbytes // 4), len(training.adapter.pairs)
    summary = f"{training.found.label} on {device.name}: {count} numbers in {pairs} matrices"
    err.print(summary, markup=False, soft_wrap=True)
    err.print(f"  data    {training.report}", markup=False, soft_wrap=True)
    batch = f"{training.options.batch_size} x {training.length}"
    parts = [
        f"{format_nbytes(memory.nbytes)}: model {format_nbytes(memory.model_nbytes)}",
        f"adapter and moments {format_nbytes(memory.adapter_nbytes)}",
        f"batches of {batch} {format_nbytes(memory.scratch_nbytes)}",
    ]
    err.print("  memory  " + ", ".join(parts), markup=False, soft_wrap=True)


def _train(training: _Training, device: Device, *, resume: bool, quiet: bool) -> dict[str, Any]:
    """Train and save; return how it went."""
    stopped = False
    with (
        load_model(training.gguf, training.config, device) as model,
        closing(Trainer(model, training.adapter, training.options)) as trainer,
    ):
        if resume:
            trainer.restore_state(training.folder / STATE_FILE)
        steps = train_adapter(trainer, training.examples, training.held_out, training.schedule)
        try:
            with _bar(quiet) as show:
                for progress in iterate_sync(steps):
                    _note(training, trainer, progress)
                    show(progress)
        except KeyboardInterrupt:
            stopped = True
        finally:
            count = trainer.steps
            if count:
                _save(trainer, training)
    if not quiet:
        _print_result(training, count, stopped)
    speed = training.tokens / training.seconds if training.seconds else 0.0
    return {
        "steps": count,
        "stopped": stopped,
        "tokens_per_second": speed,
        "losses": training.losses,
        "held_out_losses": training.held_out_losses,
        "out": str(training.folder),
    }


def _note(training: _Training, trainer: Trainer, progress: TrainingProgress) -> None:
    """Note the figures of a step, and save the best adapter so far."""
    now = time.perf_counter()
    if training.started is None:
        training.started = now
    else:
        training.seconds = now - training.started
        training.tokens += progress.result.tokens
    training.losses.append(progress.result.loss)
    if progress.held_out_loss is not None:
        training.held_out_losses.append(progress.held_out_loss)
    if progress.best:
        write_peft_folder(run_sync(trainer.adapter()), training.folder / "best")


def _save(trainer: Trainer, training: _Training) -> None:
    """Write the adapter as it is now, and what is needed to continue."""
    adapter = run_sync(trainer.adapter())
    write_peft_folder(adapter, training.folder)
    if training.as_gguf:
        write_gguf_adapter(adapter, training.folder / GGUF_FILE)
    run_sync(trainer.save_state(training.folder / STATE_FILE))


def trainable_config(gguf: Gguf) -> Config:
    """Return the configuration of a model; InputError if it cannot be trained."""
    config = Config.from_gguf(gguf)
    if config.diffusion:
        raise InputError(f"{gguf.name}: DiffusionGemma cannot be trained yet.")
    return config


@contextmanager
def _bar(quiet: bool) -> Iterator[Callable[[TrainingProgress], None]]:
    """Show a bar with the loss; give the function that moves it."""
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn())
    text = TextColumn("{task.description}")
    hidden = quiet or not err.is_terminal
    with Bars(*columns, text, TimeRemainingColumn(), console=err, disable=hidden) as shown:
        task = shown.add_task("", total=None)

        def show(progress: TrainingProgress) -> None:
            facts = f"loss {progress.result.loss:.3f}, learning rate {progress.learning_rate:.1e}"
            if progress.held_out_loss is not None:
                facts += f", held-out {progress.held_out_loss:.3f}"
            shown.update(task, completed=progress.step, total=progress.steps, description=facts)

        yield show


def _print_result(training: _Training, steps: int, stopped: bool) -> None:
    losses, held_out, folder = training.losses, training.held_out_losses, training.folder
    if losses:
        line = f"{bars(losses)}  loss {losses[0]:.3f} to {losses[-1]:.3f}"
        out.print(line, markup=False, soft_wrap=True)
    if held_out:
        best = f"held-out loss {held_out[-1]:.3f}, at best {min(held_out):.3f} ({folder / 'best'})"
        out.print(best, markup=False, soft_wrap=True)
    speed = f", {training.tokens / training.seconds:.0f} tokens/s" if training.seconds else ""
    line = f"{'stopped' if stopped else 'done'} after {steps} steps{speed}: {folder}"
    out.print(line + ("; --resume continues" if stopped else ""), markup=False, soft_wrap=True)
