"""`webgemma train`: train a LoRA adapter on examples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from webgemma.cli.loading import load_model
from webgemma.cli.options import GpuOption, JsonOption, ModelArgument
from webgemma.cli.out_folder import OutFolder
from webgemma.cli.plot import bars, check_plot, draw_losses
from webgemma.cli.saving import Saver
from webgemma.cli.stopping import StopSignals
from webgemma.cli.terminal import (
    err,
    format_count,
    format_nbytes,
    may_be_gone,
    out,
    reported_errors,
    say,
    write_json,
)
from webgemma.cli.train_settings import TrainSettings
from webgemma.device import Device, open_device
from webgemma.errors import InputError, WebgemmaError
from webgemma.gemma.config import Config
from webgemma.gguf.reader import Gguf
from webgemma.lora.adapter import Adapter
from webgemma.lora.checkpoint import Checkpoint, read_checkpoint, training_facts
from webgemma.lora.data import Example, ExampleReader, Report, bucket, split
from webgemma.lora.estimate import TrainingMemory, estimate
from webgemma.lora.schedule import Schedule
from webgemma.lora.trainer import Trainer, TrainingOptions
from webgemma.lora.training import Checkpoints, Training, TrainingProgress
from webgemma.models import FoundModel, find_model
from webgemma.sync import iterate_sync, run_sync
from webgemma.text.chat import Chat
from webgemma.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _Task:
    """What is trained on what, and how it goes."""

    found: FoundModel
    gguf: Gguf
    config: Config
    settings: TrainSettings
    adapter: Adapter
    examples: list[Example]
    held_out: list[Example]
    report: Report
    options: TrainingOptions
    schedule: Schedule
    checkpoint: Checkpoint | None  # that it continues
    losses: list[float] = field(default_factory=list)
    held_out_losses: list[float] = field(default_factory=list)
    started: float | None = None  # when the first step, which compiles, was done
    seconds: float = 0.0  # since then
    tokens: int = 0

    @property
    def length(self) -> int:
        """Tokens of the longest sequences, padded."""
        return bucket(max(len(example.ids) for example in (*self.examples, *self.held_out)))

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


def train(
    context: typer.Context,
    model: ModelArgument,
    data: Annotated[
        Path,
        typer.Argument(metavar="DATA", help="JSON lines of chats, questions or texts; or .txt."),
    ],
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
    precision: Annotated[
        str, typer.Option(help="auto (on matrix units, as precise as exact), exact or f16.")
    ] = "auto",
    as_gguf: Annotated[
        bool, typer.Option("--gguf", help="Write adapter.gguf, too, for llama.cpp and Ollama.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Write an image of the loss here, at the end.")
    ] = None,
    checkpoint_steps: Annotated[
        int | None, typer.Option(help="Write a checkpoint after so many steps.")
    ] = None,
    checkpoint_minutes: Annotated[
        float, typer.Option(help="Write a checkpoint after so many minutes; 0: not by time.")
    ] = 5.0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the training of the folder, exactly.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the adapter or training of the folder.")
    ] = False,
    only_estimate: Annotated[
        bool, typer.Option("--estimate", help="Print the memory it takes, and stop.")
    ] = False,
    gpu: GpuOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a LoRA adapter on examples, on this machine.

    Ctrl-C, SIGTERM and SIGHUP stop it after a step and save; --resume then
    continues as if it had not been stopped, with the same options. There are
    checkpoints on the way, too: a crash loses only what came after the last.

    Examples:
      webgemma train gemma4:e2b chats.jsonl --out adapter/
      webgemma train gemma4:e2b chats.jsonl --out adapter/ --resume
      webgemma train gemma4:e2b chats.jsonl --out adapter/ --checkpoint-steps 100
      webgemma train gemma4:e2b chats.jsonl --out adapter/ --layers 20-34 --plot loss.png
      webgemma run gemma4:e2b --lora adapter/
    """
    asked = TrainSettings(
        rank,
        alpha,
        targets,
        layers,
        learning_rate,
        epochs,
        steps,
        batch,
        accumulate,
        max_length,
        schedule,
        warmup,
        dropout,
        decay,
        held_out,
        seed,
        keep_activations,
        precision,
    )
    with reported_errors(), StopSignals() as signals:
        if plot is not None:
            check_plot(plot)
        if resume and force:
            raise InputError("--resume continues a training, --force begins anew: choose one.")
        found, interval = find_model(model), (checkpoint_steps, checkpoint_minutes or None)
        Checkpoints(folder, *interval)  # checks it
        reserved = OutFolder.reserved(folder, resume=resume, force=force)
        try:
            with (
                nullcontext(OutFolder(folder)) if only_estimate else reserved as out_folder,
                found.open() as gguf,
            ):
                checkpoint = read_checkpoint(out_folder.checkpoint) if resume else None
                if checkpoint is not None:
                    asked = asked.resumed(_given(context), checkpoint)
                task = _task(found, gguf, data, asked, checkpoint)
                with closing(open_device(gpu)) as device:
                    given = (gguf, task.config, task.adapter, task.options, task.length, device)
                    memory = run_sync(estimate(*given))
                    facts = {"model": found.label, "device": device.name, **memory._asdict()}
                    if not as_json:
                        _print_plan(task, device, memory)
                    if not only_estimate:
                        best = bool(task.held_out)
                        out_folder.check_space(task.adapter, as_gguf=as_gguf, best=best)
                        given_on = (device, signals, interval, as_gguf, as_json)
                        facts |= _train(task, out_folder, *given_on)
        except KeyboardInterrupt:
            say(err, "stopped before the first step was done: nothing was written")
            raise typer.Exit(signals.exit_code) from None
        if as_json:
            with may_be_gone(out):
                write_json(facts)
        if plot is not None and task.losses:
            draw_losses(task.losses, plot)
        if facts.get("stopped"):
            raise typer.Exit(signals.exit_code)


