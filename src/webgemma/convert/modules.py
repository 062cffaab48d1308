"""What sentence-transformers puts behind a text model: mean pooling, and dense layers."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from webgemma.convert.folder import SourceTensor, open_tensors, read_json, read_value
from webgemma.errors import GgufError, ModelNotFoundError
from webgemma.gemma.config import DENSE
from webgemma.values import shown

MODULES = "modules.json"
KINDS = ("Transformer", "Pooling", "Dense", "Normalize")
WEIGHT = "linear.weight"  # of a dense layer
MODES = "pooling_mode_"  # how the names of older flags begin


def check_pooling(folder: Path) -> None:
    """Raise GgufError if a folder's modules say other than that a vector is the mean of tokens."""
    for kind, path in _modules(folder):
        if kind != "Pooling":
            continue
        values = read_json(path / "config.json")
        flags = [key.removeprefix(MODES) for key in values if key.startswith(MODES) and values[key]]
        mode = values.get("pooling_mode", flags)
        if mode not in ("mean", ["mean"], ["mean_tokens"]) or not values.get("include_prompt", 1):
            raise GgufError(
                f"{path.name}/config.json does not pool by the mean of all tokens: its mode is "
                f"{shown(mode)}; EmbeddingGemma has no other."
            )


def dense_layers(folder: Path, files: ExitStack) -> dict[str, SourceTensor]:
    """Return EmbeddingGemma's two dense layers under their GGUF names."""
    if not (folder / MODULES).is_file():
        raise ModelNotFoundError(
            f"{folder} has no {MODULES}, so its dense layers are unknown; download all files of "
            "the model, with the folders 2_Dense and 3_Dense."
        )
    paths = [path for kind, path in _modules(folder) if kind == "Dense"]
    if len(paths) != len(DENSE):
        raise GgufError(f"{MODULES} has {len(paths)} dense layers; EmbeddingGemma has two.")
    return {name: _weight(path, files) for name, path in zip(DENSE, paths, strict=True)}


def _weight(path: Path, files: ExitStack) -> SourceTensor:
    """Return the matrix of a dense layer; GgufError if it has more than that."""
    activation = read_json(path / "config.json").get("activation_function", "Identity")
    tensors = {tensor.name: tensor for tensor in open_tensors(path, files)}
    if list(tensors) != [WEIGHT] or not str(activation).endswith("Identity"):
        raise GgufError(
            f"{path.name} has the tensors {shown(sorted(tensors))} and the activation "
            f"{shown(activation)}; a dense layer of EmbeddingGemma has {WEIGHT} and no activation."
        )
    if len(tensors[WEIGHT].shape) != 2:
        raise GgufError(
            f"{path.name}: {WEIGHT} has the shape {tensors[WEIGHT].shape}: it is not a matrix."
        )
    return tensors[WEIGHT]


def _modules(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the kind and the folder of each module; none if there is no list of them."""
    if not (folder / MODULES).is_file():
        return
    listed = read_value(folder / MODULES)
    for module in listed if isinstance(listed, list) else [None]:
        values = module if isinstance(module, dict) else {}
        kind, path = str(values.get("type")).rpartition(".")[2], values.get("path", "")
        if kind not in KINDS or not isinstance(path, str) or Path(path).name != path:
            raise GgufError(
                f"{MODULES} lists {shown(module)}; the modules of EmbeddingGemma are "
                f"{', '.join(KINDS)}, each in the model's folder or one inside it."
            )
        yield kind, folder / path
