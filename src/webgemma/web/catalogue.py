"""What the local Ollama store offers the page: a list of models, and their blobs by digest."""

import os
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from webgemma.errors import GgufError
from webgemma.gguf.ollama import Layer, OllamaModel, OllamaStore, parse_digest
from webgemma.web.http import Content, RefusalError
from webgemma.web.sizes import GpuSizes


@dataclass(frozen=True, slots=True)
class _Named:
    """A blob, and the manifest that names it."""

    layer: Layer
    manifest: Path
    manifest_seconds: float

    def still(self) -> bool:
        """Whether the manifest is there and unchanged."""
        try:
            return os.stat(self.manifest).st_mtime == self.manifest_seconds
        except OSError:
            return False


class Catalogue:
    """The models of a store, looked at anew for each list; only what manifests name is served."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = OllamaStore(root).root
        self._named: dict[str, _Named] = {}  # by digest; replaced as a whole, never changed
        self._sizes = GpuSizes()

    def models(self) -> dict[str, Any]:
        """The models by name, each with its blob or the sentence why it has none."""
        store = OllamaStore(self.root)
        models = store.list()
        self._remember(models)
        self._sizes.begin()
        return {"models": [self._facts(m) for m in models], "problems": list(store.problems)}

    def blob(self, digest: str) -> Content:
        """The blob of a digest, `sha256:…` or `sha256-…`."""
        try:
            wanted = f"sha256:{parse_digest(digest)}"
        except GgufError as error:
            raise RefusalError(HTTPStatus.NOT_FOUND, str(error)) from None
        named = self._named.get(wanted)
        if named is None or not named.still():
            self._remember(OllamaStore(self.root).list())
            named = self._named.get(wanted)
        if named is None:
            raise RefusalError(
                HTTPStatus.NOT_FOUND, f"No model of Ollama's store here has the blob {wanted}."
            )
        try:
            path = self._inside(named.layer)
        except GgufError as error:
            raise RefusalError(HTTPStatus.NOT_FOUND, str(error)) from None
        # The page keeps models itself: in the browser's cache they would lie a second time.
        return Content("application/octet-stream", path, named.layer.nbytes, wanted, "no-store")

    def _remember(self, models: list[OllamaModel]) -> None:
        self._named = {
            layer.digest: _Named(layer, model.manifest_path, model.modified_seconds)
            for model in models
            for layer in model.layers
        }

    def _facts(self, model: OllamaModel) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "name": str(model.name),
            "family": model.config.get("model_family", ""),
            "parameters": model.config.get("model_type", ""),
            "quantisation": model.config.get("file_type", ""),
            "format": model.config.get("model_format", ""),
            "nbytes": model.nbytes,
            "digest": None,
            "url": None,
            "gpu_nbytes": None,
            "gpu_least_nbytes": None,
            "projectors": [],
            "problem": None,
        }
        try:
            _ = model.path  # says why a model has no weights here
            weights = [layer for layer in model.layers if layer.kind == "model"][-1]
            projectors = [layer for layer in model.layers if layer.kind == "projector"]
            facts["projectors"] = [self._address(layer) for layer in projectors]
            facts |= self._address(weights)
            size = self._sizes.of(weights.digest, weights.path, str(model.name))
            facts |= {"gpu_nbytes": size.nbytes, "gpu_least_nbytes": size.least_nbytes}
            facts["problem"] = size.problem
        except GgufError as error:
            facts["problem"] = str(error)
        return facts

    def _address(self, layer: Layer) -> dict[str, Any]:
        self._inside(layer)
        url = f"/models/{layer.digest.replace(':', '-')}"
        return {"digest": layer.digest, "nbytes": layer.nbytes, "url": url}

    def _inside(self, layer: Layer) -> Path:
        """The blob's file, whole and truly in the store's folder of blobs."""
        try:
            folder, path = layer.path.parent.resolve(), layer.path.resolve()
        except (OSError, RuntimeError):  # links in circles
            raise GgufError(f"The blob {layer.digest} cannot be read: pull it again.") from None
        if path.parent != folder:
            raise GgufError(f"The blob {layer.digest} is a link out of the store: it is not read.")
        if not path.is_file():
            raise GgufError(f"The blob {layer.digest} is missing: pull the model again.")
        nbytes = path.stat().st_size
        if nbytes != layer.nbytes:
            raise GgufError(
                f"The blob {layer.digest} has {nbytes} of {layer.nbytes} bytes: pull it again."
            )
        return path
