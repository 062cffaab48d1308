"""The reader: files that must open or be rejected, messages, values, tensors and windows."""

import asyncio
import json
import lzma
import os
import struct
import tracemalloc
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import FIXTURES, SHARED, needs_shared
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gguf.malformed import ARRAY, CASES, GOOD, LITTLE, STRING, TENSORS, Tensor
from webgemma.errors import GgufError
from webgemma.gguf.metadata import VALUE_CODES, VALUE_TYPES
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.sync import run_sync

BOUNDED = settings(deadline=2000)  # milliseconds
INDEX = list(map(json.loads, (FIXTURES / "gguf" / "index.jsonl").read_text().splitlines()))


def open_bytes(data: bytes, name: str = "test.gguf") -> Gguf:
    return run_sync(Gguf.aopen(BytesSource(data, name)))


def use_all(gguf: Gguf) -> None:
    """Read every value and every tensor."""
    for key in gguf.metadata:
        assert gguf.metadata[key] is gguf.metadata[key]
        assert gguf.value_type(key)
    for info in gguf.tensors.values():
        assert len(gguf.data(info)) == info.nbytes


# Valid and invalid files


@pytest.mark.parametrize("row", INDEX, ids=lambda row: row["file"])
def test_fixture_files(row):
    path = FIXTURES / "gguf" / row["file"]
    if row["expect"] == "ok":
        with Gguf.open(path) as gguf:
            use_all(gguf)
    elif row["level"] == "container":
        with pytest.raises(GgufError, match=row["file"]):
            Gguf.open(path)
    else:
        with suppress(GgufError), Gguf.open(path) as gguf:
            use_all(gguf)


@pytest.mark.parametrize("name", CASES)
def test_packed_files(name):
    data, good, level = CASES[name]
    if good:
        use_all(open_bytes(data))
    elif level == "container":
        with pytest.raises(GgufError, match=r"test\.gguf"):
            open_bytes(data)
    else:
        with suppress(GgufError):
            use_all(open_bytes(data))


def test_packed_files_cover_the_fixture_files():
    for row in INDEX:
        case = CASES[row["file"].removesuffix(".gguf")]
        assert (case.good, case.level) == (row["expect"] == "ok", row["level"])


@pytest.mark.parametrize(
    ("name", "fragments"),
    [
        ("short-file-empty", ["is empty"]),
        ("magic-last-byte", ["not a GGUF file", "GGUG"]),
        ("version-1", ["version 1", "convert"]),
        ("version-4", ["version 4", "2 and 3"]),
        ("big-endian-whole", ["big-endian"]),
        ("kv-count-2p63", [str(1 << 63), "keys", "byte 24"]),
        ("tensor-count-2p63", [str(1 << 63), "tensors"]),
        ("truncated-after-header", ["declares 17 keys, more than the file can hold"]),
        ("array-length-2p60-strings", ["'extra.arr'", "cut short"]),
        ("truncated-in-dims", ["'output_norm.weight'", "cut short", "download it again"]),
        ("truncated-in-array-type", ["'tokenizer.ggml.tokens'", "cut short"]),
        ("data-last-byte-missing", ["'blk.0.attn_v.weight'", "1 bytes", "cut short"]),
        ("string-length-2p63", ["'extra.text'", "damaged"]),
        ("nested-array-two-levels", ["'extra.arr'", "array of arrays"]),
        ("value-type-13", ["'extra.val'", "13"]),
        ("bool-2", ["'extra.bool'", "holds 2"]),
        ("duplicate-key-same-value", ["'general.architecture'", "second"]),
        ("duplicate-tensor-token_embd", ["'token_embd.weight'", "second"]),
        ("not-utf8-needed-key", ["key number 1", "not UTF-8"]),
        ("tensor-name-65-bytes", ["65 bytes", "64"]),
        ("key-too-long", ["65536 bytes", "65535"]),
        ("dim-count-5", ["'blk.0.attn_q.weight'", "5 dimensions"]),
        ("dim-0", ["'token_embd.weight'", "[4, 0]"]),
        ("ggml-type-99", ["'blk.0.attn_q.weight'", "99", "not known"]),
        ("ggml-type-4", ["'blk.0.attn_q.weight'", "4", "removed"]),
        ("row-not-block-multiple-q4_0", ["rows of 4", "Q4_0", "32"]),
        ("offset-unaligned-1", ["'blk.0.attn_q.weight'", "multiple of the alignment 32"]),
        ("overlap-same-offset", ["'token_embd.weight'", "'blk.0.attn_q.weight'", "overlap"]),
        ("alignment-3", ["general.alignment is 3", "power of two"]),
        ("alignment-array", ["general.alignment", "UINT32[1]"]),
    ],
)
def test_the_message_says_what_and_where(name, fragments):
    with pytest.raises(GgufError) as error:
        open_bytes(CASES[name].data)
    message = str(error.value)
    assert [part for part in ["test.gguf", *fragments] if part not in message] == []


