"""`webgemma batch`: replies to all rows of a file, in any number of processes."""

from pathlib import Path
from typing import Annotated, Any

import typer

from webgemma.cli.options import (
    ContextOption,
    Device,
    DeviceOption,
    JsonOption,
    Kv,
    KvOption,
    LoraOption,
    Precision,
    PrecisionOption,
    ThinkOption,
    with_settings,
)
from webgemma.cli.stopping import StopSignals
from webgemma.cli.terminal import err, out, reported_errors, say, steps_bar, write_json


@with_settings
def batch(
    data: Annotated[
        Path, typer.Argument(metavar="FILE", help="A .jsonl or .parquet file of prompts.")
    ],
    *,
    out_path: Annotated[
        Path, typer.Option("--out", metavar="OUT", help="The .jsonl or .parquet file to write.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="An Ollama name or a path to a .gguf; else the bundled model."
        ),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(help="The column of prompts or messages; else messages, then prompt."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system message of all rows.")] = None,
    think: ThinkOption = False,
    replicas: Annotated[
        int | None,
        typer.Option(min=1, help="Processes, each with a model of its own; else one for each GPU."),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Use the GPU whose name contains this; may repeat."),
    ] = None,
    num_gpus: Annotated[
        float, typer.Option(min=0, help="What each process requests of Ray's GPUs.")
    ] = 0,
    rows_at_once: Annotated[
        int, typer.Option(min=1, max=1 << 16, help="Rows that a process is given together.")
    ] = 16,
    force: Annotated[
        bool, typer.Option("--force", help="Begin anew, and replace OUT if it exists.")
    ] = False,
    context: ContextOption = None,
    device: DeviceOption = Device.auto,
    lora: LoraOption = None,
    kv: KvOption = Kv.f16,
    precision: PrecisionOption = Precision.auto,
    as_json: JsonOption = False,
    settings: Any,
) -> None:
    """Reply to all rows of a file: here, or on the machines of RAY_ADDRESS.

    OUT has the rows of FILE with reply, finish and usage, or with the error of a row that cannot be
    answered. Stopped or killed, the same command goes on with the rows that are left.

    Examples:
      webgemma batch questions.jsonl --model gemma4:e2b --out answers.jsonl
      webgemma batch chats.parquet --model gemma4:e2b --out replies.parquet --max-tokens 200
      webgemma batch questions.jsonl --out answers.jsonl --replicas 2 --device cpu
    """
    from webgemma.distributed import batch as run_batch

    done, total = 0, 0
    with reported_errors(), steps_bar("rows") as bar, StopSignals() as signals:

        def show(rows: int, all_rows: int) -> None:
            nonlocal done, total
            done, total = rows, all_rows
            bar.show(rows, all_rows)

        try:
            result = run_batch(
                data,
                out=out_path,
                model=None if model == "-" else model,
                column=column,
                system=system,
                think=think,
                replicas=replicas,
                gpus=gpu or (),
                num_gpus=num_gpus,
                rows_at_once=rows_at_once,
                force=force,
                progress=show,
                device=device.value,
                context=context,
                kv=kv.value,
                precision=precision.value,
                lora=lora,
                **settings,
            )
        except KeyboardInterrupt:
            bar.hide()
            command = "the same command without --force" if force else "the same command"
            say(err, f"stopped: {done} of {total} rows are done; {command} goes on")
            raise typer.Exit(signals.exit_code) from None
        bar.hide()
        if as_json:
            write_json(
                {
                    "out": str(result.out),
                    "rows": result.rows,
                    "failed": result.failed,
                    "resumed": result.resumed,
                }
            )
            return
        failed = f", {result.failed} with an error" if result.failed else ""
        out.print(f"{result.out}: {result.rows} rows{failed}", markup=False, soft_wrap=True)
