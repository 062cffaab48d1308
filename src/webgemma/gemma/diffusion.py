"""DiffusionGemma's denoising step, recorded: a canvas in, the next canvas and best tokens out."""

import math
import struct
from dataclasses import dataclass

from webgemma.denoising import Canvas, Denoising
from webgemma.errors import DeviceError
from webgemma.gemma.config import Config, Layer
from webgemma.gemma.record.columns import Columns
from webgemma.gemma.record.matmul import THREADS
from webgemma.gemma.record.matmul_backward import MatmulBackward
from webgemma.gemma.record.ops import ROW_THREADS
from webgemma.gemma.text import Inputs, TextRecorder
from webgemma.gemma.weights import Model
from webgemma.graph import Recorder, Tensor
from webgemma.kernels import host_struct
from webgemma.sampler import MASK

MAX_CANVAS = 256  # positions: accept_tokens.wgsl has a thread for each
LOGITS_NBYTES = 1 << 27  # of the rows whose logits exist at once
ROWS_STEP = 64  # of them: rows of a tensor have to begin at a multiple of 256 bytes
NO_TOKEN = MASK  # an id that no token has
STATS_WORDS, RESULT_WORDS, POSITION_WORDS = 6, 4, 4  # of structs in WGSL: see CanvasState
MIN_ENTROPY = -0.5  # below it, a logit was not finite


@dataclass(frozen=True, slots=True)
class CanvasState:
    """What a canvas keeps on the device from step to step."""

    denoising: Tensor  # see denoising/schedule.wgsl
    expected: Tensor  # [canvas, width]: the embeddings that the last step expects
    stats: Tensor  # [canvas, STATS_WORDS]: see position_stats/struct.wgsl
    result: Tensor  # for the host: see accept_tokens.wgsl
    suppressed: Tensor  # ids


def canvas_length(config: Config) -> int:
    """Return how many positions a canvas has; DeviceError if the kernels do not support it."""
    assert config.diffusion is not None
    canvas = config.diffusion.canvas
    if canvas > MAX_CANVAS:
        raise DeviceError(
            f"This model has a canvas of {canvas} tokens; the kernels support {MAX_CANVAS}."
        )
    return canvas


def packed_denoising(denoising: Denoising, seed: int, canvas: int, step: int) -> bytes:
    """Return what the kernels of a step read, as denoising/schedule.wgsl declares it."""
    return host_struct("lib/denoising/schedule", "Denoising").pack(
        inverse_temperature=1 / denoising.temperature(step),
        entropy_bound=float(denoising.entropy_bound),
        confidence_threshold=float(denoising.confidence_threshold),
        stability_threshold=denoising.stability_threshold,
        seed=(seed & MASK, seed >> 32 & MASK),
        canvas=canvas,
        step=step,
        steps=denoising.steps,
    )


def blank_result(canvas: int) -> bytes:
    """Return the result before the first step: no token that could have stayed the same."""
    return bytes(4 * RESULT_WORDS) + struct.pack("<4I", 0, 0, NO_TOKEN, 0) * canvas


def parse_result(result: bytes, number: int, step: int) -> Canvas | None:
    """Parse the result of a step; None if its logits were not finite."""
    _, done, entropy, _ = struct.unpack_from("<2IfI", result)
    if not entropy > MIN_ENTROPY:
        return None
    positions = struct.iter_unpack("<3If", result[4 * RESULT_WORDS :])
    ids, accepted, best, logprobs = zip(*positions, strict=True)
    return Canvas(
        number, step, ids, tuple(map(bool, accepted)), best, logprobs, entropy, bool(done)
    )


class CanvasRecorder(TextRecorder):
    """Records a step for all positions of a canvas that follows what the cache holds.

    Its keys and values are written where the next tokens' will be, and overwritten by those;
    `inputs.batch` says where that is."""

    def __init__(
        self,
        model: Model,
        recorder: Recorder,
        inputs: Inputs,
        state: CanvasState,
        kv: str,
        precision: str = "exact",
    ) -> None:
        super().__init__(model, recorder, inputs, canvas_length(model.config), kv, precision)
        self.state = state

    def step(self) -> None:
        """Record one denoising step; the logits exist for some rows at a time."""
        h = self.body()
        at_once = self.rows_at_once()
        for first in range(0, self.rows, at_once):
            logits = self.logits(h.rows(first, min(at_once, self.rows - first)))
            self.canvas_stats(logits, first)
            MatmulBackward(self.matmul).expected_embedding(
                self.model.matrices["token_embd.weight"],
                logits,
                self.state.stats,
                self.state.denoising,
                first,
                self.state.expected,
            )
        self.accept_tokens()

    def embedding(self) -> Tensor:
        """Record rms(E[id] √width + the self-conditioning of the expected embedding)."""
        x = self.embed("token_embd.weight", math.sqrt(self.config.width))
        matrices = self.model.matrices
        n = self.norm(self.state.expected, self.model.vector("self_cond_pre_norm.weight"))
        gate = self.linear(n, matrices["self_cond_gate.weight"])
        up = self.linear(n, matrices["self_cond_up.weight"])
        ffn = gate.shape[1]
        hidden = self.row_input_for(ffn, "self_cond_down.weight")
        self.geglu(Columns(gate, ffn, 0), Columns(up, ffn, 0), ffn, hidden)
        y = self.linear(hidden, matrices["self_cond_down.weight"])
        self.recorder.call(
            "sum_norm",
            (self.rows,),
            y=y,
            x=x,
            width=self.config.width,
            eps=self.eps,
            THREADS=self.row_threads(ROW_THREADS),
        )
        return x

    def mask(self, layer: Layer) -> str:
        """Return the mask with which the canvas attends to itself, and to what is before it."""
        del layer
        return "canvas"

    @property
    def output_scale(self) -> str:
        """The decoder's scale of a layer's output."""
        return "layer_output_scale.weight"

    def rows_at_once(self) -> int:
        """Return how many rows of logits may be in memory together."""
        limit = min(LOGITS_NBYTES, self.model.device.limits.binding_nbytes)
        rows = limit // (4 * self.config.vocab)
        return self.rows if rows >= self.rows else max(1, rows // ROWS_STEP) * ROWS_STEP

    def logits(self, h: Tensor) -> Tensor:
        """Record capped logits of some rows: [rows, vocab]."""
        logits = self.softcap(self.head(h))
        count = len(self.config.suppressed)
        if count:
            grid = (-(-count // THREADS), logits.shape[0])
            self.recorder.call(
                "suppress",
                grid,
                suppressed=self.state.suppressed,
                logits=logits,
                vocab=self.config.vocab,
                count=count,
            )
        return logits

    def canvas_stats(self, logits: Tensor, first: int) -> None:
        """Record the statistics of each row; the first row is that position's."""
        self.recorder.call(
            "canvas_stats",
            (logits.shape[0],),
            denoising=self.state.denoising,
            logits=logits,
            stats=self.state.stats,
            vocab=self.config.vocab,
            first=first,
            THREADS=ROW_THREADS,
        )

    def accept_tokens(self) -> None:
        """Record the next canvas, and the result of this step for the host."""
        state = self.state
        self.recorder.call(
            "accept_tokens",
            (1,),
            denoising=state.denoising,
            stats=state.stats,
            result=state.result,
            ids=self.inputs.chunk_ids,
            canvas=self.rows,
            vocab=self.config.vocab,
            THREADS=MAX_CANVAS,
        )
