"""Ollama's API for models: `/api/tags`, `/api/show`, `/api/ps`, `/api/version`, and refusals.

Ollama owns its store: nothing here changes it."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Any

from webgemma.errors import GgufError
from webgemma.gemma.config import embeds
from webgemma.gemma.encoder_config import EncoderConfigs
from webgemma.gguf.ollama import OllamaModel
from webgemma.gguf.reader import Gguf
from webgemma.server.bodies import Body
from webgemma.server.ollama import FOREVER, parse_name, timestamp
from webgemma.server.protocol import RequestError
from webgemma.text.markup import CALL_OPEN, CHANNEL_OPEN

VERSION = "0.13.4"  # of Ollama's API, which clients compare with what they need

RUNNING = "Ollama is running"  # at the root, by which clients know the server

# Routes that would change the store, and what to do instead.
REFUSED = {
    "pull": "This server downloads nothing: run `ollama pull`, and it will find the model.",
    "create": "This server creates no models: run `ollama create`, and it will find the model.",
    "copy": "This server copies no models: run `ollama cp`.",
    "delete": "This server deletes no models: run `ollama rm`.",
    "push": "This server uploads nothing: run `ollama push`.",
    "blobs": "This server stores no blobs: run `ollama create` instead.",
}


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """What Ollama's API says about a model."""

    name: str
    nbytes: int
    modified: float  # seconds since 1970
    digest: str = ""  # sha256 in hex of the manifest; a plain file has none
    format: str = "gguf"
    family: str = ""
    families: Sequence[str] = ()
    parameter_size: str = ""  # such as "5.1B"
    quantization: str = ""  # such as "Q4_K_M"
    texts: Mapping[str, str] = field(default_factory=dict)  # template, system, license, parameters

    @classmethod
    def of_store(cls, model: OllamaModel, *, texts: bool = False) -> "ModelEntry":
        """Return a model of Ollama's store; `texts` reads its template, licences and so on."""
        config = model.config
        family = config.get("model_family", "")
        return cls(
            name=str(model.name),
            nbytes=model.nbytes,
            modified=model.modified_seconds,
            digest=model.digest,
            format=config.get("model_format", ""),
            family=family,
            families=config.get("model_families") or ([family] if family else []),
            parameter_size=config.get("model_type", ""),
            quantization=config.get("file_type", ""),
            texts=_texts(model) if texts else {},
        )

    @classmethod
    def of_file(cls, name: str, gguf: Gguf, nbytes: int, modified: float) -> "ModelEntry":
        """Return a model file: its size and format are counted."""
        family = str(gguf.metadata.get("general.architecture", ""))
        return cls(
            name=name,
            nbytes=nbytes,
            modified=modified,
            family=family,
            families=[family] if family else [],
            parameter_size=_human(parameters(gguf)),
            quantization=_main_format(gguf),
        )

    def details(self) -> dict[str, Any]:
        """Return the object `details`."""
        return {
            "parent_model": "",
            "format": self.format,
            "family": self.family,
            "families": list(self.families),
            "parameter_size": self.parameter_size,
            "quantization_level": self.quantization,
        }


@dataclass(frozen=True, slots=True)
class Running:
    """A model that is loaded."""

    entry: ModelEntry
    gpu_nbytes: int  # what it takes of the GPU's memory
    context: int  # positions
    expires: float = FOREVER  # seconds since 1970


def tags(entries: Iterable[ModelEntry]) -> dict[str, Any]:
    """Return the answer of `/api/tags`: the models that there are."""
    return {"models": [_listed(entry) for entry in entries]}


def processes(running: Iterable[Running]) -> dict[str, Any]:
    """Return the answer of `/api/ps`: the models that are loaded."""
    models = []
    for model in running:
        listed = _listed(model.entry)
        del listed["modified_at"]
        more = {"size_vram": model.gpu_nbytes, "context_length": model.context}
        models.append(listed | {"expires_at": timestamp(model.expires)} | more)
    return {"models": models}


def parse_show(given: object) -> tuple[str, bool]:
    """Return the name in a body of `/api/show`, and whether long lists are wanted, too."""
    return parse_name(given), Body(given).flag("verbose")


def show(
    entry: ModelEntry, gguf: Gguf, capabilities: Sequence[str], *, verbose: bool = False
) -> dict[str, Any]:
    """Return the answer of `/api/show`; lists in the metadata are null unless `verbose`."""
    info: dict[str, Any] = {"general.parameter_count": parameters(gguf)}
    for key, value in gguf.metadata.items():
        is_list = gguf.value_type(key).endswith("]")
        info[key] = None if is_list and not verbose else _plain(value)
    answer: dict[str, Any] = {
        **entry.texts,
        "modified_at": timestamp(entry.modified),
        "details": entry.details(),
        "model_info": info,
        "capabilities": list(capabilities),
    }
    if verbose:
        answer["tensors"] = [
            {"name": tensor.name, "type": str(tensor.format), "shape": list(tensor.shape)}
            for tensor in gguf.tensors.values()
        ]
    return answer


def version() -> dict[str, Any]:
    """Return the answer of `/api/version`."""
    return {"version": VERSION}


def refusal(route: str) -> RequestError:
    """Return the error for a route that would change Ollama's store."""
    return RequestError(REFUSED[route], 501)


def capabilities_of(gguf: Gguf, encoders: Sequence[Gguf] = ()) -> list[str]:
    """Return what a model can do, by its vocabulary and its encoders, in Ollama's words."""
    if embeds(gguf):
        return ["embedding"]
    found = ["completion"]
    configs = [EncoderConfigs.from_gguf(file) for file in (gguf, *encoders)]
    if any(config.vision for config in configs):
        found.append("vision")
    if any(config.audio for config in configs):
        found.append("audio")
    tokens: Any = gguf.metadata.get("tokenizer.ggml.tokens", ())
    vocabulary = frozenset(tokens)
    if CALL_OPEN in vocabulary:
        found.append("tools")
    if CHANNEL_OPEN in vocabulary:
        found.append("thinking")
    return found


def parameters(gguf: Gguf) -> int:
    """Return the number of weights."""
    return sum(prod(tensor.shape) for tensor in gguf.tensors.values())


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float) else list(value)


def _listed(entry: ModelEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "model": entry.name,
        "modified_at": timestamp(entry.modified),
        "size": entry.nbytes,
        "digest": entry.digest,
        "details": entry.details(),
    }


def _texts(model: OllamaModel) -> dict[str, str]:
    """Return the texts of a model; those whose file is damaged are left out."""
    texts = {}
    readers: dict[str, Callable[[], str]] = {
        "template": lambda: model.template,
        "system": lambda: model.system,
        "license": lambda: "\n".join(model.licenses),
        "parameters": lambda: _parameters(model.params),
    }
    for name, read in readers.items():
        with suppress(GgufError):
            texts[name] = read()
    return texts


def _parameters(params: Mapping[str, Any]) -> str:
    """Return the options of a model as `ollama show` lists them."""
    lines = []
    for name, value in params.items():
        for item in value if isinstance(value, list) else [value]:
            lines.append(f"{name:<30} {_option(item)}")
    return "\n".join(lines)


def _option(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else f"{value}"


def _human(count: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= unit:
            return f"{count / unit:.1f}{name}"
    return str(count)


def _main_format(gguf: Gguf) -> str:
    """Return the format of most of a file's weights."""
    weights: Counter[str] = Counter()
    for tensor in gguf.tensors.values():
        weights[str(tensor.format)] += prod(tensor.shape)
    return weights.most_common(1)[0][0] if weights else ""
