"""A denoising step over a Recorder: a canvas in, the next canvas and the likeliest tokens out."""

import math
import struct
from copy import copy
from dataclasses import dataclass

from webgemma.denoising import Canvas, Denoising
from webgemma.errors import DeviceError
from webgemma.gemma.config import Config, Layer
from webgemma.gemma.matrices import Weight
from webgemma.gemma.record.ops import ROW_THREADS, THREADS
from webgemma.gemma.record.outer import Outer
from webgemma.gemma.text import Inputs, TextRecorder
from webgemma.gemma.weights import Model
from webgemma.graph import Recorder, Tensor
from webgemma.kernels import unit as unit_of
from webgemma.sampler import MASK

MOST_CANVAS = 256  # positions: accept.wgsl has a thread for each
LOGITS_NBYTES = 1 << 27  # of the rows that are surveyed at once
ROWS_STEP = 64  # of them; a part of a tensor has to begin at a multiple of 256 bytes
SPLIT_IDS = 8192  # of the vocabulary that one workgroup of expect.wgsl adds up
SOFTWARE_IDS = 2048  # the same, before an invocation ends (see gemma/loops.py)
ROUNDING = 2**-24  # of a float32
NOBODY = MASK  # an id that no token has
FINDING, LEFT, POSITION = 6, 4, 4  # words of the structures in finding.wgsl and accept.wgsl
BROKEN = -0.5  # an entropy below it: a logit was no number


@dataclass(frozen=True, slots=True)
class Easel:
    """What a canvas keeps on the device from step to step."""

    denoising: Tensor  # see denoising.wgsl
    expected: Tensor  # [canvas, width]: the embeddings that the last step makes one expect
    findings: Tensor  # [canvas, FINDING]
    left: Tensor  # for the host: see accept.wgsl
    silent: Tensor  # the ids that must not come


def canvas_of(config: Config) -> int:
    """How many positions a canvas has; DeviceError when the kernels have no room for them."""
    assert config.diffusion is not None
    canvas = config.diffusion.canvas
    if canvas > MOST_CANVAS:
        raise DeviceError(
            f"This model has a canvas of {canvas} tokens; the kernels have room for {MOST_CANVAS}."
        )
    return canvas


def packed_denoising(denoising: Denoising, seed: int, block: int, step: int) -> bytes:
    """What a step's kernels want to know, as denoising.wgsl reads it."""
    return struct.pack(
        "<3f6I3I",
        1 / denoising.temperature(step),
        denoising.entropy_bound,
        denoising.confidence_threshold,
        denoising.stability_threshold,
        seed & MASK,
        seed >> 32 & MASK,
        *(block, step, denoising.steps),
        *(0, 0, 0),
    )


def blank_left(canvas: int) -> bytes:
    """What a block begins with: no step before, so no token that could stay the same."""
    return bytes(4 * LEFT) + struct.pack("<4I", 0, 0, NOBODY, 0) * canvas


def canvas_from(left: bytes, block: int, step: int) -> Canvas | None:
    """What a step left; None where its logits were no numbers."""
    _, done, entropy, _ = struct.unpack_from("<2IfI", left)
    if not entropy > BROKEN:
        return None
    ids, accepted, best, logprobs = zip(*struct.iter_unpack("<3If", left[4 * LEFT :]), strict=True)
    kept = tuple(map(bool, accepted))
    return Canvas(block, step, ids, kept, best, logprobs, entropy, bool(done))


