"""`webgemma bench`: tokens per second, and what one token costs."""

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer

from webgemma.cli.loading import load_model
from webgemma.cli.options import (
    Device,
    DeviceOption,
    DraftOption,
    GpuOption,
    JsonOption,
    Kv,
    KvOption,
    LoraOption,
    ModelArgument,
    NoDraftOption,
    Precision,
    PrecisionOption,
    chosen_draft,
)
from webgemma.cli.terminal import err, format_nbytes, out, reported_errors, write_json
from webgemma.device import Device as Gpu
from webgemma.device import open_device
from webgemma.diagnostics.bench import Task, copy_rate, time_gpu, time_reference
from webgemma.diagnostics.drafts import time_drafts
from webgemma.errors import DeviceError, InputError
from webgemma.gemma.config import Config
from webgemma.gemma.drafter_config import drafter_config
from webgemma.gemma.lora_weights import ScaledAdapter
from webgemma.gemma.record.precision import choose_precision
from webgemma.gemma.weights import DrafterModel, Model
from webgemma.gguf.reader import Gguf
from webgemma.lora.loading import fitted_adapters
from webgemma.models import FoundModel, find_model, with_draft
from webgemma.sync import run_sync

SHARES = (0.5, 0.7, 0.9)  # of drafts that are right


def bench(
    model: ModelArgument = None,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 512,
    decode: Annotated[int, typer.Option(help="Tokens to generate after it.")] = 128,
    depth: Annotated[int, typer.Option(help="Tokens before the prompt.")] = 0,
    repetitions: Annotated[int, typer.Option(help="Runs, of which the median counts.")] = 3,
    device: DeviceOption = Device.auto,
    gpu: GpuOption = None,
    lora: LoraOption = None,
    drafts: Annotated[
        bool,
        typer.Option(
            "--drafts",
            help="Measure what drafts of the next tokens are worth, if so many of them are right.",
        ),
    ] = False,
    draft: DraftOption = None,
    no_draft: NoDraftOption = False,
    kv: KvOption = Kv.f16,
    precision: PrecisionOption = Precision.auto,
    as_json: JsonOption = False,
) -> None:
    """Measure how fast a model reads and generates on this machine, and what limits it.

    With --drafts or --draft, also how fast it generates with drafts of which a share is right. The
    time of the model's drafter is a part of that, where it has one.

    Examples:
      webgemma bench gemma4:e2b
      webgemma bench gemma4:e2b --depth 4096 --json
      webgemma bench gemma4:e2b --drafts
      webgemma bench gemma4:e2b --draft drafter.gguf
    """
    with reported_errors():
        found = with_draft(find_model(model), chosen_draft(draft, no_draft))
        drafter = found.draft()
        task = Task(prompt, decode, depth, repetitions)
        with found.open() as gguf:
            config = Config.from_gguf(gguf)
            config.check_writes(found.label)
            if config.diffusion:
                raise InputError(
                    f"{found.label} denoises canvases, and this command times single tokens; "
                    "bench/diffusion.py in webgemma's repository times canvases."
                )
            task.check(config.context)
            if found.drafter is not None:
                with found.drafter.open() as file:
                    drafter_config(file, config)
            opened = _open(device, gpu)
            times_drafts = drafts or draft is not None
            if opened is None:
                if times_drafts:
                    raise InputError(
                        "Drafts are timed on a GPU only; --device gpu also takes a software one."
                    )
                facts = _cpu_facts(gguf, config, task, lora)
            else:
                with closing(opened):
                    adapters = fitted_adapters(lora, config)
                    timing = _Bench(gguf, config, adapters, task, kv.value, precision.value, opened)
                    facts = timing.facts()
                    if times_drafts:
                        facts["drafts"] = timing.draft_facts(drafter)
        facts = {"model": found.label, **facts, "task": asdict(task)}
        if as_json:
            write_json(facts)
        else:
            _print(facts, task)


def _cpu_facts(gguf: Gguf, config: Config, task: Task, lora: list[str] | None) -> dict[str, Any]:
    if lora:
        raise InputError("--lora is timed on a GPU only; --device gpu also takes a software one.")
    speed = time_reference(gguf, config, task)
    return {
        "device": "CPU (numpy)",
        "prompt_tokens_per_second": speed.prompt,
        "decode_tokens_per_second": speed.decode,
    }


