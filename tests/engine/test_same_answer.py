"""CPU and GPU give one answer to any file: both refuse it, or both compute the same.

As a program it goes through many mutated files, of some kinds or all: every 7th single change, then
100 files with several changes: `python tests/engine/test_same_answer.py 7 100 text moe`."""

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from helpers.gpu import device
from helpers.mutated import AUDIO, KINDS, VISION, Parts, mutated, mutated_by, mutations, parts
from helpers.tiny import Tiny, tiny_gguf
from helpers.tiny_vision import tiny_image
from tolerance import GPU_LOGITS

from webgemma import Gemma
from webgemma.engine import opening
from webgemma.errors import DeviceError, GgufError, WebgemmaError
from webgemma.gguf.sources import BytesSource
from webgemma.reference import diffusion, text, vision
from webgemma.reference.text import gelu
from webgemma.reference.weights import Weights

IDS = [2, *range(40, 52)]
COUNT = 3  # tokens
ROUNDING = 1e-6  # of a product, relative
SUBNORMAL = 1.2e-38
READER = Tiny(pattern="s", width=64)  # the text model beside an encoder


@dataclass(frozen=True)
class Answer:
    """What a device makes of a file: an error, or numbers and tokens."""

    error: WebgemmaError | None = None
    rows: np.ndarray | None = None
    tokens: tuple[int, ...] = ()
    likely: np.ndarray | None = None  # the CPU's logits after each of the GPU's tokens

    def __str__(self) -> str:
        return f"{type(self.error).__name__}: {self.error}" if self.error else f"{self.tokens}"


class KeptDevice:
    """A device that stays open when a model on it is closed: its kernels are compiled once."""

    def __init__(self) -> None:
        self._inner = device()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def close(self) -> None:
        """Stay open."""


async def kept_device(*_: object, **__: object) -> KeptDevice:
    """Open a device as `aopen_device` does."""
    return KeptDevice()


@cache
def reader() -> bytes:
    """Return the file of the text model beside an encoder."""
    return tiny_gguf(READER)


def answer(kind: str, data: bytes, on: str) -> Answer:
    """Load a file on a device and compute with it."""
    options: dict[str, Any] = {"context": 64, "kv": "f32"}
    is_encoder = kind in VISION or kind in AUDIO
    try:
        if is_encoder:
            options["mmproj"] = BytesSource(data, "mutated.gguf")
        source = BytesSource(reader() if is_encoder else data, "mutated.gguf")
        with Gemma.load(source, on, **options) as gemma:
            if kind in VISION:
                return Answer(rows=gemma.encode_image(tiny_image(VISION[kind], 2, 1), resize=False))
            if kind in AUDIO:
                samples = np.sin(np.arange(3000) ** 1.2).astype(np.float32)
                return Answer(rows=gemma.encode_audio(samples))
            return computed(gemma)
    except WebgemmaError as error:
        return Answer(error)


def computed(gemma: Gemma) -> Answer:
    """Return logits and tokens; no token may be one that the file suppresses."""
    if gemma.config.diffusion:
        pieces = list(gemma.generate(IDS, seed=1, steps=1, watch=True, max_tokens=12))
        canvas = next(piece.canvas for piece in pieces if piece.canvas)
        rows = np.array([canvas.logprobs])
        tokens = tuple(piece.token for piece in pieces if not piece.canvas)
        drawn = {i for i, kept in zip(canvas.ids, canvas.accepted, strict=True) if kept}
    else:
        rows = np.asarray(gemma.logits(IDS))
        tokens = tuple(x.token for x in gemma.generate(IDS, temperature=0, max_tokens=COUNT))
        random = gemma.generate(IDS, temperature=2, seed=3, max_tokens=COUNT, top_k=0, top_p=1)
        drawn = {x.token for x in random}
    assert not {*tokens, *drawn} & {*gemma.config.suppressed}, "a suppressed token was written"
    return Answer(None, rows, tokens)


