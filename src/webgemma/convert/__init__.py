"""Models in Hugging Face's layout to GGUF: DiffusionGemma, and Gemma 4's text model."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from webgemma.convert.floats import FLOATS, stored_as
from webgemma.convert.metadata import Blueprint
from webgemma.convert.names import gguf_name
from webgemma.convert.vocabulary import tokenizer_metadata
from webgemma.errors import GgufError, InputError, ModelNotFoundError
from webgemma.gguf.safetensors import Safetensors
from webgemma.gguf.sources import Bytes
from webgemma.gguf.writer import NewTensor, write_gguf

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
MAX_JSON_NBYTES = 256 << 20  # a vocabulary of 262144 words takes 32 MB
FORMATS = ("stored", *(name.lower() for name in FLOATS))


@dataclass(frozen=True, slots=True)
class _Found:
    """A tensor of one of the folder's files."""

    file: Safetensors
    name: str  # there

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
    """Write the model of a folder to a GGUF file.

    Matrices are written as they are stored, or as `format` says (bf16, f16, f32); vectors and the
    routers of experts become float32. `progress` is told how many bytes of how many are done."""
    if format not in FORMATS:
        raise InputError(f"There is no format {format!r}; choose {', '.join(FORMATS)}.")
    source = Path(folder)
    if not source.is_dir():
        raise ModelNotFoundError(f"There is no folder {source}.")
    with ExitStack() as files:
        tensors = _named(_open(source, files))
        config = read_json(source / "config.json")
        generation = _read_if_there(source / "generation_config.json") or {}
        blueprint = Blueprint(config, generation)
        if blueprint.tied:
            tensors.pop("output.weight", None)  # the embedding table again
        metadata = blueprint.metadata({name: x.shape for name, x in tensors.items()}, source.name)
        vocab = tensors["token_embd.weight"].shape[0]
        ends = generation.get("eos_token_id", config.get("eos_token_id"))
        words = _read_if_there(source / "tokenizer.json")
        metadata |= tokenizer_metadata(words, vocab, ends)
        made = _new_tensors(tensors, format, progress)
        write_gguf(out, metadata, [blueprint.rope_factors(), *made])


def read_json(path: Path) -> dict[str, Any]:
    """An object of a JSON file, or a sentence."""
    try:
        if path.stat().st_size > MAX_JSON_NBYTES:
            raise GgufError(f"{path.name} is larger than any model's.")
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelNotFoundError(
            f"{path.parent} has no {path.name}; it is no model in Hugging Face's layout."
        ) from None
    except (ValueError, RecursionError):
        raise GgufError(f"{path.name} is no JSON.") from None
    if not isinstance(values, dict):
        raise GgufError(f"{path.name} holds no JSON object.")
    return values


def _open(folder: Path, files: ExitStack) -> Iterator[_Found]:
    """Every tensor of the folder's files, in their order."""
    names = [WHOLE]
    if not (folder / WHOLE).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        listed = weight_map.values() if isinstance(weight_map, dict) else ()
        names = sorted({name for name in listed if isinstance(name, str)})
        if not names or any(Path(name).name != name for name in names):
            raise GgufError(f"{INDEX} names no files of its own folder.")
    for name in names:
        if not (folder / name).is_file():
            raise ModelNotFoundError(f"{folder} has no {name}; download the model again.")
        file = files.enter_context(Safetensors.open(folder / name))
        yield from (_Found(file, tensor) for tensor in file.names)


def _named(stored: Iterator[_Found]) -> dict[str, _Found]:
    """The text model's tensors under their names in GGUF."""
    tensors: dict[str, _Found] = {}
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
            raise GgufError(f"{tensors[name].name} and {tensor.name} are two names of one tensor.")
        tensors[name] = tensor
    if "token_embd.weight" not in tensors:
        raise GgufError("The folder's files have no embed_tokens.weight: they hold no text model.")
    return tensors


def _new_tensors(
    tensors: dict[str, _Found], format: str, progress: Callable[[int, int], None] | None
) -> Iterator[NewTensor]:
    total, done = sum(tensor.nbytes for tensor in tensors.values()), 0

    def data_of(tensor: _Found, target: str) -> Callable[[], Bytes]:
        def data() -> Bytes:
            nonlocal done
            converted = stored_as(tensor.read(), tensor.dtype, target, tensor.name)
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


def _read_if_there(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.is_file() else None
