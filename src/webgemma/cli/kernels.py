"""`webgemma kernels`: the WGSL ops, and the linked program of one of them."""

import sys
from typing import Annotated, Any

import typer

from webgemma.cli.options import JsonOption
from webgemma.cli.terminal import out, reported_errors, write_json
from webgemma.errors import InputError
from webgemma.kernels import Linker, names_in, read_file

Constant = int | float | bool


def kernels(
    name: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OP[/FORMAT] [SLOT=PROVIDER]... [CONSTANT=VALUE]",
            help="A kernel, as error messages name it; without it, all ops are listed.",
        ),
    ] = None,
    feature: Annotated[
        list[str] | None,
        typer.Option(help="A feature of the device, such as shuffle32; may repeat."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the ops of the GPU, or print the program that is linked for one.

    Slots that are left open get their first provider; constants without a value stay overrides.

    Examples:
      webgemma kernels
      webgemma kernels norm store=integer integer_width=int16
      webgemma kernels matvec/Q6_K epilogue=geglu LANES=32 --feature shuffle32
    """
    with reported_errors():
        if not name:
            _list(as_json)
            return
        op, _, format = name[0].partition("/")
        providers, constants = _arguments(name[1:])
        if format:
            providers["format"] = format
        linker = Linker(op, frozenset(feature or ()), constants, providers, complete=True)
        facts = _facts(linker)
        if as_json:
            write_json(facts)
            return
        sys.stdout.write(_header(facts) + facts["wgsl"])
        sys.stdout.flush()


def _list(as_json: bool) -> None:
    summaries = {op: read_file(f"ops/{op}").summary for op in names_in("ops")}
    if as_json:
        write_json([{"op": op, "summary": summary} for op, summary in summaries.items()])
        return
    width = max(map(len, summaries))
    for op, summary in summaries.items():
        first = summary.partition(". ")[0].rstrip(".")
        out.print(f"[bold]{op:{width}}[/]  ", end="")
        out.print(f"{first}.", markup=False, soft_wrap=True)


def _arguments(words: list[str]) -> tuple[dict[str, str], dict[str, Constant]]:
    """Split SLOT=PROVIDER and CONSTANT=VALUE, which has an upper-case name."""
    providers: dict[str, str] = {}
    constants: dict[str, Constant] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals and value):
            raise InputError(f"{word!r} must be SLOT=PROVIDER or CONSTANT=VALUE.")
        if key.isupper():
            constants[key] = _constant(word, value)
        else:
            providers[key] = value
    return providers, constants


def _constant(word: str, text: str) -> Constant:
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        raise InputError(f"{word!r}: a constant is a number, true or false.") from None


def _facts(linker: Linker) -> dict[str, Any]:
    program = linker.program()
    return {
        "name": program.kernel.name,
        "summary": read_file(f"ops/{linker.op}").summary,
        "slots": {
            slot: {"provider": provider, "providers": list(names_in(f"lib/{slot}"))}
            for slot, provider in sorted(linker.chosen.items())
        },
        "parameters": {field.name: field.type for field in program.params},
        "bindings": list(program.bindings),
        "wgsl": program.kernel.wgsl,
    }


def _header(facts: dict[str, Any]) -> str:
    """Return the program's signature, as comments."""
    lines = [facts["name"], facts["summary"]]
    for slot, choice in facts["slots"].items():
        others = [name for name in choice["providers"] if name != choice["provider"]]
        lines.append(
            f"slot {slot}: {choice['provider']}" + (f" (or {', '.join(others)})" if others else "")
        )
    fields = ", ".join(f"{name}: {type_}" for name, type_ in facts["parameters"].items())
    lines.append(f"parameters: {fields or 'none'}")
    lines.append(f"bindings: {', '.join(facts['bindings'])}")
    return "".join(f"// {line}\n" for line in lines) + "\n"