def disagreement(cpu: Answer, gpu: Answer) -> str:
    """Return what differs, or an empty text."""
    if cpu.error or gpu.error:
        if cpu.error and gpu.error:
            return ""
        return "" if isinstance(gpu.error, DeviceError) else f"CPU {cpu}; GPU {gpu}"
    assert cpu.rows is not None
    assert gpu.rows is not None
    finite = np.isfinite(cpu.rows)
    if cpu.rows.shape != gpu.rows.shape or (finite != np.isfinite(gpu.rows)).any():
        return "other values are finite"
    scale = np.abs(cpu.rows[finite]).max()
    error = np.abs(cpu.rows[finite] - gpu.rows[finite]).max()
    if error > GPU_LOGITS * scale:
        return f"values differ by {error:g} of {scale:g}"
    last = cpu.rows[-1]
    if len(cpu.rows) == len(IDS) and last.max() - last[gpu.tokens[0]] > GPU_LOGITS * scale:
        return f"CPU {cpu}; GPU {gpu}"
    return ""


def compare(kind: str, data: bytes) -> tuple[str, Answer, Answer]:
    """Return what CPU and GPU disagree about, and both answers."""
    with patch.object(opening, "aopen_device", kept_device), warnings.catch_warnings():
        warnings.simplefilter("error")
        cpu, gpu = answer(kind, data, "cpu"), answer(kind, data, "gpu")
    return disagreement(cpu, gpu), cpu, gpu


EVERY_TOKEN = "tokenizer.ggml.suppress_tokens = [0, 1, 2, 3, 4, 5, 6 ... 319] of 320"
SOFTCAP = "gemma4.final_logit_softcapping"
EPS = "gemma4.attention.layer_norm_rms_epsilon"
REFUSED = [
    ("text", EVERY_TOKEN),
    ("diffusion", EVERY_TOKEN),
    ("text", f"{SOFTCAP} = 3.4e+38"),
    ("text", f"{SOFTCAP} = Typed(value=1e-300, type='FLOAT64')"),
    ("text", f"{EPS} = Typed(value=1e+300, type='FLOAT64')"),
    ("text", "gemma4.rope.freq_base_swa = 1e-30"),
    ("text", "rope_freqs.weight all = 1e-20"),
    ("text", "rope_freqs.weight as noise in F16"),
    ("text", "output_norm.weight as Q4_0"),
    ("text", "blk.0.post_ffw_norm.weight as Q6_K"),
    ("moe", "blk.0.ffn_gate_inp.scale as Q8_0"),
    ("diffusion", "blk.1.ffn_gate_inp.weight as noise in MXFP4"),
    ("diffusion", "self_cond_pre_norm.weight last = -inf"),
    ("diffusion", "self_cond_gate.weight all = nan"),
    ("vision", "v.blk.0.attn_v.weight first = nan"),
    ("vision", "v.blk.0.attn_q_norm.weight last = -inf"),
    ("vision", "v.blk.0.ffn_down.weight last = -inf"),
    ("vision", "v.blk.0.attn_v.output_min of shape (2,)"),
    ("vision", "v.blk.0.attn_out.input_max first = -3.4e+38"),
    ("large vision", "v.blk.0.attn_q.weight first = inf"),
    ("embedder", "mm.input_projection.weight all = -inf"),
    ("audio", "a.conv1d.0.weight first = -inf"),
    ("audio", "a.blk.0.attn_q.weight first = inf"),
    ("audio", "a.blk.0.attn_k.input_max last = -inf"),
    ("audio", "a.blk.0.conv_pw1.weight as noise in Q8_0"),
]
COMPUTED = [
    ("text", f"{SOFTCAP} = 16777216"),
    ("text", f"{EPS} = 3.4e+38"),
    ("text", "output_norm.weight all = 1e-20"),
    ("moe", "blk.0.ffn_gate_inp.scale last = 3.4e+38"),
    ("moe", "blk.0.attn_k_norm.weight as noise in BF16"),
    ("diffusion", "blk.1.enc_layer_output_scale.weight first = 3.4e+38"),
    ("audio", "a.blk.1.attn_post_norm.weight last = 3.4e+38"),
]


@pytest.mark.parametrize(("kind", "what"), REFUSED, ids=str)
def test_files_that_both_refuse(kind: str, what: str) -> None:
    found, cpu, gpu = compare(kind, mutated_by(kind, what))
    assert not found
    assert isinstance(cpu.error, GgufError)
    assert isinstance(gpu.error, GgufError)


