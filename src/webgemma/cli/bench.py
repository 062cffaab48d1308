"""`webgemma bench`: tokens per second, and what one token costs."""

import time
from contextlib import closing
from dataclasses import asdict
from typing import Annotated, Any

import typer

from webgemma.cli.loading import load_model
from webgemma.cli.options import (
    AdapterOption,
    Device,
    DeviceOption,
    JsonOption,
    Kv,
    KvOption,
    ModelArgument,
    Precision,
    PrecisionOption,
)
from webgemma.cli.terminal import human_nbytes, out, sentences, write_json
from webgemma.device import Device as Gpu
from webgemma.device import open_device
from webgemma.diagnostics.bench import Task, copy_rate, time_gpu, time_reference
from webgemma.errors import DeviceError, InputError
from webgemma.gemma.config import Config
from webgemma.gemma.record.quantised import chosen_precision
from webgemma.gguf.reader import Gguf
from webgemma.models import find_model
from webgemma.sync import run_sync


def bench(
    model: ModelArgument,
    prompt: Annotated[int, typer.Option(help="Tokens to read.")] = 512,
    decode: Annotated[int, typer.Option(help="Tokens to write after them.")] = 128,
    depth: Annotated[int, typer.Option(help="Tokens that stand before the prompt.")] = 0,
    repetitions: Annotated[int, typer.Option(help="Runs, of which the median counts.")] = 3,
    device: DeviceOption = Device.auto,
    adapter: AdapterOption = None,
    kv: KvOption = Kv.f16,
    precision: PrecisionOption = Precision.auto,
    as_json: JsonOption = False,
) -> None:
    """Measure how fast a model reads and writes on this machine, and what holds it back.

    Examples:
      webgemma bench gemma4:e2b
      webgemma bench gemma4:e2b --depth 4096 --json
    """
    with sentences():
        found = find_model(model)
        task = Task(prompt, decode, depth, repetitions)
        with found.open() as gguf:
            config = Config.from_gguf(gguf)
            if config.diffusion:
                raise InputError(
                    f"{found.label} denoises blocks, and this command times single tokens; "
                    "bench/diffusion.py in webgemma's repository times blocks."
                )
            task.check(config.context)
            if device == Device.cpu:
                facts = _cpu_facts(gguf, config, task)
            else:
                with closing(_open(device, adapter)) as gpu:
                    facts = _gpu_facts(gguf, config, task, kv.value, precision.value, gpu)
        facts = {"model": found.label, **facts, "task": asdict(task)}
        if as_json:
            write_json(facts)
        else:
            _print(facts, task)


def _cpu_facts(gguf: Gguf, config: Config, task: Task) -> dict[str, Any]:
    speed = time_reference(gguf, config, task)
    return {
        "device": "CPU (numpy)",
        "prompt_tokens_per_second": speed.prompt,
        "decode_tokens_per_second": speed.decode,
    }


def _gpu_facts(
    gguf: Gguf, config: Config, task: Task, kv: str, precision: str, gpu: Gpu
) -> dict[str, Any]:
    copied_per_second = run_sync(copy_rate(gpu))  # before the model takes the memory
    start = time.perf_counter()
    model = load_model(gguf, config, gpu)
    load_seconds = time.perf_counter() - start
    speed, step = run_sync(time_gpu(model, task, kv, precision))
    read_per_second = step.weights_nbytes * speed.decode
    return {
        "device": gpu.name,
        "software": gpu.software,
        "kv": kv,
        "precision": chosen_precision(precision, gpu.software),
        "load_seconds": load_seconds,
        "loaded_nbytes": sum(weight.nbytes for weight in model.matrices.values()),
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


def _open(device: Device, adapter: str | None) -> Gpu:
    software = device == Device.gpu or adapter is not None
    try:
        return open_device(adapter, software=software)
    except DeviceError as error:
        if software:
            raise
        raise DeviceError(
            f"{error} To time numpy on the CPU, add --device cpu; a GPU in software, --device gpu."
        ) from None


def _print(facts: dict[str, Any], task: Task) -> None:
    kept = f", kv {facts['kv']}, {facts['precision']}" if "kv" in facts else ""
    out.print(f"{facts['model']} on {facts['device']}{kept}", style="bold", markup=False)
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
    for label, text in lines:
        out.print(f"  {label:<8}  {text}", markup=False, soft_wrap=True)


def _cost_lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """What loading and each token cost."""
    token_ms = 1000 / facts["decode_tokens_per_second"]
    host_ms = 1000 * facts["host_seconds_per_token"]
    recording_ms = 1000 * facts["recording_seconds_per_token"]
    return [
        ("load", f"{facts['load_seconds']:.2f} s, {human_nbytes(facts['loaded_nbytes'])}"),
        (
            "weights",
            f"{human_nbytes(facts['weights_nbytes_per_token'])} read for each token: "
            f"{facts['weights_nbytes_per_second'] / 1e9:.3g} GB/s, "
            f"{facts['share_of_copy']:.0%} of what this GPU copies "
            f"({facts['copy_nbytes_per_second'] / 1e9:.3g} GB/s)",
        ),
        (
            "step",
            f"{facts['dispatches_per_token']} dispatches, {token_ms:.2f} ms, "
            + (
                "all of it the CPU's: this GPU is software"
                if facts["software"]
                else f"the host works {host_ms:.2f} ms of it, "
                f"another thread {recording_ms:.2f} ms beside it"
            ),
        ),
    ]
