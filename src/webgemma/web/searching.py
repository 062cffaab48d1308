"""Search in documents on the page: an embedding model beside the chat model, and vectors on the
GPU."""

import base64
import json
import warnings
from array import array
from collections.abc import Awaitable, Callable
from typing import Any

from webgemma.api import Gemma
from webgemma.device import Device, aopen_device
from webgemma.embeddings import Task
from webgemma.engine.nearest import Vectors
from webgemma.errors import DeviceLostError, DeviceMemoryError, InputError, WebgemmaError
from webgemma.gemma.config import Config
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import Source
from webgemma.models import gpu_nbytes
from webgemma.web.gpu_memory import free_nbytes

SIZE = 256  # of EmbeddingGemma's 768 numbers: a third of the storage, and nearly as good
CONTEXT = 2048  # tokens; a passage has fewer than its bytes, which static/passages.js limits


class Searching:
    """Embeds passages and questions, and finds the vectors that are most like a question.

    Its methods handle the requests of the same names that static/tab_engine.js lists. Each reports
    `searched` with the request's id, or the error."""

    def __init__(
        self,
        report: Callable[..., None],
        report_error: Callable[[WebgemmaError, Any], None],
        open_source: Callable[[Any], Awaitable[Source]],
    ) -> None:
        self._report, self._report_error = report, report_error
        self._open = open_source
        self._model: Gemma | None = None
        self._device: Device | None = None  # of the vectors
        self._vectors: Vectors | None = None

    async def handle(self, id: Any, request: str, *arguments: Any) -> None:
        """Do what a request asks for, and report its end."""
        acts: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
            "load": self.load,
            "embed": self.embed,
            "vectors": self.set_vectors,
            "nearest": self.nearest,
            "free": self.free,
        }
        try:
            facts = await acts[request](*arguments)
        except WebgemmaError as error:
            if isinstance(error, DeviceLostError):  # the next request begins anew
                await self.free()
            self._report_error(error, id)
            return
        self._report("searched", search=id, **facts)

    async def load(self, spec: Any) -> dict[str, Any]:
        """Load an embedding model in place of another one, if the GPU has room beside the chat's.

        Returns the size of the vectors."""
        await self.free()
        gguf = await Gguf.aopen(await self._open(spec))
        try:
            config = Config.from_gguf(gguf)
            if config.embedding is None:
                raise InputError(
                    f"{gguf.name} writes text and does not embed",
                    "choose EmbeddingGemma, such as Ollama's embeddinggemma",
                )
            await _check_memory(gguf)
        except BaseException:
            gguf.close()
            raise
        context = min(CONTEXT, config.context)
        opened: Any = gguf
        self._model = await Gemma.aload(opened, "gpu", context=context)
        return {"size": self._size, "nbytes": self._model.memory_nbytes}

    async def embed(self, texts: str, task: Task) -> dict[str, Any]:
        """Return the vectors of a JSON list of texts: float32 values in base64."""
        rows = await self._embedded(json.loads(texts), task)
        values = array("f", (value for row in rows for value in row))
        return {"vectors": base64.b64encode(values.tobytes()).decode()}

    async def set_vectors(self, data: Any, size: int) -> dict[str, Any]:
        """Upload the vectors that are searched, in place of others."""
        self._free_vectors()
        self._device = self._device or await aopen_device()
        self._vectors = Vectors(self._device, data.to_bytes(), size)
        return {"count": self._vectors.count}

    async def nearest(self, question: str, count: int) -> dict[str, Any]:
        """Return the numbers of the vectors that are most like a question, the best first."""
        if self._vectors is None:
            raise InputError("There are no vectors to search: add documents.")
        (row,) = await self._embedded([question], "query")
        return {"numbers": await self._vectors.nearest(list(row), count)}

    async def free(self) -> dict[str, Any]:
        """Free the model and the vectors."""
        model, self._model = self._model, None
        if model is not None:
            model.close()
        self._free_vectors()
        if self._device is not None:
            self._device.close()
            self._device = None
        return {}

    @property
    def _size(self) -> int:
        return min(SIZE, self._loaded.texts.embedding.size)

    @property
    def _loaded(self) -> Gemma:
        if self._model is None:
            raise InputError("No embedding model is loaded: choose one.")
        return self._model

    async def _embedded(self, texts: list[str], task: Task) -> list[Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a question that is cut
            rows = await self._loaded.aembed(texts, task=task, size=self._size)
        return list(rows)

    def _free_vectors(self) -> None:
        vectors, self._vectors = self._vectors, None
        if vectors is not None:
            vectors.close()


async def _check_memory(gguf: Gguf) -> None:
    """Raise DeviceMemoryError if the GPU has no room for a model beside what it holds."""
    nbytes, _ = gpu_nbytes(gguf)
    device = await aopen_device()
    try:
        free = await free_nbytes(device, nbytes)
    finally:
        device.close()
    if free < nbytes:
        raise DeviceMemoryError(
            f"{gguf.name} needs {nbytes / 1e9:.1f} GB of GPU memory beside the chat's model, but "
            f"{free / 1e9:.1f} GB is free",
            free,
            "load a smaller model to chat with",
        )
