"""An index and its folder: nothing twice, nothing lost, nothing damaged, nothing forged."""

import hashlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.embedder import WordEmbedder
from helpers.pdf import pdf_of
from numpy.typing import NDArray

from webgemma.errors import InputError
from webgemma.search import Index, Update, find_passages, update_index
from webgemma.search import index as index_module
from webgemma.search import indexing as indexing_module
from webgemma.search.documents import read_document
from webgemma.search.index import delete_index
from webgemma.search.retrieval import has_changed

SIZE = 128


def opened(folder: Path, embedder: WordEmbedder) -> Index:
    path = folder / ".index"
    if path.exists():
        return Index.open(path)
    return Index.create(path, folder, embedder.name, embedder.fingerprint, SIZE)


def update(folder: Path, embedder: WordEmbedder | None = None) -> tuple[Update, list[str]]:
    """Update the index of a folder; return what was done, and the texts that were embedded."""
    embedder = embedder or WordEmbedder()
    with opened(folder, embedder) as index:
        return update_index(folder, index, embedder), embedder.texts


def found(folder: Path, question: str, top: int = 6) -> list[Any]:
    embedder = WordEmbedder()
    with opened(folder, embedder) as index:
        return find_passages(index, embedder, question, top)


def assert_sound(folder: Path) -> None:
    """The file is whole, and every passage is at its offsets in its file, with its vector."""
    connection = sqlite3.connect(folder / ".index")
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    (counts,) = connection.execute(
        "SELECT (SELECT count(*) FROM passages), (SELECT count(*) FROM vectors)"
    )
    assert counts[0] == counts[1]
    ids = [id for (id,) in connection.execute("SELECT id FROM passages")]
    connection.close()
    with Index.open(folder / ".index") as index:
        for entry in index.entries(ids):
            data = (folder / entry.path).read_bytes()
            assert hashlib.sha256(data).hexdigest() == entry.file_digest
            document = read_document(entry.path, data)
            assert document is not None
            text = document.text[entry.span.begin : entry.span.end]
            assert hashlib.sha256(text.encode()).digest() == entry.span.digest
            assert index.text(entry.document) == document.text
            assert document.place(entry.span.begin) == entry.span.first


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    (folder / "notes").mkdir(parents=True)
    (folder / "foxes.txt").write_text("The red fox sleeps under the old oak.\r\n", newline="")
    (folder / "notes" / "rivers.md").write_text(
        "# Rivers\n\nThe river Spree runs through Berlin.\n\n"
        + "\n\n".join(f"Paragraph {at} says {'water ' * 60}" for at in range(12))
    )
    (folder / "page.html").write_text("<title>Cheese</title>\n<p>Cheese is made\n<p>from milk.")
    (folder / "paper.pdf").write_bytes(pdf_of(["Introduction", "Volcanoes erupt lava."]))
    (folder / "latin.txt").write_bytes("Käse und Brot – überall".encode("cp1252"))
    (folder / "image.png").write_bytes(b"\x89PNG\0\0")
    (folder / ".secret").write_text("hidden")
    return folder


def test_passages_are_found_and_stand_where_they_say(folder: Path) -> None:
    done, texts = update(folder)
    assert (done.files, done.done, done.added, done.embedded) == (6, 6, 5, len(texts))
    assert done.skipped == {"hidden": 1, "binary": 1}
    assert_sound(folder)
    for question, path, place in (
        ("red fox", "foxes.txt", "line 1"),
        ("volcanoes lava", "paper.pdf", "pages 1-2"),
        ("cheese milk", "page.html", "lines 2-3"),
        ("Käse Brot", "latin.txt", "line 1"),
        ("river Spree Berlin", "notes/rivers.md", "lines 1-13"),
    ):
        best = found(folder, question)[0]
        assert (best.path, best.place) == (path, place)
        document = read_document(path, (folder / path).read_bytes())
        assert document is not None
        assert document.text[best.begin : best.end] == best.text
    assert found(folder, "fox")[0].text == "The red fox sleeps under the old oak."


