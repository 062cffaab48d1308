"""Safetensors files: what is read, and a sentence for every kind of damage."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from webgemma.errors import GgufError
from webgemma.gguf.safetensors import SafetensorsFile

GOOD = {"a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}


def write(path: Path, header: Any, data: bytes = bytes(range(12))) -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return path


def refused(path: Path) -> str:
    with pytest.raises(GgufError) as caught:
        SafetensorsFile(path)
    return str(caught.value)


def test_tensors_are_found_and_read(tmp_path: Path) -> None:
    header = GOOD | {
        "__metadata__": {"format": "pt"},
        "b": {"dtype": "F32", "shape": [], "data_offsets": [12, 16]},
    }
    file = SafetensorsFile(write(tmp_path / "x.safetensors", header, bytes(range(16))))
    assert list(file.tensors) == ["a", "b"]
    assert (file.tensors["a"].shape, file.tensors["a"].dtype) == ((2, 3), "BF16")
    assert file.tensors["a"].read() == bytes(range(12))
    assert file.tensors["b"].read() == bytes(range(12, 16))
    file.close()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"dtype": "F99"}, "which webgemma does not know"),
        ({"dtype": 3}, "without a sound dtype"),
        ({"shape": [2, 4]}, "does not fit its bytes"),
        ({"shape": [2, -3]}, "without a sound dtype, shape and place"),
        ({"shape": [True, 6]}, "without a sound dtype, shape and place"),
        ({"shape": [1, 1, 1, 2, 3]}, "does not fit its bytes"),
        ({"shape": "6"}, "without a sound dtype, shape and place"),
        ({"data_offsets": [0, 13]}, "outside the file"),
        ({"data_offsets": [12, 0]}, "outside the file"),
        ({"data_offsets": [0]}, "without a sound dtype, shape and place"),
        ({"data_offsets": [1 << 80, 1 << 81]}, "outside the file"),
    ],
)
def test_damaged_tensors_get_a_sentence(
    tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    assert sentence in refused(write(tmp_path / "x", {"a": GOOD["a"] | change}))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "too short"),
        (b"\xff" * 8, "a header of 18446744073709551615 bytes"),
        (struct.pack("<Q", 9) + b"{}", "a header of 9 bytes"),
        (struct.pack("<Q", 2) + b"[]", "lists no tensors"),
        (struct.pack("<Q", 3) + b"{]}", "no JSON"),
        (struct.pack("<Q", 2) + b"\xff\xfe", "no JSON"),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "no JSON"),
        (struct.pack("<Q", 13) + b'{"a":1,"a":2}', "names a tensor twice"),
        (struct.pack("<Q", 7) + b'{"a":1}', "without a sound dtype"),
    ],
)
def test_damaged_headers_get_a_sentence(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    assert sentence in refused(path)


@given(data=st.data())
def test_any_damage_is_read_or_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write(tmp_path_factory.getbasetemp() / "damaged", GOOD)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content[: data.draw(st.integers(0, len(content)))]))
    try:
        file = SafetensorsFile(path)
    except GgufError:
        return
    for tensor in file.tensors.values():
        assert len(tensor.read()) == tensor.nbytes
    file.close()
