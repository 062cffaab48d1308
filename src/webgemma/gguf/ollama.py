"""Ollama's model store on disk: model names such as "gemma4:e2b", and the files of each model.

    ROOT/manifests/HOST/NAMESPACE/MODEL/TAG    JSON: the list of the model's blobs
    ROOT/blobs/sha256-<64 hex>                 the GGUF file, the config, the texts

Manifests are untrusted. A name is compared with the names of the folders and never joined into a
path; a digest becomes part of a path only after it was checked.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, TypeVar

from webgemma.errors import GgufError, InputError, ModelNotFoundError

SERVICE_ROOT = Path("/usr/share/ollama/.ollama/models")  # of Ollama's Linux service
MAX_TEXT_NBYTES = 4 << 20  # of every file but weights: manifest, config, template, licence, …
DEFAULT_HOST = "registry.ollama.ai"
DEFAULT_NAMESPACE = "library"
DEFAULT_TAG = "latest"

_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://")
_NAME_PARTS = {  # the rule for each part of a name, as a pattern and in words
    "host": (r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,349}", "350 letters, digits or _ - . :"),
    "namespace": (r"[A-Za-z0-9_][A-Za-z0-9_-]{0,79}", "80 letters, digits or _ -"),
    "model": (r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}", "80 letters, digits or _ - ."),
    "tag": (r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}", "80 letters, digits or _ - ."),
}
_IMAGE = "application/vnd.ollama.image."
_DIGEST = re.compile(r"sha256[:-]([0-9a-fA-F]{64})")
_CONFIG_KEYS: dict[type[Any], tuple[str, ...]] = {
    str: (
        *("model_format", "model_family", "model_type", "file_type", "base_name", "requires"),
        *("renderer", "parser", "remote_host", "remote_model"),
    ),
    int: ("context_length", "embedding_length"),
    list: ("model_families", "capabilities"),
    dict: ("draft",),
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelName:
    """A complete and valid model name; `str` returns the short form that Ollama shows."""

    host: str
    namespace: str
    model: str
    tag: str

    def __post_init__(self) -> None:
        for part, (rule, letters) in _NAME_PARTS.items():
            value = getattr(self, part)
            if not re.fullmatch(rule, value):
                shown = repr(value if len(value) <= 60 else value[:60] + "…")
                raise InputError(
                    f"Not a model name: its {part} {shown} must be 1 to {letters}, the first a "
                    "letter, digit or _. Write [HOST/][NAMESPACE/]MODEL[:TAG], as in 'gemma4:e2b'."
                )

    @classmethod
    def parse(cls, text: str) -> "ModelName":
        """Parse `[scheme://][HOST/][NAMESPACE/]MODEL[:TAG]`; missing parts take their defaults."""
        host, namespace, tag = DEFAULT_HOST, DEFAULT_NAMESPACE, DEFAULT_TAG
        if text.rfind(":") > text.rfind("/"):
            text, _, tag = text.rpartition(":")
        text, slash, model = text.rpartition("/")
        if slash:
            text, slash, namespace = text.rpartition("/")
            if slash:
                host = _SCHEME.sub("", text)
        return cls(host, namespace, model, tag)

    def __str__(self) -> str:
        name = f"{self.model}:{self.tag}"
        if self.host != DEFAULT_HOST:
            return f"{self.host}/{self.namespace}/{name}"
        return name if self.namespace == DEFAULT_NAMESPACE else f"{self.namespace}/{name}"

    def folded(self) -> tuple[str, ...]:
        """Return the parts in lower case: Ollama compares names without regard to case."""
        return tuple(part.lower() for part in astuple(self))


@dataclass(frozen=True, slots=True)
class Layer:
    """One blob of a model, as its manifest describes it; the file may still be missing."""

    kind: str  # "model", "projector", "template", …: the media type after Ollama's prefix
    digest: str  # "sha256:" and 64 hex digits
    nbytes: int
    path: Path
    name: str = ""  # of a tensor or file, in models that are not GGUF


@dataclass(frozen=True, slots=True)
class OllamaModel:
    """A model of the store. Its files are checked when a property returns them."""

    name: ModelName
    manifest_path: Path
    layers: tuple[Layer, ...]
    config: dict[str, Any]  # the keys that Ollama defines have the types that it defines
    digest: str  # sha256 of the manifest in hex; its first 12 digits are the ID in `ollama list`
    modified_seconds: float  # since 1970
    nbytes: int  # of all layers and the config

    @property
    def path(self) -> Path:
        """The path of the GGUF file, which exists and has the right size; GgufError otherwise."""
        if remote := self.config.get("remote_host") or self.config.get("remote_model"):
            raise GgufError(
                f"{self.name} runs on {remote!r} and has no weights on this machine: "
                "pull a tag that is not a cloud model."
            )
        models, tensors = self._layers("model"), self._layers("tensor")
        if self.config.get("model_format") == "safetensors" or (tensors and not models):
            raise GgufError(
                f"{self.name} is stored as safetensors and webgemma reads GGUF: "
                "pull a tag that Ollama stores as GGUF."
            )
        if not models:
            raise GgufError(f"{self.name} has no model file in its manifest: pull it again.")
        return _blob_path(models[-1], f"The model file of {self.name}")

    @property
    def projectors(self) -> tuple[Path, ...]:
        """GGUF files of the vision and audio encoders; empty if the model file contains them."""
        return self._files("projector")

    @property
    def adapters(self) -> tuple[Path, ...]:
        """GGUF files of LoRA adapters."""
        return self._files("adapter")

    @property
    def draft(self) -> Path | None:
        """The GGUF file of the draft model for speculative decoding, if there is one."""
        return (self._files("draft") or (None,))[-1]

    @property
    def template(self) -> str:
        """The Go template of the prompt, or ""."""
        return (self._texts("template", "prompt") or ("",))[-1]

    @property
    def system(self) -> str:
        """The system message, or ""."""
        return (self._texts("system") or ("",))[-1]

    @property
    def licenses(self) -> tuple[str, ...]:
        """The texts of the licences."""
        return self._texts("license")

    @property
    def params(self) -> dict[str, Any]:
        """Options of the sampler and the engine under Ollama's names; values are not checked."""
        where = f"The params file of {self.name}"
        text = (self._texts("params") or ("{}",))[-1]
        return _checked(_parse_json(text, where), dict, where)

    @property
    def messages(self) -> tuple[dict[str, Any], ...]:
        """The first messages of every conversation; `role` and `content` are strings."""
        where = f"The messages file of {self.name}"
        text = (self._texts("messages") or ("[]",))[-1]
        messages = _checked(_parse_json(text, where), list, where)
        for message in messages:
            for key in ("role", "content"):
                _checked(_checked(message, dict, where).get(key), str, f"{where}, {key!r}")
        return tuple(messages)

    def _layers(self, *kinds: str) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.kind in kinds)

    def _files(self, kind: str) -> tuple[Path, ...]:
        where = f"The {kind} file of {self.name}"
        return tuple(_blob_path(layer, where) for layer in self._layers(kind))

    def _texts(self, *kinds: str) -> tuple[str, ...]:
        where = f"The {kinds[0]} file of {self.name}"
        return tuple(_read(_blob_path(layer, where), where) for layer in self._layers(*kinds))