def test_nothing_is_embedded_twice(folder: Path) -> None:
    _, first = update(folder)
    assert len(set(first)) == len(first)
    done, texts = update(folder)
    assert texts == []
    assert (done.unchanged, done.added, done.changed, done.removed) == (5, 0, 0, 0)

    os.utime(folder / "foxes.txt", (1, 1))  # a new time is no change
    (folder / "notes" / "rivers.md").rename(folder / "moved.md")
    (folder / "copy.txt").write_bytes((folder / "foxes.txt").read_bytes())
    done, texts = update(folder)
    assert texts == []
    assert (done.unchanged, done.added, done.removed) == (4, 2, 1)
    assert_sound(folder)


def test_what_changes_is_embedded_and_what_goes_is_removed(folder: Path) -> None:
    update(folder)
    with (folder / "notes" / "rivers.md").open("a") as file:
        file.write("\n\nThe Danube ends in the Black Sea.")
    (folder / "foxes.txt").unlink()
    (folder / "latin.txt").write_bytes(b"\0 now binary")
    done, texts = update(folder)
    assert (done.changed, done.removed, done.unchanged) == (1, 2, 2)
    assert len(texts) == 1  # the end of the file; the rest of it is known
    assert "Danube" in texts[0]
    assert "Danube" in found(folder, "Danube Black Sea")[0].text
    assert "foxes.txt" not in {passage.path for passage in found(folder, "red fox oak")}
    assert b"Paragraph 11" not in (folder / ".index").read_bytes()  # texts are packed
    assert_sound(folder)


def test_a_text_in_many_files_is_found_once_and_neighbours_are_joined(folder: Path) -> None:
    for at in range(5):
        (folder / f"fox{at}.txt").write_text("The red fox sleeps under the old oak.")
    update(folder)
    passages = found(folder, "red fox oak water")
    assert sum("red fox" in passage.text for passage in passages) == 1
    rivers = sorted(
        (each for each in found(folder, "water") if each.path == "notes/rivers.md"),
        key=lambda each: each.begin,
    )
    assert any(len(each.text) > 1200 for each in rivers)
    text = (folder / "notes" / "rivers.md").read_text()
    assert all(text[each.begin : each.end] == each.text for each in rivers)
    assert len(found(folder, "water", 1)) == 1


# Interruptions


class Interrupting(WordEmbedder):
    """Acts in the middle of a call."""

    def __init__(self, call: int, act: Any) -> None:
        super().__init__()
        self.call, self.act = call, act

    def embed(self, texts: Sequence[str], *given: Any) -> NDArray[np.float32]:
        if self.calls + 1 == self.call:
            self.act()
        return super().embed(texts, *given)


