"""Which tensors a Gemma 4 has: one name for each, whoever wrote the file, and its shape."""

import re
import struct
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from webgemma.errors import GgufError
from webgemma.gguf.reader import Gguf, TensorInfo

if TYPE_CHECKING:
    from webgemma.gemma.config import Config, Layer

Wanted: TypeAlias = tuple[str, tuple[int, ...], bool]  # name, shape in ggml's order, needed

# Ollama's names of audio tensors -> llama.cpp's, which are ours. `ln2` differs in meaning.
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
    """Every tensor of the file under its canonical name (llama.cpp's)."""
    ollama_audio = "a.blk.0.layer_pre_norm.weight" in gguf.tensors
    tensors: dict[str, TensorInfo] = {}
    for name, tensor in gguf.tensors.items():
        canonical = _canonical(name, ollama_audio)
        if canonical in tensors:
            raise GgufError(
                f"{gguf.name}: the tensors {tensors[canonical].name} and {name} "
                "are two names of one thing."
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


def check_tensors(gguf: Gguf, wanted: Iterable[Wanted], tensors: dict[str, TensorInfo]) -> None:
    """Every tensor the model needs is there, in a shape and a format we compute with."""
    for name, shape, needed in wanted:
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
                "webgemma cannot compute with; take another quantisation (Q4_K_M, Q8_0, …)."
            )


def text_tensors(config: "Config") -> Iterator[Wanted]:
    """All tensors of the text model."""
    width, ple, number = config.width, config.ple, len(config.layers)
    yield "token_embd.weight", (width, config.vocab), True
    yield "output.weight", (width, config.vocab), False
    yield "output_norm.weight", (width,), True
    full = [layer for layer in config.layers if not layer.sliding]
    if full:
        yield "rope_freqs.weight", (full[0].head_dim // 2,), False
    if ple:
        yield "per_layer_token_embd.weight", (ple * number, config.vocab), True
        yield "per_layer_model_proj.weight", (width, ple * number), True
        yield "per_layer_proj_norm.weight", (ple,), True
    if config.diffusion:
        ffn = config.diffusion.ffn
        yield "self_cond_pre_norm.weight", (width,), True
        yield "self_cond_gate.weight", (width, ffn), True
        yield "self_cond_up.weight", (width, ffn), True
        yield "self_cond_down.weight", (ffn, width), True
    for layer in config.layers:
        for name, shape, needed in _layer_tensors(config, layer):
            yield f"blk.{layer.index}.{name}", shape, needed


def _layer_tensors(config: "Config", layer: "Layer") -> Iterator[Wanted]:
    width, ple = config.width, config.ple
    queries = layer.heads * layer.head_dim
    keys = layer.kv_heads * layer.head_dim
    own_kv = not layer.shares_kv
    yield "attn_norm.weight", (width,), True
    yield "attn_q.weight", (width, queries), True
    yield "attn_q_norm.weight", (layer.head_dim,), True
    if own_kv:  # sharing layers may carry these, unused
        yield "attn_k.weight", (width, keys), True
        yield "attn_k_norm.weight", (layer.head_dim,), True
        yield "attn_v.weight", (width, keys), not layer.k_is_v
    yield "attn_output.weight", (queries, width), True
    yield "post_attention_norm.weight", (width,), True
    yield "ffn_norm.weight", (width,), True
    yield "ffn_gate.weight", (width, layer.ffn), True
    yield "ffn_up.weight", (width, layer.ffn), True
    yield "ffn_down.weight", (layer.ffn, width), True
    yield "post_ffw_norm.weight", (width,), True
    yield "layer_output_scale.weight", (1,), False
    if config.diffusion:
        yield "enc_layer_output_scale.weight", (1,), False
    if ple:
        yield "inp_gate.weight", (width, ple), True
        yield "proj.weight", (ple, width), True
        yield "post_norm.weight", (width,), True
    if layer.experts and config.experts:
        experts = config.experts
        yield "ffn_gate_inp.weight", (width, experts.count), True
        yield "ffn_gate_inp.scale", (width,), True
        for name, ffn in gate_and_up(experts.fused, experts.ffn):
            yield name, (width, ffn, experts.count), True
        yield "ffn_down_exps.weight", (experts.ffn, width, experts.count), True
        yield "ffn_down_exps.scale", (experts.count,), False
        for norm in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
            yield f"{norm}.weight", (width,), True


def check_rope_factors(gguf: Gguf, factors: Iterable[float]) -> list[float]:
    """The divisors of the rotary frequencies, when every one can divide."""
    checked = [float(factor) for factor in factors]
    if not all(factor > 0 for factor in checked):  # NaN is not
        raise GgufError(
            f"{gguf.name}: rope_freqs.weight holds something else than numbers above zero; "
            "the file is damaged: get it again."
        )
    return checked


def gate_and_up(fused: bool, ffn: int) -> tuple[tuple[str, int], ...]:
    """The experts' input tensors and their rows: one fused (gate first), or two."""
    if fused:
        return (("ffn_gate_up_exps.weight", 2 * ffn),)
    return (("ffn_gate_exps.weight", ffn), ("ffn_up_exps.weight", ffn))


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a scalar"


async def read_floats(gguf: Gguf, tensor: TensorInfo) -> list[float]:
    """A vector of a file as numbers; norms and scales are stored as plain floats."""
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
