"""Split models: all files are opened through the first one and must belong together."""

import asyncio

import pytest

from tests.gguf.server import serve
from webgemma.errors import GgufError, ModelNotFoundError
from webgemma.gguf.http import HttpSource
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import NewTensor, Typed, gguf_bytes
from webgemma.sync import run_sync


def part_name(number: int, count: int = 3) -> str:
    return f"m-{number + 1:05}-of-{count:05}.gguf"


def part(number: int, *tensors: str, count: int = 3, total: int = 4, **extra: object) -> bytes:
    metadata = {
        "split.no": Typed(number, "UINT16"),
        "split.count": Typed(count, "UINT16"),
        "split.tensors.count": Typed(total, "INT32"),
    }
    new_tensors = [NewTensor(name, (8,), "F32", bytes([number] * 32)) for name in tensors]
    return gguf_bytes(metadata | extra, new_tensors)


def parts() -> dict[str, bytes]:
    """Return three files, the first without tensors, as some tools write it."""
    return {
        part_name(0): part(0, **{"general.name": "split"}),
        part_name(1): part(1, "a", "b"),
        part_name(2): part(2, "c", "d"),
    }


def open_split(files: dict[str, bytes], name: str = part_name(0)) -> Gguf:
    return run_sync(Gguf.aopen(BytesSource(files[name], name, files)))


def test_all_parts_are_opened_as_one_model(tmp_path):
    files = parts()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with Gguf.open(tmp_path / part_name(0)) as gguf:
        assert gguf.metadata["general.name"] == "split"
        assert gguf.nbytes == sum(map(len, files.values()))
        assert {name: info.part for name, info in gguf.tensors.items()} == {
            "a": 1,
            "b": 1,
            "c": 2,
            "d": 2,
        }
        for info in gguf.tensors.values():
            assert gguf.data(info) == run_sync(gguf.read(info)) == bytes([info.part] * 32)
    with pytest.raises(GgufError, match="is closed"):
        gguf.data(gguf.tensors["a"])


def test_a_model_in_one_part_may_have_any_name():
    only = part(0, "a", count=1, total=1)
    assert list(open_split({"x": only}, "x").tensors) == ["a"]


def test_a_later_part_names_the_first():
    with pytest.raises(GgufError, match=rf"is part 2 of 3: open {part_name(0)} instead"):
        open_split(parts(), part_name(1))


def test_a_missing_part_is_named(tmp_path):
    files = parts()
    del files[part_name(2)]
    with pytest.raises(GgufError, match=rf"part 3 is missing: {part_name(2)} must be in"):
        open_split(files)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(GgufError, match=part_name(2)) as error:
        Gguf.open(tmp_path / part_name(0))
    assert isinstance(error.value.__cause__, ModelNotFoundError)


@pytest.mark.parametrize(
    ("number", "data", "message"),
    [
        (1, part(2, "a", "b"), "should be part 2 of 3 but is marked as 3 of 3"),
        (1, part(1, "a", "b", count=4), "should be part 2 of 3 but is marked as 2 of 4"),
        (1, gguf_bytes({"general.name": "x"}, []), "should be part 2 of 3"),
        (1, part(1, "a", "c"), f"'c' is in {part_name(1)} already"),
        (1, part(1, "a"), "split.tensors.count is 4, but the 3 parts have 3"),
        (1, part(1, "a", "b")[:-1], "cut short"),
        (1, part(1, **{"split.no": "one"}), "split.no has type STRING, not an integer"),
        (1, b"junk", "not a GGUF file"),
        (0, part(0, count=2), "is marked as part 1 of 2: rename it"),
        (0, part(7), "is marked as part 8 of 3"),
        (0, part(0, **{"split.no": -1}), "is marked as part 0 of 3"),
        (0, part(0, **{"split.count": 1 << 63}), f"is marked as part 1 of {1 << 63}"),
        (0, part(0, **{"split.count": [3]}), "split.count has type INT32[1]"),
    ],
)
def test_parts_that_do_not_belong_together_are_rejected(number, data, message):
    files = parts() | {part_name(number): data}
    with pytest.raises(GgufError) as error:
        open_split(files)
    assert message in str(error.value)


def test_a_first_part_with_another_name_must_be_renamed():
    with pytest.raises(GgufError, match="rename it to NAME-00001-of-00003"):
        open_split(parts() | {"renamed.gguf": parts()[part_name(0)]}, "renamed.gguf")


def test_an_implausible_count_is_rejected_at_once():
    with pytest.raises(GgufError, match=f"is part 1 of {1 << 63}"):
        open_split({"x": part(0, **{"split.count": 1 << 63})}, "x")


def test_parts_on_a_server_are_opened():
    async def open_remote(url: str) -> Gguf:
        return await Gguf.aopen(await HttpSource.open(url, retries=0))

    files = {f"/folder/{name}": data for name, data in parts().items()}
    with serve(files) as site:
        url = f"{site.url}/folder/{part_name(0)}?download=true"
        with asyncio.run(open_remote(url)) as gguf:
            assert asyncio.run(gguf.read(gguf.tensors["d"])) == bytes([2] * 32)
        del files[f"/folder/{part_name(1)}"]
        with pytest.raises(GgufError, match=f"{part_name(1)} must be in the same folder"):
            asyncio.run(open_remote(url))
    assert site.paths[2] == f"/folder/{part_name(1)}?download=true"