@pytest.mark.parametrize(("kind", "what"), COMPUTED, ids=str)
def test_files_that_both_compute(kind: str, what: str) -> None:
    found, cpu, gpu = compare(kind, mutated_by(kind, what))
    assert not found
    assert cpu.error is None
    assert gpu.error is None


@pytest.mark.parametrize("kind", [*KINDS, *VISION, *AUDIO])
def test_some_of_all_changes(kind: str) -> None:
    """Compare a few of the thousands that this file compares as a program."""
    for number in range(5, len(mutations(kind)), 397):
        what, data = mutated(kind, number)
        found, cpu, _ = compare(kind, data)
        assert not found or is_unstable(kind, data, cpu), f"{what}: {found}"


@pytest.mark.parametrize("kind", ["moe", "diffusion"])
@pytest.mark.parametrize("on", ["cpu", "gpu"])
def test_suppressed_is_suppressed(kind: str, on: str) -> None:
    """Even where all logits are equal and the token is special: the first other one is written."""
    good = parts(kind)
    key = "tokenizer.ggml."
    lists = {key + "suppress_tokens": [4, 0, 2, 0, 3, 1], key + "eos_token_ids": [0, 2, 7]}
    norm = good.tensors["output_norm.weight"]
    zeros = {norm.name: replace(norm, data=bytes(len(norm.data)))}
    file = Parts({**good.metadata, **lists, key + "eos_token_id": 0}, good.tensors | zeros)
    settings = {"seed": 2, "steps": 2} if kind == "diffusion" else {"temperature": 0}
    with Gemma.load(BytesSource(file.data(), "zeros.gguf"), on, context=64) as gemma:
        tokens = [x.token for x in gemma.generate(IDS, max_tokens=COUNT, **settings)]
        assert tokens == [5] * COUNT
        if kind != "diffusion":
            biased = {"logit_bias": dict.fromkeys(range(5), 1e9), "temperature": 1, "seed": 1}
            drawn = [x.token for x in gemma.generate(IDS, max_tokens=9, **biased)]
            assert min(drawn) > 4


def is_unstable(kind: str, data: bytes, cpu: Answer) -> bool:
    """Return whether the CPU disagrees with itself when its products are rounded a little more."""
    noise = np.random.default_rng(1)

    def rounded(exact: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def compute(*arguments: Any) -> np.ndarray:
            values = exact(*arguments)
            values = np.where(np.abs(values) < SUBNORMAL, 0, values)  # which a GPU may do
            return values * (1 + ROUNDING * noise.standard_normal(values.shape)).astype(np.float32)

        return compute

    def rounded_gelu(x: np.ndarray) -> np.ndarray:  # a tanh is off by 1e-7 also where it is -1
        return gelu(x) + ROUNDING * np.abs(x) * noise.standard_normal(x.shape).astype(np.float32)

    with ExitStack() as patched:
        for name in ("linear", "__getitem__"):
            changed = rounded(getattr(Weights, name))
            patched.enter_context(patch.object(Weights, name, changed))
        for module in (text, vision, diffusion):
            patched.enter_context(patch.object(module, "gelu", rounded_gelu))
        return disagreement(cpu, answer(kind, data, "cpu")) != ""


def main(step: int, several: int, kinds: list[str]) -> None:
    """Compare the answers to every step-th single change and to some of several; print the rest."""
    counts: Counter[str] = Counter()
    for kind in kinds:
        number = len(mutations(kind))
        print(kind, number, "single changes", flush=True)
        for index in [*range(0, number, step), *range(number, number + several)]:
            what, data = mutated(kind, index)
            try:
                found, cpu, _ = compare(kind, data)
                unstable = found and not cpu.error and is_unstable(kind, data, cpu)
            except Exception as error:
                found, cpu, unstable = f"{type(error).__name__}: {error}", Answer(), False
            counts["refused" if cpu.error else "computed"] += 1
            if found:
                counts["unstable" if unstable else "disagreements"] += 1
                label = "unstable " if unstable else ""
                print(f"{label}{kind} {index} ({what}): {found}", flush=True)
        print(dict(counts), flush=True)


if __name__ == "__main__":
    chosen = sys.argv[3:] or [*KINDS, *VISION, *AUDIO]
    main(int(sys.argv[1]), int(sys.argv[2]), chosen)
