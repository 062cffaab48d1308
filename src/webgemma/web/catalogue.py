"""Models of the local Ollama store for the page: their list, and their blobs by digest."""

import os
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from webgemma.errors import GgufError
from webgemma.gguf.ollama import Layer, OllamaModel, OllamaStore, parse_digest
from webgemma.web.gpu_memory import GpuSizes
from webgemma.web.http import Content, RefusalError


@dataclass(frozen=True, slots=True)
class _Blob:
    """A blob, and the manifest that lists it."""

    layer: Layer
    manifest: Path
    manifest_seconds: float  # modification time

    def is_current(self) -> bool:
        """Return whether the manifest exists and is unchanged."""
        try:
            return os.stat(self.manifest).st_mtime == self.manifest_seconds
        except OSError:
            return False


class Catalogue:
    """The models of a store, read again for each list; only blobs of manifests are served."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = OllamaStore(root).root
        self._blobs: dict[str, _Blob] = {}  # by digest; replaced as a whole, never changed
        self._sizes = GpuSizes()

    def models(self) -> dict[str, Any]:
        """Return the list of models, each with its blob or the reason why it has none."""
        store = OllamaStore(self.root)
        models = store.list()
        self._index_blobs(models)
        self._sizes.start_listing()
        return {"models": [self._facts(m) for m in models], "problems": list(store.problems)}

    def blob(self, digest: str) -> Content:
        """Return the blob of a digest, `sha256:…` or `sha256-…`; RefusalError if there is none."""
        try:
            normalised = f"sha256:{parse_digest(digest)}"
        except GgufError as error:
            raise RefusalError(HTTPStatus.NOT_FOUND, str(error)) from None
        blob = self._blobs.get(normalised)
        if blob is None or not blob.is_current():
            self._index_blobs(OllamaStore(self.root).list())
            blob = self._blobs.get(normalised)
        if blob is None:
            raise RefusalError(
                HTTPStatus.NOT_FOUND,
                f"No model in this machine's Ollama store has the blob {normalised}.",
            )
        try:
            path = self._checked_path(blob.layer)
        except GgufError as error:
            raise RefusalError(HTTPStatus.NOT_FOUND, str(error)) from None
        # The page stores models itself: the browser's cache would hold a second copy.
        return Content("application/octet-stream", path, blob.layer.nbytes, normalised, "no-store")

    def _index_blobs(self, models: list[OllamaModel]) -> None:
        self._blobs = {
            layer.digest: _Blob(layer, model.manifest_path, model.modified_seconds)
            for model in models
            for layer in model.layers
        }

    def _facts(self, model: OllamaModel) -> dict[str, Any]:
        """Return what the page shows of a model and needs to fetch it."""
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
            "gpu_min_nbytes": None,
            "projectors": [],
            "draft": None,
            "problem": None,
        }
        try:
            _ = model.path  # GgufError with the reason if the weights are not on this machine
            weights = [layer for layer in model.layers if layer.kind == "model"][-1]
            projectors = [layer for layer in model.layers if layer.kind == "projector"]
            facts["projectors"] = [self._address(layer) for layer in projectors]
            drafts = [layer for layer in model.layers if layer.kind == "draft"]
            facts["draft"] = self._address(drafts[-1]) if drafts else None
            facts |= self._address(weights)
            size = self._sizes.of(weights.digest, weights.path, str(model.name))
            facts |= {"gpu_nbytes": size.nbytes, "gpu_min_nbytes": size.min_nbytes}
            facts["problem"] = size.problem
        except GgufError as error:
            facts["problem"] = str(error)
        return facts

    def _address(self, layer: Layer) -> dict[str, Any]:
        """Return digest, size and URL of a blob; GgufError if it cannot be served."""
        self._checked_path(layer)
        url = f"models/{layer.digest.replace(':', '-')}"
        return {"digest": layer.digest, "nbytes": layer.nbytes, "url": url}

    def _checked_path(self, layer: Layer) -> Path:
        """Return the blob's file; GgufError unless it is complete and inside the blobs folder."""
        try:
            folder, path = layer.path.parent.resolve(), layer.path.resolve()
        except (OSError, RuntimeError):  # circular links
            raise GgufError(f"The blob {layer.digest} cannot be read: pull it again.") from None
        if path.parent != folder:
            raise GgufError(
                f"The blob {layer.digest} is a link to outside the store: it is not read."
            )
        if not path.is_file():
            raise GgufError(f"The blob {layer.digest} is missing: pull the model again.")
        nbytes = path.stat().st_size
        if nbytes != layer.nbytes:
            raise GgufError(
                f"The blob {layer.digest} has {nbytes} of {layer.nbytes} bytes: pull it again."
            )
        return path
