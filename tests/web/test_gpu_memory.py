"""GPU memory of listed models: read once from the header, without delaying the list."""

from pathlib import Path

import pytest
from helpers.store import add_model
from helpers.tiny import KINDS, tiny_gguf

from webgemma import Gemma
from webgemma.errors import DeviceError
from webgemma.web import gpu_memory
from webgemma.web.catalogue import Catalogue
from webgemma.web.gpu_memory import GpuSize, gpu_size


def listed(catalogue: Catalogue) -> dict[str, tuple[int | None, int | None, str | None]]:
    models = catalogue.models()["models"]
    return {m["name"]: (m["gpu_nbytes"], m["gpu_min_nbytes"], m["problem"]) for m in models}


@pytest.mark.parametrize("kind", KINDS)
def test_the_size_is_what_loading_needs(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf(KINDS[kind]))
    size = gpu_size(path, kind)
    assert size.nbytes
    assert size.min_nbytes
    Gemma.load(path, "gpu", memory_gb=size.min_nbytes / 1e9).close()
    with pytest.raises(DeviceError, match="memory_gb"):
        Gemma.load(path, "gpu", memory_gb=(size.min_nbytes - 1) / 1e9)
    has_table = KINDS[kind].ple > 0
    assert (size.nbytes > size.min_nbytes) == has_table


def test_the_list_has_the_sizes_and_reads_each_header_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []

    def counted(path: Path, name: str) -> GpuSize:
        read.append(name)
        return gpu_size(path, name)

    monkeypatch.setattr(gpu_memory, "gpu_size", counted)
    for name in ("one:e2b", "same:e2b"):
        add_model(tmp_path, name, gguf=tiny_gguf(KINDS["small"]))
    add_model(tmp_path, "other:8b", gguf=b"GGUF" * 100)
    catalogue = Catalogue(tmp_path)
    first = listed(catalogue)
    assert listed(catalogue) == first
    assert read == ["one:e2b", "other:8b"]
    assert first["one:e2b"] == first["same:e2b"]
    assert first["one:e2b"][0]
    nbytes, min_nbytes, problem = first["other:8b"]
    assert nbytes is min_nbytes is None
    assert problem
    assert problem.startswith("other:8b has GGUF version")


def test_a_long_list_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "LIST_SECONDS", 0.0)
    add_model(tmp_path, "one:e2b", gguf=tiny_gguf(KINDS["small"]))
    catalogue = Catalogue(tmp_path)
    assert listed(catalogue) == {"one:e2b": (None, None, None)}
    monkeypatch.setattr(gpu_memory, "LIST_SECONDS", 60.0)
    assert listed(catalogue)["one:e2b"][0]