class OllamaStore:
    """The models that Ollama has on this machine, read-only."""

    def __init__(self, root: Path | None = None) -> None:
        """Use `root`, the folder with `manifests` and `blobs`; by default the one Ollama uses."""
        self.root = default_root() if root is None else Path(root)
        self.problems: tuple[str, ...] = ()  # of the last `list`, one sentence each

    def list(self) -> list[OllamaModel]:
        """Return all models, sorted by name. `problems` describes those that cannot be read."""
        manifests, problems = _manifests(self.root)
        models = []
        for name, path in manifests.items():
            try:
                models.append(_load(name, path, self.root / "blobs"))
            except GgufError as error:
                problems.append(str(error))
        self.problems = tuple(problems)
        return sorted(models, key=lambda model: str(model.name))

    def find(self, name: str) -> OllamaModel:
        """Return the model of this name in any case; the exact spelling is preferred.

        Raises ModelNotFoundError, which lists the most similar names.
        """
        wanted = ModelName.parse(name)
        manifests, problems = _manifests(self.root)
        if wanted not in manifests:
            matches = [other for other in manifests if other.folded() == wanted.folded()]
            if not matches:
                raise ModelNotFoundError(_not_found(wanted, manifests, problems, self.root))
            wanted = matches[0]
        return _load(wanted, manifests[wanted], self.root / "blobs")


