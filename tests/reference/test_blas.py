"""Threads of BLAS: few for small products, more for large ones, as before afterwards."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.tiny import SMALL, tiny_gguf

from webgemma import Gemma
from webgemma.reference import blas as module
from webgemma.reference.blas import Blas, available_cores, blas


class Library:
    """Stands in for a BLAS; remembers what was set."""

    def __init__(self, count: int) -> None:
        self.num_threads = count
        self.set: list[int] = []

    def set_num_threads(self, count: int) -> None:
        self.num_threads = count
        self.set.append(count)


def make(threads: int, cores: int = 64) -> tuple[Library, Blas]:
    library = Library(threads)
    return library, Blas([library], cores)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("threads", "cores", "few", "most"),
    [(16, 16, 8, 12), (2, 2, 1, 2), (1, 8, 1, 1), (64, 3, 1, 3)],
)
def test_how_many(threads: int, cores: int, few: int, most: int) -> None:
    _, blas = make(threads, cores)
    assert (blas.few, blas.most) == (few, most)
    assert blas.threads(1, 512 * 512) == few
    assert blas.threads(1, 12288 * 1536) == most
    assert blas.threads(64, 512 * 512) == few
    assert blas.threads(512, 512 * 512) == most


def test_it_is_as_before_afterwards() -> None:
    library, blas = make(16, 12)
    with blas.product(1, 100):
        assert library.num_threads == 6
    assert library.num_threads == 16
    with blas.step():
        assert library.num_threads == 6
        with blas.product(1, 100):
            assert library.num_threads == 6
        with blas.product(1, 10**9):
            assert library.num_threads == 9
        assert library.num_threads == 6
        with blas.step():
            pass
        assert library.num_threads == 6
    assert library.num_threads == 16
    assert library.set == [6, 16, 6, 9, 6, 16]
    with pytest.raises(ZeroDivisionError), blas.step(), blas.product(1, 10**9):
        raise ZeroDivisionError
    assert library.num_threads == 16


def test_the_model_multiplies_with_few_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, pretended = make(16)
    monkeypatch.setattr("webgemma.reference.weights.blas", lambda: pretended)
    monkeypatch.setattr(module, "blas", lambda: pretended)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf(SMALL))
    with Gemma.load(path, "cpu") as model:
        assert len(list(model.generate([2, 30], temperature=0, max_tokens=3))) == 3
    assert set(library.set) == {8, 16}
    assert library.num_threads == 16


def test_the_blas_of_this_process_can_be_set() -> None:
    found = blas()
    assert found._libraries
    before = [library.num_threads for library in found._libraries]
    with found.step():
        assert {library.num_threads for library in found._libraries} == {found.few}
    assert [library.num_threads for library in found._libraries] == before


def test_any_thread_can_set_it() -> None:
    """threadpoolctl hears only the first one, unless that is released."""
    found, seen = blas(), list[int]()

    def step() -> None:
        with found.step():
            seen.extend(library.num_threads for library in found._libraries)

    for run in (step, lambda: on_a_thread(step), step):
        run()
    assert set(seen) == {found.few}


def on_a_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_cores_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    limit = tmp_path / "cpu.max"
    assert available_cores(limit) == 8
    for text, cores in (("max 100000", 8), ("150000 100000", 2), ("1600000 100000", 8)):
        limit.write_text(text + "\n")
        assert available_cores(limit) == cores
    for text in ("10000 100000", "0 0", "-5 1"):
        limit.write_text(text)
        assert available_cores(limit) == 1
