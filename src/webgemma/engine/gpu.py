"""The engine on the GPU: opened within a memory budget, several sessions, shared weights."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from webgemma.denoising import Canvas, Denoising
from webgemma.device import Device
from webgemma.device.forks import check_process
from webgemma.engine.constraints import Constraint
from webgemma.engine.diffusion_session import DiffusionSession
from webgemma.engine.interface import EngineOptions, Started
from webgemma.engine.memory_budget import MemoryBudget, free_host_nbytes, gigabytes
from webgemma.engine.saved_session import SavedPath
from webgemma.engine.selftest import check_matrix_units, selftest
from webgemma.engine.session import Session
from webgemma.errors import DeviceError, DeviceLostError, DeviceMemoryError, InputError
from webgemma.gemma.config import Config
from webgemma.gemma.drafter_config import drafter_config
from webgemma.gemma.lora_weights import NO_CHOICE, Adapters, Choice, ScaledAdapter
from webgemma.gemma.soft_tokens import SoftTokens, marked
from webgemma.gemma.weights import DrafterModel, Model, TableLocation
from webgemma.gguf.reader import Gguf
from webgemma.media.encoders import Encoders, MediaSpan, gpu_encoders, gpu_soft_tokens
from webgemma.sampler import SampledToken
from webgemma.settings import Settings
from webgemma.sync import IN_BROWSER, Deferred, ForDriver, Worker, checkpoint

DEFAULT_SLOTS = 4  # conversations that may be computed at once
FEWEST_COPIED = 32  # tokens of another conversation that are worth a copy
BUSY = (
    "Every slot of this model has a conversation that is being written, and there is no memory for "
    "another"
)
BUSY_ADVICE = "finish one first, or load the model with a shorter context"

OpenedDrafter = tuple[Gguf, Config]


class GpuEngine:
    """Sessions with the model they run on; forks share the model."""

    def __init__(
        self,
        gguf: Gguf,
        session: Session,
        encoders: Encoders,
        sharing: "list[GpuEngine] | None" = None,
        slots: int = 1,
    ) -> None:
        """Compute up to `slots` conversations at once; memory for those that the session's slots do
        not hold is taken when it is needed."""
        self.name = session.device.name
        self.encoders = encoders  # shared too
        self.gguf = gguf
        self.slots = 1 if isinstance(session, DiffusionSession) else slots
        self._session = session  # the one that was used last
        self._sessions = [session]
        self._add_sessions()
        self._sharing = [] if sharing is None else sharing  # every open engine on this model
        self._sharing.append(self)

    def attach(self, worker: Worker) -> None:
        """Let a worker drive the steps of conversations that are computed at once."""
        self._session.batch.worker = worker
        worker.turns.capacity = self.slots

    @property
    def nbytes(self) -> int:
        """Memory of the device that is in use, by all engines on it."""
        return self._session.device.nbytes

    @property
    def model(self) -> Model:
        """The weights."""
        return self._session.model

    async def logits(self, ids: Sequence[int]) -> bytes:
        """Return float32 logits after each of the ids: [len(ids), vocab]."""
        return await self._session.logits(ids)

    async def generate(
        self,
        ids: Sequence[int],
        settings: Settings,
        seed: int,
        media: Sequence[MediaSpan] = (),
        constraint: Constraint | None = None,
        choice: Choice = NO_CHOICE,
    ) -> AsyncGenerator[SampledToken | ForDriver, None]:
        """Yield token after token with its log-probability; the tokens keep to the constraint.

        The conversation gets an idle slot, and begins with the longest prefix that any slot holds.
        It is computed together with all others."""
        soft = self._soft_tokens(media)
        while (session := await self._take_session(ids, soft, choice)) is None:
            yield Deferred()
        generation = await session.begin(ids, settings, seed, soft, constraint, choice)
        self._session = session
        try:
            yield Started(generation.cached, generation.speculation.counts)
            while (sampled := await generation.next()) is not None:
                yield sampled
        finally:
            generation.leave()

    async def _take_session(
        self, ids: Sequence[int], soft: Sequence[SoftTokens], choice: Choice
    ) -> Session | None:
        """Return an idle session that begins as the prompt does, as far as any session does.

        None if all are busy, which happens where there was no memory for more of them."""
        batch = self._session.batch
        if all(map(batch.is_busy, self._sessions)) and len(self._sessions) < self.slots:
            await self._grow()
        idle = [each for each in self._sessions if not batch.is_busy(each)]
        if not idle:
            if batch.worker is None:  # nobody's turn would come later
                raise InputError(BUSY, BUSY_ADVICE)
            return None
        marks = marked(ids, soft)

        def reach(session: Session) -> int:
            """Return how many tokens of the prompt a session holds, in all of its layers."""
            length = session.reusable(marks, soft, choice)
            return length if session.cache.covers_window(length) else 0

        best = max(self._sessions, key=reach)
        length = reach(best)
        if best in idle and (length == len(best.tokens) or len(idle) == 1):
            return best
        oldest = _least_recently_used(idle)  # whose conversation is dropped
        if oldest is not best and length >= FEWEST_COPIED:
            oldest.copy_prefix(best, length)
        return oldest

    async def _grow(self) -> None:
        """Get memory for all conversations that may be computed at once, or for fewer."""
        batch = self._session.batch
        check_process()  # its error is not about memory
        while len(self._sessions) < self.slots:
            try:
                self._check_memory(self.slots)
                await batch.grow(self.slots, self._sessions)
                self._add_sessions()
            except DeviceLostError:
                raise
            except DeviceError:  # too little memory, or a buffer that kernels cannot bind
                self.slots = (self.slots + len(self._sessions)) // 2
        if batch.worker is not None:
            batch.worker.turns.capacity = self.slots

    def _check_memory(self, slots: int) -> None:
        """Raise DeviceMemoryError if this machine's memory does not hold the caches of so many.

        A device without memory of its own allocates more than there is, and the process is
        killed."""
        session = self._session
        free_nbytes = free_host_nbytes() if session.device.unified else None
        if free_nbytes is not None and slots * session.slots.cache.slot_nbytes > free_nbytes:
            raise DeviceMemoryError(f"{gigabytes(free_nbytes)} is free.", session.device.nbytes)

    def _add_sessions(self) -> None:
        """Make sessions in the slots that have none."""
        first = self._sessions[0]
        for index in range(len(self._sessions), first.slots.count):
            self._sessions.append(type(first).in_slot(first.batch, index))

    def slot_states(self, streams: int) -> list[tuple[bool, int]]:
        """Return of each slot whether it is busy and the tokens it holds, while so many streams
        have their turn."""
        if isinstance(self._session, DiffusionSession):
            return [(streams > 0, len(self._session.tokens))]
        busy = self._session.batch.is_busy
        states = [(busy(each), len(each.tokens)) for each in list(self._sessions)]
        return states + [(False, 0)] * (self.slots - len(states))

    def denoise(
        self,
        ids: Sequence[int],
        denoising: Denoising,
        seed: int,
        media: Sequence[MediaSpan] = (),
        choice: Choice = NO_CHOICE,
    ) -> AsyncGenerator[Canvas, None]:
        """Yield step after step, canvas after canvas; DiffusionGemma only."""
        assert isinstance(self._session, DiffusionSession)
        return self._session.denoise(ids, denoising, seed, self._soft_tokens(media), choice)

    def _soft_tokens(self, spans: Sequence[MediaSpan]) -> list[SoftTokens]:
        bidirectional = self._session.model.config.bidirectional_images
        return gpu_soft_tokens(spans, bidirectional=bidirectional)

    @property
    def adapters(self) -> Adapters:
        """The adapters, also those of forks."""
        return self.model.lora.adapters

    def set_adapters(
        self,
        always: Sequence[ScaledAdapter] | None = None,
        named: Mapping[str, ScaledAdapter] | None = None,
    ) -> None:
        """Apply adapters from now on, or attach some that conversations may choose."""
        self.model.set_adapters(always, named)

    def fork(self) -> "GpuEngine":
        """Return an engine on the same model whose session continues from here."""
        fork = self._session.fork()
        return GpuEngine(self.gguf, fork, self.encoders, self._sharing, self.slots)

    async def save(self, path: SavedPath) -> None:
        """Write the session to a file."""
        await self._session.save(path)

    async def restore(self, path: SavedPath) -> list[int]:
        """Continue where a saved session was, in the slot that was used longest ago; return its
        tokens."""
        session = _least_recently_used(self._sessions)
        await session.load(path)
        session.batch.note_use(session)
        self._session = session
        return list(session.tokens)

    def close(self) -> None:
        """Free the session and, with the last engine on it, the model and its device."""
        if self not in self._sharing:
            return
        self._sharing.remove(self)
        for session in reversed(self._sessions):  # the first one owns the memory
            session.close()
        if not self._sharing:
            self.encoders.close()
            self._session.model.close()
            self._session.device.close()
            self.gguf.close()


def _least_recently_used(sessions: Sequence[Session]) -> Session:
    """Return an empty session or, if all hold conversations, the one that was used longest ago."""
    return min(sessions, key=lambda each: (len(each.tokens) > 0, each.used))


async def open_gpu_engine(
    gguf: Gguf, config: Config, device: Device, context: int, options: EngineOptions
) -> GpuEngine:
    """Load a model on a device, which is closed if that fails."""
    loaded, total = 0, gguf.nbytes

    def advance(nbytes: int) -> None:
        nonlocal loaded
        checkpoint()
        loaded += nbytes
        if options.progress is not None:
            options.progress(loaded, total)

    draft = None
    try:
        await selftest(device)
        await check_matrix_units(device)
        drafter = None
        if options.draft is not None:
            draft = await options.draft()
            drafter = draft, drafter_config(draft, config)
            total += draft.nbytes
        slots = options.slots or 1
        budget = MemoryBudget.of(
            gguf, config, context, options.kv, options.memory_gb, slots, drafter
        )
        session = await allocate(gguf, config, device, budget, options, drafter)
        await session.model.derive(gguf)
        if draft and session.model.drafter:
            await session.model.drafter.derive(draft)
        if IN_BROWSER:
            session.prepare()
        await session.model.load_all(gguf, advance)
        if draft and session.model.drafter:
            await session.model.drafter.load_all(draft, advance)
        files = options.encoder_files(gguf, config)
        encoders = gpu_encoders(files, device, options.memory_gb, session.precision)
        slots = options.slots or possible_slots(session, budget)
        return GpuEngine(gguf, session, encoders, slots=slots)
    except BaseException:
        device.close()
        raise
    finally:
        if draft is not None:
            draft.close()


def possible_slots(session: Session, budget: MemoryBudget) -> int:
    """Return how many conversations may be computed at once, where nobody says how many."""
    if budget.memory_gb is None:
        return DEFAULT_SLOTS
    wanted = replace(budget, slots=DEFAULT_SLOTS)
    table: TableLocation = "host" if session.model.table else "device"
    return wanted.fitting(int(budget.memory_gb * 1e9), table).slots


async def allocate(
    gguf: Gguf,
    config: Config,
    device: Device,
    budget: MemoryBudget,
    options: EngineOptions,
    drafter: OpenedDrafter | None = None,
) -> Session:
    """Allocate weights and cache before the first byte is loaded; DeviceMemoryError if too much.

    If the table of per-layer embeddings is too large, it stays in the file."""
    table = budget.table_location()
    free_nbytes = free_host_nbytes() if device.unified else None
    if free_nbytes is not None:  # such a device allocates more than there is; the process is killed
        if budget.nbytes(table) > free_nbytes:
            table = "host"
        if budget.nbytes(table) > free_nbytes:
            raise budget.refusal(
                f"{device.name} computes in this machine's memory, of which "
                f"{gigabytes(free_nbytes)} is free"
            )
    locations: list[TableLocation] = [table]
    if table == "device" and budget.table_nbytes:
        locations.append("host")
    for location in locations:
        try:
            return await _allocate_with_table(
                gguf, config, device, budget, options, location, drafter
            )
        except DeviceMemoryError as error:
            failed = error
    available = f"{device.name} could allocate only {gigabytes(failed.held_nbytes)}"
    raise budget.refusal(available) from failed


async def _allocate_with_table(
    gguf: Gguf,
    config: Config,
    device: Device,
    budget: MemoryBudget,
    options: EngineOptions,
    table: TableLocation,
    drafter: OpenedDrafter | None,
) -> Session:
    with ExitStack() as allocated:
        model = Model.allocate_all(gguf, config, device, table=table)
        allocated.callback(model.close)
        if drafter is not None:
            model.drafter = DrafterModel.allocate_all(*drafter, device)
        kind = DiffusionSession if config.diffusion else Session
        session = kind(
            model,
            budget.context,
            kv=options.kv,
            precision=options.precision,
            slots=budget.slots,
        )
        allocated.callback(session.close)
        await device.read(model.one.buffer, 0, 4).bytes()  # browsers report missing memory late
        allocated.pop_all()
    return session
