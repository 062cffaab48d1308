"""Ollama's model store on disk: from a name such as "gemma4:e2b" to the files of that model.

    ROOT/manifests/HOST/NAMESPACE/MODEL/TAG    JSON: which blobs make up the model
    ROOT/blobs/sha256-<64 hex>                 the GGUF file, the config, the texts

Manifests are other people's data. A name is compared with what the folders hold and never joined
into a path; a digest becomes a path only when it is a digest.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, TypeVar

from webgemma.errors import GgufError, InputError, ModelNotFoundError
from webgemma.gguf.ollama_names import ModelName

SERVICE_ROOT = Path("/usr/share/ollama/.ollama/models")  # where Ollama's Linux service keeps them
TEXT_LIMIT_NBYTES = 4 << 20  # of everything but weights: manifest, config, template, licence, …

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
class Layer:
    """One blob of a model, as its manifest describes it; the file may still be missing."""

    kind: str  # "model", "projector", "template", …: the media type after Ollama's prefix
    digest: str  # "sha256:" and 64 hex digits
    nbytes: int
    path: Path
    name: str = ""  # of a tensor or file, in models that are not GGUF


@dataclass(frozen=True, slots=True)
class OllamaModel:
    """A model of the store. Its files are looked at when they are asked for."""

    name: ModelName
    manifest_path: Path
    layers: tuple[Layer, ...]
    config: dict[str, Any]  # the keys that Ollama knows have the types that Ollama gives them
    digest: str  # sha256 of the manifest in hex; its first 12 digits are the ID in `ollama list`
    config_digest: str
    modified_seconds: float  # since 1970
    nbytes: int  # of all layers and the config

    @property
    def path(self) -> Path:
        """The model's GGUF file, present and of the right size."""
        if remote := self.config.get("remote_host") or self.config.get("remote_model"):
            raise GgufError(
                f"{self.name} runs on {remote!r} and has no weights on this machine: "
                "pull a tag that is not a cloud model."
            )
        models, tensors = self._layers("model"), self._layers("tensor")
        if self.config.get("model_format") == "safetensors" or (tensors and not models):
            raise GgufError(
                f"{self.name} is stored as safetensors and webgemma reads GGUF: "
                "pull a tag that Ollama keeps as GGUF."
            )
        if not models:
            raise GgufError(f"{self.name} has no model file in its manifest: pull it again.")
        return _intact(models[-1], f"The model file of {self.name}")

    @property
    def projectors(self) -> tuple[Path, ...]:
        """GGUF files of the image and sound towers; empty when the model file holds them."""
        return self._files("projector")

    @property
    def adapters(self) -> tuple[Path, ...]:
        """GGUF files of LoRA adapters."""
        return self._files("adapter")

    @property
    def draft(self) -> Path | None:
        """The GGUF file of the small model that guesses ahead."""
        return (self._files("draft") or (None,))[-1]

    @property
    def template(self) -> str:
        """The Go template of the prompt; "" when there is none."""
        return (self._texts("template", "prompt") or ("",))[-1]

    @property
    def system(self) -> str:
        """The system message; "" when there is none."""
        return (self._texts("system") or ("",))[-1]

    @property
    def licenses(self) -> tuple[str, ...]:
        """The texts of the licences."""
        return self._texts("license")

    @property
    def params(self) -> dict[str, Any]:
        """Options for sampling and running, as Ollama names them; their values are not checked."""
        where = f"The params file of {self.name}"
        text = (self._texts("params") or ("{}",))[-1]
        return _typed(_parse_json(text, where), dict, where)

    @property
    def messages(self) -> tuple[dict[str, Any], ...]:
        """The messages that open every conversation; `role` and `content` are texts."""
        where = f"The messages file of {self.name}"
        text = (self._texts("messages") or ("[]",))[-1]
        messages = _typed(_parse_json(text, where), list, where)
        for message in messages:
            for key in ("role", "content"):
                _typed(_typed(message, dict, where).get(key), str, f"{where}, {key!r}")
        return tuple(messages)

    def _layers(self, *kinds: str) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.kind in kinds)

    def _files(self, kind: str) -> tuple[Path, ...]:
        where = f"The {kind} file of {self.name}"
        return tuple(_intact(layer, where) for layer in self._layers(kind))

    def _texts(self, *kinds: str) -> tuple[str, ...]:
        where = f"The {kinds[0]} file of {self.name}"
        return tuple(_read(_intact(layer, where), where) for layer in self._layers(*kinds))


class OllamaStore:
    """The models that Ollama has on this machine. Nothing here writes."""

    def __init__(self, root: Path | None = None) -> None:
        """`root` is the folder with `manifests` and `blobs`; by default the one Ollama uses."""
        self.root = default_root() if root is None else Path(root)
        self.problems: tuple[str, ...] = ()  # of the last listing, a sentence each

    def list(self) -> list[OllamaModel]:
        """All models by name. Those that cannot be read are left out and stand in `problems`."""
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
        """The model of this name, written in any case; the exact spelling wins."""
        wanted = ModelName.parse(name)
        manifests, problems = _manifests(self.root)
        if wanted not in manifests:
            same = [found for found in manifests if found.folded() == wanted.folded()]
            if not same:
                raise ModelNotFoundError(_not_found(wanted, manifests, problems, self.root))
            wanted = same[0]
        return _load(wanted, manifests[wanted], self.root / "blobs")


def default_root() -> Path:
    """Where Ollama keeps its models: $OLLAMA_MODELS, else the user's store, else the service's."""
    configured = os.environ.get("OLLAMA_MODELS", "").strip().strip("\"'")
    if configured:
        return Path(configured)
    home = Path(os.path.expanduser("~"), ".ollama", "models")
    return SERVICE_ROOT if not _exists(home) and _exists(SERVICE_ROOT) else home


