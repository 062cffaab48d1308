"""Stand-in model: a valid Gemma 4 of 512 tokens whose weights produce a handful of sentences."""

import struct
from collections.abc import Iterator

from webgemma.gguf.writer import NewTensor, gguf_bytes

WIDTH = 512  # also the vocabulary: token i is unit vector i, so a matrix maps tokens to followers
HEAD_DIMS = {"attn_q": 64, "attn_k": 64, "attn_v": 64}
NORMAL, USER_DEFINED, CONTROL, BYTE = 1, 4, 3, 6

CONTROLS = [
    *("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|tool>", "<tool|>", "<|think|>"),
    *("<|turn>", "<turn|>", "<|image>", "<image|>", "<|audio>", "<audio|>"),
    *("<|image|>", "<|audio|>", "<|video|>"),
]
TAGS = [
    *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
    *('<|"|>', "<|channel>", "<channel|>"),
]

# Followers of each phrase. Every phrase is one token; START is the beginning of the model's turn.
SENTENCES: dict[str, tuple[str, ...]] = {
    "START": ("Hello! I am webgemma's stand-in: a Gemma 4 of a few weights, made on the spot.",),
    "Hello! I am webgemma's stand-in: a Gemma 4 of a few weights, made on the spot.": (
        " I know only a few words:",
        " So far I can only say that",
    ),
    " I know only a few words:": (" a small fox", " the old river", " a quiet bird"),
    " So far I can only say that": (" a small fox", " the old river", " a quiet bird"),
    " a small fox": (" sings", " dreams", " waits"),
    " the old river": (" sings", " dreams", " waits"),
    " a quiet bird": (" sings", " dreams", " waits"),
    " sings": (" under the moon.", " by the garden wall."),
    " dreams": (" under the moon.", " by the garden wall."),
    " waits": (" under the moon.", " by the garden wall."),
    " under the moon.": (
        " For a real talk, run me with a model of yours: webgemma run gemma4:e2b",
    ),
    " by the garden wall.": (
        " For a real talk, run me with a model of yours: webgemma run gemma4:e2b",
    ),
    " For a real talk, run me with a model of yours: webgemma run gemma4:e2b": ("<turn|>",),
}


def standin_gguf() -> bytes:
    """Return the bytes of the file: two layers, attention that adds zero, a table of followers."""
    tokens, kinds = _vocabulary()
    metadata: dict[str, object] = {
        "general.architecture": "gemma4",
        "general.name": "webgemma stand-in",
        "gemma4.block_count": 2,
        "gemma4.context_length": 4096,
        "gemma4.embedding_length": WIDTH,
        "gemma4.feed_forward_length": WIDTH,
        "gemma4.attention.head_count": 1,
        "gemma4.attention.head_count_kv": 1,
        "gemma4.attention.key_length": 64,
        "gemma4.attention.value_length": 64,
        "gemma4.attention.key_length_swa": 64,
        "gemma4.attention.value_length_swa": 64,
        "gemma4.attention.layer_norm_rms_epsilon": 1e-6,
        "gemma4.attention.sliding_window": 64,
        "gemma4.attention.sliding_window_pattern": [True, False],
        "gemma4.attention.shared_kv_layers": 0,
        "gemma4.final_logit_softcapping": 30.0,
        "gemma4.embedding_length_per_layer_input": 0,
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.pre": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["t h", "th e", "i n", "a n"],
        "tokenizer.ggml.bos_token_id": tokens.index("<bos>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<eos>"),
        "tokenizer.ggml.unknown_token_id": tokens.index("<unk>"),
        "tokenizer.ggml.padding_token_id": tokens.index("<pad>"),
    }
    return gguf_bytes(metadata, _tensors(tokens))


def _vocabulary() -> tuple[list[str], list[int]]:
    groups = (
        (CONTROLS, CONTROL),
        (TAGS, USER_DEFINED),
        ([f"<0x{byte:02X}>" for byte in range(256)], BYTE),
        ([chr(code) for code in range(33, 127)] + ["\n", "▁", "th", "the", "in", "an"], NORMAL),
        ([_spelling(phrase) for phrase in SENTENCES if phrase != "START"], NORMAL),
    )
    tokens = [token for group, _ in groups for token in group]
    kinds = [kind for group, kind in groups for _ in group]
    rest = range(WIDTH - len(tokens))
    return tokens + [f"<unused{i}>" for i in rest], kinds + [CONTROL for _ in rest]


def _tensors(tokens: list[str]) -> Iterator[NewTensor]:
    """Yield all tensors: layer 0 maps a token to the sum of its followers, layer 1 adds zero."""
    unit = [[column] for column in range(WIDTH)]
    zeros: list[list[int]] = [[] for _ in range(WIDTH)]
    yield _matrix("token_embd.weight", WIDTH, unit)
    yield _vector("output_norm.weight", WIDTH, 2.0)
    yield NewTensor(
        "rope_freqs.weight", (32,), "F32", struct.pack("<32f", *[1.0] * 8, *[1e30] * 24)
    )
    for layer, follows in enumerate((_follows(tokens), zeros)):
        name = f"blk.{layer}."
        for matrix in HEAD_DIMS:
            yield _matrix(f"{name}{matrix}.weight", WIDTH, unit[:64])
        yield _matrix(f"{name}attn_output.weight", 64, zeros)
        for norm in ("attn_q_norm", "attn_k_norm"):
            yield _vector(f"{name}{norm}.weight", 64, 1.0)
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm"):
            yield _vector(f"{name}{norm}.weight", WIDTH, 1.0)
        yield _vector(f"{name}post_ffw_norm.weight", WIDTH, 8.0)
        yield _matrix(f"{name}ffn_gate.weight", WIDTH, unit)
        yield _matrix(f"{name}ffn_up.weight", WIDTH, unit)
        yield _matrix(f"{name}ffn_down.weight", WIDTH, follows)


def _follows(tokens: list[str]) -> list[list[int]]:
    """Return the table of followers: row t lists the tokens that t follows."""
    ids = {token: i for i, token in enumerate(tokens)}
    rows: list[list[int]] = [[] for _ in tokens]
    for phrase, followers in SENTENCES.items():
        before = ("\n", "<channel|>") if phrase == "START" else (phrase,)
        for follower in followers:
            rows[ids[_spelling(follower)]] += [ids[_spelling(token)] for token in before]
    return rows


def _spelling(phrase: str) -> str:
    return phrase.replace(" ", "▁")


def _vector(name: str, width: int, value: float) -> NewTensor:
    return NewTensor(name, (width,), "F32", struct.pack(f"<{width}f", *[value] * width))


def _matrix(name: str, width: int, rows: list[list[int]]) -> NewTensor:
    """Return a Q8_0 matrix that is 1 at the columns listed for each row and 0 elsewhere.

    A block is a float16 scale of 1 and 32 int8."""
    blank = struct.pack("<e32x", 1.0) * (width // 32)
    data = bytearray(blank * len(rows))
    for row, columns in enumerate(rows):
        for column in columns:
            data[row * len(blank) + column // 32 * 34 + 2 + column % 32] = 1
    return NewTensor(name, (width, len(rows)), "Q8_0", bytes(data))