def _given(context: typer.Context) -> set[str]:
    """Return the names of the options that were given."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source and source.name != "DEFAULT"}


def _task(
    found: FoundModel,
    gguf: Gguf,
    data: Path,
    settings: TrainSettings,
    checkpoint: Checkpoint | None,
) -> _Task:
    """Read the data, and make the adapter to train on it."""
    options, schedule = settings.training_options(), settings.course()
    config = trainable_config(gguf)
    chat = Chat(found.chat_size(config))
    reader = ExampleReader(Tokenizer.from_gguf(gguf), chat, settings.max_length)
    rows, report = reader.read(data)
    examples, held_out = split(rows, settings.held_out, settings.seed)
    adapter = settings.adapter(config)
    if checkpoint is not None:
        checkpoint.check(training_facts(adapter, options, schedule, examples, held_out))
    given = (settings, adapter, examples, held_out, report, options, schedule, checkpoint)
    return _Task(found, gguf, config, *given)


def _print_plan(task: _Task, device: Device, memory: TrainingMemory) -> None:
    """Print what will be trained, and the memory it takes."""
    count, pairs = format_count(task.adapter.nbytes // 4), len(task.adapter.pairs)
    summary = f"{task.found.label} on {device.name}: {count} numbers in {pairs} matrices"
    say(err, summary)
    say(err, f"  data    {task.report}")
    batch = f"{task.options.batch_size} x {task.length}"
    parts = [
        f"{format_nbytes(memory.nbytes)}: model {format_nbytes(memory.model_nbytes)}",
        f"adapter and moments {format_nbytes(memory.adapter_nbytes)}",
        f"batches of {batch} {format_nbytes(memory.scratch_nbytes)}",
    ]
    say(err, "  memory  " + ", ".join(parts))
    if task.checkpoint is not None:
        say(err, f"  resumes after step {task.checkpoint.step}")


def _train(
    task: _Task,
    folder: OutFolder,
    device: Device,
    signals: StopSignals,
    interval: tuple[int | None, float | None],
    as_gguf: bool,
    quiet: bool,
) -> dict[str, Any]:
    """Train and save; return how it went."""
    with (
        load_model(task.gguf, task.config, device) as model,
        closing(Trainer(model, task.adapter, task.options)) as trainer,
    ):
        training = Training(trainer, task.examples, task.held_out, task.schedule)
        notes = {"settings": asdict(task.settings)}
        saver = Saver(training, folder, notes, as_gguf=as_gguf)
        if task.checkpoint is not None:
            training.restore(task.checkpoint)
            saver.last = task.checkpoint.step
        task.losses, task.held_out_losses = training.losses, training.held_out_losses
        try:
            stopped = _run(task, saver, signals, interval, quiet)
            signals.at_once = False
            if stopped:
                saver.stop()
            else:
                saver.finish()
        except KeyboardInterrupt:
            if signals.at_once:
                raise
            say(err, f"stopped at once. {saver.what_is_kept() or 'Nothing was saved.'}")
            raise typer.Exit(signals.exit_code) from None
        steps = trainer.steps
    if not quiet:
        _print_result(task, folder, steps, stopped)
    return {
        "steps": steps,
        "stopped": stopped,
        "tokens_per_second": task.speed,
        "losses": task.losses,
        "held_out_losses": task.held_out_losses,
        "checkpoints": saver.events,
        "out": str(folder.path),
    }


def _run(
    task: _Task,
    saver: Saver,
    signals: StopSignals,
    interval: tuple[int | None, float | None],
    quiet: bool,
) -> bool:
    """Train to the end, or until a signal; return whether a signal stopped it."""
    steps = saver.training.run(saver.checkpoints(*interval))
    try:
        with _bar(quiet) as show:
            for progress in iterate_sync(steps):
                signals.at_once = False  # from now on there is something to save
                _note(task, progress)
                if progress.best:
                    saver.save_best()
                show(progress)
                if signals.number is not None and progress.step < progress.steps:
                    return True
    except WebgemmaError as error:
        raise InputError(f"{error} {saver.save_after(error)}".rstrip()) from error
    return False


def _note(task: _Task, progress: TrainingProgress) -> None:
    """Note the speed."""
    now = time.perf_counter()
    if task.started is None:
        task.started = now
    else:
        task.seconds = now - task.started
        task.tokens += progress.result.tokens


def trainable_config(gguf: Gguf) -> Config:
    """Return the configuration of a model; InputError if it cannot be trained."""
    config = Config.from_gguf(gguf)
    if config.diffusion:
        raise InputError(f"{gguf.name}: DiffusionGemma cannot be trained yet.")
    config.check_writes(gguf.name)
    return config


@contextmanager
def _bar(quiet: bool) -> Iterator[Callable[[TrainingProgress], None]]:
    """Show a bar with the loss; give the function that moves it."""
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn())
    text = TextColumn("{task.description}")
    hidden = quiet or not err.is_terminal
    shown = Bars(*columns, text, TimeRemainingColumn(), console=err, disable=hidden)
    task = shown.add_task("", total=None)

    def show(progress: TrainingProgress) -> None:
        facts = f"loss {progress.result.loss:.3f}, learning rate {progress.learning_rate:.1e}"
        if progress.held_out_loss is not None:
            facts += f", held-out {progress.held_out_loss:.3f}"
        with may_be_gone(err):
            shown.update(task, completed=progress.step, total=progress.steps, description=facts)

    with may_be_gone(err):
        shown.start()
    try:
        yield show
    finally:
        with may_be_gone(err):
            shown.stop()


def _print_result(task: _Task, folder: OutFolder, steps: int, stopped: bool) -> None:
    losses, held_out = task.losses, task.held_out_losses
    if losses:
        say(out, f"{bars(losses)}  loss {losses[0]:.3f} to {losses[-1]:.3f}")
    if held_out:
        best = f"at best {min(held_out):.3f} ({folder.best})"
        say(out, f"held-out loss {held_out[-1]:.3f}, {best}")
    speed = f", {task.speed:.0f} tokens/s" if task.seconds else ""
    line = f"{'stopped' if stopped else 'done'} after {steps} steps{speed}: {folder.path}"
    say(out, line + ("; --resume continues" if stopped else ""))
