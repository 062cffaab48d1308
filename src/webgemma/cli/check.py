"""`webgemma check`: the GPU against the reference, layer by layer."""

import math
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from webgemma.cli.loading import load_model
from webgemma.cli.options import (
    GpuOption,
    JsonOption,
    Kv,
    KvOption,
    LoraOption,
    ModelArgument,
    Precision,
    PrecisionOption,
)
from webgemma.cli.terminal import err, fail, out, reported_errors, write_json
from webgemma.device import open_device
from webgemma.gemma.config import Config
from webgemma.gemma.record.precision import choose_precision
from webgemma.lora.loading import fitted_adapters
from webgemma.models import find_model
from webgemma.sync import run_sync

if TYPE_CHECKING:
    from webgemma.diagnostics.check import Report

LARGE_NBYTES = 1 << 30  # of a file: the reference takes minutes


def check(
    model: ModelArgument = None,
    tokens: Annotated[int, typer.Option(help="How many tokens to compute.")] = 8,
    gpu: GpuOption = None,
    lora: LoraOption = None,
    kv: KvOption = Kv.f16,
    precision: PrecisionOption = Precision.auto,
    as_json: JsonOption = False,
) -> None:
    """Check that the GPU computes the right values: every layer against the CPU.

    Of DiffusionGemma it checks the encoder, which reads prompts.

    Example: webgemma check gemma4:e2b
    """
    from webgemma.diagnostics.check import (  # needs numpy
        Mode,
        compare,
        gpu_stages,
        reference_stages,
        token_ids,
    )

    with reported_errors():
        found = find_model(model)
        with found.open() as gguf, closing(open_device(gpu)) as device:
            config = Config.from_gguf(gguf)
            config.check_writes(found.label)
            ids = token_ids(config, tokens)
            adapters = fitted_adapters(lora, config)
            loaded = load_model(gguf, config, device)
            loaded.set_adapters(adapters)
            if gguf.nbytes > LARGE_NBYTES:
                err.print("The reference in numpy takes a minute or more.", style="dim")
            mode = Mode(kv.value, choose_precision(precision.value, device))
            reference = reference_stages(gguf, config, mode, ids, adapters)
            prompt = run_sync(gpu_stages(loaded, mode, ids, reference, tokens))
            decode = run_sync(gpu_stages(loaded, mode, ids, reference, 1))
            report = compare(config, mode, reference, prompt, decode)
            if as_json:
                write_json({"model": found.label, "device": device.name, **_facts(report)})
                raise typer.Exit(1 if report.first_wrong else 0)
            out.print(f"{found.label} on {device.name}", style="bold", markup=False)
            _print(report)


def _facts(report: "Report") -> dict[str, Any]:
    """Return the report for scripts; what is not finite is null."""
    stages = [
        {k: None if v == math.inf else v for k, v in asdict(comparison).items()}
        for comparison in report.comparisons
    ]
    return {
        "ok": report.first_wrong is None,
        "tokens": report.tokens,
        "same_best": report.same_best,
        "limit": report.limit,
        "stages": stages,
    }


def _print(report: "Report") -> None:
    """Print one line for each stage, then the verdict."""
    out.print(f"{'':7}  {'':10}  {'prompt':>8}  {'decode':>8}  relative error", style="dim")
    for comparison in report.comparisons:
        good = comparison.error <= report.limit
        mark = "[green]ok     [/]" if good else "[red]differs[/]"
        numbers = f"{_short(comparison.prompt):>8}  {_short(comparison.decode):>8}"
        out.print(f"{mark}  {comparison.stage:10}  {numbers}")
    wrong = report.first_wrong
    if wrong:
        how = f"differs by {100 * wrong.error:.2g} %" if wrong.error < math.inf else "is not finite"
        fail(
            f"{wrong.stage.capitalize()} {how}: this GPU or its driver computes wrong values. "
            "Update the driver, use another GPU (webgemma gpus) or --device cpu."
        )
    worst = report.worst
    out.print(
        f"Everything agrees: largest relative error {_short(worst.error)} ({worst.stage}); "
        f"the best token is the same {report.same_best} of {report.tokens} times.",
        soft_wrap=True,
    )


def _short(error: float) -> str:
    """Format 3.1e-06 as 3e-6."""
    return "0" if error == 0 else f"{error:.0e}".replace("e-0", "e-")
