"""`webgemma merge`: a model and a LoRA adapter become one file."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from webgemma.cli.options import JsonOption, ModelArgument
from webgemma.cli.terminal import bytes_bar, err, reported_errors, write_json
from webgemma.errors import InputError
from webgemma.models import find_model


def merge_command(
    model: ModelArgument,
    adapter: Annotated[
        str, typer.Argument(metavar="ADAPTER[:SCALE]", help="A PEFT folder or a GGUF file.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT.gguf", help="The file to write.")],
    format: Annotated[
        str, typer.Option(help="The format of changed matrices: same, F16, Q8_0 and others")
    ] = "same",
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Merge an adapter into the weights of a new model file.

    Example: webgemma merge gemma4:e2b adapter/ merged.gguf
    """
    from webgemma.convert.merge import SAME, merge  # numpy

    with reported_errors(), find_model(model).open() as gguf:
        found = find_model(model).path
        if found is not None and out.exists() and out.samefile(found):
            raise InputError(f"{out} is the model itself: choose another file.")
        with bytes_bar("merging", gguf.nbytes) as show:
            stored = SAME if format.lower() == SAME else format.upper()
            changed = merge(gguf, adapter, out, format=stored, overwrite=force, progress=show)
        if as_json:
            write_json({"out": str(out), "nbytes": out.stat().st_size, "changed": changed})
            return
        kinds = ", ".join(f"{n} as {kind}" for kind, n in Counter(changed.values()).items())
        err.print(
            f"{out}: {len(changed)} matrices changed ({kinds}).", markup=False, soft_wrap=True
        )
