"""Tensors of a file: canonical names, whichever converter wrote them, and checked shapes."""

import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from webgemma.errors import GgufError
from webgemma.gguf.reader import Gguf, TensorInfo

TensorSpec: TypeAlias = tuple[str, tuple[int, ...], bool]  # name, shape in ggml's order, needed

PLAIN_FORMATS = ("F32", "F16", "BF16")  # of vectors: `read_floats` decodes them without numpy
LOWEST_ROPE_FACTOR = 1e-3  # a smaller divisor turns heads faster than any position can tell
BOUNDS = ("input_min", "input_max", "output_min", "output_max")  # of a clipped linear
MAY_BE_INFINITE = (*BOUNDS, "rope_freqs.weight", "v.clamp_data")  # how their names end

# Ollama's names of audio tensors -> llama.cpp's, the canonical ones. `ln2` differs in meaning.
_OLLAMA_AUDIO_BLOCK = {
    "ln1": "attn_pre_norm",
    "ln2": "attn_post_norm",
    "layer_pre_norm": "ln2",
    "linear_pos": "attn_k_rel",
}
_OLLAMA_AUDIO = {
    "a.pre_encode.out.weight": "a.input_projection.weight",
    "mm.a.fc.weight": "a.pre_encode.out.weight",
    "mm.a.fc.bias": "a.pre_encode.out.bias",
}
# Ollama's names of EmbeddingGemma's last tensors.
_OLLAMA_EMBEDDING = {
    "norm.weight": "output_norm.weight",
    "dense.0.weight": "dense_2.weight",
    "dense.1.weight": "dense_3.weight",
}
_AUDIO_BLOCK = re.compile(r"(a\.blk\.\d+\.)(\w+)(\..+)", re.ASCII)


def canonical_tensors(gguf: Gguf) -> dict[str, TensorInfo]:
    """Return every tensor of the file under its canonical name (llama.cpp's)."""
    ollama_audio = "a.blk.0.layer_pre_norm.weight" in gguf.tensors
    tensors: dict[str, TensorInfo] = {}
    for name, tensor in gguf.tensors.items():
        canonical = _canonical(name, ollama_audio)
        if canonical in tensors:
            raise GgufError(
                f"{gguf.name}: the tensors {tensors[canonical].name} and {name} "
                "are two names of the same tensor."
            )
        tensors[canonical] = tensor
    return tensors


def _canonical(name: str, ollama_audio: bool) -> str:
    if name.endswith(".ffn_gate_inp.per_expert_scale"):
        return name.removesuffix("ffn_gate_inp.per_expert_scale") + "ffn_down_exps.scale"
    if ollama_audio:
        if match := _AUDIO_BLOCK.fullmatch(name):
            block, part, rest = match.groups()
            return block + _OLLAMA_AUDIO_BLOCK.get(part, part) + rest
        return _OLLAMA_AUDIO.get(name, name)
    return _OLLAMA_EMBEDDING.get(name, name)


def check_tensors(
    gguf: Gguf, specs: Iterable[TensorSpec], tensors: Mapping[str, TensorInfo]
) -> None:
    """Raise GgufError unless every needed tensor is there, in its shape and a usable format."""
    for name, shape, needed in specs:
        tensor = tensors.get(name)
        if tensor is None:
            if needed:
                raise GgufError(
                    f"{gguf.name}: the tensor {name} is missing; "
                    "the file is incomplete or was made by another converter."
                )
            continue
        if tensor.shape != shape:
            raise GgufError(
                f"{gguf.name}: the tensor {tensor.name} is {_times(tensor.shape)}; "
                f"this model needs {_times(shape)}."
            )
        if not tensor.format.usable:
            raise GgufError(
                f"{gguf.name}: the tensor {tensor.name} is stored as {tensor.format}, which "
                "webgemma does not support; use another quantisation (Q4_K_M, Q8_0, …)."
            )
        if len(shape) == 1:
            check_vector(gguf, tensor)


def check_vector(gguf: Gguf, tensor: TensorInfo) -> None:
    """Raise GgufError unless a norm, scale or bound is stored as plain floats."""
    if tensor.format.name not in PLAIN_FORMATS:
        raise GgufError(
            f"{gguf.name}: the vector {tensor.name} is stored as {tensor.format}; norms, scales "
            f"and bounds must be {', '.join(PLAIN_FORMATS[:-1])} or {PLAIN_FORMATS[-1]}: "
            "convert the model again."
        )


def check_finite(gguf: Gguf, tensor: TensorInfo, total: float) -> None:
    """Raise GgufError for a vector with NaN or infinity, which every token would meet.

    `total` is the sum of its float32 values in float64: finite exactly if all of them are."""
    if not math.isfinite(total) and not tensor.name.endswith(MAY_BE_INFINITE):
        raise GgufError(
            f"{gguf.name}: the vector {tensor.name} holds NaN or infinity; "
            "the file is damaged: download it again."
        )


def bound_tensors(linears: Iterable[str]) -> Iterator[TensorSpec]:
    """Yield the bounds that clipped linears may have."""
    for name in linears:
        for bound in BOUNDS:
            yield f"{name}.{bound}", (1,), False


def check_bounds(gguf: Gguf, linear: str, bounds: Sequence[float]) -> None:
    """Raise GgufError unless four bounds, in the order of BOUNDS, leave something between them."""
    if not (bounds[0] <= bounds[1] and bounds[2] <= bounds[3]):  # NaN is not
        raise GgufError(
            f"{gguf.name}: the bounds of {linear} are {', '.join(f'{x:g}' for x in bounds)}, and "
            "nothing lies between them; the file is damaged: download it again."
        )


def check_rope_factors(gguf: Gguf, factors: Iterable[float]) -> list[float]:
    """Return the divisors of the RoPE frequencies; GgufError unless all are large enough."""
    checked = [float(factor) for factor in factors]
    if not all(factor >= LOWEST_ROPE_FACTOR for factor in checked):  # NaN is not
        raise GgufError(
            f"{gguf.name}: rope_freqs.weight must hold numbers above zero, of at least "
            f"{LOWEST_ROPE_FACTOR:g}; the file is damaged: download it again."
        )
    return checked


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a scalar"


async def read_floats(gguf: Gguf, tensor: TensorInfo) -> list[float]:
    """Read a vector of a file; GgufError unless it is stored as plain, finite floats."""
    check_vector(gguf, tensor)
    data, count = bytes(await gguf.read(tensor)), tensor.weights
    if tensor.format.name == "BF16":  # the upper half of a float32
        words = (word << 16 for word in struct.unpack(f"<{count}H", data))
        data = struct.pack(f"<{count}I", *words)
    values = list(struct.unpack(f"<{count}{'e' if tensor.format.name == 'F16' else 'f'}", data))
    if len(tensor.shape) == 1:
        check_finite(gguf, tensor, sum(values))
    return values
