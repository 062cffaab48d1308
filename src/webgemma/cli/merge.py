"""`webgemma merge`: a model and an adapter become one file."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from webgemma.cli.options import ModelArgument
from webgemma.cli.terminal import err, progress, sentences
from webgemma.errors import InputError
from webgemma.models import find_model


def merge_command(
    model: ModelArgument,
    adapter: Annotated[
        str, typer.Argument(metavar="ADAPTER[:SCALE]", help="A folder of PEFT's or a GGUF file.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT.gguf", help="The file to write.")],
    format: Annotated[
        str, typer.Option(help="How to store what changes: same, F16, Q8_0, …")
    ] = "same",
    force: Annotated[bool, typer.Option("--force", help="Write over a file.")] = False,
) -> None:
    """Write a new model file with an adapter's changes in its weights.

    Example: webgemma merge gemma4:e2b adapter/ merged.gguf
    """
    from webgemma.convert.merge import SAME, merge  # numpy

    with sentences(), find_model(model).open() as gguf:
        found = find_model(model).path
        if found is not None and out.exists() and out.samefile(found):
            raise InputError(f"{out} is the model itself: name another file.")
        with progress("merging", gguf.nbytes) as show:
            stored = SAME if format.lower() == SAME else format.upper()
            changed = merge(gguf, adapter, out, format=stored, overwrite=force, progress=show)
        kinds = ", ".join(f"{n} as {kind}" for kind, n in Counter(changed.values()).items())
        err.print(
            f"{out}: {len(changed)} matrices changed ({kinds}).", markup=False, soft_wrap=True
        )
