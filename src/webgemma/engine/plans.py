"""The plans of a model's slots: typed keys, and how each plan is recorded."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from webgemma.device import Plan
from webgemma.gemma.drafting import Drafting
from webgemma.gemma.gpu_sampler import GpuSampler
from webgemma.gemma.lora_weights import LoraScales
from webgemma.gemma.text import Inputs, TextRecorder
from webgemma.gemma.weights import Model
from webgemma.graph import BufferPool, Recorder, Tensor

GIVEN = "given"  # drafts that the host writes

# Records drafts for conversations of so many rows each (the third argument), of so many.
DraftRecorder = Callable[[Recorder, int, int], None]


@dataclass(frozen=True, slots=True)
class PlanKey:
    """Which plan: what it does, and for how many rows.

    `read` computes the states of a chunk of one conversation, `logits` those of its states,
    `sample` chooses the token after it, `decode` reads the next tokens of several conversations and
    samples those after them, `body` and `choose` are its halves, before and after the logits, and
    `denoise` is a step of a canvas."""

    kind: Literal["read", "logits", "sample", "decode", "body", "choose", "denoise"]
    rows: int = 1
    soft: bool = False  # the chunk has soft tokens
    greedy: bool = False
    top_logprobs: bool = False
    masked: bool = False  # masks say which tokens may follow
    drafts: str = ""  # whether rows may be drafts: GIVEN, or the name of who makes them
    line: int = 1  # rows of a conversation, of which those after the first are drafts to be made
    adapted: bool = False  # some of the conversations apply adapters


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
        lora: LoraScales,
        drafting: Drafting | None = None,
    ) -> None:
        self.model = model
        self.device = model.device
        self.kv = kv
        self.precision = precision
        self.chunk = chunk
        self.rows = rows
        self.hidden = hidden  # [chunk, width], the states of the last chunk
        self.sampler = sampler
        self.lora = lora
        self.drafting = drafting  # if the model has a drafter, whose states are kept then
        self.drafters: dict[str, DraftRecorder] = {"lookup": self._lookup_drafts}
        if drafting is not None:
            self.drafters["mtp"] = drafting.record
        self.logits: dict[PlanKey, Tensor] = {}  # of each `logits` plan
        # Between `body` and `choose`, by their rows:
        self._row_logits: dict[int, Tensor] = {}
        self._row_states: dict[int, Tensor] = {}
        self._memory = BufferPool(self.device)
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
        if key.kind in ("decode", "body"):
            inputs = replace(self.rows, drafts=bool(key.drafts))
            if key.line > 1:
                self.drafters[key.drafts](recorder, key.rows, key.line)
        if key.adapted:
            inputs = replace(inputs, lora=self.lora.applied)
        text = TextRecorder(self.model, recorder, inputs, key.rows, self.kv, self.precision)
        width = self.model.config.width
        states = Tensor((key.rows, width), 4 * key.rows * width, self.hidden.buffer)
        if key.kind == "read":
            text.body(states)
        elif key.kind == "logits":
            self.logits[key] = text.softcap(text.head(states))
        elif key.kind == "body":
            text.head(text.body(), self.row_logits(key.rows))
            if self.drafting:
                text.norm(text.stream, self._output_norm, self.row_states(key.rows))
        elif key.kind == "choose":
            self._sample(recorder, self.row_logits(key.rows), key)
            if self.drafting:
                self.drafting.keep(recorder, self.row_states(key.rows), self.sampler.results)
        elif key.kind == "decode":
            self._sample(recorder, text.head(text.body()), key)
            if self.drafting:
                norm, results = self._output_norm, self.sampler.results
                self.drafting.keep(recorder, text.stream, results, norm)
        else:
            h = text.last_row(self.hidden)
            self._sample(recorder, text.head(h), key)
            if self.drafting:
                self.drafting.keep(recorder, h, self.sampler.results)

    @property
    def _output_norm(self) -> Tensor:
        return self.model.vector("output_norm.weight")

    def _lookup_drafts(self, recorder: Recorder, rows: int, line: int) -> None:
        self.sampler.lookup_drafts(recorder, self.rows.batch, rows, line)

    def _sample(self, recorder: Recorder, logits: Tensor, key: PlanKey) -> None:
        self.sampler.record(
            recorder,
            logits,
            self.rows.batch,
            greedy=key.greedy,
            top_logprobs=key.top_logprobs,
            masked=key.masked,
            drafts=bool(key.drafts),
        )

    def row_logits(self, rows: int) -> Tensor:
        """Return where `body` leaves the logits of so many rows for `choose`: [rows, vocab]."""
        if rows not in self._row_logits:
            vocab = self.model.config.vocab
            self._row_logits[rows] = self._memory.tensor(rows, vocab, label="logits")
        return self._row_logits[rows]

    def row_states(self, rows: int) -> Tensor:
        """Return where `body` leaves the states of so many rows for `choose`: [rows, width]."""
        if rows not in self._row_states:
            width = self.model.config.width
            self._row_states[rows] = self._memory.tensor(rows, width, label="states")
        return self._row_states[rows]

    def close(self) -> None:
        """Free the plans; they are recorded again when they are needed."""
        while self._plans:
            self._plans.popitem()[1].close(self.device)
        self.logits.clear()
        self._row_logits.clear()
        self._row_states.clear()
        self._memory.close()
