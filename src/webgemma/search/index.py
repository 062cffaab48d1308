"""The index: one SQLite file with the documents of a folder, their passages and vectors.

Vectors are in an ordinary table, as bytes: with sqlite-vec the database compares them itself, and
where Python cannot load extensions numpy does, on the same file and with the same result. Documents
are written in transactions: a crash or a full disk loses what is under way, never the index."""

import hashlib
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from webgemma.errors import InputError
from webgemma.search.chunks import SIZE
from webgemma.search.documents import Unit

if TYPE_CHECKING:
    from numpy.typing import NDArray

NAME = ".webgemma-index.sqlite"
APPLICATION = 0x77676978  # in the header of the file
VERSION = 1  # of the tables, of what documents become, and of how they are cut
BUSY_SECONDS = 10.0
SCANNED = 4096  # vectors at a time, without sqlite-vec
MAX_TEXT_NBYTES = 64_000_000  # of a document, unpacked
MAX_SCORE = 1.03  # vectors have length 1, nearly

_TABLES = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID;
CREATE TABLE documents (
    id INTEGER PRIMARY KEY,
    path BLOB NOT NULL UNIQUE,
    digest TEXT NOT NULL,
    title TEXT NOT NULL,
    unit TEXT NOT NULL,
    text BLOB NOT NULL
);
CREATE TABLE passages (
    id INTEGER PRIMARY KEY,
    document INTEGER NOT NULL REFERENCES documents (id) ON DELETE CASCADE,
    begin INTEGER NOT NULL,
    end INTEGER NOT NULL,
    first INTEGER NOT NULL,
    last INTEGER NOT NULL,
    digest BLOB NOT NULL
);
CREATE TABLE vectors (
    passage INTEGER PRIMARY KEY REFERENCES passages (id) ON DELETE CASCADE,
    vector BLOB NOT NULL
);
CREATE INDEX passages_of_document ON passages (document);
CREATE INDEX passages_by_digest ON passages (digest);
"""
_SCHEMA = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name"


@dataclass(frozen=True, slots=True)
class Facts:
    """What an index is of, and what made its vectors."""

    folder: str  # from the index, if it is inside the folder; else the whole path
    embedder: str
    fingerprint: str
    size: int


@dataclass(frozen=True, slots=True)
class Span:
    """A passage to store: where it is in its document, and on which lines or pages."""

    begin: int
    end: int
    first: int
    last: int
    digest: bytes  # of its text


@dataclass(frozen=True, slots=True)
class NewDocument:
    """A document to store, with its passages and their vectors."""

    path: str
    digest: str  # of its file
    text: str
    spans: Sequence[Span]
    vectors: Sequence["NDArray[np.float32]"]
    title: str = ""
    unit: Unit = "line"


@dataclass(frozen=True, slots=True)
class Entry:
    """A passage of the index, and its document."""

    id: int
    document: int
    path: str
    file_digest: str
    title: str
    unit: Unit
    span: Span


def passage_digest(text: str) -> bytes:
    """Return what a passage is known by: passages with the same text have the same vector."""
    return hashlib.sha256(text.encode()).digest()


class Index:
    """An open index."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        """Use `Index.open` and `Index.create`."""
        self.path = path
        self._connection = connection
        self.has_extension = _load_extension(connection)
        with self._reported():
            connection.execute("PRAGMA trusted_schema = OFF")  # the file may be a stranger's
            connection.execute("PRAGMA foreign_keys = ON")
            # What leaves the folder leaves the file.
            connection.execute("PRAGMA secure_delete = ON")
            self._check_version()
            self._check_sound()
            self.facts = self._read_facts()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an index that exists; InputError if it is none, or of another version."""
        if not path.is_file() or not path.stat().st_size:
            raise InputError(f"There is no index {path}.")
        connection = _connect(path)
        try:
            return cls(path, connection)
        except BaseException:
            connection.close()
            raise

    @classmethod
    def create(cls, path: Path, folder: Path, embedder: str, fingerprint: str, size: int) -> Self:
        """Make an index without documents; only its owner may read it, as it holds their texts."""
        if path.exists() and path.stat().st_size:
            raise InputError(f"{path} exists already.")
        facts = {
            "folder": os.fsencode(_folder_from(path, folder)),
            "embedder": os.fsencode(embedder),
            "fingerprint": fingerprint,
            "size": size,
        }
        begun = path.with_name(f"{path.name}.new")  # an index appears when it is one
        try:
            begun.unlink(missing_ok=True)
            os.close(os.open(begun, os.O_CREAT | os.O_EXCL, 0o600))
            try:
                _write_tables(begun, path, facts)
                os.replace(begun, path)
            finally:
                begun.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}.") from None
        return cls.open(path)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def folder(self) -> Path:
        """The folder whose documents it holds."""
        return Path(os.path.normpath(self.path.resolve().parent / self.facts.folder))

    # What it holds

    def digests(self) -> dict[str, str]:
        """Return the digest of each document's file, by path."""
        with self._reported():
            rows = self._connection.execute("SELECT path, digest FROM documents").fetchall()
            return {os.fsdecode(path): str(digest) for path, digest in rows}

    def counts(self) -> tuple[int, int]:
        """Return how many documents and passages there are."""
        with self._reported():
            (row,) = self._connection.execute(
                "SELECT (SELECT count(*) FROM documents), (SELECT count(*) FROM passages)"
            )
            return int(row[0]), int(row[1])

    def known_vectors(self, digests: Iterable[bytes]) -> dict[bytes, "NDArray[np.float32]"]:
        """Return the vectors of those passages that have been embedded before."""
        found = {}
        with self._reported():
            for digest in set(digests):
                row = self._connection.execute(
                    "SELECT vector FROM passages JOIN vectors ON passage = id WHERE digest = ?",
                    (digest,),
                ).fetchone()
                if row and len(row[0]) == 4 * self.facts.size:
                    found[digest] = np.frombuffer(row[0], "<f4")
        return found

    def entries(self, ids: Sequence[int]) -> list[Entry]:
        """Return passages in the order of their ids here."""
        found = {}
        with self._reported():
            for id in ids:
                row = self._connection.execute(
                    "SELECT document, path, documents.digest, title, unit, begin, end, first, last,"
                    " passages.digest FROM passages JOIN documents ON document = documents.id"
                    " WHERE passages.id = ?",
                    (id,),
                ).fetchone()
                if row:
                    found[id] = _entry(id, row)
        return [found[id] for id in ids if id in found]

    def text(self, document: int) -> str:
        """Return the text of a document, in which its passages have their offsets."""
        with self._reported():
            (row,) = self._connection.execute(
                "SELECT text FROM documents WHERE id = ?", (document,)
            )
            unpacking = zlib.decompressobj()
            unpacked = unpacking.decompress(row[0], MAX_TEXT_NBYTES)
            if not unpacking.eof:
                raise ValueError("the text is cut, or too long")
            return unpacked.decode()

    def nearest(self, vector: "NDArray[np.float32]", count: int) -> list[tuple[int, float]]:
        """Return the ids of the passages whose vectors are most like one, and how much: best first.

        The likeness is the cosine of the angle between them, 1 at most."""
        query = np.ascontiguousarray(vector, "<f4")
        if query.shape != (self.facts.size,):
            raise InputError(f"A vector of {self.facts.size} numbers is expected.")
        with self._reported():
            ids = self._compared(query, count) if self.has_extension else self._scan(query, count)
            scores = {id: self._score(id, query) for id in ids}
            if not all(abs(score) < MAX_SCORE for score in scores.values()):  # nor is it NaN
                raise ValueError("vectors are not of length 1")
        return sorted(scores.items(), key=lambda each: (-each[1], each[0]))[:count]

    # Changing it

    def store(self, documents: Iterable[NewDocument]) -> None:
        """Write documents in place of what was stored for their paths: all of them, or none."""
        with self._changing() as run:
            for document in documents:
                path = os.fsencode(document.path)
                packed = zlib.compress(document.text.encode(), 6)
                run("DELETE FROM documents WHERE path = ?", (path,))
                added = run(
                    "INSERT INTO documents (path, digest, title, unit, text)"
                    " VALUES (?, ?, ?, ?, ?)",
                    (path, document.digest, document.title, document.unit, packed),
                ).lastrowid
                for span, vector in zip(document.spans, document.vectors, strict=True):
                    values = (span.begin, span.end, span.first, span.last, span.digest)
                    passage = run(
                        "INSERT INTO passages (document, begin, end, first, last, digest)"
                        " VALUES (?, ?, ?, ?, ?, ?)",
                        (added, *values),
                    ).lastrowid
                    data = np.ascontiguousarray(vector, "<f4").tobytes()
                    run("INSERT INTO vectors VALUES (?, ?)", (passage, data))

    def remove(self, paths: Iterable[str]) -> None:
        """Remove the documents of these paths."""
        with self._changing() as run:
            for path in paths:
                run("DELETE FROM documents WHERE path = ?", (os.fsencode(path),))

    # How

    def _check_version(self) -> None:
        (application,) = self._connection.execute("PRAGMA application_id").fetchone()
        if application != APPLICATION:
            raise InputError(f"{self.path} is not an index of webgemma.")
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version != VERSION:
            raise InputError(
                f"{self.path} was made by another version of webgemma; --rebuild makes it anew."
            )

    def _check_sound(self) -> None:
        """Raise DatabaseError for tables that are not ours, or pages that are damaged.

        A stranger's tables may be views and triggers that compute for ever, and so may pages that
        refer to each other: no query is safe before."""
        found = self._connection.execute(_SCHEMA).fetchmany(len(_own_schema()) + 1)
        if found != _own_schema():
            raise sqlite3.DatabaseError("malformed")
        (said,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
        if said != "ok":
            raise sqlite3.DatabaseError("malformed")

    def _read_facts(self) -> Facts:
        facts: Mapping[str, Any] = dict(self._connection.execute("SELECT name, value FROM facts"))
        return Facts(
            _path_in(facts["folder"]),
            os.fsdecode(facts["embedder"]),
            str(facts["fingerprint"]),
            int(facts["size"]),
        )

    def _compared(self, query: "NDArray[np.float32]", count: int) -> list[int]:
        """Let the database compare all vectors."""
        rows = self._connection.execute(
            "SELECT passage FROM vectors WHERE length(vector) = ?"
            " ORDER BY vec_distance_cosine(vector, ?), passage LIMIT ?",
            (query.nbytes, query.tobytes(), count),
        )
        return [int(id) for (id,) in rows]

    def _scan(self, query: "NDArray[np.float32]", count: int) -> list[int]:
        """Compare all vectors here."""
        rows = self._connection.execute(
            "SELECT passage, vector FROM vectors WHERE length(vector) = ? ORDER BY passage",
            (query.nbytes,),
        )
        best: list[tuple[float, int]] = []  # of the lowest id first among equals
        while block := rows.fetchmany(SCANNED):
            data = b"".join(vector for _, vector in block)
            vectors = np.frombuffer(data, "<f4").reshape(len(block), -1)  # [block, size]
            scores = vectors @ query
            order = np.argsort(-scores, kind="stable")[:count]
            best += [(-float(scores[at]), int(block[at][0])) for at in order]
            best = sorted(best)[:count]
        return [id for _, id in best]

    def _score(self, id: int, query: "NDArray[np.float32]") -> float:
        """Return the cosine with one vector, whoever has compared it before."""
        (row,) = self._connection.execute("SELECT vector FROM vectors WHERE passage = ?", (id,))
        score = float(np.frombuffer(row[0], "<f4").astype(np.float64) @ query.astype(np.float64))
        return round(score, 6)  # equal texts are equal, in whichever order they were summed

    @contextmanager
    def _changing(self) -> Iterator[Any]:
        """Give the function that changes something, in one transaction."""
        with _reported(self.path, reading=False):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection.execute
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # a full disk has ended it already
                    self._connection.execute("ROLLBACK")
                raise

    def _reported(self) -> Any:
        return _reported(self.path)


@cache
def _own_schema() -> list[tuple[str, ...]]:
    """Return what the database says of its tables if they are those of an index."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(_TABLES)
        return connection.execute(_SCHEMA).fetchall()


def _entry(id: int, row: Sequence[Any]) -> Entry:
    """Return an entry; TypeError or ValueError for values that no index has."""
    document, path, file_digest, title, unit, begin, end, first, last, digest = row
    is_passage = 0 <= begin < end <= begin + SIZE and 1 <= first <= last
    if not (is_passage and isinstance(digest, bytes)):
        raise ValueError("this is no passage")
    return Entry(
        id,
        int(document),
        _path_in(path),
        str(file_digest),
        str(title),
        "page" if unit == "page" else "line",
        Span(int(begin), int(end), int(first), int(last), digest),
    )


def _path_in(value: bytes) -> str:
    """Return a path as the index has it; ValueError if no file has such a one."""
    if b"\0" in value:
        raise ValueError("the path has a NUL")
    return os.fsdecode(value)


def _write_tables(begun: Path, path: Path, facts: Mapping[str, Any]) -> None:
    """Write a file that is to become the index of a path."""
    connection = _connect(begun)
    try:
        with _reported(path):
            connection.executescript(
                f"BEGIN IMMEDIATE; PRAGMA application_id = {APPLICATION};"
                f"PRAGMA user_version = {VERSION}; {_TABLES}"
            )
            connection.executemany("INSERT INTO facts VALUES (?, ?)", facts.items())
            connection.execute("COMMIT")
    finally:
        connection.close()


def delete_index(path: Path) -> None:
    """Delete an index, of any version and also a damaged one; InputError if it is anything else."""
    if not path.exists():
        return
    try:
        with path.open("rb") as file:
            header = file.read(72)
        if header and header[68:72] != APPLICATION.to_bytes(4, "big"):
            raise InputError(f"{path} is not an index of webgemma; choose another name.")
        path.unlink()
        for ending in ("-journal", "-wal", "-shm"):  # of a process that was killed
            path.with_name(path.name + ending).unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{path} cannot be deleted: {error.strerror}.") from None


def _connect(path: Path) -> sqlite3.Connection:
    address = f"{path.resolve().as_uri()}?mode=rw"
    with _reported(path):
        return sqlite3.connect(address, BUSY_SECONDS, isolation_level=None, uri=True)


def _load_extension(connection: sqlite3.Connection) -> bool:
    """Load sqlite-vec; return whether it is there and this Python can load extensions."""
    try:
        import sqlite_vec

        connection.enable_load_extension(True)
        try:
            sqlite_vec.load(connection)
        finally:
            connection.enable_load_extension(False)
    except (ImportError, AttributeError, sqlite3.Error):
        return False
    return True


@contextmanager
def _reported(path: Path, *, reading: bool = True) -> Iterator[None]:
    """Turn what SQLite says, and values that a sound index does not have, into a sentence."""
    try:
        yield
    except sqlite3.Error as error:
        raise InputError(_sentence(path, error)) from None
    except (KeyError, TypeError, ValueError, zlib.error):
        if not reading:
            raise
        raise InputError(_sentence(path, sqlite3.DatabaseError("malformed"))) from None


def _sentence(path: Path, error: sqlite3.Error) -> str:
    said = str(error).rstrip(".")
    if "locked" in said:
        return f"{path} is in use by another process; try again when that is done."
    if "not a database" in said:
        return f"{path} is not an index of webgemma."
    if any(word in said for word in ("malformed", "no such", "corrupt")):
        return f"{path} is damaged; --rebuild makes it anew."
    return f"{path} cannot be used: {said}."


def _folder_from(path: Path, folder: Path) -> str:
    """Return the folder as an index names it: both can be moved together if one holds the other."""
    whole, parent = folder.resolve(), path.resolve().parent
    is_inside = parent == whole or whole in parent.parents
    return os.path.relpath(whole, parent) if is_inside else str(whole)
