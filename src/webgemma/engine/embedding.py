"""The engine of embedding models on the GPU: many texts packed into each pass."""

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from struct import pack
from typing import NamedTuple, NoReturn

from webgemma.denoising import Canvas
from webgemma.device import Device, Plan, Reading
from webgemma.engine.interface import EngineOptions
from webgemma.engine.memory_budget import MemoryBudget, free_host_nbytes, gigabytes
from webgemma.engine.selftest import check_matrix_units, selftest
from webgemma.errors import DeviceError, DeviceMemoryError, InputError
from webgemma.gemma.config import Config
from webgemma.gemma.embedding import (
    BATCH_WORDS,
    TEXT_WORDS,
    EmbeddingRecorder,
    Texts,
    packed_texts,
    record_vectors,
)
from webgemma.gemma.lora_weights import NO_CHOICE, Adapters, Choice, LoraScales, ScaledAdapter
from webgemma.gemma.record.precision import choose_precision
from webgemma.gemma.soft_tokens import SoftTokens, copy_soft_tokens, packed_ends
from webgemma.gemma.text import Inputs
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.graph import MAX_GRID, BufferPool, Recorder, Tensor
from webgemma.media.encoders import Encoders, MediaSpan, gpu_encoders, gpu_soft_tokens
from webgemma.progress import Progress
from webgemma.sampler import SampledToken
from webgemma.sync import IN_BROWSER, checkpoint

# Tokens of a pass, unless one text has more; matrix units of a large GPU need many to be busy.
BATCH, UNITS_BATCH = 2048, 32768
FEWEST_ROWS = 8  # of a plan
ROWS_STEP = 4  # a plan has so many times the rows of the next smaller one, up to FINE_ROWS
FINE_ROWS = 512  # from there on, twice as many
UNDER_WAY = 2  # passes that the device computes before the first one's vectors are read


class _Pass(NamedTuple):
    """A pass that the device computes: its vectors, when they are there."""

    reading: Reading
    texts: int


class _SoftRows(NamedTuple):
    """What a pass with soft tokens reads more."""

    marks: Tensor  # see lib/batch/soft_tokens
    rows: Tensor  # [tokens, width], those of the others are not read


class EmbeddingEngine:
    """A model on the GPU that makes vectors of texts. There is no conversation."""

    def __init__(
        self, gguf: Gguf, model: Model, context: int, precision: str, encoders: Encoders
    ) -> None:
        assert model.config.embedding is not None
        self.name = model.device.name
        self.gguf = gguf
        self.model = model
        self.device: Device = model.device
        self.encoders = encoders
        self.context = context
        self.precision = precision
        self.size = model.config.embedding.size
        self.most = most_tokens(model.config, self.device)  # tokens of a pass
        self.batch = UNITS_BATCH if precision == "f16" else BATCH  # the same, by default
        self.closed = False
        self._scratch = BufferPool(self.device)  # of all plans: they run one after another
        self._passes: Passes | None = None
        self._lora = LoraScales(model.lora, 1)

    @property
    def nbytes(self) -> int:
        """Memory of the device that is in use."""
        return self.device.nbytes

    async def embed(
        self,
        texts: Sequence[Sequence[int]],
        batch: int | None,
        progress: Progress,
        choice: Choice = NO_CHOICE,
        media: Sequence[Sequence[MediaSpan]] = (),
    ) -> bytes:
        """Return a float32 vector for each text, not normalised: [len(texts), size].

        At most `batch` tokens are computed at once, but always a whole text. The adapters of the
        choice are applied, beside those that always are. `media` are those of each text, if some
        have any: encoded images and audio, which are read in place of ids."""
        self._check_open()
        self._lora.set(0, choice)
        adapted = self.model.lora.applies(choice)
        vectors: list[bytes] = []
        under_way: list[_Pass] = []
        done = 0

        async def finish_first() -> None:
            nonlocal done
            first = under_way.pop(0)
            vectors.append(await first.reading.bytes())
            done += first.texts
            progress(done, len(texts))

        lengths = list(map(len, texts))
        bounds = list(packed(lengths, min(batch or self.batch, self.most)))
        rows = max((plan_rows(sum(lengths[first:end])) for first, end in bounds), default=0)
        passes = self.passes(rows)
        for first, end in bounds:
            checkpoint()
            self._check_open()
            starts = accumulate(lengths[first:end], initial=0)
            soft = [
                each
                for spans, start in zip(media[first:end], starts, strict=False)
                for each in gpu_soft_tokens(spans, offset=start)
            ]
            reading = await passes.submit(texts[first:end], adapted, soft)
            under_way.append(_Pass(reading, end - first))
            if len(under_way) == UNDER_WAY:
                await finish_first()
        while under_way:
            await finish_first()
        return b"".join(vectors)

    def passes(self, rows: int) -> "Passes":
        """Return the passes, with space for so many tokens."""
        if self._passes is not None and rows > self._passes.capacity:
            self._passes.close()
            self._passes = None
        if self._passes is None:
            capacity = max(rows, plan_rows(32))
            self._passes = Passes(self.model, self._lora, self.precision, self._scratch, capacity)
        return self._passes

    async def logits(self, ids: Sequence[int]) -> NoReturn:
        """Raise InputError, as all that writes text does."""
        del ids
        raise self._writes_nothing()

    def generate(self, *_: object, **__: object) -> AsyncGenerator[SampledToken, None]:
        """Raise InputError, as all that writes text does."""
        raise self._writes_nothing()

    def denoise(self, *_: object, **__: object) -> AsyncGenerator[Canvas, None]:
        """Raise InputError, as all that writes text does."""
        raise self._writes_nothing()

    @property
    def adapters(self) -> Adapters:
        """The adapters of the model."""
        return self.model.lora.adapters

    def set_adapters(
        self,
        always: Sequence[ScaledAdapter] | None = None,
        named: Mapping[str, ScaledAdapter] | None = None,
    ) -> None:
        """Apply adapters from now on, or attach some that calls may choose."""
        self._check_open()
        self.model.set_adapters(always, named)
        if self._passes is not None:  # whose plans have the old ones
            self._passes.close()
            self._passes = None
        self._lora.follow(self.model.lora)

    def slot_states(self, streams: int) -> list[tuple[bool, int]]:
        """Return whether something is being computed; no tokens are held."""
        return [(streams > 0, 0)]

    def prepare(self) -> None:
        """Start compiling the kernels of a short text, before they are needed."""
        self.passes(0).plans(plan_rows(32), FEWEST_ROWS, adapted=False)

    def close(self) -> None:
        """Free everything, and close the device and the file."""
        if not self.closed:
            self.free()
            self.device.close()
            self.gguf.close()

    def free(self) -> None:
        """Free the model and what passes work in."""
        self.closed = True
        if self._passes is not None:
            self._passes.close()
        self._lora.close()
        self._scratch.close()
        self.encoders.close()
        self.model.close()

    def _writes_nothing(self) -> InputError:
        return InputError(f"{self.gguf.name} is an embedding model, which writes no text.")

    def _check_open(self) -> None:
        if self.closed:
            raise InputError(f"{self.gguf.name} is closed: load the model again.")


