"""Documents: the text of a file, and on which line or page each of its characters stands."""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from webgemma.search.pdf import has_pypdf, read_pdf
from webgemma.search.web_pages import declared_encoding, read_web_page

HTML = (".html", ".htm", ".xhtml")
PDF, PDF_MARK = ".pdf", b"%PDF-"
MAX_TEXT_NBYTES = 8_000_000
MAX_PDF_NBYTES = 200_000_000
LOOKED_AT_NBYTES = 1 << 16  # of a file, to see whether it is text

Unit = Literal["line", "page"]

_BOMS = (  # UTF-32 first: its mark begins with that of UTF-16
    (b"\xff\xfe\x00\x00", "utf-32"),
    (b"\x00\x00\xfe\xff", "utf-32"),
    (b"\xef\xbb\xbf", "utf-8-sig"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
_CONTROLS = re.compile(rb"[\x00-\x06\x0e-\x1a\x1c-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Document:
    """The text of a file, in which passages have their offsets.

    That of plain text and source code is the whole file, decoded: `data.decode(encoding)`."""

    text: str
    encoding: str
    title: str = ""
    unit: Unit = "line"
    starts: Sequence[int] = (0,)  # offsets in the text at which a line or page begins
    numbers: Sequence[int] = (1,)  # of these lines or pages

    def place(self, offset: int) -> int:
        """Return the number of the line or page on which a character stands."""
        return self.numbers[max(0, bisect_right(self.starts, offset) - 1)]


def most_nbytes(path: str) -> int:
    """Return how large a file of this name may be."""
    return MAX_PDF_NBYTES if _suffix(path) == PDF else MAX_TEXT_NBYTES


def may_be_document(path: str, beginning: bytes) -> bool:
    """Return whether a file may hold text or a PDF, by its first LOOKED_AT_NBYTES."""
    is_known = _suffix(path) == PDF or beginning.startswith(PDF_MARK) or _marked(beginning)
    return bool(is_known) or not _is_binary(beginning)


def read_document(path: str, data: bytes) -> Document | None:
    """Return the document that a file holds; None if it is neither text nor a PDF.

    InputError, without the path, if it is damaged, encrypted or too slow to read."""
    suffix = _suffix(path)
    if suffix == PDF or data.startswith(PDF_MARK):
        pdf = read_pdf(data)
        numbers = range(1, len(pdf.starts) + 1)
        return Document(pdf.text, "", pdf.title, "page", pdf.starts, numbers)
    declared = declared_encoding(data) if suffix in HTML else None
    decoded = _decode(data, declared)
    if decoded is None:
        return None
    text, encoding = decoded
    if suffix in HTML:
        page = read_web_page(text)
        return Document(page.text, encoding, page.title, "line", page.starts, page.numbers)
    starts = [0, *(found.end() for found in re.finditer("\n", text))]
    return Document(text, encoding, "", "line", starts, range(1, len(starts) + 1))


def is_readable(path: str) -> bool:
    """Return whether this installation can read files of this name."""
    return _suffix(path) != PDF or has_pypdf()


def _decode(data: bytes, declared: str | None) -> tuple[str, str] | None:
    """Return the text and its encoding, or None for what is not text."""
    marked = _marked(data)
    if marked is None and _is_binary(data[:LOOKED_AT_NBYTES]):
        return None
    if not data.isascii():  # what is UTF-8 is hardly anything else, whatever it declares
        declared = None if _is_utf8(data) else declared
    # Windows-1252 has no meaning for five bytes; latin-1 has one for all of them.
    for encoding in (marked, declared, "utf-8", "cp1252", "latin-1"):
        if encoding is not None:
            try:
                return data.decode(encoding), encoding
            except (UnicodeError, LookupError):
                if encoding == marked:
                    return None
    raise AssertionError("latin-1 decodes everything")


def _marked(data: bytes) -> str | None:
    """Return the encoding that a byte order mark tells."""
    return next((encoding for mark, encoding in _BOMS if data.startswith(mark)), None)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_binary(data: bytes) -> bool:
    """Return whether bytes hold what no text does: a NUL, or many control characters."""
    return b"\0" in data or len(_CONTROLS.findall(data)) > len(data) // 100


def _suffix(path: str) -> str:
    return PurePosixPath(path).suffix.lower()
