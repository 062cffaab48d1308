"""`webgemma check`: the GPU against the reference, in words a user understands."""

import math
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from webgemma.cli.loading import load_model
from webgemma.cli.options import (
    AdapterOption,
    JsonOption,
    Kv,
    KvOption,
    ModelArgument,
    Precision,
    PrecisionOption,
)
from webgemma.cli.terminal import complain, err, out, sentences, write_json
from webgemma.device import open_device
from webgemma.gemma.config import Config
from webgemma.gemma.record.quantised import chosen_precision
from webgemma.models import find_model
from webgemma.sync import run_sync

if TYPE_CHECKING:
    from webgemma.diagnostics.check import Report

BIG_NBYTES = 1 << 30  # of a file: the reference takes minutes


def check(
    model: ModelArgument,
    tokens: Annotated[int, typer.Option(help="How many tokens to compute.")] = 8,
    adapter: AdapterOption = None,
    kv: KvOption = Kv.f16,
    precision: PrecisionOption = Precision.auto,
    as_json: JsonOption = False,
) -> None:
    """Check that this GPU computes the right values: every layer against the CPU.

    Of DiffusionGemma, as it reads.

    Example: webgemma check gemma4:e2b
    """
    from webgemma.diagnostics.check import (  # needs numpy
        Way,
        compare,
        gpu_stages,
        reference_stages,
        token_ids,
    )

    with sentences():
        found = find_model(model)
        with found.open() as gguf, closing(open_device(adapter)) as device:
            config = Config.from_gguf(gguf)
            ids = token_ids(config, tokens)
            loaded = load_model(gguf, config, device)
            if gguf.nbytes > BIG_NBYTES:
                err.print("First the truth, in numpy: this takes a minute or more.", style="dim")
            way = Way(kv.value, chosen_precision(precision.value, device.software))
            truth = reference_stages(gguf, config, way, ids)
            at_once = run_sync(gpu_stages(loaded, way, ids, truth, tokens))
            one_by_one = run_sync(gpu_stages(loaded, way, ids, truth, 1))
            report = compare(config, way, truth, at_once, one_by_one)
            if as_json:
                write_json({"model": found.label, "device": device.name, **_facts(report)})
                raise typer.Exit(1 if report.first_wrong else 0)
            out.print(f"{found.label} on {device.name}", style="bold", markup=False)
            _print(report)


def _facts(report: "Report") -> dict[str, Any]:
    """The report for scripts; what is no number is null."""
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
    """One line for each stage, then the verdict."""
    out.print(f"{'':7}  {'':10}  {'at once':>8}  {'one by one':>10}  relative error", style="dim")
    for comparison in report.comparisons:
        good = comparison.error <= report.limit
        mark = "[green]ok     [/]" if good else "[red]differs[/]"
        numbers = f"{_short(comparison.at_once):>8}  {_short(comparison.one_by_one):>10}"
        out.print(f"{mark}  {comparison.stage:10}  {numbers}")
    wrong = report.first_wrong
    if wrong:
        how = f"differs by {100 * wrong.error:.2g} %" if wrong.error < math.inf else "is no number"
        complain(
            f"{wrong.stage.capitalize()} {how}: this GPU or its driver computes wrong values. "
            "Update the driver, take another GPU (webgemma adapters) or use --device cpu."
        )
    worst = report.worst
    out.print(
        f"Everything agrees: largest relative error {_short(worst.error)} ({worst.stage}); "
        f"the best token is the same {report.same_best} of {report.tokens} times.",
        soft_wrap=True,
    )


def _short(error: float) -> str:
    """3e-6, not 3.1e-06."""
    return "0" if error == 0 else f"{error:.0e}".replace("e-0", "e-")