class Passes:
    """The plans of passes over at most `capacity` tokens, and the tensors between them."""

    def __init__(
        self, model: Model, lora: LoraScales, precision: str, scratch: BufferPool, capacity: int
    ) -> None:
        assert model.config.embedding is not None
        self._lora = lora
        self.capacity = capacity
        self._model, self._device, self._precision = model, model.device, precision
        self._scratch, self._memory = scratch, BufferPool(model.device)
        self._plans: dict[tuple[str, int, bool], Plan] = {}
        self._soft: _SoftRows | None = None  # once a pass has some
        self._compiling = False
        tensor = self._memory.tensor
        try:
            batch = tensor(BATCH_WORDS + TEXT_WORDS * capacity, label="texts")
            self._inputs = Inputs(batch, tensor(capacity, label="texts"), {})
            self._texts = Texts(
                tensor(BATCH_WORDS, label="texts"), tensor(capacity, TEXT_WORDS, label="texts")
            )
            self._states = tensor(capacity, model.config.width, label="texts")
            self._vectors = tensor(capacity, model.config.embedding.size, label="texts")
        except BaseException:
            self.close()
            raise

    async def submit(
        self, texts: Sequence[Sequence[int]], adapted: bool, soft: Sequence[SoftTokens] = ()
    ) -> Reading:
        """Submit the passes over texts; return the reading of their vectors.

        Soft tokens are read in place of some of the ids of all texts."""
        count = sum(map(len, texts))
        rows = plan_rows(count)
        plans = self.plans(rows, plan_rows(len(texts)), adapted=adapted, soft=bool(soft))
        if self._compiling:
            await self._device.compiled()
            self._compiling = False
        write = self._device.write
        tokens, batch, bounds = packed_texts(list(map(len, texts)))
        write(self._inputs.batch.buffer, tokens)
        write(self._inputs.chunk_ids.buffer, pack(f"<{count}I", *(x for ids in texts for x in ids)))
        write(self._texts.batch.buffer, batch)
        write(self._texts.bounds.buffer, bounds)
        if soft:
            marks, rows_of = self._soft_rows()
            write(marks.buffer, pack("<4I", 0, count, 0, 0) + packed_ends(0, count, soft))
            copy_soft_tokens(self._device, rows_of, 0, count, soft)
        self._device.run(plans[0])
        row_nbytes = 4 * self._vectors.shape[1]
        reading = self._device.run(plans[1], (self._vectors.buffer, 0, row_nbytes * len(texts)))
        assert reading is not None
        return reading

    def plans(
        self, rows: int, texts: int, *, adapted: bool, soft: bool = False
    ) -> tuple[Plan, Plan]:
        """Return the plans for so many tokens, and for so many texts.

        `adapted`: with adapters; `soft`: with soft tokens among the tokens."""
        model, precision = self._model, self._precision
        lora = self._lora.applied if adapted else None
        read, pool = ("read soft" if soft else "read", rows, adapted), ("pool", texts, adapted)
        if read not in self._plans:
            recorder = Recorder(self._device, self._scratch)
            marks, rows_of = self._soft_rows() if soft else (None, None)
            inputs = replace(self._inputs, lora=lora, soft=rows_of)
            text = EmbeddingRecorder(model, recorder, inputs, rows, precision, marks)
            text.body(_first_rows(self._states, rows))
            self._keep(read, recorder)
        if pool not in self._plans:
            recorder = Recorder(self._device, self._scratch)
            vectors = _first_rows(self._vectors, texts)
            record_vectors(model, recorder, self._texts, self._states, vectors, precision, lora)
            self._keep(pool, recorder)
        return self._plans[read], self._plans[pool]

    def _soft_rows(self) -> "_SoftRows":
        """Return where passes find soft tokens."""
        if self._soft is None:
            tensor, width = self._memory.tensor, self._model.config.width
            marks = tensor(BATCH_WORDS + self.capacity, label="texts")
            self._soft = _SoftRows(marks, tensor(self.capacity, width, label="texts"))
        return self._soft

    def _keep(self, key: tuple[str, int, bool], recorder: Recorder) -> None:
        self._plans[key] = recorder.plan()
        self._compiling = True

    def close(self) -> None:
        """Free plans and tensors; the scratch is kept."""
        while self._plans:
            self._plans.popitem()[1].close(self._device)
        self._memory.close()