def default_root() -> Path:
    """Return Ollama's folder of models: $OLLAMA_MODELS, else the user's, else the service's."""
    configured = os.environ.get("OLLAMA_MODELS", "").strip().strip("\"'")
    if configured:
        return Path(configured)
    home = Path(os.path.expanduser("~"), ".ollama", "models")
    return SERVICE_ROOT if not _exists(home) and _exists(SERVICE_ROOT) else home


def parse_digest(text: str) -> str:
    """Return the 64 hex digits of `sha256:…` or `sha256-…` in lower case, or raise GgufError."""
    match = _DIGEST.fullmatch(text)
    if not match:
        raise GgufError(f"{text[:80]!r} is not a digest: sha256: and 64 hex digits are expected.")
    return match[1].lower()


def sha256_file(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """Return the sha256 of a file in hex; `progress` is called with the bytes done so far."""
    digest, done = hashlib.sha256(), 0
    try:
        with open(path, "rb", buffering=0) as file:
            while data := file.read(1 << 20):
                digest.update(data)
                done += len(data)
                if progress:
                    progress(done)
    except OSError as error:
        raise GgufError(f"{path} cannot be read: {error.strerror}.") from error
    return digest.hexdigest()


def _exists(path: Path) -> bool:
    try:
        os.stat(path)
    except PermissionError:
        return True  # it exists but cannot be read, which the listing reports
    except OSError:
        return False
    return True


def _manifests(root: Path) -> tuple[dict[ModelName, Path], list[str]]:
    """Return the manifest of every model, and a sentence about each invalid one."""
    manifests: dict[ModelName, Path] = {}
    problems: list[str] = []
    for path in _walk(root / "manifests", 4, problems):
        try:
            manifests[ModelName(*path.parts[-4:])] = path
        except InputError as error:
            problems.append(f"{str(path)!r} is skipped. {error}")
    return manifests, problems


def _walk(folder: Path, depth: int, problems: list[str]) -> Iterator[Path]:
    """Yield the files `depth` levels down. Links are not followed: they may lead anywhere."""
    try:
        with os.scandir(folder) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
        for entry in entries:
            if entry.name.startswith("."):
                continue  # hidden files such as .DS_Store; no model name starts with a dot
            if entry.is_symlink():
                problems.append(f"{entry.path!r} is skipped: it is a symbolic link.")
            elif depth > 1 and entry.is_dir():
                yield from _walk(folder / entry.name, depth - 1, problems)
            elif depth == 1 and entry.is_file():
                yield folder / entry.name
    except FileNotFoundError:
        pass  # the store is empty
    except OSError as error:
        problems.append(f"{str(folder)!r} cannot be read: {error.strerror}.")


def _not_found(
    wanted: ModelName, present: Iterable[ModelName], problems: list[str], root: Path
) -> str:
    """Return the message for a missing model, with the most similar names first."""

    def similarity(name: str) -> float:
        return SequenceMatcher(None, name.lower(), str(wanted).lower()).ratio()

    names = sorted(sorted(map(str, present)), key=similarity, reverse=True)
    if names:
        more = f" and {len(names) - 10} more" if len(names) > 10 else ""
        hint = f"Available: {', '.join(names[:10])}{more}."
    else:
        hint = "The store is empty: if Ollama's models are elsewhere, set OLLAMA_MODELS."
    problem = f"Ollama has no {wanted} in {str(root)!r}: download it with `ollama pull {wanted}`."
    return " ".join([problem, hint, *problems[:3]])


def _load(name: ModelName, path: Path, blobs: Path) -> OllamaModel:
    where = f"The manifest of {name}"
    text = _read(path, where)
    manifest = _checked(_parse_json(text, where), dict, where)
    entries = _field(manifest, "layers", list, where)
    layers = [_layer(entry, blobs, f"{where}, layer {i}") for i, entry in enumerate(entries)]
    config: dict[str, Any] = {}
    config_layers = []
    entry = _field(manifest, "config", dict, where)
    if entry.get("digest"):
        config_layers = [_layer(entry, blobs, f"{where}, config")]
        config = _config(config_layers[0], f"The config of {name}")
    return OllamaModel(
        name=name,
        manifest_path=path,
        layers=tuple(layers),
        config=config,
        digest=hashlib.sha256(text.encode()).hexdigest(),
        modified_seconds=_stat(path, where).st_mtime,
        nbytes=sum(layer.nbytes for layer in layers + config_layers),
    )


def _layer(entry: Any, blobs: Path, where: str) -> Layer:
    entry = _checked(entry, dict, where)
    digest = _field(entry, "digest", str, where)
    try:
        hex_digits = parse_digest(digest)
    except GgufError as error:
        raise GgufError(f"{where} is damaged: {error} Pull the model again.") from None
    nbytes = _field(entry, "size", int, where)
    if not 0 <= nbytes < 1 << 63:
        raise GgufError(f"{where} is damaged: its size is out of range: pull the model again.")
    return Layer(
        kind=_field(entry, "mediaType", str, where).removeprefix(_IMAGE),
        digest=f"sha256:{hex_digits}",
        nbytes=nbytes,
        path=blobs / digest.replace(":", "-"),  # in the case that the manifest uses, as Ollama does
        name=_field(entry, "name", str, where),
    )


def _config(layer: Layer, where: str) -> dict[str, Any]:
    config = _checked(_parse_json(_read(_blob_path(layer, where), where), where), dict, where)
    for kind, keys in _CONFIG_KEYS.items():
        for key in keys:
            value = _field(config, key, kind, where)
            for item in value if kind is list else ():
                _checked(item, str, f"{where}, {key!r}")
    return {key: value for key, value in config.items() if value is not None}


def _field(entry: dict[str, Any], key: str, kind: type[T], where: str) -> T:
    """Return a value of type `kind`; missing and null become its empty value, as in Ollama."""
    value = entry.get(key)
    return kind() if value is None else _checked(value, kind, f"{where}, {key!r}")


def _checked(value: Any, kind: type[T], where: str) -> T:
    """Return the value; raise GgufError unless it has exactly the type `kind`."""
    if type(value) is not kind:  # isinstance would accept true as an int
        raise GgufError(
            f"{where} is damaged: {kind.__name__} is expected, not {type(value).__name__}: "
            "pull the model again."
        )
    return value


def _parse_json(text: str, where: str) -> Any:
    def reject(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        value = json.loads(text, parse_constant=reject)
        json.dumps(value, ensure_ascii=False).encode()  # fails on half a surrogate pair
    except (ValueError, RecursionError) as error:
        raise GgufError(f"{where} is damaged: {error}: pull the model again.") from None
    return value


def _stat(path: Path, where: str) -> os.stat_result:
    """Return the status of a plain file; raise GgufError for anything else, such as a pipe."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise GgufError(f"{where} is missing ({path}): pull the model again.") from None
    except OSError as error:
        raise GgufError(f"{where} cannot be read ({path}): {error.strerror}.") from error
    if not stat.S_ISREG(status.st_mode):
        raise GgufError(f"{where} is not a plain file ({path}): pull the model again.")
    return status


def _blob_path(layer: Layer, where: str) -> Path:
    """Return the path of a layer's blob; raise GgufError if it is missing or has another size."""
    nbytes = _stat(layer.path, where).st_size
    if nbytes != layer.nbytes:
        raise GgufError(f"{where} has {nbytes} of {layer.nbytes} bytes: pull it again.")
    return layer.path


def _read(path: Path, where: str) -> str:
    """Return the content of a small text file."""
    if _stat(path, where).st_size > MAX_TEXT_NBYTES:
        raise GgufError(f"{where} is larger than {MAX_TEXT_NBYTES >> 20} MiB: it is not read.")
    try:
        with open(path, "rb") as file:
            return file.read(MAX_TEXT_NBYTES).decode()
    except OSError as error:
        raise GgufError(f"{where} cannot be read ({path}): {error.strerror}.") from error
    except UnicodeDecodeError:
        raise GgufError(f"{where} is damaged: it is not UTF-8: pull the model again.") from None
