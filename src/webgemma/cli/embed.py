"""`webgemma embed`: a vector for each text of a file, and for images and audio."""

import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.markup import escape

from webgemma.api import Gemma
from webgemma.cli.embedder import DEFAULT, check_embeds
from webgemma.cli.options import (
    Device,
    DeviceOption,
    GpuOption,
    JsonOption,
    LoraOption,
    MmprojOption,
    Precision,
    PrecisionOption,
)
from webgemma.cli.terminal import (
    bytes_bar,
    err,
    out,
    reported_errors,
    steps_bar,
    write_json,
    writes_unicode,
)
from webgemma.cli.tokens import check_writable, read_stdin, read_text, write_npy
from webgemma.errors import InputError
from webgemma.models import find_model

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

JSON_LINES = (".jsonl", ".ndjson")  # endings of such files
ROWS_AT_ONCE = 4096  # whose lines are written together


class Task(StrEnum):
    """What texts are for: the names of PREFIXES."""

    query = "query"
    document = "document"
    question = "question"
    fact = "fact"
    classification = "classification"
    clustering = "clustering"
    similarity = "similarity"
    code = "code"
    summary = "summary"


class Row(NamedTuple):
    """A text, or content parts, and what is written beside its vector."""

    text: Any
    fields: dict[str, Any]


def embed(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="A text a line, or JSON lines with a field text; - for standard input.",
        ),
    ] = None,
    image: Annotated[
        list[Path] | None, typer.Option(help="An image to embed, after the texts; may repeat.")
    ] = None,
    audio: Annotated[
        list[Path] | None, typer.Option(help="Audio to embed, after the images; may repeat.")
    ] = None,
    mmproj: MmprojOption = None,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="An Ollama name or a path to a .gguf.")
    ] = DEFAULT,
    to: Annotated[
        Path | None,
        typer.Option("--out", help="Where to write the vectors, float32 (.npy)."),
    ] = None,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="Print each row with its embedding as a line of JSON.")
    ] = False,
    task: Annotated[Task | None, typer.Option(help="What the texts are for.")] = None,
    size: Annotated[
        int | None, typer.Option(help="Numbers of a vector: 768, 512, 256 or 128, say.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Tokens that are computed at once, at most.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of a text, at most; the rest is cut.")
    ] = None,
    device: DeviceOption = Device.auto,
    gpu: GpuOption = None,
    lora: LoraOption = None,
    precision: PrecisionOption = Precision.auto,
    as_json: JsonOption = False,
) -> None:
    """Compute a vector for each text of a file, and with EmbeddingGemma 2 for images and audio.

    A file whose name ends in .jsonl has JSON lines; so has standard input if its first line is an
    object with a text.

    Examples:
      webgemma embed notes.txt --task document --out notes.npy
      webgemma embed rows.jsonl --model embeddinggemma --task query --size 256 --jsonl
      webgemma embed --image cat.png --image dog.png --model embeddinggemma-2.gguf --out pets.npy
    """
    with reported_errors():
        if (to is None) == (not jsonl):
            raise InputError("Say where the vectors go: --out FILE.npy, or --jsonl to print them.")
        if to is not None:
            check_writable(to, *([file] if file else []), *(image or []), *(audio or []))
        media = _media_rows({"image": image or [], "audio": audio or []})
        if file is None and not media:
            raise InputError("Say what to embed: a FILE of texts, --image or --audio.")
        found = find_model(model)
        if check_embeds(found, size).generation == 3 and media:
            raise InputError(
                f"{found.label} reads text only: EmbeddingGemma 2 also embeds images and audio."
            )
        rows = read_rows(file) if file else []
        with _notes(), bytes_bar(model) as loading:
            gemma = Gemma.load(
                model,
                device.value,
                context=context,
                gpu=gpu,
                lora=lora,
                precision=precision.value,
                progress=loading,
                mmproj=mmproj,
            )
        with gemma:
            asked = task.value if task else None
            parts = chain(
                _vectors(gemma, rows, asked, size, batch),
                _media_vectors(gemma, media, asked, size, batch),
            )
            if to is None:
                _print_lines([*rows, *media], parts)
                return
            values = _joined(parts)
        write_npy(to, values)
        if as_json:
            write_json({"out": str(to), "shape": list(values.shape)})
        else:
            shape = " x ".join(map(str, values.shape))
            out.print(f"{to}: {shape} float32", markup=False, soft_wrap=True)


