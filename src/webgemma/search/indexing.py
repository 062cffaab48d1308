"""Indexing: bring an index up to date with its folder, and embed nothing twice.

What is stored stays stored: whoever is interrupted goes on with the files that are left."""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from webgemma.errors import InputError
from webgemma.progress import Progress, ignore_progress
from webgemma.search.chunks import cut
from webgemma.search.documents import (
    LOOKED_AT_NBYTES,
    Document,
    is_readable,
    may_be_document,
    most_nbytes,
    read_document,
)
from webgemma.search.embedding import Embedder, embed_texts
from webgemma.search.folders import File, list_files, read_beginning, read_bytes, reason
from webgemma.search.index import Index, NewDocument, Span, passage_digest
from webgemma.search.lock import lock_path

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TOGETHER = 64  # passages of small files that are embedded and stored together


@dataclass(slots=True)
class Update:
    """What was done to an index."""

    files: int = 0  # of the folder, without those that are skipped unread
    done: int = 0  # files that have been looked at
    unchanged: int = 0
    added: int = 0
    changed: int = 0
    removed: int = 0
    embedded: int = 0  # passages
    skipped: Counter[str] = field(default_factory=Counter)  # why, and how many
    problems: dict[str, str] = field(default_factory=dict)  # a sentence for each path


@dataclass(frozen=True, slots=True)
class _Read:
    """A file that was read and cut, and waits for its vectors."""

    path: str
    digest: str
    document: Document
    spans: list[Span]

    def texts(self) -> dict[bytes, str]:
        """Return its passages, by their digests."""
        text = self.document.text
        return {span.digest: text[span.begin : span.end] for span in self.spans}

    def stored(self, vectors: Mapping[bytes, "NDArray[np.float32]"]) -> NewDocument:
        """Return it as the index stores it."""
        document = self.document
        return NewDocument(
            self.path,
            self.digest,
            document.text,
            self.spans,
            [vectors[span.digest] for span in self.spans],
            document.title,
            document.unit,
        )


def update_index(
    folder: Path,
    index: Index,
    embedder: Embedder,
    *,
    progress: Progress = ignore_progress,
    update: Update | None = None,
) -> Update:
    """Embed what is new or changed in a folder, and remove what is gone.

    `progress` is called with bytes, as files differ in size; `update` is filled on the way, for
    whoever has to say how far it came. InputError if another model made the vectors, or if the
    index is of another folder."""
    check_embedder(index, embedder.name, embedder.fingerprint)
    if index.folder != folder.resolve():
        raise InputError(
            f"{index.path} is the index of {index.folder}; name another file with --index, or add "
            "--rebuild."
        )
    return _Updating(folder, index, embedder, progress, update or Update()).run()


def check_embedder(index: Index, name: str, fingerprint: str) -> None:
    """Raise InputError if the vectors of an index are those of another model."""
    if index.facts.fingerprint != fingerprint:
        other = "" if index.facts.embedder == name else f", {index.facts.embedder}"
        raise InputError(
            f"{index.path} was made with another embedding model{other}: its vectors cannot be "
            f"compared with those of {name}. Build it anew: webgemma index --rebuild."
        )


class _Updating:
    """One run over a folder."""

    def __init__(
        self, folder: Path, index: Index, embedder: Embedder, progress: Progress, update: Update
    ) -> None:
        self.folder, self.index, self.embedder = folder, index, embedder
        self.progress, self.update = progress, update
        self.waiting: list[_Read] = []
        self.stored: Mapping[str, str] = {}
        self.nbytes = self.total_nbytes = 0

    def run(self) -> Update:
        listing = list_files(self.folder, without=(self.index.path, lock_path(self.index.path)))
        update = self.update
        update.files = len(listing.files)
        update.skipped += listing.skipped
        update.problems |= listing.problems
        self.total_nbytes = sum(map(_counted_nbytes, listing.files))
        self.stored = self.index.digests()
        kept = {path for path in self.stored if listing.may_hold(path)}
        self.progress(0, self.total_nbytes)
        for file in listing.files:
            before = len(self.waiting)
            if self._look_at(file):
                kept.add(file.path)
            update.done += len(self.waiting) == before
            if sum(max(1, len(read.spans)) for read in self.waiting) >= TOGETHER:
                self._embed_waiting()
            self.nbytes += _counted_nbytes(file)
            if not self.waiting:
                self.progress(self.nbytes, self.total_nbytes)
        self._embed_waiting()
        # Last: a file that was moved is in the index under its old path until its vectors are used.
        gone = self.stored.keys() - kept
        if gone:
            self.index.remove(sorted(gone))
        update.removed = len(gone)
        return update

    def _look_at(self, file: File) -> bool:
        """Read a file that is new or has changed; return whether the index is to have it."""
        update = self.update
        if not is_readable(file.path):
            update.skipped["pdf"] += 1
            return file.path in self.stored
        whole = self.folder / file.path
        try:
            if not may_be_document(file.path, read_beginning(whole, LOOKED_AT_NBYTES)):
                update.skipped["binary"] += 1
                return False
            data = read_bytes(whole, most_nbytes(file.path))
        except OSError as error:
            update.problems[file.path] = f"It cannot be read: {reason(error)}."
            return file.path in self.stored  # perhaps it can be read again tomorrow
        if data is None:
            update.skipped["large"] += 1
            return False
        digest = hashlib.sha256(data).hexdigest()
        if self.stored.get(file.path) == digest:
            update.unchanged += 1
            return True
        try:
            document = read_document(file.path, data)
        except InputError as error:
            update.problems[file.path] = str(error)
            return False
        if document is None:
            update.skipped["binary"] += 1
            return False
        self.waiting.append(_Read(file.path, digest, document, spans_of(document)))
        return True

    def _embed_waiting(self) -> None:
        """Embed the passages of the files that wait for it, and store these files.

        In one transaction: the disk takes 15 ms for each, longer than a small file its passages."""
        waiting, self.waiting = self.waiting, []
        if not waiting:
            return
        texts: dict[bytes, str] = {}
        for read in waiting:
            texts |= read.texts()
        vectors = self.index.known_vectors(texts)
        new = [digest for digest in texts if digest not in vectors]
        made = embed_texts(
            self.embedder,
            [texts[digest] for digest in new],
            "document",
            self.index.facts.size,
            self._part_of(sum(len(texts[digest]) for digest in new)),
        )
        self.update.embedded += len(new)
        vectors |= dict(zip(new, made, strict=True))
        self.index.store(read.stored(vectors) for read in waiting)
        self.update.done += len(waiting)
        changed = sum(read.path in self.stored for read in waiting)
        self.update.changed += changed
        self.update.added += len(waiting) - changed

    def _part_of(self, nbytes: int) -> Callable[[int, int], None]:
        """Return the progress of one call of the embedder as a part of the whole."""

        def show(done: int, total: int) -> None:
            reached = self.nbytes + nbytes * done // max(1, total)
            self.progress(min(reached, self.total_nbytes), self.total_nbytes)

        return show


def _counted_nbytes(file: File) -> int:
    """Return what a file counts in the progress: its bytes, if it is small enough to be read."""
    return file.nbytes if file.nbytes <= most_nbytes(file.path) else 0


def spans_of(document: Document) -> list[Span]:
    """Return the passages of a document."""
    text = document.text
    return [
        Span(
            begin,
            end,
            document.place(begin),
            document.place(end - 1),
            passage_digest(text[begin:end]),
        )
        for begin, end in cut(text)
    ]
