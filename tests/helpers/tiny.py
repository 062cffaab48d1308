"""Tiny Gemma models of every layer kind and format; seed and tensor name set the weights."""

import hashlib
import math
import re
from dataclasses import dataclass, field, replace

import numpy as np

from webgemma.gguf.formats import FORMATS, Format
from webgemma.gguf.writer import NewTensor, gguf_bytes

CONTROLS = [
    *("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|tool>", "<tool|>", "<|think|>"),
    *("<|turn>", "<turn|>", "<|image>", "<image|>", "<|audio>", "<audio|>"),
    *("<|image|>", "<|audio|>", "<|video|>"),
]
TAGS = [
    *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
    *('<|"|>', "<|channel>", "<channel|>"),
]
LETTERS = [*"abcdefghijklmnopqrstuvwxyz", *".,!?", "\n", "▁", "th", "the", "▁the", "in", "er"]
GEMMA3_CONTROLS = [
    *("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"),
]
RUNS = ["\n", "\n\n", "\n\n\n", "  ", "   ", "<td>", "[multimodal]"]  # user-defined pieces
MERGES = ["t h", "th e", "▁ the", "i n", "e r"]


@dataclass(frozen=True)
class Tiny:
    """Shape of a model; its matrices are stored in `formats`, in rotation."""

    pattern: str = "ssfssf"  # one letter per layer: s sliding, f full
    width: int = 64
    heads: int = 2
    kv_heads: tuple[int, int] = (1, 1)  # sliding, full
    head_dims: tuple[int, int] = (16, 32)
    ffn: int = 96
    shared: int = 0  # trailing layers that share keys and values
    double_wide: bool = False
    window: int = 8
    ple: int = 0
    k_is_v: bool = False  # full layers have no value projection
    experts: tuple[int, int, int] | None = None  # count, used, width
    fused: bool = True
    vocab: int = 320
    context: int = 512
    formats: tuple[str, ...] = ("F32",)
    suppressed: tuple[int, ...] = ()
    canvas: int = 0  # above 0 the model is a DiffusionGemma
    generation: int = 4  # 3: a Gemma 3, whose layers have heads of the same number and size
    embedding: str = ""  # an embedding model: "dense" layers, "ollama"'s names, a "projection"
    seed: int = 3
    metadata: dict[str, object] = field(default_factory=dict)  # entries to add; None removes


