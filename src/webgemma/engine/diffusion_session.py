"""A conversation with DiffusionGemma: the prompt is read, the reply denoised canvas by canvas."""

import struct
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from webgemma.denoising import Canvas, Denoising, canvas_capacity, position_bits
from webgemma.device import Plan
from webgemma.engine.batching import not_finite
from webgemma.engine.plans import PlanKey, Plans
from webgemma.engine.session import Session
from webgemma.engine.slots import Slots
from webgemma.gemma.diffusion import (
    NO_TOKEN,
    POSITION_WORDS,
    RESULT_WORDS,
    STATS_WORDS,
    CanvasRecorder,
    CanvasState,
    blank_result,
    canvas_length,
    packed_denoising,
    parse_result,
)
from webgemma.gemma.lora_weights import NO_CHOICE, Choice
from webgemma.gemma.soft_tokens import SoftTokens
from webgemma.gemma.text import Inputs
from webgemma.graph import Recorder
from webgemma.kernels import host_struct


class CanvasPlans(Plans):
    """Plans of a session whose `denoise` plan works on a canvas."""

    canvas: Inputs
    state: CanvasState

    def record(self, recorder: Recorder, key: PlanKey) -> None:
        """Record the ops of a plan."""
        if key.kind != "denoise":
            super().record(recorder, key)
            return
        canvas = replace(self.canvas, lora=self.lora.applied) if key.adapted else self.canvas
        kv, precision = self.kv, self.precision
        CanvasRecorder(self.model, recorder, canvas, self.state, kv, precision).step()


class CanvasSlots(Slots):
    """Slots with a canvas."""

    plans: CanvasPlans

    def make_plans(self, chunk: Inputs, rows: Inputs) -> CanvasPlans:
        """Return the plans over these inputs and a canvas."""
        config, tensor = self.model.config, self.memory.tensor
        canvas, suppressed = canvas_length(config), config.suppressed
        hidden = tensor(self.chunk, config.width, label="session")
        kv, precision, lora = self.kv, self.precision, self.lora
        plans = CanvasPlans(self.model, kv, precision, chunk, rows, hidden, self.sampler, lora)
        batch, ids = (tensor(n, label="canvas") for n in (4, canvas))
        plans.canvas = Inputs(batch, ids, self.cache.layers)
        denoising = host_struct("lib/denoising/schedule", "Denoising")
        plans.state = CanvasState(
            denoising=tensor(denoising.nbytes // 4, label="canvas"),
            expected=tensor(canvas, config.width, label="canvas"),
            stats=tensor(canvas, STATS_WORDS, label="canvas"),
            result=tensor(RESULT_WORDS + POSITION_WORDS * canvas, label="canvas"),
            suppressed=tensor(len(suppressed) or 1, label="canvas"),
        )
        if suppressed:
            packed = struct.pack(f"<{len(suppressed)}I", *suppressed)
            self.device.write(plans.state.suppressed.buffer, packed)
        return plans


class DiffusionSession(Session):
    """A session whose replies come canvas by canvas. The cache holds what the encoder has read."""

    slots_type = CanvasSlots
    slots: CanvasSlots

    @property
    def canvas(self) -> int:
        """Positions of a canvas."""
        return canvas_length(self.model.config)

    @property
    def canvas_inputs(self) -> Inputs:
        """What a denoising step reads and leaves."""
        return self.slots.plans.canvas

    @property
    def state(self) -> CanvasState:
        """What the canvas keeps from step to step."""
        return self.slots.plans.state

    def prepare(self) -> None:
        """Start compiling the kernels of a short prompt and of a step, before they are needed."""
        for key in (PlanKey("read", 32), PlanKey("denoise", self.canvas)):
            self.plans.get(key)

    async def denoise(
        self,
        ids: Sequence[int],
        denoising: Denoising,
        seed: int,
        soft: Sequence[SoftTokens] = (),
        choice: Choice = NO_CHOICE,
    ) -> AsyncGenerator[Canvas, None]:
        """Yield step after step, canvas after canvas, while the context has space for a whole one.

        A canvas's tokens are the `best` of its last step. The caller may stop at any step."""
        canvas_capacity(len(ids), self.canvas, self.context)
        marks, epoch = await self.start(ids, soft, choice)
        number = 0
        while len(marks) + self.canvas <= self.context:
            for rows, count in self.chunks(marks, soft=soft):
                await self.read_chunk(rows, marks, count, epoch, soft)
            key = PlanKey("denoise", self.canvas, adapted=self.adapted)
            plan = await self.compiled(key, epoch)
            self._reset_canvas(seed, number)
            for step in range(1, denoising.steps + 1):
                packed = packed_denoising(denoising, seed, number, step)
                self.device.write(self.state.denoising.buffer, packed)
                canvas = await self._step(plan, number, step, epoch)
                yield canvas
                self.check_current(epoch)
                if canvas.done:
                    break
            marks += canvas.best
            number += 1

    def reusable(
        self, marks: list[int], soft: Sequence[SoftTokens], choice: Choice = NO_CHOICE
    ) -> int:
        """Return how many tokens need not be read again; none is needed for its logits."""
        return super().reusable([*marks, NO_TOKEN], soft, choice)

    async def _step(self, plan: Plan, number: int, step: int, epoch: int) -> Canvas:
        """Return what a step leaves; GgufError if its logits were not finite."""
        result = self.state.result
        data = await self.submit(plan, (result.buffer, 0, result.nbytes)).bytes()
        self.check_current(epoch)
        canvas = parse_result(data, number, step)
        if canvas is None:
            self.truncate(0)
            raise not_finite(self.model.name, self.device.name)
        return canvas

    def _reset_canvas(self, seed: int, number: int) -> None:
        """Write a canvas of noise after the tokens that were read, with no expectation."""
        write, vocab, canvas = self.device.write, self.model.config.vocab, self.canvas
        first = len(self.tokens)
        self.cache.advance(first + canvas)
        noise = [position_bits(seed, number, 0, p, sampling=False) % vocab for p in range(canvas)]
        write(self.canvas_inputs.batch.buffer, struct.pack("<4I", first, canvas, 0, 0))
        write(self.canvas_inputs.chunk_ids.buffer, struct.pack(f"<{canvas}I", *noise))
        write(self.state.expected.buffer, bytes(self.state.expected.nbytes))
        write(self.state.result.buffer, blank_result(canvas))