@pytest.mark.parametrize(
    ("start", "hint"),
    [(b"version https://git-lfs", "git lfs pull"), (b"<!DOCTYPE html>", "web page")],
)
def test_other_files_are_recognised(start, hint):
    with pytest.raises(GgufError, match=hint):
        open_bytes(start + bytes(100))


@pytest.mark.parametrize("end", range(0, len(GOOD), 61))
def test_a_file_truncated_anywhere_is_rejected(end):
    with pytest.raises(GgufError, match=r"test\.gguf"):
        open_bytes(GOOD[:end])


# Values


def test_every_type_of_value_is_decoded():
    values = {"B": 200, "b": -5, "H": 60000, "h": -7, "I": 1 << 31, "i": -9, "f": 0.5}
    values |= {"Q": 1 << 63, "q": -11, "d": 0.1}
    keys, expected = [], {}
    for number, kind in enumerate(VALUE_TYPES):
        if kind not in ("BOOL", "STRING", "ARRAY"):
            code = VALUE_CODES[kind]
            keys.append((kind, number, LITTLE.number(code, values[code])))
            pair = LITTLE.number(f"2{code}", 0, values[code])
            keys.append((f"{kind}[2]", ARRAY, LITTLE.array(number, 2, pair)))
            expected |= {kind: values[code], f"{kind}[2]": [0, values[code]]}
    keys.append(("BOOL", VALUE_TYPES.index("BOOL"), b"\1"))
    keys.append(("BOOL[3]", ARRAY, LITTLE.array(VALUE_TYPES.index("BOOL"), 3, b"\1\0\1")))
    keys.append(("STRING", STRING, LITTLE.text("é")))
    keys.append(("STRING[2]", ARRAY, LITTLE.texts(["", "\0€"])))
    expected |= {"BOOL": True, "BOOL[3]": [True, False, True]}
    expected |= {"STRING": "é", "STRING[2]": ["", "\0€"]}
    gguf = open_bytes(LITTLE.file(keys=keys))
    assert dict(gguf.metadata) == expected
    assert {key: gguf.value_type(key) for key in gguf.metadata} == {key: key for key in expected}
    assert gguf.metadata["BOOL"] is True
    assert all(type(flag) is bool for flag in gguf.metadata["BOOL[3]"])


def test_metadata_is_a_mapping():
    metadata = open_bytes(GOOD).metadata
    assert "gemma4.block_count" in metadata
    assert "none" not in metadata
    assert metadata.get("none", 7) == 7
    assert list(metadata) == [key for key, _, _ in LITTLE.gemma_keys()]
    for error in (GgufError, KeyError):
        with pytest.raises(error) as caught:
            metadata["none"]
        assert str(caught.value) == "test.gguf has no key 'none'."


@pytest.mark.parametrize(
    ("kind", "value", "fragment"),
    [
        (STRING, LITTLE.text(b"ab\xff"), "byte 2"),
        (ARRAY, LITTLE.array(STRING, 2, LITTLE.text("a") + LITTLE.text(b"\xc3")), "element 1"),
        (ARRAY, LITTLE.array(STRING, 2, LITTLE.text(b"\xc3") + LITTLE.text("é" * 70)), "element 0"),
        (ARRAY, LITTLE.array(STRING, 2, LITTLE.text(b"\xff") + LITTLE.text("")), "element 0"),
        (ARRAY, LITTLE.array(7, 2, b"\0\7"), "holds 7"),
    ],
)
def test_an_invalid_value_is_rejected_when_it_is_read(kind, value, fragment):
    gguf = open_bytes(LITTLE.file(keys=[("good.key", 0, b"\1"), ("bad.key", kind, value)]))
    assert gguf.metadata["good.key"] == 1
    with pytest.raises(GgufError) as error:
        gguf.metadata["bad.key"]
    assert "'bad.key'" in str(error.value)
    assert fragment in str(error.value)


