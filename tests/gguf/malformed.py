"""Files that are each invalid in one way, packed without the code under test."""

import struct
from collections.abc import Iterable
from math import prod
from typing import NamedTuple

U32, STRING, ARRAY, BOOL, F32_VALUE = 4, 8, 9, 7, 6
F32, F16, Q4_0 = 0, 1, 2
SIZES = {F32: 4, F16: 2}


class Case(NamedTuple):
    """A file, whether it must open, and what is invalid: the container, or only its model."""

    data: bytes
    good: bool = False
    level: str = "container"


class Tensor(NamedTuple):
    """A row of the tensor table; without `offset` its data follow those of the row before."""

    name: str
    dims: tuple[int, ...]
    type: int = F16
    offset: int | None = None
    dim_count: int | None = None


Key = tuple[str | bytes, int, bytes]


class Packer:
    """Packs a file in one byte order and checks nothing."""

    def __init__(self, order: str = "<") -> None:
        self.order = order

    def number(self, code: str, *values: float) -> bytes:
        return struct.pack(self.order + code, *values)

    def text(self, text: str | bytes) -> bytes:
        data = text.encode() if isinstance(text, str) else text
        return self.number("Q", len(data)) + data

    def array(self, kind: int, count: int, content: bytes) -> bytes:
        return self.number("IQ", kind, count) + content

    def texts(self, texts: Iterable[str]) -> bytes:
        packed = [self.text(text) for text in texts]
        return self.array(STRING, len(packed), b"".join(packed))

    def gemma_keys(self) -> list[Key]:
        """Return the metadata of a small Gemma: two layers, width 4, eight tokens."""
        numbers = {
            "block_count": 2,
            "context_length": 64,
            "embedding_length": 4,
            "attention.head_count": 1,
            "attention.head_count_kv": 1,
            "attention.key_length": 4,
            "attention.key_length_swa": 4,
            "attention.value_length": 4,
            "attention.value_length_swa": 4,
            "attention.sliding_window": 8,
            "feed_forward_length": 4,
        }
        tokens = self.texts(["<pad>", "<eos>", "<bos>", "<unk>", "a", "b", "\u2581", "ab"])
        return [
            ("general.architecture", STRING, self.text("gemma4")),
            *((f"gemma4.{key}", U32, self.number("I", value)) for key, value in numbers.items()),
            ("gemma4.attention.layer_norm_rms_epsilon", F32_VALUE, self.number("f", 1e-6)),
            ("gemma4.attention.sliding_window_pattern", ARRAY, self.array(BOOL, 2, b"\1\0")),
            ("tokenizer.ggml.model", STRING, self.text("gemma4")),
            ("tokenizer.ggml.tokens", ARRAY, tokens),
            ("tokenizer.ggml.merges", ARRAY, self.texts(["a b"])),
        ]

    def file(
        self,
        keys: list[Key] | None = None,
        tensors: list[Tensor] | None = None,
        version: int = 3,
        alignment: int = 32,
    ) -> bytes:
        """Return the whole file: header, tensor table, and varied data of the right length."""
        keys = self.gemma_keys() if keys is None else keys
        tensors = TENSORS if tensors is None else tensors
        head = b"GGUF" + self.number("IQQ", version, len(tensors), len(keys))
        for key, kind, value in keys:
            head += self.text(key) + self.number("I", kind) + value
        end = 0
        for name, dims, kind, offset, dim_count in tensors:
            count = len(dims) if dim_count is None else dim_count
            start = end if offset is None else offset
            head += self.text(name) + self.number("I", count) + self.number(f"{len(dims)}Q", *dims)
            head += self.number("IQ", kind, start)
            if offset is None:
                end += -(-_nbytes(dims, kind) // alignment) * alignment
        return head + bytes(-len(head) % alignment) + bytes(i * 7 % 256 for i in range(end))


def _nbytes(dims: tuple[int, ...], kind: int) -> int:
    nbytes = SIZES.get(kind, 2) * prod(dims)
    return nbytes if nbytes <= 1 << 20 else 32  # only an invalid file declares more


def _tensors() -> list[Tensor]:
    square, row = (4, 4), (4,)
    rows = [Tensor("token_embd.weight", (4, 8)), Tensor("output_norm.weight", row, F32)]
    for block in range(2):
        norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "attn_q_norm")
        squares = ("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        rows += [Tensor(f"blk.{block}.{name}.weight", row, F32) for name in (*norms, "attn_k_norm")]
        rows += [Tensor(f"blk.{block}.{name}.weight", square) for name in squares]
    return [*rows, Tensor("blk.0.attn_v.weight", square)]


TENSORS = _tensors()
LITTLE = Packer("<")
GOOD = LITTLE.file()


def _u32(value: int) -> bytes:
    return LITTLE.number("I", value)


def _u64(value: int) -> bytes:
    return LITTLE.number("Q", value)


def _patch(at: int, new: bytes) -> bytes:
    return GOOD[:at] + new + GOOD[at + len(new) :]


def _cut(text: bytes, plus: int) -> bytes:
    return GOOD[: GOOD.index(text) + plus]


def _more(key: str, kind: int, value: bytes) -> bytes:
    """Return the valid file with one more key."""
    return LITTLE.file(keys=[*LITTLE.gemma_keys(), (key, kind, value)])


def _keys(name: str, kind: int = U32, value: bytes | None = None) -> bytes:
    """Return the valid file with one key changed or removed."""
    new = [] if value is None else [(name, kind, value)]
    keys = LITTLE.gemma_keys()
    return LITTLE.file(keys=[k for key in keys for k in (new if key[0] == name else [key])])


def _table(name: str, *new: Tensor) -> bytes:
    """Return the valid file with one row of the tensor table changed or removed."""
    return LITTLE.file(tensors=[t for old in TENSORS for t in (new if old.name == name else [old])])


def _container() -> dict[str, bytes]:
    embedding, q = "token_embd.weight", "blk.0.attn_q.weight"
    tokens = b"tokenizer.ggml.tokens"
    aligned = "general.alignment"
    table_end = len(_cut(b"blk.0.attn_v.weight", 19 + 4 + 16 + 4 + 8))
    return {
        "magic-last-byte": b"GGUG" + GOOD[4:],
        "short-file-empty": b"",
        "fill-zeros": bytes(512),
        "version-0": _patch(4, _u32(0)),
        "version-1": _patch(4, _u32(1)),
        "version-4": _patch(4, _u32(4)),
        "big-endian-whole": Packer(">").file(),
        "tensor-count-2p63": _patch(8, _u64(1 << 63)),
        "kv-count-2p63": _patch(16, _u64(1 << 63)),
        "tensor-count-plus-one": _patch(8, _u64(len(TENSORS) + 1)),
        "kv-count-plus-one": _patch(16, _u64(len(LITTLE.gemma_keys()) + 1)),
        "truncated-after-magic": GOOD[:4],
        "truncated-in-tensor-count": GOOD[:12],
        "truncated-after-header": GOOD[:24],
        "truncated-in-key": _cut(b"gemma4.block_count", 9),
        "truncated-in-u32-value": _cut(b"gemma4.block_count", 18 + 4 + 2),
        "truncated-in-array-type": _cut(tokens, len(tokens) + 4 + 2),
        "truncated-in-string-array": _cut(b"<unk>", 2),
        "truncated-in-tensor-name": _cut(b"blk.1.attn_q.weight", 6),
        "truncated-in-dims": _cut(b"output_norm.weight", 18 + 4 + 3),
        "truncated-in-offset": _cut(b"blk.0.attn_v.weight", 19 + 4 + 16 + 4 + 5),
        "data-missing": GOOD[: table_end + -table_end % 32],
        "data-last-byte-missing": GOOD[:-1],
        "key-length-2p64-1": _patch(24, _u64((1 << 64) - 1)),
        "key-too-long": _more("k" * 65536, U32, _u32(1)),
        "string-length-2p63": _more("extra.text", STRING, _u64(1 << 63) + b"abc"),
        "string-length-2p64-8": _more("extra.text", STRING, _u64((1 << 64) - 8) + b"abc"),
        "array-length-2p64-1": _more("extra.arr", ARRAY, LITTLE.array(0, (1 << 64) - 1, b"abc")),
        "array-length-2p61-f64": _more("extra.arr", ARRAY, LITTLE.array(12, 1 << 61, bytes(8))),
        "array-length-2p31-u32": _more("extra.arr", ARRAY, LITTLE.array(4, 1 << 31, bytes(8))),
        "array-length-2p60-strings": _more("extra.arr", ARRAY, LITTLE.array(8, 1 << 60, bytes(8))),
        "array-string-length-2p63": _more(
            "extra.arr", ARRAY, LITTLE.array(8, 2, _u64(1 << 63) + bytes(16))
        ),
        "array-type-13": _more("extra.arr", ARRAY, LITTLE.array(13, 1, bytes(8))),
        "nested-array-two-levels": _more(
            "extra.arr", ARRAY, LITTLE.array(ARRAY, 1, LITTLE.array(U32, 1, _u32(1)))
        ),
        "value-type-13": _more("extra.val", 13, bytes(8)),
        "bool-2": _more("extra.bool", BOOL, b"\2"),
        "duplicate-key-same-value": _more("general.architecture", STRING, LITTLE.text("gemma4")),
        "key-empty": _more("", U32, _u32(1)),
        "duplicate-tensor-token_embd": LITTLE.file(tensors=[*TENSORS, TENSORS[0]]),
        "tensor-name-65-bytes": _table(q, Tensor("n" * 65, (4, 4))),
        "tensor-name-empty": _table(q, Tensor("", (4, 4))),
        "dim-count-5": _table(q, Tensor(q, (4, 4, 1, 1, 1))),
        "dim-count-2p31": _table(q, Tensor(q, (4, 4), dim_count=1 << 31)),
        "dim-2p63": _table(embedding, Tensor(embedding, (4, 1 << 63))),
        "dim-product-2p64": _table(embedding, Tensor(embedding, (1 << 32, 1 << 32))),
        "tensor-bytes-2p64-f32": _table(embedding, Tensor(embedding, (1 << 62,), F32)),
        "ggml-type-99": _table(q, Tensor(q, (4, 4), 99)),
        "ggml-type-4": _table(q, Tensor(q, (4, 4), 4)),
        "row-not-block-multiple-q4_0": _table(q, Tensor(q, (4, 4), Q4_0)),
        "offset-unaligned-1": _table(q, Tensor(q, (4, 4), F16, 33)),
        "offset-beyond-file": _table(q, Tensor(q, (4, 4), F16, 1 << 20)),
        "offset-2p63": _table(q, Tensor(q, (4, 4), F16, 1 << 63)),
        "overlap-same-offset": _table(q, Tensor(q, (4, 4), F16, 0)),
        "alignment-0": _more(aligned, U32, _u32(0)),
        "alignment-3": _more(aligned, U32, _u32(3)),
        "alignment-2p31": _more(aligned, U32, _u32(1 << 31)),
        "alignment-string": _more(aligned, STRING, LITTLE.text("32")),
        "alignment-array": _more(aligned, ARRAY, LITTLE.array(U32, 1, _u32(32))),
        "alignment-4096-data-at-32": _more(aligned, U32, _u32(4096)),
    }


def _model() -> dict[str, bytes]:
    embedding, norm = "token_embd.weight", "blk.0.attn_norm.weight"
    tokens, pattern = "tokenizer.ggml.tokens", "gemma4.attention.sliding_window_pattern"
    keys = [
        (b"gemma4.block\xffcount", *key[1:]) if "block" in key[0] else key
        for key in LITTLE.gemma_keys()
    ]
    zero = {
        "head_count-0": "attention.head_count",
        "head_count_kv-0": "attention.head_count_kv",
        "block_count-0": "block_count",
        "embedding_length-0": "embedding_length",
        "key_length-swa-0": "attention.key_length_swa",
    }
    return {name: _keys(f"gemma4.{key}", U32, _u32(0)) for name, key in zero.items()} | {
        "not-utf8-needed-key": LITTLE.file(keys=keys),
        "dim-count-0": _table(norm, Tensor(norm, ())),
        "dim-0": _table(embedding, Tensor(embedding, (4, 0))),
        "architecture-missing": _keys("general.architecture"),
        "architecture-not-utf8": _keys("general.architecture", STRING, LITTLE.text(b"gem\xffa4")),
        "type-mismatch-block_count-string": _keys("gemma4.block_count", STRING, LITTLE.text("2")),
        "type-mismatch-head_count-string": _keys(
            "gemma4.attention.head_count", STRING, LITTLE.text("1")
        ),
        "type-mismatch-tokens-u32": _keys(tokens, ARRAY, LITTLE.array(U32, 8, bytes(32))),
        "missing-key-block_count": _keys("gemma4.block_count"),
        "missing-key-tokens": _keys(tokens),
        "sliding-window-pattern-too-long": _keys(pattern, ARRAY, LITTLE.array(BOOL, 3, b"\1\0\1")),
        "sliding-window-pattern-strings": _keys(pattern, ARRAY, LITTLE.texts(["a", "b"])),
        "sliding-window-pattern-of-2": _keys(pattern, ARRAY, LITTLE.array(BOOL, 2, b"\1\2")),
        "vocab-size-tokens-fewer-than-rows": _keys(tokens, ARRAY, LITTLE.texts("abcdefg")),
        "feed_forward_length-array-too-long": _keys(
            "gemma4.feed_forward_length", ARRAY, LITTLE.array(U32, 3, bytes(12))
        ),
        "missing-tensor-output_norm": _table("output_norm.weight"),
        "tensor-shape-attn_norm": _table(norm, Tensor(norm, (8,), F32)),
        "tensor-shape-ffn_gate-wide": _table(
            "blk.0.ffn_gate.weight", Tensor("blk.0.ffn_gate.weight", (8, 4))
        ),
    }


def _good() -> dict[str, bytes]:
    unknown = [
        ("extra.i8", 1, b"\xff"),
        ("extra.f64", 12, LITTLE.number("d", 0.5)),
        ("extra.list", ARRAY, LITTLE.texts(["", "\0", "x" * 300])),
        ("extra.none", ARRAY, LITTLE.array(STRING, 0, b"")),
    ]
    return {
        "good-plain": GOOD,
        "good-version-2": LITTLE.file(version=2),
        "good-unknown-keys": LITTLE.file(keys=[*LITTLE.gemma_keys(), *unknown]),
        "good-no-tensors": LITTLE.file(tensors=[]).rstrip(b"\0"),
    }


CASES: dict[str, Case] = (
    {name: Case(data) for name, data in _container().items()}
    | {name: Case(data, level="model") for name, data in _model().items()}
    | {name: Case(data, good=True, level="model") for name, data in _good().items()}
)
