"""The writer: its files are read back by webgemma and by the gguf package."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from webgemma.errors import GgufError, InputError
from webgemma.gguf.formats import FORMATS
from webgemma.gguf.metadata import SCALARS
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import NewTensor, Typed, gguf_bytes, write_gguf
from webgemma.sync import run_sync

BOUNDED = settings(deadline=2000)  # milliseconds
METADATA = {
    "general.architecture": "gemma4",
    "plain.bool": True,
    "plain.int": 7,
    "plain.negative": -7,
    "plain.large": 1 << 40,
    "plain.very_negative": -(1 << 40),
    "plain.float": 0.5,
    "plain.text": "é\0€",
    "list.bool": [True, False],
    "list.int": [1, 2],
    "list.mixed_sign": [-1, 2],
    "list.large": [1, 1 << 32],
    "list.wide": [-1, 1 << 31],
    "list.float": [0.5, 2],
    "list.text": ["a", "", "b"],
    "tuple.int": (3, 4),
    "typed.u8": Typed(255, "UINT8"),
    "typed.i8": Typed(-128, "INT8"),
    "typed.u16": Typed(65535, "UINT16"),
    "typed.i16": Typed(-32768, "INT16"),
    "typed.i32": Typed(5, "INT32"),
    "typed.u64": Typed(5, "UINT64"),
    "typed.i64": Typed(5, "INT64"),
    "typed.f64": Typed(0.1, "FLOAT64"),
    "typed.list": Typed([1, 2, 3], "INT16"),
}
TYPES = {
    "plain.bool": "BOOL",
    "plain.int": "UINT32",
    "plain.negative": "INT32",
    "plain.large": "UINT64",
    "plain.very_negative": "INT64",
    "plain.float": "FLOAT32",
    "plain.text": "STRING",
    "list.bool": "BOOL[2]",
    "list.int": "INT32[2]",
    "list.mixed_sign": "INT32[2]",
    "list.large": "UINT64[2]",
    "list.wide": "INT64[2]",
    "list.float": "FLOAT32[2]",
    "list.text": "STRING[3]",
    "tuple.int": "INT32[2]",
    "typed.f64": "FLOAT64",
    "typed.list": "INT16[3]",
}


def plain(value: object) -> object:
    value = value.value if isinstance(value, Typed) else value
    return list(value) if isinstance(value, tuple) else value


def tensors() -> list[NewTensor]:
    """Return a tensor of each format that the gguf package has too, three rows of two blocks."""
    created = []
    for index, fmt in enumerate(FORMATS.values()):
        if fmt.name != "Q8_1":  # the gguf package counts its bytes differently
            data = bytes((index + i) % 251 for i in range(6 * fmt.nbytes))
            created.append(NewTensor(f"t.{fmt.name}", (2 * fmt.block, 3), fmt.name, data))
    return created


def open_bytes(data: bytes) -> Gguf:
    return run_sync(Gguf.aopen(BytesSource(data)))


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [32, 8, 4096])
def test_a_file_is_read_back(tmp_path, version, alignment):
    path = tmp_path / "a.gguf"
    write_gguf(path, METADATA, tensors(), version=version, alignment=alignment)
    assert path.read_bytes() == gguf_bytes(
        METADATA, tensors(), version=version, alignment=alignment
    )
    with Gguf.open(path) as file:
        assert (file.version, file.alignment) == (version, alignment)
        values = {key: value for key, value in file.metadata.items() if key != "general.alignment"}
        assert values == {key: plain(value) for key, value in METADATA.items()}
        assert {key: file.value_type(key) for key in TYPES} == TYPES
        for tensor in tensors():
            info = file.tensors[tensor.name]
            assert (info.shape, info.format.name) == (tensor.shape, tensor.format)
            assert file.data(info) == tensor.data


def test_the_gguf_package_reads_a_file(tmp_path):
    path = tmp_path / "a.gguf"
    write_gguf(path, METADATA, tensors(), alignment=64)
    reader = gguf.GGUFReader(path)
    for key, value in METADATA.items():
        assert reader.fields[key].contents() == pytest.approx(plain(value)), key
    assert [tensor.name for tensor in reader.tensors] == [tensor.name for tensor in tensors()]
    for theirs, ours in zip(reader.tensors, tensors(), strict=True):
        assert (theirs.tensor_type.name, tuple(theirs.shape)) == (ours.format, ours.shape)
        assert theirs.data.tobytes() == ours.data


def test_a_file_of_the_gguf_package_is_read(tmp_path):
    path = tmp_path / "theirs.gguf"
    writer = gguf.GGUFWriter(path, "gemma4")
    writer.add_uint8("u8", 200)
    writer.add_int64("i64", -(1 << 40))
    writer.add_float64("f64", 0.1)
    writer.add_bool("bool", True)
    writer.add_array("texts", ["a", "é", ""])
    writer.add_array("numbers", [1, 2, 3])
    weights = np.arange(96, dtype=np.float32).reshape(3, 32)
    packed = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("f32", weights)
    writer.add_tensor("q8", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with Gguf.open(path) as file:
        expected = {"u8": 200, "i64": -(1 << 40), "f64": 0.1, "bool": True}
        expected |= {"texts": ["a", "é", ""], "numbers": [1, 2, 3]}
        assert {key: file.metadata[key] for key in expected} == expected
        assert file.tensors["f32"].shape == file.tensors["q8"].shape == (32, 3)
        assert file.data(file.tensors["f32"]) == weights.tobytes()
        assert file.data(file.tensors["q8"]) == packed.tobytes()


def test_any_contiguous_buffer_is_accepted():
    weights = np.arange(8, dtype=np.float32).reshape(2, 4)
    file = open_bytes(gguf_bytes({}, [NewTensor("w", weights.T.shape, "F32", weights)]))
    assert file.data(file.tensors["w"]) == weights.tobytes()
    with pytest.raises(InputError, match="'w': its data cannot be used"):
        gguf_bytes({}, [NewTensor("w", (2, 4), "F32", weights.T)])


def span(kind: str) -> tuple[int, int]:
    """Return the smallest and the largest number of an integer type."""
    bits = 8 * SCALARS[kind].size
    return (0, (1 << bits) - 1) if kind[0] == "U" else (-(1 << bits - 1), (1 << bits - 1) - 1)


SCALAR_STRATEGIES = {
    **{kind: st.integers(*span(kind)) for kind in SCALARS if "INT" in kind},
    "FLOAT32": st.floats(width=32, allow_nan=False),
    "FLOAT64": st.floats(allow_nan=False),
    "BOOL": st.booleans(),
    "STRING": st.text(),
}
VALUES = st.sampled_from(list(SCALAR_STRATEGIES)).flatmap(
    lambda kind: st.builds(
        Typed,
        SCALAR_STRATEGIES[kind] | st.lists(SCALAR_STRATEGIES[kind], max_size=5),
        st.just(kind),
    )
)
SHAPES = st.lists(st.integers(1, 4), max_size=4)


@BOUNDED
@given(
    st.dictionaries(st.text(min_size=1, max_size=9), VALUES, max_size=6),
    st.dictionaries(
        st.text(min_size=1, max_size=9), st.tuples(SHAPES, st.sampled_from(["F32", "F16", "I8"]))
    ),
    st.sampled_from([1, 8, 32, 256]),
)
def test_round_trip(metadata, shapes, alignment):
    created = []
    for name, (shape, fmt) in shapes.items():
        count = int(np.prod(shape, dtype=int))
        created.append(NewTensor(name, shape, fmt, bytes(FORMATS[fmt].nbytes * count)))
    file = open_bytes(gguf_bytes(metadata, created, alignment=alignment))
    extra = {"general.alignment": alignment} if alignment != 32 else {}
    assert dict(file.metadata) == {key: value.value for key, value in metadata.items()} | extra
    for key, value in metadata.items():
        assert file.value_type(key).partition("[")[0] == value.type
    assert {name: list(info.shape) for name, info in file.tensors.items()} == {
        name: shape for name, (shape, _) in shapes.items()
    }


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"": 1}, "key '' has 0 bytes"),
        ({"k" * 65536: 1}, "65536 bytes"),
        ({"a\ud800": 1}, "UTF-8"),
        ({"k": "a\ud800"}, "value of 'k'"),
        ({"k": []}, "empty list"),
        ({"k": [1, "a"]}, "'k' (int, str)"),
        ({"k": [[1]]}, "'k' (list)"),
        ({"k": None}, "'k' (NoneType)"),
        ({"k": b"x"}, "'k' (bytes)"),
        ({"k": 1 << 64}, "does not fit UINT64"),
        ({"k": 1e39}, "does not fit FLOAT32"),
        ({"k": Typed(256, "UINT8")}, "does not fit UINT8"),
        ({"k": Typed("1", "UINT8")}, "does not fit UINT8"),
        ({"k": Typed(1, "STRING")}, "value of 'k'"),
        ({"k": Typed(2, "BOOL")}, "true or false"),
        ({"k": Typed(1, "ARRAY")}, "'ARRAY' is not a valid type"),
        ({"k": Typed(1, "INT")}, "'INT' is not a valid type"),
        ({"general.alignment": 64}, "an alignment of 32"),
    ],
)
def test_invalid_values_are_rejected(metadata, message):
    with pytest.raises(InputError) as error:
        gguf_bytes(metadata, [])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (NewTensor("t", (4,), "F32", bytes(15)), "takes 16 bytes, not 15"),
        (NewTensor("t", (4,), "F33", bytes(16)), "'F33' is not a valid format"),
        (NewTensor("t", (4,), "Q4_0", bytes(18)), "rows of 4"),
        (NewTensor("t", (4, 0), "F32", b""), "shape"),
        (NewTensor("t", (-4,), "F32", b""), "shape"),
        (NewTensor("t", (1, 1, 1, 1, 1), "F32", bytes(4)), "shape"),
        (NewTensor("", (1,), "F32", bytes(4)), "0 bytes"),
        (NewTensor("n" * 65, (1,), "F32", bytes(4)), "65 bytes"),
        (NewTensor("t", (1,), "F32", "text"), "cannot be used"),
    ],
)
def test_invalid_tensors_are_rejected(tensor, message):
    with pytest.raises(InputError) as error:
        gguf_bytes({}, [tensor])
    assert message in str(error.value)


def test_duplicate_names_and_invalid_settings_are_rejected():
    one = NewTensor("t", (1,), "F32", bytes(4))
    with pytest.raises(InputError, match="same name"):
        gguf_bytes({}, [one, one])
    with pytest.raises(InputError, match="power of two"):
        gguf_bytes({}, [one], alignment=24)
    with pytest.raises(InputError, match="version 1"):
        gguf_bytes({}, [one], version=1)


def test_the_alignment_may_be_in_the_metadata():
    file = open_bytes(gguf_bytes({"general.alignment": 64}, tensors(), alignment=64))
    assert (file.alignment, file.value_type("general.alignment")) == (64, "UINT32")


def test_a_failure_leaves_the_existing_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        with pytest.raises(GgufError, match=r"a\.gguf cannot be written: No space left"):
            write_gguf(path, METADATA, tensors())
    with pytest.raises(InputError):
        write_gguf(path, {"k": None}, [])
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"old", [path])
    with pytest.raises(GgufError, match="cannot be written"):
        write_gguf(tmp_path / "none" / "a.gguf", {}, [])
    write_gguf(path, METADATA, tensors())
    assert list(tmp_path.iterdir()) == [path]


def test_functions_are_called_when_their_data_are_written(tmp_path: Path) -> None:
    called: list[str] = []

    def data(name: str, nbytes: int) -> Callable[[], bytes]:
        def read() -> bytes:
            called.append(name)
            return name.encode() * nbytes

        return read

    tensors = [NewTensor(name, (4,), "F32", data(name, 16)) for name in "ab"]
    write_gguf(tmp_path / "lazy.gguf", {}, tensors)
    assert called == ["a", "b"]
    with Gguf.open(tmp_path / "lazy.gguf") as file:
        assert bytes(run_sync(file.read(file.tensors["b"]))) == b"b" * 16
    short = NewTensor("c", (4,), "F32", data("c", 15))
    with pytest.raises(InputError, match="takes 16 bytes, not 15"):
        write_gguf(tmp_path / "short.gguf", {}, [short])
    assert [path.name for path in tmp_path.iterdir()] == ["lazy.gguf"]
