"""The plans of a model's slots: typed keys, and how each plan is recorded."""

from dataclasses import dataclass, replace
from typing import Literal

from webgemma.device import Plan
from webgemma.gemma.gpu_sampler import GpuSampler
from webgemma.gemma.text import Inputs, TextRecorder
from webgemma.gemma.weights import Model
from webgemma.graph import Recorder, Tensor


@dataclass(frozen=True, slots=True)
class PlanKey:
    """Which plan: what it does, and for how many rows.

    `read` computes the states of a chunk of one conversation, `logits` those of its states,
    `sample` chooses the token after it, `decode` reads one token each of several conversations and
    samples the next ones, `denoise` is a step of a canvas."""

    kind: Literal["read", "logits", "sample", "decode", "denoise"]
    rows: int = 1
    soft: bool = False  # the chunk has soft tokens
    greedy: bool = False
    top_logprobs: bool = False


class Plans:
    """Records plans when they are first needed, over the tensors of some slots."""

    def __init__(
        self,
        model: Model,
        kv: str,
        precision: str,
        chunk: Inputs,
        rows: Inputs,
        hidden: Tensor,
        sampler: GpuSampler,
    ) -> None:
        self.model = model
        self.device = model.device
        self.kv = kv
        self.precision = precision
        self.chunk = chunk
        self.rows = rows
        self.hidden = hidden  # [chunk, width], the states of the last chunk
        self.sampler = sampler
        self.logits: dict[int, Tensor] = {}  # of each `logits` plan, by its rows
        self._plans: dict[PlanKey, Plan] = {}
        self._compiling = False  # whether kernels may still be compiling

    def get(self, key: PlanKey) -> Plan:
        """Return a plan, whose kernels may still be compiling."""
        if key not in self._plans:
            recorder = Recorder(self.device)
            self.record(recorder, key)
            self._plans[key] = recorder.plan()
            self._compiling = True
        return self._plans[key]

    async def compiled(self, key: PlanKey) -> Plan:
        """Return a plan whose kernels are compiled."""
        plan = self.get(key)
        if self._compiling:
            await self.device.compiled()
            self._compiling = False
        return plan

    def record(self, recorder: Recorder, key: PlanKey) -> None:
        """Record the ops of a plan."""
        inputs = self.chunk if key.soft else replace(self.chunk, soft=None)
        if key.kind == "decode":
            inputs = self.rows
        text = TextRecorder(self.model, recorder, inputs, key.rows, self.kv, self.precision)
        width = self.model.config.width
        states = Tensor((key.rows, width), 4 * key.rows * width, self.hidden.buffer)
        if key.kind == "read":
            text.body(states)
        elif key.kind == "logits":
            self.logits[key.rows] = text.softcap(text.head(states))
        else:
            h = text.body() if key.kind == "decode" else text.last_row(self.hidden)
            self.sampler.record(
                recorder,
                text.head(h),
                self.rows.batch,
                greedy=key.greedy,
                top_logprobs=key.top_logprobs,
            )

    def close(self) -> None:
        """Free the plans; they are recorded again when they are needed."""
        while self._plans:
            self._plans.popitem()[1].close(self.device)
        self.logits.clear()