TRICKY = st.one_of(
    st.text(max_size=5),
    st.text("a\0\1", max_size=20),
    st.text(min_size=120, max_size=300),
    st.sampled_from(
        ["é" * 64, "x" * 127, "x" * 128, "x" * 256, "\0" * 7, "\0" * 8, "\x7f" + "\0" * 7]
    ),
)


@BOUNDED
@given(st.lists(TRICKY, max_size=40))
def test_arrays_of_any_strings_are_decoded(texts):
    gguf = open_bytes(LITTLE.file(keys=[("k", ARRAY, LITTLE.texts(texts))]))
    assert gguf.metadata["k"] == texts


def test_long_arrays_of_strings_are_decoded():
    texts = [chr(33 + i % 5000) * (1 + i % 40) for i in range(20_000)]
    gguf = open_bytes(LITTLE.file(keys=[("k", ARRAY, LITTLE.texts(texts))]))
    assert gguf.metadata["k"] == texts


# Tensors


def test_tensors_are_described():
    gguf = open_bytes(GOOD)
    assert (gguf.name, gguf.version, gguf.alignment, gguf.nbytes) == ("test.gguf", 3, 32, len(GOOD))
    assert list(gguf.tensors) == [tensor.name for tensor in TENSORS]
    info = gguf.tensors["token_embd.weight"]
    assert (info.shape, str(info.format), info.nbytes, info.part) == ((4, 8), "F16", 64, 0)
    assert (info.width, info.rows, info.weights) == (4, 8, 32)
    norm = gguf.tensors["output_norm.weight"]
    assert (norm.width, norm.rows, norm.weights, norm.offset - info.offset) == (4, 1, 4, 64)


def test_a_scalar_is_one_weight():
    gguf = open_bytes(LITTLE.file(tensors=[Tensor("scale", (), 0)]))
    info = gguf.tensors["scale"]
    assert (info.shape, info.width, info.rows, info.weights, info.nbytes) == ((), 1, 1, 1, 4)


def test_tensor_bytes_are_read():
    gguf = open_bytes(GOOD)
    info = gguf.tensors["token_embd.weight"]
    content = GOOD[info.offset : info.offset + 64]
    assert gguf.data(info) == run_sync(gguf.read(info)) == content
    assert gguf.data(info, 8, 16) == run_sync(gguf.read(info, 8, 16)) == content[8:24]
    assert gguf.data(info, 60) == content[60:]
    assert gguf.data(info, 64, 0) == b""


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 2), (0, 65), (65, 0), (65, None), (8, -1)])
def test_bytes_outside_a_tensor_are_rejected(offset, nbytes):
    gguf = open_bytes(GOOD)
    info = gguf.tensors["token_embd.weight"]
    for read in (gguf.data, lambda *span: run_sync(gguf.read(*span))):
        with pytest.raises(GgufError, match=r"'token_embd\.weight' were requested, but it has 64"):
            read(info, offset, nbytes)


def test_other_alignments_are_read():
    keys = [("general.alignment", 4, LITTLE.number("I", 4096))]
    gguf = open_bytes(LITTLE.file(keys=keys, alignment=4096))
    assert gguf.alignment == 4096
    assert all(info.offset % 4096 == 0 for info in gguf.tensors.values())
    use_all(gguf)


# Files and windows