def read_rows(file: Path) -> list[Row]:
    """Read the texts of a file; InputError if there is none, or a line that has none."""
    standard = str(file) == "-"
    name, text = "Standard input" if standard else str(file), ""
    text = read_stdin() if standard else read_text(file)
    lines = text.removesuffix("\n").split("\n") if text else []
    lines = [line.removesuffix("\r") for line in lines]
    if standard:
        is_jsonl = bool(lines) and _has_text(lines[0])
    else:
        is_jsonl = file.suffix.lower() in JSON_LINES
    if is_jsonl:
        numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
        rows = [_row(name, number, line) for number, line in numbered]
    else:
        rows = [Row(line, {"text": line}) for line in lines]
    if not rows:
        raise InputError(f"{name} has no texts.")
    return rows


def _has_text(line: str) -> bool:
    try:
        return isinstance(json.loads(line)["text"], str)
    except (ValueError, RecursionError, TypeError, KeyError, IndexError):
        return False


def _row(name: str, number: int, line: str) -> Row:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}, line {number}, is not JSON: {error}.") from None
    text = fields.get("text") if isinstance(fields, dict) else None
    if not isinstance(text, str):
        raise InputError(f"{name}, line {number}, must be an object with a text, a string.")
    return Row(text, fields)


def _vectors(
    gemma: Gemma, rows: list[Row], task: Any, size: int | None, batch: int | None
) -> Iterator["NDArray[np.float32]"]:
    """Yield the vectors of some rows after the other."""
    cut: list[int] = []
    with steps_bar("texts") as bar:
        for first in range(0, len(rows), ROWS_AT_ONCE):
            texts = [row.text for row in rows[first : first + ROWS_AT_ONCE]]

            def show(done: int, total: int, first: int = first) -> None:
                del total
                bar.show(first + done, len(rows))

            read = gemma.texts.read(texts, task)
            cut += [first + number for number in read.cut]
            yield gemma.embed(read.ids, size=size, batch=batch, progress=show)
    if cut:
        _note(gemma.texts.cut_warning(cut, len(rows)))


def _media_rows(paths: Mapping[str, Sequence[Path]]) -> list[Row]:
    """Return a row for each file of images or audio; InputError if there is no such file."""
    rows = []
    for kind, path in ((kind, path) for kind, listed in paths.items() for path in listed):
        if not path.is_file():
            raise InputError(f"There is no file {path}.")
        rows.append(Row([{"type": kind, "path": path}], {kind: str(path)}))
    return rows


def _media_vectors(
    gemma: Gemma, rows: list[Row], task: Any, size: int | None, batch: int | None
) -> Iterator["NDArray[np.float32]"]:
    """Yield the vectors of images and audio, if there are some."""
    if rows:
        with _notes(), steps_bar("media") as bar:
            yield gemma.embed(
                [row.text for row in rows], task, size, batch=batch, progress=bar.show
            )


def _joined(parts: Iterable["NDArray[np.float32]"]) -> "NDArray[np.float32]":
    import numpy as np

    return np.concatenate(list(parts))


def _print_lines(rows: list[Row], parts: Iterable["NDArray[np.float32]"]) -> None:
    """Print each row with its vector."""
    numbered = iter(rows)
    for vectors in parts:
        for vector in vectors:
            fields = next(numbered).fields | {"embedding": [round(float(x), 7) for x in vector]}
            sys.stdout.write(json.dumps(fields, ensure_ascii=not writes_unicode()) + "\n")
        sys.stdout.flush()


@contextmanager
def _notes() -> Iterator[None]:
    """Print warnings as notes."""
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        yield
    for warning in noted:
        _note(str(warning.message))


def _note(message: str) -> None:
    err.print(f"[yellow]note:[/] {escape(message)}", soft_wrap=True)