SMALL = Tiny(ple=16, shared=3, double_wide=True)
LARGE = Tiny(heads=4, kv_heads=(2, 1), k_is_v=True, suppressed=(7, 9), formats=("BF16", "F16"))
MOE = replace(LARGE, pattern="ssfsf", experts=(6, 2, 32), suppressed=(), formats=("F32",))
MIXED = Tiny(
    pattern="sf" * 3,
    width=256,
    head_dims=(64, 128),
    heads=4,
    ffn=256,
    ple=256,
    vocab=320,
    formats=(
        *("Q6_K", "Q4_K", "Q5_K", "Q3_K", "Q2_K", "IQ4_XS", "Q8_0", "Q4_0"),
        *("Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4", "F16", "BF16"),
    ),
)
DIFFUSION = replace(MOE, formats=("BF16",), canvas=12)
GEMMA3 = Tiny(
    generation=3,
    pattern="sssssfs",
    heads=4,
    kv_heads=(2, 2),
    head_dims=(32, 32),
    seed=9,
    metadata={"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0},
)
# EmbeddingGemma as llama.cpp and Ollama write it (a radius of 5 positions), EmbeddingGemma 2.
EMBEDDING = replace(GEMMA3, embedding="dense", window=10, context=128, seed=12, metadata={})
OLLAMA_EMBEDDING = replace(EMBEDDING, embedding="ollama")
EMBEDDING2 = Tiny(
    embedding="projection", pattern="sssf", heads=4, kv_heads=(2, 1), ple=16, window=5, seed=13
)
DENSE, PROJECTED = 96, 96  # width between the dense layers; size of EmbeddingGemma 2's vectors
KINDS = {"small": SMALL, "large": LARGE, "moe": MOE, "mixed": MIXED, "gemma3": GEMMA3}


def tiny_gguf(tiny: Tiny) -> bytes:
    """Return the bytes of the file."""
    return gguf_bytes(tiny_metadata(tiny), tiny_tensors(tiny))


def tiny_metadata(tiny: Tiny) -> dict[str, object]:
    """Return the metadata of the file."""
    number = len(tiny.pattern)
    first_shared = number - tiny.shared
    sliding = [kind == "s" for kind in tiny.pattern]
    if tiny.generation == 3:
        changed = _gemma3_metadata(tiny)
        if tiny.embedding:
            changed |= {"tokenizer.ggml.add_eos_token": True, "gemma3.pooling_type": 1}
        if tiny.embedding == "dense":
            changed = {re.sub("^gemma3", "gemma-embedding", k): v for k, v in changed.items()}
            changed |= {"general.architecture": "gemma-embedding"}
        changed |= tiny.metadata
        return {key: value for key, value in changed.items() if value is not None}
    tokens = vocabulary(tiny.vocab)
    metadata: dict[str, object] = {
        "general.architecture": "gemma4",
        "general.name": "tiny",
        "gemma4.block_count": number,
        "gemma4.context_length": tiny.context,
        "gemma4.embedding_length": tiny.width,
        "gemma4.feed_forward_length": [_ffn(tiny, i, first_shared) for i in range(number)],
        "gemma4.attention.head_count": tiny.heads,
        "gemma4.attention.head_count_kv": [tiny.kv_heads[not s] for s in sliding],
        "gemma4.attention.key_length": tiny.head_dims[1],
        "gemma4.attention.value_length": tiny.head_dims[1],
        "gemma4.attention.key_length_swa": tiny.head_dims[0],
        "gemma4.attention.value_length_swa": tiny.head_dims[0],
        "gemma4.attention.layer_norm_rms_epsilon": 1e-6,
        "gemma4.attention.sliding_window": tiny.window,
        "gemma4.attention.sliding_window_pattern": sliding,
        "gemma4.attention.shared_kv_layers": tiny.shared,
        "gemma4.rope.freq_base": 1e6,
        "gemma4.rope.freq_base_swa": 1e4,
        "gemma4.rope.dimension_count": tiny.head_dims[1],
        "gemma4.rope.dimension_count_swa": tiny.head_dims[0],
        "gemma4.final_logit_softcapping": 30.0,
        "gemma4.embedding_length_per_layer_input": tiny.ple,
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.pre": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_kind(token) for token in tokens],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }
    if tiny.experts:
        names = ("expert_count", "expert_used_count", "expert_feed_forward_length")
        metadata |= {
            f"gemma4.{name}": value for name, value in zip(names, tiny.experts, strict=True)
        }
    if tiny.suppressed:
        metadata["tokenizer.ggml.suppress_tokens"] = list(tiny.suppressed)
    if tiny.canvas:
        metadata = {re.sub("^gemma4", "diffusion-gemma", k): v for k, v in metadata.items()}
        metadata |= {"general.architecture": "diffusion-gemma"}
        metadata |= {"diffusion.canvas_length": tiny.canvas, "diffusion.eb_max_steps": 4}
    if tiny.embedding:
        metadata = {re.sub("^gemma4", "embedding-gemma2", k): v for k, v in metadata.items()}
        metadata |= {"general.architecture": "embedding-gemma2"}
        metadata |= {"embedding-gemma2.embedding_length_out": PROJECTED}
    changed = metadata | tiny.metadata
    return {key: value for key, value in changed.items() if value is not None}


def _gemma3_metadata(tiny: Tiny) -> dict[str, object]:
    """Return what llama.cpp writes of a Gemma 3, and the pattern, which it leaves out."""
    tokens = gemma3_vocabulary(tiny.vocab)
    return {
        "general.architecture": "gemma3",
        "general.name": "tiny",
        "gemma3.block_count": len(tiny.pattern),
        "gemma3.context_length": tiny.context,
        "gemma3.embedding_length": tiny.width,
        "gemma3.feed_forward_length": tiny.ffn,
        "gemma3.attention.head_count": tiny.heads,
        "gemma3.attention.head_count_kv": tiny.kv_heads[0],
        "gemma3.attention.key_length": tiny.head_dims[0],
        "gemma3.attention.value_length": tiny.head_dims[0],
        "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
        "gemma3.attention.sliding_window": tiny.window,
        "gemma3.attention.sliding_window_pattern": [kind == "s" for kind in tiny.pattern],
        "gemma3.rope.freq_base": 1e6,
        "gemma3.rope.freq_base_swa": 1e4,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [_score(token) for token in tokens],
        "tokenizer.ggml.token_type": [_gemma3_kind(token) for token in tokens],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }


def gemma3_vocabulary(size: int) -> list[str]:
    """Return Gemma 3's special tokens and runs, all bytes, a few letters, then unused tokens."""
    tokens = [*GEMMA3_CONTROLS, *RUNS, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [letter for letter in LETTERS if letter != "\n"]
    return [*tokens, *(f"<unused{i}>" for i in range(size - len(tokens)))][:size]


def _gemma3_kind(token: str) -> int:
    if token in RUNS:
        return 4
    if token in GEMMA3_CONTROLS or token.startswith("<unused"):
        return 3
    return 6 if token.startswith("<0x") else 1


def _score(token: str) -> float:
    """Return a score: of pieces by their place, as if they had been merged in that order."""
    return -float(LETTERS[::-1].index(token)) if token in LETTERS and token != "\n" else -1000.0


def vocabulary(size: int) -> list[str]:
    """Return Gemma 4's special tokens, all bytes, a few letters and merges, then unused tokens."""
    tokens = [*CONTROLS, *TAGS, *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS]
    return [*tokens, *(f"<unused{i}>" for i in range(size - len(tokens)))][:size]


def tiny_tensors(tiny: Tiny) -> list[NewTensor]:
    """Return all weights, the matrices in the model's formats in rotation."""
    tensors: list[NewTensor] = []

    def matrix(name: str, *shape: int, format: str = "") -> None:
        tensors.append(
            random_tensor(
                tiny.seed, name, shape, format or tiny.formats[len(tensors) % len(tiny.formats)]
            )
        )

    def vector(name: str, width: int, spread: float = 0.1, mean: float = 1.0) -> None:
        values = mean * (1 + spread * uniform(tiny.seed, name, width))
        tensors.append(NewTensor(name, (width,), "F32", values.astype("<f4").tobytes()))

    width, ple, number = tiny.width, tiny.ple, len(tiny.pattern)
    matrix("token_embd.weight", width, tiny.vocab)
    norm = "norm.weight" if tiny.embedding == "ollama" else "output_norm.weight"
    vector(norm, width, mean=5.0)  # logits with a standard deviation of about 4
    if tiny.embedding == "projection":
        matrix("embedding_projection.weight", width, PROJECTED)
    elif tiny.embedding:
        ollama = tiny.embedding == "ollama"
        matrix("dense.0.weight" if ollama else "dense_2.weight", width, DENSE)
        matrix("dense.1.weight" if ollama else "dense_3.weight", DENSE, width)
    if tiny.generation == 4 and not tiny.embedding:
        half = tiny.head_dims[1] // 2
        factors = np.where(np.arange(half) < half // 4, 1, 1e30).astype("<f4")
        tensors.append(NewTensor("rope_freqs.weight", (half,), "F32", factors.tobytes()))
    if ple:
        if not tiny.embedding:
            matrix("per_layer_token_embd.weight", ple * number, tiny.vocab)
        matrix("per_layer_model_proj.weight", width, ple * number)
        vector("per_layer_proj_norm.weight", ple)
    if tiny.canvas:
        vector("self_cond_pre_norm.weight", width)
        matrix("self_cond_gate.weight", width, tiny.ffn)
        matrix("self_cond_up.weight", width, tiny.ffn)
        matrix("self_cond_down.weight", tiny.ffn, width)
    for index in range(number):
        _layer(tiny, index, matrix, vector)
    return tensors


def _layer(tiny: Tiny, index: int, matrix, vector) -> None:
    width, name = tiny.width, f"blk.{index}."
    full = tiny.pattern[index] == "f"
    head_dim, kv_heads = tiny.head_dims[full], tiny.kv_heads[full]
    first_shared = len(tiny.pattern) - tiny.shared
    ffn = _ffn(tiny, index, first_shared)
    for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
        vector(f"{name}{norm}.weight", width)
    matrix(f"{name}attn_q.weight", width, tiny.heads * head_dim)
    matrix(f"{name}attn_output.weight", tiny.heads * head_dim, width)
    vector(f"{name}attn_q_norm.weight", head_dim)
    if index < first_shared:
        matrix(f"{name}attn_k.weight", width, kv_heads * head_dim)
        vector(f"{name}attn_k_norm.weight", head_dim)
        if not (tiny.k_is_v and full):
            matrix(f"{name}attn_v.weight", width, kv_heads * head_dim)
    matrix(f"{name}ffn_gate.weight", width, ffn)
    matrix(f"{name}ffn_up.weight", width, ffn)
    matrix(f"{name}ffn_down.weight", ffn, width)
    if tiny.generation == 4:
        vector(f"{name}layer_output_scale.weight", 1, 0.3)
    if tiny.canvas:
        vector(f"{name}enc_layer_output_scale.weight", 1, 0.3)
    if tiny.ple:
        matrix(f"{name}inp_gate.weight", width, tiny.ple)
        matrix(f"{name}proj.weight", tiny.ple, width)
        vector(f"{name}post_norm.weight", width)
    if tiny.experts:
        count, _, expert_ffn = tiny.experts
        matrix(f"{name}ffn_gate_inp.weight", width, count, format="F32")
        vector(f"{name}ffn_gate_inp.scale", width, 0.5)
        if tiny.fused:
            matrix(f"{name}ffn_gate_up_exps.weight", width, 2 * expert_ffn, count)
        else:
            matrix(f"{name}ffn_gate_exps.weight", width, expert_ffn, count)
            matrix(f"{name}ffn_up_exps.weight", width, expert_ffn, count)
        matrix(f"{name}ffn_down_exps.weight", expert_ffn, width, count)
        vector(f"{name}ffn_down_exps.scale", count, 0.5)
        for norm in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
            vector(f"{name}{norm}.weight", width)


def _ffn(tiny: Tiny, index: int, first_shared: int) -> int:
    return tiny.ffn * (2 if tiny.double_wide and index >= first_shared else 1)


def _kind(token: str) -> int:
    if token in TAGS:
        return 4
    if token in CONTROLS or token.startswith("<unused"):
        return 3
    return 6 if token.startswith("<0x") else 1


def random_bytes(seed: int, name: str, nbytes: int) -> bytes:
    """Return bytes that depend on the seed and the name only, on any machine and in any version."""
    return hashlib.shake_128(f"{seed}:{name}".encode()).digest(nbytes)


def uniform(seed: int, name: str, count: int) -> np.ndarray:
    """Return numbers between -1 and 1 that float16 and bfloat16 do not represent exactly."""
    return np.frombuffer(random_bytes(seed, name, 4 * count), "<i4") / np.float64(2**31)


# By format: (offset of a float16 scale in a block, size of the integers it scales). With these,
# random bytes become weights of the intended spread. Size -1 marks m, the offset of a "_1" format.
_SCALES: dict[str, tuple[tuple[int, float], ...]] = {
    "Q4_0": ((0, 8),),
    "Q4_1": ((0, 8), (2, -1)),
    "Q5_0": ((0, 16),),
    "Q5_1": ((0, 16), (2, -1)),
    "Q8_0": ((0, 128),),
    "Q2_K": ((80, 24), (82, 16)),
    "Q3_K": ((108, 96),),
    "Q4_K": ((0, 360), (2, 48)),
    "Q5_K": ((0, 720), (2, 48)),
    "Q6_K": ((208, 2400),),
    "IQ4_NL": ((0, 100),),
    "IQ4_XS": ((0, 2400),),
}


def random_tensor(seed: int, name: str, shape: tuple[int, ...], format: str) -> NewTensor:
    """Return random weights with a spread of about 1/√width in any usable format."""
    fmt: Format = FORMATS[format]
    width, rows = shape[0], math.prod(shape[1:])
    spread = 1.4 / math.sqrt(width)
    if fmt.block == 1:
        values = spread * uniform(seed, name, width * rows)
        return NewTensor(name, shape, format, _floats(values, format))
    data = random_bytes(seed, name, rows * fmt.row_nbytes(width))
    blocks = np.frombuffer(data, np.uint8).reshape(-1, fmt.nbytes).copy()
    if format == "MXFP4":
        blocks[:, 0] = 127 + round(math.log2(spread / 4))
    for at, size in _SCALES.get(format, ()):
        value = np.float16(-spread if size == -1 else spread / size)
        blocks[:, at : at + 2] = np.frombuffer(value.tobytes(), np.uint8)
    return NewTensor(name, shape, format, blocks.tobytes())


def _floats(values: np.ndarray, format: str) -> bytes:
    if format == "BF16":
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype({"F32": "<f4", "F16": "<f2"}[format]).tobytes()
