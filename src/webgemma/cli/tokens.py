"""`webgemma tokenize`, `render` and `logits`: how text becomes tokens, prompts and logits."""

import io
import json
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from webgemma.api import Gemma
from webgemma.cli.options import (
    Device,
    DeviceOption,
    GpuOption,
    JsonOption,
    Kv,
    KvOption,
    LoraOption,
    ModelArgument,
    Precision,
    PrecisionOption,
)
from webgemma.cli.terminal import out, reported_errors, write_json
from webgemma.errors import InputError
from webgemma.gguf.sources import Bytes
from webgemma.gguf.writer import write_atomically
from webgemma.models import find_model
from webgemma.text.chat import Chat
from webgemma.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Size(StrEnum):
    """Which chat template."""

    small = "small"
    large = "large"
    gemma3 = "gemma3"


def tokenize(
    model: ModelArgument = None,
    text: Annotated[
        str | None,
        typer.Argument(metavar="TEXT", help="The text; standard input if left out."),
    ] = None,
    special: Annotated[
        bool, typer.Option("--special", help="Read spelled-out special tokens as such.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the tokens of a text.

    Example: webgemma tokenize gemma4:e2b "Hello world"
    """
    with reported_errors():
        with find_model(model).open() as gguf:
            tokenizer = Tokenizer.from_gguf(gguf)
        ids = tokenizer.encode(read_stdin() if text is None else text, special=special)
        if as_json:
            write_json([{"id": token, "piece": tokenizer.piece(token)} for token in ids])
            return
        width = len(str(tokenizer.size))
        for token in ids:
            out.print(f"{token:>{width}}  {tokenizer.piece(token)!r}", markup=False, soft_wrap=True)
        out.print(f"{len(ids)} tokens", style="dim")


def render(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="MESSAGES.json", help="A list of messages; - or nothing: standard input."
        ),
    ] = None,
    size: Annotated[
        Size, typer.Option(help="small: E2B, E4B; large: 12B and up; gemma3.")
    ] = Size.small,
    think: Annotated[bool, typer.Option("--think", help="Let the model think first.")] = False,
    tools: Annotated[Path | None, typer.Option(help="A JSON file with a list of tools.")] = None,
    continue_last: Annotated[
        bool, typer.Option("--continue", help="Continue the last message of the model.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the prompt that the chat template makes of a conversation.

    Example: echo '[{"role": "user", "content": "Hi"}]' | webgemma render
    """
    with reported_errors():
        messages = _load_json(file)
        declared = None if tools is None else _load_json(tools)
        prompt = Chat(size.value).render(messages, declared, think, continue_last=continue_last)
        if as_json:
            write_json({"prompt": prompt})
        else:
            sys.stdout.write(prompt)
            sys.stdout.flush()


def logits(
    model: ModelArgument = None,
    *,
    ids: Annotated[
        Path, typer.Option(help="A file of token ids: separated by spaces, or a JSON list.")
    ],
    to: Annotated[Path, typer.Option("--out", help="Where to write [T, vocab] float32 (.npy).")],
    device: DeviceOption = Device.auto,
    gpu: GpuOption = None,
    lora: LoraOption = None,
    kv: KvOption = Kv.f16,
    precision: PrecisionOption = Precision.auto,
    as_json: JsonOption = False,
) -> None:
    """Compute the logits after each token of a prompt.

    Example: webgemma logits gemma4:e2b --ids ids.txt --out logits.npy
    """
    with reported_errors():
        tokens = _load_ids(ids)
        check_writable(to, ids)
        with Gemma.load(
            model, device.value, gpu=gpu, lora=lora, kv=kv.value, precision=precision.value
        ) as gemma:
            values = gemma.logits(tokens)
        write_npy(to, values)
        best = [int(token) for token in values.argmax(axis=-1)]
        if as_json:
            write_json({"out": str(to), "shape": list(values.shape), "argmax": best})
        else:
            shape = " x ".join(map(str, values.shape))
            out.print(f"{to}: {shape} float32", markup=False, soft_wrap=True)


def check_writable(path: Path, *sources: Path) -> None:
    """Raise InputError for a file that cannot be written, before it has been computed.

    It is none of the `sources`, which would be lost."""
    if path.is_file() and any(each.is_file() and path.samefile(each) for each in sources):
        raise InputError(f"{path} is the file that is read: name another one with --out.")
    if not path.parent.is_dir():
        raise InputError(f"{path} cannot be written: there is no folder {path.parent}.")
    if path.is_dir():
        raise InputError(f"{path} is a folder; name a file in it.")
    if path.exists() and not path.is_file():  # a pipe or a device
        return
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}.") from None


def write_npy(path: Path, values: "NDArray[np.float32]") -> None:
    """Write an array as numpy does, but whole or not at all."""
    import numpy as np

    values = np.ascontiguousarray(values)
    header = io.BytesIO()
    facts = np.lib.format.header_data_from_array_1_0(values)
    np.lib.format.write_array_header_1_0(header, facts)
    chunks: list[Bytes] = [header.getvalue(), values.data.cast("B")]
    if not path.exists() or path.is_file():
        write_atomically(path, chunks)
        return
    try:  # a pipe or a device, which must not be replaced
        with path.open("wb") as file:
            file.writelines(chunks)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}.") from None


def read_stdin() -> str:
    """Read standard input as UTF-8 text."""
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"Standard input is not UTF-8 text (byte {error.start}).") from None


def _load_json(path: Path | None) -> Any:
    name = "standard input" if path is None or str(path) == "-" else str(path)
    text = read_stdin() if name == "standard input" else read_text(Path(name))
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is not JSON: {error}.") from None


def _load_ids(path: Path) -> list[int]:
    text = read_text(path).strip()
    try:
        if text.startswith("["):
            ids = json.loads(text)
            if isinstance(ids, list) and all(type(token) is int for token in ids):
                return ids
            raise ValueError
        return [int(word) for word in text.replace(",", " ").split()]
    except (ValueError, RecursionError):
        raise InputError(
            f"{path} must hold token ids only: whole numbers, or a JSON list of them."
        ) from None


def read_text(path: Path) -> str:
    """Read a file of UTF-8 text; InputError if it is none."""
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise InputError(f"There is no file {path}.") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder; name a file.") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text.") from None