class CanvasRecorder(TextRecorder):
    """Records a step for all positions of a canvas that stands after what the cache holds.

    Its keys and values are written where the next tokens' will be, and so become nobody's when
    those are read; `inputs.state` says where that is."""

    def __init__(
        self,
        model: Model,
        recorder: Recorder,
        inputs: Inputs,
        easel: Easel,
        kv: str,
        precision: str = "exact",
    ) -> None:
        canvas = canvas_of(model.config)
        super().__init__(model, recorder, inputs, canvas, kv, precision)
        self.easel = easel

    def step(self) -> None:
        """One denoising step; the logits live for some rows at a time."""
        h = self.body()
        rows = self.rows_at_once()
        for first in range(0, self.batch, rows):
            part = some_rows(h, first, min(rows, self.batch - first))
            logits = self.logits(part)
            self.survey(logits, first)
            self.expect(logits, first)
        self.accept()

    def opening(self) -> Tensor:
        """rms(E[id] √d + the self-conditioning of what was expected): [canvas, width]."""
        x = self.embed("token_embd.weight", math.sqrt(self.config.width))
        matrices = self.model.matrices
        n = self.norm(self.easel.expected, "self_cond_pre_norm.weight")
        gate = self.linear(n, matrices["self_cond_gate.weight"])
        up = self.linear(n, matrices["self_cond_up.weight"])
        ffn = gate.shape[1]
        hidden = self.room(ffn, "self_cond_down.weight")
        self.geglu(gate, ffn, up, ffn, 0, ffn, hidden)
        y = self.linear(hidden, matrices["self_cond_down.weight"])
        params = [self.config.width, self.eps]
        threads = self.row_threads(ROW_THREADS)
        self.call("sum_norm", (self.batch,), params, y, x, pieces=("sum",), THREADS=threads)
        return x

    def sees(self, layer: Layer) -> str:
        """All of the canvas, and what the layer sees before it."""
        del layer
        return "sees_canvas"

    @property
    def output_scale(self) -> str:
        """The decoder's."""
        return "layer_output_scale.weight"

    def rows_at_once(self) -> int:
        """Rows of logits that may be in memory together."""
        most = min(LOGITS_NBYTES, self.model.device.limits.binding_nbytes)
        rows = most // (4 * self.config.vocab)
        return self.batch if rows >= self.batch else max(1, rows // ROWS_STEP) * ROWS_STEP

    def logits(self, h: Tensor) -> Tensor:
        """Capped logits of some rows: [rows, vocab]."""
        logits = self.softcap(self.head(h))
        count = len(self.config.suppressed)
        if count:
            grid = (-(-count // THREADS), logits.shape[0])
            params = [self.config.vocab, count]
            self.call("silence", grid, params, self.easel.silent, logits)
        return logits

    def survey(self, logits: Tensor, first: int) -> None:
        """What there is to know of each row, the first of which is that position's."""
        self.call(
            "survey",
            (logits.shape[0],),
            [self.config.vocab, first],
            *(self.easel.denoising, logits, self.easel.findings),
            pieces=("best", "denoising", "draw", "finding", "finite", "sum"),
            THREADS=ROW_THREADS,
        )

    def expect(self, logits: Tensor, first: int) -> None:
        """softmax(z) E √d of each row, for the next step."""
        rows, width = logits.shape[0], self.config.width
        weight = self.model.matrices["token_embd.weight"]
        splits = sum(-(-part.rows // self._split) for part in weight.parts)
        sums = self.recorder.scratch(splits, rows, width)
        self._expect_parts(weight, logits, first, sums)
        self.call(
            "expect_sum",
            (-(-width // (4 * THREADS)), rows),
            [width // 4, splits, first, rows],
            *(sums, self.easel.findings, self.easel.expected),
            pieces=("finding",),
        )

    @property
    def _split(self) -> int:
        return SOFTWARE_IDS if self.software else SPLIT_IDS

    def _expect_parts(self, weight: Weight, logits: Tensor, first: int, sums: Tensor) -> None:
        name, width, (rows, vocab) = weight.format.name, weight.width, logits.shape
        pieces = ("denoising", "draw", "finding", "outer", "outer_weights")
        tile = Outer.large()
        kernel = self.link("expect", name, pieces, **tile.constants | {"SKIP": 1})
        units, first_split = width // unit_of(name), 0
        least = ROUNDING / vocab  # all that is less would be lost in the rounding, even together
        for part in weight.parts:
            splits = -(-part.rows // self._split)
            params = [
                *(width // weight.format.block, *part.planes, part.first_row, part.rows, units),
                *(vocab, first, rows, self._split, first_split, least, math.sqrt(width)),
            ]
            grid = (-(-width // tile.n), -(-rows // tile.m), splits)
            tensors = (part.data, self.easel.denoising, logits, self.easel.findings, sums)
            self.recorder.call(kernel, grid, params, *tensors)
            first_split += splits

    def accept(self) -> None:
        """The next canvas, and what the host may see of this one."""
        self.call(
            "accept",
            (1,),
            [self.batch, self.config.vocab],
            *(self.easel.denoising, self.easel.findings, self.inputs.ids, self.easel.left),
            pieces=("denoising", "draw", "finding", "sum"),
            THREADS=MOST_CANVAS,
        )


def some_rows(h: Tensor, first: int, rows: int) -> Tensor:
    """Some rows of a tensor."""
    if rows == h.shape[0]:
        return h
    part, row_nbytes = copy(h), h.nbytes // h.shape[0]
    part.shape, part.nbytes = (rows, h.shape[1]), rows * row_nbytes
    part.offset, part.whole = h.offset + first * row_nbytes, h.whole or h
    return part
