"""The text of a PDF, by pypdf (the extra `search`), and where its pages begin."""

import io
import logging
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from webgemma.errors import InputError, MissingPackageError

if TYPE_CHECKING:
    from pypdf import PdfReader

MAX_CHARS = 8_000_000
MAX_SECONDS = 120.0
PAGE_END = "\n\n"

_UNWRITABLE = re.compile("[\0\ud800-\udfff]")  # what a wrong font makes of letters


@dataclass(frozen=True, slots=True)
class Pdf:
    """The text of a PDF; pages are separated by an empty line."""

    text: str
    title: str
    starts: Sequence[int]  # the offset of each page


def has_pypdf() -> bool:
    """Return whether PDF files can be read."""
    return find_spec("pypdf") is not None


def read_pdf(data: bytes) -> Pdf:
    """Return the text of a PDF.

    InputError if it is damaged, encrypted, or takes too long to read."""
    try:
        import pypdf
    except ImportError:
        raise MissingPackageError(
            'PDF files need one package more: run `pip install "webgemma[search]"`.'
        ) from None
    try:
        with _quiet():
            reader = pypdf.PdfReader(io.BytesIO(data))
            if reader.is_encrypted and not reader.decrypt(""):
                raise InputError("The PDF is encrypted.")
            title = reader.metadata.title if reader.metadata else None
            return _read(reader, str(title or ""))
    except (InputError, KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:  # a damaged file fails anywhere, in any way
        why = " ".join(str(error).split())[:120].rstrip(".") or type(error).__name__
        raise InputError(f"The PDF cannot be read: {why}.") from None


def _read(reader: "PdfReader", title: str) -> Pdf:
    parts: list[str] = []
    starts: list[int] = []
    length, begun = 0, time.monotonic()
    for page in reader.pages:
        text = _UNWRITABLE.sub("\ufffd", page.extract_text()).strip()
        starts.append(length)
        parts.append(text + PAGE_END)
        length += len(parts[-1])
        if length > MAX_CHARS:
            raise InputError(f"The PDF has more than {MAX_CHARS} characters.")
        if time.monotonic() - begun > MAX_SECONDS:
            raise InputError(f"The PDF takes more than {MAX_SECONDS:.0f} seconds to read.")
    return Pdf("".join(parts), _UNWRITABLE.sub("\ufffd", title), starts or [0])


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what pypdf says of damaged files to itself: the report has a line for each."""
    logger = logging.getLogger("pypdf")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
