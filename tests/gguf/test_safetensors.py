"""Safetensors: written files are read back, invalid files raise an error."""

import json
import struct
from pathlib import Path

import pytest
from conftest import SHARED, needs_shared
from hypothesis import given
from hypothesis import strategies as st

from webgemma.errors import GgufError, InputError
from webgemma.gguf.safetensors import (
    DTYPE_NBYTES,
    NewSafetensor,
    Safetensors,
    safetensors_chunks,
    write_safetensors,
)
from webgemma.gguf.sources import BytesSource
from webgemma.sync import run_sync

TENSORS = [
    NewSafetensor("a", "F32", (2, 3), bytes(range(24))),
    NewSafetensor("empty", "I64", (0, 5), b""),
    NewSafetensor("scalar", "BF16", (), b"xy"),
]


def opened(data: bytes) -> Safetensors:
    return run_sync(Safetensors.aopen(BytesSource(data, "t.safetensors")))


def packed(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_a_written_file_is_read_back(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "t.safetensors", TENSORS, {"format": "pt"})
    with Safetensors.open(tmp_path / "t.safetensors") as file:
        assert file.names == ["a", "empty", "scalar"]
        assert file.metadata == {"format": "pt"}
        for tensor in TENSORS:
            assert file.dtype(tensor.name) == tensor.dtype
            assert file.shape(tensor.name) == tensor.shape
            assert bytes(file.read(tensor.name)) == tensor.data
        assert bytes(file.read("a", 4, 3)) == bytes([4, 5, 6])
        with pytest.raises(GgufError, match="were requested, but it has 24"):
            file.read("a", 20, 5)
        with pytest.raises(GgufError, match="no tensor 'b'"):
            file.read("b")


def entry(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> object:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


INVALID = {
    "short": (b"1234567", "has 7 bytes"),
    "longer than the file": (struct.pack("<Q", 1 << 63), "does not fit"),
    "not json": (packed(b"{nonsense"), "not JSON"),
    "not utf-8": (packed(b'{"\xff":1}'), "not JSON"),
    "deep": (packed(b"[" * 100_000), "not JSON"),
    "long number": (packed(b"[" + b"9" * 5000 + b"]"), "not JSON"),
    "list": (packed([]), "not a JSON object"),
    "twice": (packed(b'{"a":1,"a":2}'), "occurs twice"),
    "metadata": (packed({"__metadata__": {"a": 1}}), "__metadata__"),
    "entry": (packed({"a": 3}), "JSON object"),
    "dtype": (packed({"a": entry(dtype="F31")}, b"1234"), "the dtype 'F31'"),
    "dtype list": (packed({"a": entry(dtype=[1])}, b"1234"), "the dtype"),
    "negative": (packed({"a": entry(shape=[-1])}, b"1234"), "no valid shape"),
    "boolean": (packed({"a": entry(shape=[True])}, b"1234"), "no valid shape"),
    "offsets": (packed({"a": entry(offsets=[4, 0])}, b"1234"), "no valid data_offsets"),
    "beyond": (packed({"a": entry(offsets=[0, 8], shape=[2])}, b"1234"), "after the end"),
    "size": (packed({"a": entry(shape=[2])}, b"1234"), "cannot have 4 bytes"),
    "overlap": (packed({"a": entry(), "b": entry()}, b"1234"), "overlap"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_files_raise_an_error(case: str) -> None:
    data, message = INVALID[case]
    with pytest.raises(GgufError, match=message):
        opened(data)


@given(st.binary(max_size=200), st.integers(0, 150), st.integers(0, 255))
def test_any_bytes_open_or_raise_an_error(data: bytes, at: int, byte: int) -> None:
    good = bytearray(b"".join(safetensors_chunks(TENSORS)))
    good[at % len(good)] = byte
    for attempt in (data, struct.pack("<Q", len(data)) + data, bytes(good)):
        try:
            file = opened(attempt)
        except GgufError:
            continue
        for name in file.names:
            assert len(file.read(name)) == file.tensors[name].nbytes


@given(
    st.dictionaries(
        st.text(min_size=1).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(sorted(DTYPE_NBYTES)), st.lists(st.integers(0, 4), max_size=4)),
        max_size=5,
    )
)
def test_round_trip(specs: dict[str, tuple[str, list[int]]]) -> None:
    tensors = []
    for name, (dtype, shape) in specs.items():
        nbytes = DTYPE_NBYTES[dtype]
        for n in shape:
            nbytes *= n
        tensors.append(
            NewSafetensor(name, dtype, tuple(shape), name.encode("utf-16", "replace")[:1] * nbytes)
        )
    file = opened(b"".join(safetensors_chunks(tensors)))
    assert file.names == [t.name for t in tensors]
    assert all(bytes(file.read(t.name)) == t.data for t in tensors)


def test_invalid_tensors_are_not_written() -> None:
    for wrong in (("F32", (2,), b"1234"), ("F31", (1,), b"1234")):
        with pytest.raises(InputError, match="cannot be written"):
            safetensors_chunks([NewSafetensor("a", *wrong)])
    with pytest.raises(InputError, match="occurs twice"):
        safetensors_chunks(TENSORS[:1] * 2)


@needs_shared
def test_a_file_of_the_safetensors_library_is_read() -> None:
    with Safetensors.open(SHARED / "diffusion" / "model.safetensors") as file:
        name = file.names[0]
        assert file.dtype(name) == "BF16"
        assert len(file.read(name)) == file.tensors[name].nbytes
