"""The files of a Hugging Face folder: JSON, and tensors in one file of safetensors or several."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from webgemma.errors import GgufError, ModelNotFoundError
from webgemma.gguf.safetensors import Safetensors
from webgemma.gguf.sources import Bytes

INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_JSON_NBYTES = 256 << 20  # a vocabulary of 262144 tokens takes 32 MB


@dataclass(frozen=True, slots=True)
class SourceTensor:
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


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or raise ModelNotFoundError or GgufError."""
    values = read_value(path)
    if not isinstance(values, dict):
        raise GgufError(f"{path.name} is not a JSON object: download it again.")
    return values


def read_value(path: Path) -> Any:
    """Return what a JSON file holds, or raise ModelNotFoundError or GgufError."""
    try:
        if path.stat().st_size > MAX_JSON_NBYTES:
            raise GgufError(
                f"{path.name} is larger than {MAX_JSON_NBYTES >> 20} MiB: it is not read."
            )
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelNotFoundError(
            f"{path.parent} has no {path.name}; it is not a model in Hugging Face's layout."
        ) from None
    except (ValueError, RecursionError):
        raise GgufError(f"{path.name} is not valid JSON: download it again.") from None


def open_tensors(folder: Path, files: ExitStack) -> Iterator[SourceTensor]:
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
        yield from (SourceTensor(file, tensor) for tensor in file.names)


def read_optional(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if there is no such file."""
    return read_json(path) if path.is_file() else None