def test_a_local_file_is_read_until_it_changes_or_is_closed(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(GOOD)
    with Gguf.open(path) as gguf:
        info = gguf.tensors["token_embd.weight"]
        data = gguf.data(info)
        os.truncate(path, info.offset)
        with pytest.raises(GgufError, match="became shorter"):
            gguf.data(info)
    assert data == GOOD[info.offset : info.offset + 64]
    with pytest.raises(GgufError, match=r"model\.gguf is closed"):
        gguf.data(gguf.tensors["token_embd.weight"])
    with pytest.raises(GgufError, match=r"model\.gguf is closed: read 'general\.architecture'"):
        gguf.metadata["general.architecture"]
    assert gguf.metadata["gemma4.block_count"] == 2
    gguf.close()


class Remote:
    """A source that records its reads."""

    name = "remote.gguf"

    def __init__(self, data: bytes) -> None:
        self.bytes = data
        self.nbytes = len(data)
        self.spans: list[tuple[int, int]] = []

    async def read(self, offset: int, nbytes: int) -> bytes:
        await asyncio.sleep(0)
        self.spans.append((offset, offset + nbytes))
        assert 0 <= offset <= offset + nbytes <= self.nbytes
        return self.bytes[offset : offset + nbytes]

    async def sibling(self, name: str) -> "Remote":
        raise AssertionError(name)

    def close(self) -> None:
        """Do nothing."""


def test_the_header_is_read_in_growing_windows_and_nothing_twice(monkeypatch):
    monkeypatch.setattr("webgemma.gguf.reader._FIRST_WINDOW_NBYTES", 100)
    data = LITTLE.file(
        keys=[*LITTLE.gemma_keys(), ("k", ARRAY, LITTLE.texts(map(str, range(5000))))],
        tensors=[Tensor("big", (1 << 18,), 0), Tensor("w", (4, 4))],
    ) + bytes(1 << 20)  # fmt: skip
    remote = Remote(data)
    gguf = asyncio.run(Gguf.aopen(remote))
    assert gguf.metadata["k"][4999] == "4999"
    starts, ends = zip(*remote.spans, strict=True)
    assert (starts[0], starts[1:]) == (0, ends[:-1])
    assert gguf.tensors["big"].offset < ends[-1] < 2 * gguf.tensors["big"].offset
    for info in gguf.tensors.values():  # the first starts in the last window and ends after it
        with pytest.raises(GgufError, match=r"remote\.gguf is not on this machine"):
            gguf.data(info)
        end = info.offset + info.nbytes
        assert asyncio.run(gguf.read(info)) == data[info.offset : end]
        assert remote.spans[-1] == (info.offset, end)


def test_an_endless_remote_header_is_rejected(monkeypatch):
    monkeypatch.setattr("webgemma.gguf.reader._MAX_FETCHED_HEADER_NBYTES", 3 << 20)
    data = LITTLE.file(keys=[("k", ARRAY, LITTLE.array(0, 4 << 20, bytes(4 << 20)))])
    with pytest.raises(GgufError, match="too long to be real"):
        asyncio.run(Gguf.aopen(Remote(data)))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.good])
def test_an_invalid_file_takes_little_memory(name):
    tracemalloc.start()
    with suppress(GgufError):
        use_all(open_bytes(CASES[name].data))
    peak_nbytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_nbytes < 100_000 + 10 * len(CASES[name].data)


def test_unused_arrays_take_no_memory():
    data = LITTLE.file(keys=[("k", ARRAY, LITTLE.texts(["token"] * 100_000))])
    tracemalloc.start()
    gguf = open_bytes(data)
    peak_nbytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_nbytes < 100_000
    assert len(gguf.metadata["k"]) == 100_000


def test_implausible_counts_are_rejected():
    count = (1 << 24) + 1
    keys = [("k", ARRAY, LITTLE.array(STRING, count, bytes(8 * count)))]
    with pytest.raises(GgufError, match="too many to be real"):
        open_bytes(LITTLE.file(keys=keys, tensors=[]))
    entries = (1 << 18) + 1
    with pytest.raises(GgufError, match=f"declares {entries} keys.*too many to be real"):
        open_bytes(GOOD[:16] + struct.pack("<Q", entries) + bytes(14 * entries))


# The real vocabulary


@needs_shared
def test_the_vocabulary_of_gemma_is_read(vocabulary: Path):
    with Gguf.open(vocabulary) as gguf:
        tokens, merges = (gguf.metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "merges"))
        assert isinstance(tokens, Sequence)
        assert (len(tokens), len(merges)) == (262_144, 514_906)
        assert gguf.value_type("tokenizer.ggml.tokens") == "STRING[262144]"
        data = vocabulary.read_bytes()
        for key, texts in ((b"tokenizer.ggml.tokens", tokens), (b"tokenizer.ggml.merges", merges)):
            at = data.index(key) + len(key) + 4 + 4 + 8
            packed = b"".join(struct.pack("<Q", len(t := x.encode())) + t for x in texts)
            assert data[at : at + len(packed)] == packed


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    path = tmp_path / "vocab.gguf"
    with lzma.open(SHARED / "vocab" / "gemma4-vocab.gguf.xz") as packed:
        path.write_bytes(packed.read())
    return path
