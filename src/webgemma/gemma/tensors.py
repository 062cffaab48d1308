"""Tensors of a file: canonical names, whichever converter wrote them, and checked shapes."""

import re
import struct
from collections.abc import Iterable
from typing import TypeAlias

from webgemma.errors import GgufError
from webgemma.gguf.reader import Gguf, TensorInfo

TensorSpec: TypeAlias = tuple[str, tuple[int, ...], bool]  # name, shape in ggml's order, needed

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
    return name


def check_tensors(gguf: Gguf, specs: Iterable[TensorSpec], tensors: dict[str, TensorInfo]) -> None:
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


def check_rope_factors(gguf: Gguf, factors: Iterable[float]) -> list[float]:
    """Return the divisors of the RoPE frequencies; GgufError unless all are above zero."""
    checked = [float(factor) for factor in factors]
    if not all(factor > 0 for factor in checked):  # NaN is not
        raise GgufError(
            f"{gguf.name}: rope_freqs.weight must hold numbers above zero; "
            "the file is damaged: download it again."
        )
    return checked


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a scalar"


async def read_floats(gguf: Gguf, tensor: TensorInfo) -> list[float]:
    """Read a vector of a file; norms and scales are stored as plain floats."""
    data = bytes(await gguf.read(tensor))
    match tensor.format.name:
        case "F32":
            return list(struct.unpack(f"<{tensor.weights}f", data))
        case "F16":
            return list(struct.unpack(f"<{tensor.weights}e", data))
        case "BF16":
            words = struct.unpack(f"<{tensor.weights}H", data)
            return list(
                struct.unpack(
                    f"<{len(words)}f", struct.pack(f"<{len(words)}I", *(w << 16 for w in words))
                )
            )
    raise GgufError(
        f"{gguf.name}: the vector {tensor.name} is stored as {tensor.format}, not as floats."
    )