def raise_interrupt() -> None:
    raise KeyboardInterrupt


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embed every file in a call of its own."""
    monkeypatch.setattr(indexing_module, "TOGETHER", 1)


@pytest.mark.usefixtures("one_by_one")
def test_an_interrupt_loses_the_file_under_way(folder: Path) -> None:
    embedder, done = Interrupting(3, raise_interrupt), Update()
    with opened(folder, embedder) as index, pytest.raises(KeyboardInterrupt):
        update_index(folder, index, embedder, update=done)
    assert (done.added, done.done) == (2, 3)  # and a binary one
    assert_sound(folder)
    again, texts = update(folder)
    assert (again.unchanged, again.added) == (2, 3)
    assert not set(texts) & set(embedder.texts)
    assert_sound(folder)


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from search.test_index import Interrupting, opened
from webgemma.search import indexing, update_index
indexing.TOGETHER = 1
kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[3] == "storing":
    original = indexing.Index.store
    import sqlite3, webgemma.search.index as module
    def contextual(self, *given, **named):
        count[0] += 1
        if count[0] == 3:
            execute = self._connection.execute
            class Killing:
                in_transaction = True
                def execute(self, statement, *values):
                    if statement == "COMMIT": kill()
                    return execute(statement, *values)
            self._connection = Killing()
        return original(self, *given, **named)
    count = [0]
    indexing.Index.store = contextual
embedder = Interrupting(3 if sys.argv[3] == "embedding" else 0, kill)
with opened(Path(sys.argv[1]), embedder) as index:
    update_index(Path(sys.argv[1]), index, embedder)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs kill -9")
@pytest.mark.parametrize("where", ["embedding", "storing"])
def test_kill_9_loses_the_file_under_way(folder: Path, where: str) -> None:
    tests = str(Path(__file__).parents[1])
    args = [sys.executable, "-c", KILLED, str(folder), tests, where]
    killed = subprocess.run(args, capture_output=True, text=True, timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again, _ = update(folder)
    assert (again.unchanged, again.added) == (2, 3)
    assert_sound(folder)


# Full disks


@pytest.mark.usefixtures("one_by_one")
def test_a_full_index_says_so_and_is_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = index_module._connect

    def small(path: Path) -> sqlite3.Connection:
        connection = connect(path)
        connection.execute("PRAGMA max_page_count = 12")
        return connection

    (folder / "long.txt").write_text(random.Random(1).randbytes(9000).hex())
    monkeypatch.setattr(index_module, "_connect", small)
    with pytest.raises(InputError, match="cannot be used: database or disk is full"):
        update(folder)
    monkeypatch.undo()
    assert_sound(folder)
    before = sqlite3.connect(folder / ".index").execute("SELECT count(*) FROM documents").fetchone()
    done, _ = update(folder)
    assert done.unchanged == before[0] >= 1
    assert done.unchanged + done.added == 6
    assert_sound(folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_loses_nothing_that_was_stored(folder: Path, small_disk: Path) -> None:
    embedder, path = WordEmbedder(), small_disk / "index"
    with Index.create(path, folder, "words", "1", SIZE) as index:
        update_index(folder, index, embedder)
        filler = small_disk / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
        (folder / "new.txt").write_text("\n\n".join(f"Sentence {at}." * 40 for at in range(99)))
        with pytest.raises(InputError, match=r"index cannot be used: (disk|database)"):
            update_index(folder, index, embedder)
    with Index.open(path) as index:
        assert len(index.digests()) == 5
        assert find_passages(index, embedder, "red fox")[0].path == "foxes.txt"
        with pytest.raises(InputError, match=r"other cannot be (used|written): "):
            Index.create(small_disk / "other", folder, "words", "1", SIZE)
        assert not (small_disk / "other").exists()
        filler.unlink()
        done = update_index(folder, index, embedder)
    assert (done.unchanged, done.added) == (5, 1)


# Other files, other models, other folders


def test_another_model_and_another_folder_are_refused(folder: Path, tmp_path: Path) -> None:
    update(folder)
    with Index.open(folder / ".index") as index:
        other = WordEmbedder("sentences", "2")
        for act in (
            lambda: update_index(folder, index, other),
            lambda: find_passages(index, other, "fox"),
        ):
            with pytest.raises(
                InputError, match=r"made with another embedding model, words: .*anew"
            ):
                act()
        with pytest.raises(InputError, match=r"is the index of .*folder; name another file"):
            update_index(tmp_path, index, WordEmbedder())
    with pytest.raises(InputError, match="exists already"):
        Index.create(folder / ".index", folder, "words", "1", SIZE)


def test_folder_and_index_can_be_moved_together(folder: Path, tmp_path: Path) -> None:
    update(folder)
    moved = folder.rename(tmp_path / "elsewhere")
    assert update(moved)[0].unchanged == 5
    (passage, *_) = found(moved, "red fox")
    with Index.open(moved / ".index") as index:
        assert not has_changed(index, passage)
        (moved / "foxes.txt").write_text("No more.")
        assert has_changed(index, passage)
        (moved / "foxes.txt").unlink()
        assert has_changed(index, passage)
        (moved / "foxes.txt").symlink_to("foxes.txt")
        assert has_changed(index, passage)


def test_what_is_no_index_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "other"
    with pytest.raises(InputError, match=r"There is no index"):
        Index.open(path)
    path.write_text("my diary, which is longer than the header of a database file " * 5)
    with pytest.raises(InputError, match=r"is not an index of webgemma\.$"):
        Index.open(path)
    with pytest.raises(InputError, match="choose another name"):
        delete_index(path)
    path.unlink()
    sqlite3.connect(path).executescript("CREATE TABLE t (x); INSERT INTO t VALUES (1);")
    with pytest.raises(InputError, match=r"is not an index of webgemma\.$"):
        Index.open(path)
    with pytest.raises(InputError, match="choose another name"):
        delete_index(path)
    assert path.exists()


def test_a_damaged_index_is_a_sentence(folder: Path) -> None:
    update(folder)
    path = folder / ".index"
    whole = path.read_bytes()
    for statement in (
        "UPDATE documents SET text = x'00'",
        "UPDATE facts SET value = 'many' WHERE name = 'size'",
        "DELETE FROM facts",
        "DROP TABLE vectors",
        "UPDATE passages SET begin = 'x'",
        "UPDATE passages SET end = begin + 1000000",
        "UPDATE passages SET digest = 1000000000000",
        "UPDATE documents SET path = CAST('a' || char(0) || id AS BLOB)",
        "UPDATE facts SET value = CAST('a' || char(0) AS BLOB) WHERE name = 'folder'",
        f"UPDATE vectors SET vector = x'{np.full(SIZE, np.nan, '<f4').tobytes().hex()}'",
        f"UPDATE vectors SET vector = x'{np.full(SIZE, 9e9, '<f4').tobytes().hex()}'",
        # Views and triggers of a stranger may compute for ever.
        "ALTER TABLE facts RENAME TO other; CREATE VIEW facts AS SELECT * FROM other",
        "CREATE TRIGGER more AFTER DELETE ON documents BEGIN DELETE FROM vectors; END",
    ):
        path.write_bytes(whole)
        connection = sqlite3.connect(path)
        connection.executescript(statement)
        connection.close()
        with pytest.raises(InputError, match=r"is damaged; --rebuild makes it anew\.$"):
            found(folder, "red fox")
    (root,) = sqlite3.connect(path).execute(
        "SELECT rootpage FROM sqlite_master WHERE name = 'passages_of_document'"
    )
    for begin, end in ((100, len(whole)), (4096 * (root[0] - 1), 4096 * root[0])):
        path.write_bytes(whole[:begin] + bytes(end - begin) + whole[end:])
        with pytest.raises(InputError, match="is damaged"):
            found(folder, "red fox")
    connection = sqlite3.connect(path)
    path.write_bytes(whole)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(InputError, match="another version of webgemma"):
        found(folder, "red fox")
    delete_index(path)
    assert not path.exists()


def test_an_index_in_use_is_a_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "BUSY_SECONDS", 0.05)
    update(folder)
    (folder / "new.txt").write_text("new")
    other = sqlite3.connect(folder / ".index")
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(InputError, match="is in use by another process"):
        update(folder)
    other.close()
    assert update(folder)[0].added == 1


@pytest.mark.skipif(sys.platform == "win32", reason="needs permissions of Unix")
def test_only_its_owner_reads_an_index(folder: Path) -> None:
    update(folder)
    assert (folder / ".index").stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(sys.platform != "linux", reason="needs any bytes as names")
def test_hostile_names_are_only_names(folder: Path) -> None:
    names = [b"a'; DROP TABLE documents;--.txt", b"new\nline.txt", b"\xff\xfe.txt", b"<|turn>.txt"]
    for name in names:
        (folder / os.fsdecode(name)).write_text("zebra " + name.decode("latin-1"))
    done, _ = update(folder)
    assert done.problems == {}
    assert {os.fsencode(each.path) for each in found(folder, "zebra", 10)} >= set(names)
    assert update(folder)[0].unchanged == 9
    assert_sound(folder)


def test_what_cannot_be_read_is_a_line_and_stays_in_the_index(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update(folder)
    (folder / "damaged.pdf").write_bytes(b"%PDF-1.4 nothing")
    read = indexing_module.read_bytes

    def refusing(path: Path, most: int) -> bytes | None:
        if path.name == "foxes.txt":
            raise PermissionError(13, "Permission denied")
        return read(path, most)

    monkeypatch.setattr(indexing_module, "read_bytes", refusing)
    scandir = os.scandir

    def closed(path: Any) -> Any:
        if str(path).endswith("notes"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    done, texts = update(folder)
    assert texts == []
    assert done.removed == 0
    assert done.problems.keys() == {"foxes.txt", "damaged.pdf", "notes"}
    assert done.problems["foxes.txt"] == "It cannot be read: Permission denied."
    monkeypatch.undo()
    assert update(folder)[0].unchanged == 5


def test_of_binary_files_the_beginning_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder may hold more photos than a disk reads in an hour."""
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8\0" + bytes(1 << 20))
    monkeypatch.setattr(indexing_module, "read_bytes", lambda *_: pytest.fail("it is read"))
    assert update(tmp_path)[0].skipped == {"binary": 1}