@dataclass(slots=True)
class _Bench:
    """A model on a GPU, and what to time."""

    gguf: Gguf
    config: Config
    adapters: Sequence[ScaledAdapter]
    task: Task
    kv: str
    precision: str
    gpu: Gpu
    model: Model = field(init=False)

    def facts(self) -> dict[str, Any]:
        """Load the model; return its speed, and what a token costs."""
        gpu = self.gpu
        copied_per_second = run_sync(copy_rate(gpu))  # before the model is in memory
        start = time.perf_counter()
        self.model = load_model(self.gguf, self.config, gpu)
        self.model.set_adapters(self.adapters)
        load_seconds = time.perf_counter() - start
        speed, step = run_sync(time_gpu(self.model, self.task, self.kv, self.precision))
        read_per_second = step.weights_nbytes * speed.decode
        return {
            "device": gpu.name,
            "software": gpu.software,
            "kv": self.kv,
            "precision": choose_precision(self.precision, gpu),
            "load_seconds": load_seconds,
            "loaded_nbytes": sum(weight.nbytes for weight in self.model.matrices.values()),
            "prompt_tokens_per_second": speed.prompt,
            "decode_tokens_per_second": speed.decode,
            "weights_nbytes_per_token": step.weights_nbytes,
            "weights_nbytes_per_second": read_per_second,
            "copy_nbytes_per_second": copied_per_second,
            "share_of_copy": read_per_second / copied_per_second,
            "dispatches_per_token": step.dispatches,
            "host_seconds_per_token": step.host_seconds,
            "recording_seconds_per_token": step.recording_seconds,
        }

    def draft_facts(self, drafter: FoundModel | None) -> dict[str, Any]:
        """Return the speed with drafts, after `facts`; a drafter, if there is one, makes them."""
        if drafter is not None:
            with drafter.open() as file:
                own = drafter_config(file, self.config)
                self.model.drafter = run_sync(DrafterModel.load(file, own, self.gpu))
        try:
            plain, speeds = run_sync(
                time_drafts(self.model, self.task, self.kv, self.precision, SHARES)
            )
        except AssertionError as error:
            raise DeviceError(
                f"{self.gpu.name} writes another text with drafts than without them: {error}. "
                "Use --speculate off there, and report it."
            ) from None
        return {
            "drafter": drafter.label if drafter else None,
            "tokens_per_second_without": plain,
            "speeds": [
                {
                    "share": speed.share,
                    "drafts": speed.drafts,
                    "accepted_per_step": speed.accepted,
                    "tokens_per_second": speed.rate,
                }
                for speed in speeds
            ],
        }


def _open(device: Device, gpu: str | None) -> Gpu | None:
    """Open the GPU that `run` would use with the same options; None: it computes in numpy."""
    if device == Device.cpu:
        return None
    required = device == Device.gpu or gpu is not None
    try:
        return open_device(gpu, software=required)
    except DeviceError:
        if required:
            raise
        if err.is_terminal:
            err.print("No GPU found: computing on the CPU, in numpy.", style="dim")
        return None


def _print(facts: dict[str, Any], task: Task) -> None:
    mode = f", kv {facts['kv']}, {facts['precision']}" if "kv" in facts else ""
    out.print(f"{facts['model']} on {facts['device']}{mode}", style="bold", markup=False)
    before = task.depth + task.prompt
    lines = [
        (
            "prompt",
            f"{facts['prompt_tokens_per_second']:.1f} tokens/s, {task.prompt} tokens"
            + (f" after {task.depth}" if task.depth else ""),
        ),
        (
            "decode",
            f"{facts['decode_tokens_per_second']:.1f} tokens/s, {task.decode} tokens "
            f"after {before}",
        ),
    ]
    if "load_seconds" in facts:
        lines += _cost_lines(facts)
    if "drafts" in facts:
        lines += _draft_lines(facts["drafts"])
    for label, text in lines:
        out.print(f"  {label:<8}  {text}", markup=False, soft_wrap=True)


def _draft_lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines about drafts: the best number of them for each share that is right."""
    drafter = facts["drafter"]
    plain = facts["tokens_per_second_without"]
    made = f"with the time of {drafter}" if drafter else "without the time of a drafter"
    lines = [("drafts", f"{plain:.1f} tokens/s without any; {made}:")]
    for share in SHARES:
        speeds = [speed for speed in facts["speeds"] if speed["share"] == share]
        best = max(speeds, key=lambda speed: speed["tokens_per_second"])
        rate = best["tokens_per_second"]
        lines.append(
            (
                f"  {share:.0%}",
                f"of them right: {rate:.1f} tokens/s, {rate / plain:.2f}×, at best with "
                f"{best['drafts']} a step ({best['accepted_per_step']:.1f} accepted)",
            )
        )
    return lines


def _cost_lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines about loading and the cost of a token."""
    token_ms = 1000 / facts["decode_tokens_per_second"]
    host_ms = 1000 * facts["host_seconds_per_token"]
    recording_ms = 1000 * facts["recording_seconds_per_token"]
    return [
        ("load", f"{facts['load_seconds']:.2f} s, {format_nbytes(facts['loaded_nbytes'])}"),
        (
            "weights",
            f"{format_nbytes(facts['weights_nbytes_per_token'])} read per token: "
            f"{facts['weights_nbytes_per_second'] / 1e9:.3g} GB/s, "
            f"{facts['share_of_copy']:.0%} of this GPU's copies "
            f"({facts['copy_nbytes_per_second'] / 1e9:.3g} GB/s)",
        ),
        (
            "step",
            f"{facts['dispatches_per_token']} dispatches, {token_ms:.2f} ms, "
            + (
                "all on the CPU: this is a software GPU"
                if facts["software"]
                else f"{host_ms:.2f} ms of host work, "
                f"{recording_ms:.2f} ms of recording in another thread"
            ),
        ),
    ]