def packed(lengths: Sequence[int], batch: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of the texts of each pass: as many as `batch` tokens hold, or one."""
    starts, count = [0], 0
    for index, length in enumerate(lengths):
        if index > starts[-1] and count + length > batch:
            starts.append(index)
            count = 0
        count += length
    yield from pairwise([*starts, len(lengths)] if lengths else [])


def plan_rows(count: int) -> int:
    """Return the rows of the smallest plan that holds so many."""
    rows = FEWEST_ROWS
    while rows < count:
        rows *= ROWS_STEP if rows < FINE_ROWS else 2
    return rows


def _first_rows(tensor: Tensor, rows: int) -> Tensor:
    return tensor.rows(0, rows)


async def open_embedding_engine(
    gguf: Gguf, config: Config, device: Device, context: int, options: EngineOptions
) -> EmbeddingEngine:
    """Load an embedding model on a device, which is closed if that fails."""
    loaded = 0

    def advance(nbytes: int) -> None:
        nonlocal loaded
        checkpoint()
        loaded += nbytes
        if options.progress is not None:
            options.progress(loaded, gguf.nbytes)

    try:
        await selftest(device)
        await check_matrix_units(device)
        precision = choose_precision(options.precision, device)
        check_longest_text(config, device, context)
        kv = "f16" if precision == "f16" else "f32"
        budget = MemoryBudget.of(gguf, config, context, kv, options.memory_gb)
        budget.table_location()  # DeviceMemoryError if it is too much
        _check_free_memory(budget, device)
        try:
            model = Model.allocate_all(gguf, config, device)
        except DeviceMemoryError as error:
            held = gigabytes(error.held_nbytes)
            raise budget.refusal(f"{device.name} could allocate only {held}") from error
        await model.derive(gguf)
        files = options.encoder_files(gguf, config)
        encoders = gpu_encoders(files, device, options.memory_gb, precision)
        engine = EmbeddingEngine(gguf, model, context, precision, encoders)
        if IN_BROWSER:
            engine.prepare()
        await model.load_all(gguf, advance)
        return engine
    except BaseException:
        device.close()
        raise


def most_tokens(config: Config, device: Device) -> int:
    """Return the tokens of the largest pass whose tensors kernels can bind and grids can cover."""
    assert config.embedding is not None
    widths = [config.width, len(config.layers) * config.ple]
    widths += [config.embedding.hidden, config.embedding.size]
    widths += [max(2 * x.ffn, (x.heads + 2 * x.kv_heads) * x.head_dim) for x in config.layers]
    bindable = device.limits.binding_nbytes // (4 * max(widths))
    rows = FEWEST_ROWS
    while plan_rows(rows + 1) <= min(bindable, MAX_GRID):
        rows = plan_rows(rows + 1)
    return rows


def check_longest_text(config: Config, device: Device, context: int) -> None:
    """Raise DeviceError if a device cannot compute a text as long as the context."""
    most = most_tokens(config, device)
    if context > most:
        raise DeviceError(
            f"{device.name} binds at most {device.limits.binding_nbytes} bytes to a kernel, which "
            f"is enough for texts of {most} tokens of this model, not {context}; load it with a "
            f"context of {most} or less."
        )


def _check_free_memory(budget: MemoryBudget, device: Device) -> None:
    """Raise DeviceMemoryError if this machine's memory, in which a device computes, is too small.

    Such a device allocates more than there is, and the process is killed."""
    free_nbytes = free_host_nbytes() if device.unified else None
    if free_nbytes is not None and budget.nbytes("device") > free_nbytes:
        raise budget.refusal(
            f"{device.name} computes in this machine's memory, of which "
            f"{gigabytes(free_nbytes)} is free"
        )