def test_large_files_are_skipped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not counted: a film would be most of the progress, and take no time."""
    monkeypatch.setattr(indexing_module, "most_nbytes", lambda _: 45)
    embedder, seen = WordEmbedder(), list[tuple[int, int]]()
    with opened(folder, embedder) as index:
        done = update_index(folder, index, embedder, progress=lambda *now: seen.append(now))
    assert done.skipped["large"] == 3
    sizes = [path.stat().st_size for path in folder.rglob("[!.]*") if path.is_file()]
    small = sum(nbytes for nbytes in sizes if nbytes <= 45)
    assert seen[0] == (0, small)
    assert seen[-1] == (small, small)


# With and without sqlite-vec


@pytest.fixture
def many(tmp_path: Path) -> tuple[Path, NDArray[np.float32]]:
    """An index of random vectors, many of them twice."""
    rng = np.random.default_rng(4)
    vectors = rng.standard_normal((300, SIZE)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    path = tmp_path / "many"
    with Index.create(path, tmp_path, "words", "1", SIZE) as index:
        for at in range(9):
            rows = [vectors[row] for row in rng.integers(0, 300, 40)]
            spans = [index_module.Span(i, i + 1, 1, 1, bytes([at, i])) for i in range(40)]
            name = f"{at}.txt"
            index.store([index_module.NewDocument(name, str(at), "x" * 50, spans, rows)])
    return path, vectors


def exact(path: Path, query: NDArray[np.float32], count: int) -> list[int]:
    rows = sqlite3.connect(path).execute("SELECT passage, vector FROM vectors").fetchall()
    scores = [
        (-np.frombuffer(data, "<f4").astype(float) @ query.astype(float), id) for id, data in rows
    ]
    return [id for _, id in sorted((round(score, 6), id) for score, id in scores)][:count]


def test_numpy_finds_the_nearest(
    many: tuple[Path, NDArray[np.float32]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, vectors = many
    monkeypatch.setattr(index_module, "SCANNED", 32)
    monkeypatch.setattr(index_module, "_load_extension", lambda _: False)
    with Index.open(path) as index:
        for query in vectors[:20]:
            near = index.nearest(query, 24)
            assert [id for id, _ in near] == exact(path, query, 24)
            assert near[0][1] <= 1.000001


def test_sqlite_vec_finds_the_same(many: tuple[Path, NDArray[np.float32]]) -> None:
    path, vectors = many
    with Index.open(path) as index:
        if not index.has_extension:
            pytest.skip("this Python's sqlite3 loads no extensions")
        compared = [index.nearest(query, 24) for query in vectors[:20]]
        index.has_extension = False
        assert compared == [index.nearest(query, 24) for query in vectors[:20]]
        assert [id for id, _ in compared[3]] == exact(path, vectors[3], 24)
