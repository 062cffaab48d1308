"""One conversation with DiffusionGemma: what was said is read, the reply is denoised in blocks."""

import struct
from collections.abc import AsyncIterator, Sequence

from webgemma.denoising import Canvas, Denoising, position_bits, whole_canvases
from webgemma.device import Plan
from webgemma.engine.session import Session, no_numbers
from webgemma.gemma.diffusion import (
    FINDING,
    LEFT,
    NOBODY,
    POSITION,
    CanvasRecorder,
    Easel,
    blank_left,
    canvas_from,
    canvas_of,
    packed_denoising,
)
from webgemma.gemma.soft_tokens import Soft, plain
from webgemma.gemma.text import Inputs
from webgemma.graph import Recorder

DENOISE = "denoise"


class DiffusionSession(Session):
    """A session whose replies come block by block. The cache holds what the encoder has read."""

    def _make_tensors(self) -> None:
        super()._make_tensors()
        config, device = self.model.config, self.device
        canvas, silent = canvas_of(config), config.suppressed
        self.canvas = canvas
        self._canvas = Inputs(
            self._keep(4), self._keep(canvas), self._cache.tensors, self._cache.rings
        )
        self._easel = Easel(
            denoising=self._keep(12),
            expected=self._keep(canvas, config.width),
            findings=self._keep(canvas, FINDING),
            left=self._keep(LEFT + POSITION * canvas),
            silent=self._keep(len(silent) or 1),
        )
        if silent:
            device.write(self._easel.silent.buffer, struct.pack(f"<{len(silent)}I", *silent))

    def prepare(self) -> None:
        """Have the kernels of a short prompt and of a step compiled before they are needed."""
        self._plan("read", 32)
        self._plan(DENOISE, self.canvas)

    async def denoise(
        self, ids: Sequence[int], denoising: Denoising, seed: int, soft: Sequence[Soft] = ()
    ) -> AsyncIterator[Canvas]:
        """Step after step, block after block, while the context has room for a whole one.

        A block's tokens are the `best` of its last canvas. The caller may stop at any step."""
        whole_canvases(len(ids), self.canvas, self.context)
        known, turn = await self._take_up(ids, soft)
        block = 0
        while len(known) + self.canvas <= self.context:
            for batch, count in self._chunks(known, soft=soft):
                at = len(self.tokens)
                await self._read_chunk(batch, plain(known[at : at + count]), turn, soft)
            plan = await self._compiled(DENOISE, self.canvas, turn)
            self._stretch(seed, block)
            for step in range(1, denoising.steps + 1):
                packed = packed_denoising(denoising, seed, block, step)
                self.device.write(self._easel.denoising.buffer, packed)
                canvas = await self._step(plan, block, step, turn)
                yield canvas
                self._check_turn(turn)
                if canvas.done:
                    break
            known += canvas.best
            block += 1

    def _kept(self, known: list[int], soft: Sequence[Soft]) -> int:
        """How many of the tokens need not be read again: all may be, nobody wants their logits."""
        return super()._kept([*known, NOBODY], soft)

    async def _step(self, plan: Plan, block: int, step: int, turn: int) -> Canvas:
        """What a step leaves; GgufError where its logits were no numbers."""
        left = self._easel.left
        data = await self._submit(plan, (left.buffer, 0, left.nbytes)).bytes()
        self._check_turn(turn)
        canvas = canvas_from(data, block, step)
        if canvas is None:
            self._forget(0)
            raise no_numbers(self.model.name, self.device.name)
        return canvas

    def _stretch(self, seed: int, block: int) -> None:
        """A fresh canvas of noise after the tokens that were read; nothing is expected of it."""
        write, vocab, canvas = self.device.write, self.model.config.vocab, self.canvas
        first = len(self.tokens)
        self._cache.write_to(first + canvas)
        noise = [position_bits(seed, block, 0, p, sampling=False) % vocab for p in range(canvas)]
        write(self._canvas.state.buffer, struct.pack("<4I", first, canvas, 0, 0))
        write(self._canvas.ids.buffer, struct.pack(f"<{canvas}I", *noise))
        write(self._easel.expected.buffer, bytes(self._easel.expected.nbytes))
        write(self._easel.left.buffer, blank_left(canvas))

    def _record(self, kind: str, batch: int) -> Plan:
        if kind != DENOISE:
            return super()._record(kind, batch)
        recorder = Recorder(self.device)
        kv, precision = "kv_" + self.kv, self.precision
        CanvasRecorder(self.model, recorder, self._canvas, self._easel, kv, precision).step()
        plan = recorder.plan()
        self._owned.callback(plan.close, self.device)
        return plan
