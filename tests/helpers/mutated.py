"""Mutated model files: every key and tensor of tiny models changed, one at a time or several.

The order is fixed, so that a number names a file on any machine."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from helpers.tiny import Tiny, random_tensor, tiny_metadata, tiny_tensors
from helpers.tiny_audio import RAW_AUDIO, TINY_AUDIO, audio_metadata, audio_weights
from helpers.tiny_vision import (
    EMBEDDER,
    LARGE_VISION,
    SMALL_VISION,
    vision_metadata,
    vision_weights,
)
from webgemma.gguf.formats import FORMATS
from webgemma.gguf.header import MAX_DIMS
from webgemma.gguf.writer import NewTensor, Typed, gguf_bytes

HUGE = 3.4e38  # of float32
NUMBERS = (0, 1, 2, 3, 5, 255, 4096, -1, 1 << 24, (1 << 31) - 1, 1 << 32, (1 << 63) - 1)
FLOATS = (0.5, 1e-45, 1e-38, 1e-30, 1e-3, 1e4, 1e19, 1e30, HUGE, -1.0, -HUGE, math.inf, math.nan)
OTHERS = (True, False, "", "x", Typed(1e300, "FLOAT64"), Typed(1e-300, "FLOAT64"))
SCALARS = (*NUMBERS, *FLOATS, *OTHERS)
VALUES = (0.0, -0.0, 1e-42, 1e-20, 1e4, 7e4, 1e12, 1e25, HUGE, -HUGE, math.inf, -math.inf, math.nan)


@dataclass(frozen=True)
class Parts:
    """What a file is made of."""

    metadata: dict[str, object]
    tensors: dict[str, NewTensor]

    def data(self) -> bytes:
        """Return the bytes of the file."""
        return gguf_bytes(self.metadata, self.tensors.values())


Mutation = Callable[[Parts], Parts]

TEXT = Tiny(pattern="sf", width=256, heads=2, ffn=256, ple=32, seed=5)
MOE = Tiny(pattern="sf", width=64, heads=4, k_is_v=True, experts=(6, 2, 32), suppressed=(7, 9))
SHARED = Tiny(pattern="sfsf", width=32, ffn=32, ple=16, shared=2, double_wide=True)
FORMATTED = replace(TEXT, ffn=256, formats=("Q4_K", "Q6_K", "Q8_0", "Q4_0", "BF16"), ple=0)
DIFFUSION = replace(MOE, formats=("F16",), canvas=12, suppressed=(3,))
GEMMA3 = Tiny(
    generation=3, pattern="sf", kv_heads=(2, 2), head_dims=(32, 32), formats=("Q8_0", "F16")
)
KINDS: dict[str, Tiny] = {
    "text": TEXT,
    "shared": SHARED,
    "formats": FORMATTED,
    "moe": MOE,
    "diffusion": DIFFUSION,
    "gemma3": GEMMA3,
}
VISION = {"vision": SMALL_VISION, "large vision": LARGE_VISION, "embedder": EMBEDDER}
AUDIO = {"audio": replace(TINY_AUDIO, output=64), "raw audio": replace(RAW_AUDIO, output=64)}
# Keys that the tiny files do not have.
OPTIONAL = ("suppress_tokens", "eos_token_ids", "eot_token_id")
DIFFUSION_KEYS = (
    *("eb_t_min", "eb_t_max", "eb_entropy_bound"),
    *("eb_stability_threshold", "eb_confidence_threshold"),
)


@cache
def parts(kind: str) -> Parts:
    """Return the parts of a good file."""
    if kind in VISION:
        metadata: dict[str, object] = {"general.architecture": "clip"}
        metadata |= vision_metadata(VISION[kind], "clip.")
        tensors = vision_weights(VISION[kind])
    elif kind in AUDIO:
        metadata, tensors = audio_metadata(AUDIO[kind]), audio_weights(AUDIO[kind])
    else:
        metadata, tensors = tiny_metadata(KINDS[kind]), tiny_tensors(KINDS[kind])
    return Parts(metadata, {tensor.name: tensor for tensor in tensors})


@cache
def mutations(kind: str) -> tuple[tuple[str, Mutation], ...]:
    """Return every single change of a file, with a name."""
    good = parts(kind)
    found: list[tuple[str, Mutation]] = []
    keys = list(good.metadata)
    if kind in KINDS:
        keys += [f"tokenizer.ggml.{key}" for key in OPTIONAL if key not in keys]
    if kind == "diffusion":
        keys += [f"diffusion.{key}" for key in DIFFUSION_KEYS]
    for key in keys:
        for value in (None, *SCALARS, *_lists(good.metadata.get(key))):
            shown = repr(value)
            if isinstance(value, list) and len(shown) > 60:
                shown = f"{shown[:20]} ... {value[-1]!r}] of {len(value)}"
            found.append((f"{key} = {shown}", _with_key(key, value)))
    for name, tensor in good.tensors.items():
        found += [(f"{name} {what}", change) for what, change in _tensor_mutations(tensor)]
    return tuple(found)


def mutated_by(kind: str, what: str) -> bytes:
    """Return the file with the single change of this name."""
    return dict(mutations(kind))[what](parts(kind)).data()


def mutated(kind: str, number: int) -> tuple[str, bytes]:
    """Return a file of a number and what was changed: single changes first, then several."""
    single = mutations(kind)
    if number < len(single):
        chosen = [single[number]]
    else:
        source = random.Random(f"{kind} {number}")
        chosen = source.sample(single, source.choice((2, 2, 3)))
    changed = parts(kind)
    for _, change in chosen:
        changed = change(changed)
    return " and ".join(name for name, _ in chosen), changed.data()


def _lists(value: object) -> Iterator[object]:
    yield Typed([], "UINT32")
    yield [0]
    yield [0, 0, 1]
    yield [1, 2, 3, 4, 5, 6, 7, 8]
    yield [True, False]
    yield ["a", "b"]
    yield [0.5, math.nan]
    yield [-1, 5]
    yield list(range(320))
    yield list(range(319))
    yield list(range(1, 320))
    yield [319, 0]
    if isinstance(value, list):
        yield value[:-1]
        yield [*value, value[-1]]
        yield value[::-1]
        if type(value[0]) is int:
            for number in (0, 1, 2, -1, 255, 1 << 31):
                yield [number, *value[1:]]
                yield [*value[:-1], number]
    elif type(value) is int:
        yield [value, value]


def _with_key(key: str, value: object) -> Mutation:
    def change(old: Parts) -> Parts:
        metadata = {name: other for name, other in old.metadata.items() if name != key}
        return replace(old, metadata=metadata if value is None else {**metadata, key: value})

    return change


def _tensor_mutations(tensor: NewTensor) -> Iterator[tuple[str, Mutation]]:
    name, shape = tensor.name, tuple(tensor.shape)

    def become(*new: NewTensor) -> Mutation:
        def change(old: Parts) -> Parts:
            rest = {key: other for key, other in old.tensors.items() if key != name}
            return replace(old, tensors=rest | {each.name: each for each in new})

        return change

    yield "missing", become()
    for fmt in FORMATS.values():
        if shape[0] % fmt.block == 0 and fmt.name != tensor.format:
            nbytes = fmt.row_nbytes(shape[0]) * math.prod(shape[1:])
            if fmt.usable:
                new = random_tensor(4, name, shape, fmt.name)
            else:
                new = NewTensor(name, shape, fmt.name, bytes(nbytes))
            yield f"as {fmt}", become(new)
    total = math.prod(shape)
    others = {(*shape, 1), shape[::-1], (total,), (1, total), (*shape[:-1], shape[-1] + 1)}
    others |= {(shape[0] + 4, *shape[1:]), (2 * shape[0], *shape[1:]), (shape[0] // 2 or 1,)}
    for other in sorted(x for x in others - {shape} if len(x) <= MAX_DIMS):
        yield f"of shape {other}", become(random_tensor(4, name, other, "F32"))
    for value in VALUES:
        for where, at in (("first", slice(0, 1)), ("last", slice(-1, None)), ("all", slice(None))):
            values = np.frombuffer(random_tensor(4, name, shape, "F32").data, "<f4").copy()
            values[at] = value
            yield f"{where} = {value}", become(NewTensor(name, shape, "F32", values.tobytes()))
    for format in ("Q8_0", "Q4_K", "Q6_K", "MXFP4", "F16", "BF16"):
        if shape[0] % FORMATS[format].block == 0:
            noise = random.Random(name + format).randbytes(
                FORMATS[format].row_nbytes(shape[0]) * math.prod(shape[1:])
            )
            yield f"as noise in {format}", become(NewTensor(name, shape, format, noise))
