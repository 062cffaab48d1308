"""Retrieval: the passages of an index that are most like a question, each of them once."""

from dataclasses import dataclass, replace
from hashlib import sha256

from webgemma.errors import InputError
from webgemma.progress import Progress, ignore_progress
from webgemma.search.documents import Unit, most_nbytes
from webgemma.search.embedding import Embedder, embed_texts
from webgemma.search.folders import read_bytes
from webgemma.search.index import Entry, Index
from webgemma.search.indexing import check_embedder

MAX_TOP = 100
DEPTH = 4  # passages that are looked at, for each that is returned
BETWEEN = 8  # characters of white space between neighbours, at most
MERGED = 3000  # characters of a passage that neighbours were added to, at most


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage that was found: its text is exactly what stands at its offsets."""

    path: str  # from the folder of the index
    title: str
    unit: Unit
    first: int  # line or page
    last: int
    begin: int  # in the text of the document
    end: int
    score: float  # the cosine with the question
    text: str
    file_digest: str

    @property
    def place(self) -> str:
        """Its lines or pages, in words: lines 3-9."""
        if self.first == self.last:
            return f"{self.unit} {self.first}"
        return f"{self.unit}s {self.first}-{self.last}"


def find_passages(
    index: Index,
    embedder: Embedder,
    question: str,
    top: int = 6,
    progress: Progress = ignore_progress,
) -> list[Passage]:
    """Return the passages that are most like a question, the best first.

    Neighbours become one passage, and a text that several files hold is found in the first."""
    if not question.strip():
        raise InputError("There is no question.")
    if not 1 <= top <= MAX_TOP:
        raise InputError(f"{top} passages are not possible; it is 1 to {MAX_TOP}.")
    check_embedder(index, embedder.name, embedder.fingerprint)
    (vector,) = embed_texts(embedder, [question], "query", index.facts.size, progress)
    near = index.nearest(vector, top * DEPTH)
    scores = dict(near)
    texts: dict[int, str] = {}
    return [
        _passage(index, entry, scores[entry.id], texts)
        for entry in _chosen(index.entries([id for id, _ in near]), top)
    ]


def has_changed(index: Index, passage: Passage) -> bool:
    """Return whether the file of a passage is gone, or is not as it was when it was indexed."""
    try:
        whole = (index.folder / passage.path).resolve()
        if index.folder not in whole.parents:  # an index may be a stranger's
            return True
        data = read_bytes(whole, most_nbytes(passage.path))
    except (OSError, RuntimeError):  # RuntimeError: links that lead in a circle
        return True
    return data is None or sha256(data).hexdigest() != passage.file_digest


def _chosen(entries: list[Entry], top: int) -> list[Entry]:
    """Return the best entries, widened to the neighbours among the others."""
    chosen: list[Entry] = []
    seen: set[bytes] = set()
    for entry in entries:
        if entry.span.digest in seen:
            continue
        at = next((at for at, other in enumerate(chosen) if _touches(entry, other)), None)
        if at is not None:
            chosen[at] = _joined(chosen[at], entry)
        elif len(chosen) < top:
            chosen.append(entry)
        else:
            continue
        seen.add(entry.span.digest)
    return chosen


def _touches(entry: Entry, other: Entry) -> bool:
    """Return whether two passages overlap or are neighbours, and together are not too long."""
    a, b = entry.span, other.span
    return (
        entry.document == other.document
        and a.begin <= b.end + BETWEEN
        and b.begin <= a.end + BETWEEN
        and max(a.end, b.end) - min(a.begin, b.begin) <= MERGED
    )


def _joined(entry: Entry, other: Entry) -> Entry:
    a, b = entry.span, other.span
    span = replace(
        a,
        begin=min(a.begin, b.begin),
        end=max(a.end, b.end),
        first=min(a.first, b.first),
        last=max(a.last, b.last),
    )
    return replace(entry, span=span)


def _passage(index: Index, entry: Entry, score: float, texts: dict[int, str]) -> Passage:
    if entry.document not in texts:
        texts[entry.document] = index.text(entry.document)
    span = entry.span
    return Passage(
        path=entry.path,
        title=entry.title,
        unit=entry.unit,
        first=span.first,
        last=span.last,
        begin=span.begin,
        end=span.end,
        score=score,
        text=texts[entry.document][span.begin : span.end],
        file_digest=entry.file_digest,
    )