def parse_digest(text: str) -> str:
    """The 64 hex digits, in lower case, of `sha256:…` or `sha256-…`."""
    found = _DIGEST.fullmatch(text)
    if not found:
        raise GgufError(f"{text[:80]!r} is not a digest: sha256: and 64 hex digits are expected.")
    return found[1].lower()


def sha256_file(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """The sha256 of a file in hex; `progress` hears how many bytes are done."""
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
        return True  # there, though not for us: the listing will say so
    except OSError:
        return False
    return True


def _manifests(root: Path) -> tuple[dict[ModelName, Path], list[str]]:
    """The manifest of every model, and what is wrong with the others."""
    manifests: dict[ModelName, Path] = {}
    problems: list[str] = []
    for path in _walk(root / "manifests", 4, problems):
        try:
            manifests[ModelName(*path.parts[-4:])] = path
        except InputError as error:
            problems.append(f"{str(path)!r} is left out. {error}")
    return manifests, problems


def _walk(folder: Path, depth: int, problems: list[str]) -> Iterator[Path]:
    """The files `depth` levels down. Links are not followed: they could lead anywhere."""
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            if entry.name.startswith("."):
                continue  # no name starts so, but .DS_Store does
            if entry.is_symlink():
                problems.append(f"{entry.path!r} is left out: it is a symbolic link.")
            elif depth > 1 and entry.is_dir():
                yield from _walk(folder / entry.name, depth - 1, problems)
            elif depth == 1 and entry.is_file():
                yield folder / entry.name
    except FileNotFoundError:
        pass  # an empty store
    except OSError as error:
        problems.append(f"{str(folder)!r} cannot be read: {error.strerror}.")


def _not_found(
    wanted: ModelName, present: Iterable[ModelName], problems: list[str], root: Path
) -> str:
    def likeness(name: str) -> float:
        return SequenceMatcher(None, name.lower(), str(wanted).lower()).ratio()

    names = sorted(sorted(map(str, present)), key=likeness, reverse=True)
    if names:
        more = f" and {len(names) - 10} more" if len(names) > 10 else ""
        hint = f"There are {', '.join(names[:10])}{more}."
    else:
        hint = "There are none at all: if Ollama keeps them elsewhere, set OLLAMA_MODELS."
    sentence = f"Ollama has no {wanted} in {str(root)!r}: `ollama pull {wanted}` gets it."
    return " ".join([sentence, hint, *problems[:3]])


def _load(name: ModelName, path: Path, blobs: Path) -> OllamaModel:
    where = f"The manifest of {name}"
    text = _read(path, where)
    manifest = _typed(_parse_json(text, where), dict, where)
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
        config_digest="".join(layer.digest for layer in config_layers),
        modified_seconds=_stat(path, where).st_mtime,
        nbytes=sum(layer.nbytes for layer in layers + config_layers),
    )


def _layer(entry: Any, blobs: Path, where: str) -> Layer:
    entry = _typed(entry, dict, where)
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
        path=blobs / digest.replace(":", "-"),  # in the manifest's case, as Ollama does
        name=_field(entry, "name", str, where),
    )


def _config(layer: Layer, where: str) -> dict[str, Any]:
    config = _typed(_parse_json(_read(_intact(layer, where), where), where), dict, where)
    for kind, keys in _CONFIG_KEYS.items():
        for key in keys:
            value = _field(config, key, kind, where)
            for item in value if kind is list else ():
                _typed(item, str, f"{where}, {key!r}")
    return {key: value for key, value in config.items() if value is not None}


def _field(entry: dict[str, Any], key: str, kind: type[T], where: str) -> T:
    """A value of the right type; absent and null are its empty value, as for Ollama."""
    value = entry.get(key)
    return kind() if value is None else _typed(value, kind, f"{where}, {key!r}")


def _typed(value: Any, kind: type[T], where: str) -> T:
    if type(value) is not kind:  # not isinstance: true is no number
        raise GgufError(
            f"{where} is damaged: {kind.__name__} is expected, not {type(value).__name__}: "
            "pull the model again."
        )
    return value


def _parse_json(text: str, where: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        value = json.loads(text, parse_constant=refuse)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair fails here
    except (ValueError, RecursionError) as error:
        raise GgufError(f"{where} is damaged: {error}: pull the model again.") from None
    return value


def _stat(path: Path, where: str) -> os.stat_result:
    """Size and time of a plain file; anything else, a pipe say, is refused without opening it."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise GgufError(f"{where} is missing ({path}): pull the model again.") from None
    except OSError as error:
        raise GgufError(f"{where} cannot be read ({path}): {error.strerror}.") from error
    if not stat.S_ISREG(found.st_mode):
        raise GgufError(f"{where} is not a plain file ({path}): pull the model again.")
    return found


def _intact(layer: Layer, where: str) -> Path:
    """The path of a layer's blob, which is there and has the size that the manifest says."""
    nbytes = _stat(layer.path, where).st_size
    if nbytes != layer.nbytes:
        raise GgufError(f"{where} has {nbytes} of {layer.nbytes} bytes: pull it again.")
    return layer.path


def _read(path: Path, where: str) -> str:
    if _stat(path, where).st_size > TEXT_LIMIT_NBYTES:
        raise GgufError(f"{where} is larger than {TEXT_LIMIT_NBYTES >> 20} MiB: it is not read.")
    try:
        with open(path, "rb") as file:
            return file.read(TEXT_LIMIT_NBYTES).decode()
    except OSError as error:
        raise GgufError(f"{where} cannot be read ({path}): {error.strerror}.") from error
    except UnicodeDecodeError:
        raise GgufError(f"{where} is damaged: it is not UTF-8: pull the model again.") from None
