"""What a session keeps on the device: its cache, its tensors, and the plans recorded on them."""

from contextlib import ExitStack
from dataclasses import replace
from math import prod

from webgemma.device import Buffer, Device, Plan, Reading
from webgemma.errors import InputError
from webgemma.gemma.gpu_sampler import GpuSampler
from webgemma.gemma.kv_cache import ELEMENT_NBYTES, Cache
from webgemma.gemma.record.quantised import chosen_precision
from webgemma.gemma.text import Inputs, TextRecorder
from webgemma.gemma.weights import Model
from webgemma.graph import Recorder, Tensor


class SessionMemory:
    """A cache, room for one chunk of tokens, a sampler, and plans that work on these.

    All of it is made together by `_make_room` and freed together by `_let_go`; which tokens it
    holds, and whose turn it is, the session knows."""

    def __init__(self, model: Model, context: int, kv: str, precision: str) -> None:
        if kv not in ELEMENT_NBYTES:
            raise InputError(f"There is no kv {kv!r}; choose f16 or f32.")
        self.precision = chosen_precision(precision, model.device.software)
        self.model = model
        self.device: Device = model.device
        self.context = context
        self.kv = kv
        self._logits: dict[int, Tensor] = {}
        self._plans: dict[tuple[str, int], Plan] = {}
        self._compiling = False  # whether their kernels may still be

    def _make_room(self, chunk: int) -> None:
        """All memory of a session that reads so many tokens at once."""
        with ExitStack() as owned:
            self._owned = owned
            self._chunk = chunk
            self._make_tensors()
            self._owned = owned.pop_all()  # `_let_go` frees it; what raises before has freed it

    def _make_tensors(self) -> None:
        config, chunk = self.model.config, self._chunk
        self._cache = Cache(self.device, config, self.context, self.kv, chunk)
        self._owned.callback(self._cache.close)
        self._inputs = Inputs(
            self._keep(4 + chunk), self._keep(chunk), self._cache.tensors, self._cache.rings
        )
        self._hidden = self._keep(chunk, config.width)  # of the last chunk
        self._sampler = GpuSampler(
            self.device, config.vocab, self.context, config.suppressed, config.softcap
        )
        self._owned.callback(self._sampler.close)

    def _keep(self, *shape: int) -> Tensor:
        """A tensor that lives as long as the session."""
        nbytes = 4 * prod(shape)
        tensor = Tensor(shape, nbytes, self.device.buffer(nbytes, "session"))
        self._owned.callback(self.device.free, tensor.buffer)
        return tensor

    def _soft_rows(self) -> Tensor:
        """Where a chunk's soft tokens lie; there is room for them once there are any."""
        if self._inputs.soft is None:
            soft = self._keep(self._chunk, self.model.config.width)
            self._inputs = replace(self._inputs, soft=soft)
        assert self._inputs.soft is not None
        return self._inputs.soft

    def _plan(self, kind: str, batch: int) -> Plan:
        """A plan, recorded when it is first needed."""
        key = (kind, batch)
        if key not in self._plans:
            self._plans[key] = self._record(kind, batch)
            self._compiling = True
        return self._plans[key]

    def _record(self, kind: str, batch: int) -> Plan:
        recorder = Recorder(self.device)
        kv, precision = "kv_" + self.kv, self.precision
        if kind == "see":
            self._soft_rows()
        inputs = self._inputs if kind == "see" else replace(self._inputs, soft=None)
        text = TextRecorder(self.model, recorder, inputs, batch, kv, precision)
        width = self.model.config.width
        hidden = Tensor((batch, width), 4 * batch * width, self._hidden.buffer)
        if kind in ("read", "see"):
            text.body(hidden)
        elif kind == "logits":
            self._logits[batch] = text.softcap(text.head(hidden))
        else:
            greedy, top = "greedy" in kind, kind.endswith("top")
            h = text.body() if kind.startswith("decode") else text.last_row(self._hidden)
            state, ids = self._inputs.state, self._inputs.ids
            self._sampler.record(recorder, text.head(h), state, ids, greedy=greedy, top=top)
        plan = recorder.plan()
        self._owned.callback(plan.close, self.device)
        return plan

    def _submit(self, plan: Plan, read: tuple[Buffer, int, int]) -> Reading:
        reading = self.device.run(plan, read)
        assert reading is not None
        return reading

    def _drop_plans(self) -> None:
        """Free the plans alone; they are recorded again when they are needed."""
        while self._plans:
            self._plans.popitem()[1].close(self.device)
        self._logits.clear()

    def _let_go(self) -> None:
        """Free the room and all that is in it."""
        self._owned.close()
        self._plans.clear()
        self._logits.clear()
