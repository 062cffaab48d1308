"""The lock of an index: one holder, freed however that ends, and nothing left behind."""

import subprocess
import sys
from pathlib import Path

import pytest

from webgemma.errors import InputError
from webgemma.search import index_lock
from webgemma.search.lock import lock_path

pytest.importorskip("fcntl", reason="needs locks of Unix")

HOLDING = """
import sys
from pathlib import Path
from webgemma.search import index_lock
with index_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_holder_by_any_name_of_the_index(tmp_path: Path) -> None:
    path = tmp_path / "notes.sqlite"
    (tmp_path / "link").symlink_to(path)
    for name in (path, tmp_path / "link"):
        with index_lock(path):
            assert lock_path(path).name == ".notes.sqlite.lock"
            with pytest.raises(InputError, match=r"run of `webgemma index` is writing"):
                index_lock(name).__enter__()
            with index_lock(tmp_path / "another"):
                pass
        assert not lock_path(path).exists()


def test_a_process_that_is_killed_frees_it(tmp_path: Path) -> None:
    path = tmp_path / "index"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDING, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(InputError, match="wait for it"):
        index_lock(path).__enter__()
    holder.kill()
    holder.communicate()
    assert lock_path(path).exists()
    with index_lock(path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_locked_runs_go_on(tmp_path: Path) -> None:
    """Whoever writes the index has a better sentence for a folder that cannot be written."""
    lock_path(tmp_path / "index").mkdir()
    for path in (tmp_path / "none" / "index", tmp_path / "index"):
        with index_lock(path), index_lock(path):
            pass
    assert lock_path(tmp_path / "index").is_dir()
