"""Conversion of Hugging Face models to GGUF: DiffusionGemma, and Gemma 4's text model."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from webgemma.convert.floats import FLOATS, cast_floats
from webgemma.convert.metadata import HuggingFaceConfig
from webgemma.convert.names import gguf_name
from webgemma.convert.vocabulary import tokenizer_metadata
from webgemma.errors import GgufError, InputError, ModelNotFoundError
from webgemma.gguf.safetensors import Safetensors
from webgemma.gguf.sources import Bytes
from webgemma.gguf.writer import NewTensor, write_gguf

INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_JSON_NBYTES = 256 << 20  # a vocabulary of 262144 tokens takes 32 MB
FORMATS = ("stored", *(name.lower() for name in FLOATS))


@dataclass(frozen=True, slots=True)
class _SourceTensor:
    """A tensor in one of the folder's files."""

    file: Safetensors
    name: str  # in that file

    @property
    def dtype(self) -> str:
        return self.file.dtype(self.name)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.file.shape(self.name)

    @property
    def nbytes(self) -> int:
        return self.file.tensors[self.name].nbytes

    def read(self) -> Bytes:
        return self.file.read(self.name)


def convert(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    format: str = "stored",
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Convert the model in a folder and write it to a GGUF file.

    Matrices are written in the type they are stored in, or in `format` (bf16, f16, f32); vectors
    and the routers of experts become float32. `progress` is called with the bytes done and the
    total.
    """
    if format not in FORMATS:
        raise InputError(f"{format!r} is not a valid format; choose {', '.join(FORMATS)}.")
    source = Path(folder)
    if not source.is_dir():
        raise ModelNotFoundError(f"There is no folder {source}.")
    with ExitStack() as files:
        tensors = _text_tensors(_open(source, files))
        config = read_json(source / "config.json")
        generation = _read_optional(source / "generation_config.json") or {}
        model = HuggingFaceConfig(config, generation)
        if model.tied:
            tensors.pop("output.weight", None)  # a copy of the embedding table
        metadata = model.metadata({name: x.shape for name, x in tensors.items()}, source.name)
        vocab = tensors["token_embd.weight"].shape[0]
        ends = generation.get("eos_token_id", config.get("eos_token_id"))
        tokenizer = _read_optional(source / "tokenizer.json")
        metadata |= tokenizer_metadata(tokenizer, vocab, ends)
        new_tensors = _new_tensors(tensors, format, progress)
        write_gguf(out, metadata, [model.rope_factors(), *new_tensors])


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or raise ModelNotFoundError or GgufError."""
    try:
        if path.stat().st_size > MAX_JSON_NBYTES:
            raise GgufError(
                f"{path.name} is larger than {MAX_JSON_NBYTES >> 20} MiB: it is not read."
            )
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelNotFoundError(
            f"{path.parent} has no {path.name}; it is not a model in Hugging Face's layout."
        ) from None
    except (ValueError, RecursionError):
        raise GgufError(f"{path.name} is not valid JSON: download it again.") from None
    if not isinstance(values, dict):
        raise GgufError(f"{path.name} is not a JSON object: download it again.")
    return values


def _open(folder: Path, files: ExitStack) -> Iterator[_SourceTensor]:
    """Open the folder's files and yield their tensors in order."""
    names = [SINGLE_FILE]
    if not (folder / SINGLE_FILE).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        listed = weight_map.values() if isinstance(weight_map, dict) else ()
        names = sorted({name for name in listed if isinstance(name, str)})
        if not names or any(Path(name).name != name for name in names):
            raise GgufError(
                f"{INDEX} lists no files, or files outside its own folder: download it again."
            )
    for name in names:
        if not (folder / name).is_file():
            raise ModelNotFoundError(f"{folder} has no {name}; download the model again.")
        file = files.enter_context(Safetensors.open(folder / name))
        yield from (_SourceTensor(file, tensor) for tensor in file.names)


def _text_tensors(stored: Iterator[_SourceTensor]) -> dict[str, _SourceTensor]:
    """Return the tensors of the text model under their GGUF names."""
    tensors: dict[str, _SourceTensor] = {}
    for tensor in stored:
        name = gguf_name(tensor.name)
        if name is None:
            continue
        if tensor.dtype not in FLOATS:
            raise GgufError(
                f"{tensor.file.name}: the tensor {tensor.name} is stored as {tensor.dtype}; "
                "only models in BF16, F16 or F32 can be converted."
            )
        if name in tensors:
            raise GgufError(f"{tensors[name].name} and {tensor.name} are the same tensor.")
        tensors[name] = tensor
    if "token_embd.weight" not in tensors:
        raise GgufError(
            "The folder's files have no embed_tokens.weight, so they have no text model."
        )
    return tensors


def _new_tensors(
    tensors: dict[str, _SourceTensor], format: str, progress: Callable[[int, int], None] | None
) -> Iterator[NewTensor]:
    """Yield the tensors to write, each read and converted when it is written."""
    total, done = sum(tensor.nbytes for tensor in tensors.values()), 0

    def data_of(tensor: _SourceTensor, target: str) -> Callable[[], Bytes]:
        def data() -> Bytes:
            nonlocal done
            converted = cast_floats(tensor.read(), tensor.dtype, target, tensor.name)
            done += tensor.nbytes
            if progress is not None:
                progress(done, total)
            return converted

        return data

    for name, tensor in tensors.items():
        matrix = len(tensor.shape) > 1 and not name.endswith(".ffn_gate_inp.weight")
        target = tensor.dtype if format == "stored" else format.upper()
        target = target if matrix else "F32"
        yield NewTensor(name, tensor.shape[::-1], target, data_of(tensor, target))


def _read_optional(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.is_file() else None
