"""The text of an HTML page: without tags, scripts and styles, with the lines of its source."""

import codecs
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from html.parser import HTMLParser

HIDDEN = {"script", "style", "template", "noscript", "svg", "math", "iframe", "object"}
BLOCKS = {  # what stands on lines of its own
    *("address", "article", "aside", "blockquote", "body", "caption", "center", "dd", "details"),
    *("dialog", "div", "dl", "dt", "fieldset", "figcaption", "figure", "footer", "form", "h1"),
    *("h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main", "nav", "ol", "p", "pre"),
    *("section", "summary", "table", "tr", "ul"),
}
APART = {"p", "h1", "h2", "h3", "h4", "h5", "h6", "table", "blockquote", "pre", "ul", "ol", "dl"}
CELLS = {"td", "th", "option"}
# What ends every construct that a page may leave open: without its end, the parser of Python would
# search for it anew at each of a million beginnings.
CLOSING = "\n-->]]>?>\"'>"

_CHARSET = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([A-Za-z0-9_.:-]{1,40})""", re.I)
_DECLARATION = re.compile(rb"""<\?xml[^>]{0,100}?encoding\s*=\s*["']([A-Za-z0-9_.:-]{1,40})""")
# Those of the web: some of Python's, such as punycode, take hours for a long text.
_ENCODINGS = re.compile(r"iso8859|iso2022|cp\d|koi8|shift_jis|euc_|gb|big5|mac_|utf-16")
_WORDS = re.compile(r"\S+|\n|[^\S\n]+")


@dataclass(frozen=True, slots=True)
class WebPage:
    """The text of a page, and the lines of its source from which it comes."""

    text: str
    title: str
    starts: Sequence[int]  # offsets in the text
    numbers: Sequence[int]  # the lines of the source from there on


def declared_encoding(data: bytes) -> str | None:
    """Return the encoding that a page declares at its beginning, if it is one."""
    found = _DECLARATION.search(data[:200]) or _CHARSET.search(data[:4096])
    try:
        name = codecs.lookup(found[1].decode("ascii")).name if found else ""
    except LookupError:
        return None
    if name in ("iso8859-1", "ascii"):  # as browsers read them
        return "cp1252"
    return name if _ENCODINGS.match(name) else None


def read_web_page(source: str) -> WebPage:
    """Return the text of a page."""
    reader = _Reader()
    reader.feed(source + CLOSING)
    reader.close()
    return reader.page()


class _Reader(HTMLParser):
    """Collects words; between them stand single spaces, line ends and empty lines."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._parts: list[str] = []
        self._length = 0
        self._gap = ""  # before the next word
        self._starts, self._numbers = array("q", [0]), array("q", [1])
        self._hidden, self._depth = "", 0  # the element around that is not shown
        self._title: list[str] = []
        self._in_title = False

    def page(self) -> WebPage:
        title = " ".join("".join(self._title).split())
        text = _without_closing("".join(self._parts))
        return WebPage(text, _without_closing(title), self._starts, self._numbers)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        del attrs
        if tag == "title" and not self._title and not self._hidden:
            self._in_title = True
        elif tag == self._hidden:
            self._depth += 1
        elif tag in HIDDEN and not self._hidden:
            self._hidden, self._depth = tag, 1
        self._separate(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == "title":
            self._in_title = False
        elif tag == self._hidden:
            self._depth -= 1
            self._hidden = tag if self._depth else ""
        self._separate(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        del attrs
        self._separate(tag)

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self._title.append(data)
            return
        if self._hidden:
            return
        line = self.getpos()[0]
        for word in _WORDS.findall(data):
            if word == "\n":
                line += 1
            if word.isspace():
                self._gap = self._gap or " "
            else:
                self._add(word, line)

    def _add(self, word: str, line: int) -> None:
        text = (self._gap if self._length else "") + word
        self._gap = ""
        if line != self._numbers[-1]:
            self._starts.append(self._length + len(text) - len(word))
            self._numbers.append(line)
        self._parts.append(text)
        self._length += len(text)

    def _separate(self, tag: str) -> None:
        gap = "\n\n" if tag in APART else "\n" if tag in BLOCKS or tag == "br" else ""
        if tag in CELLS:
            gap = " "
        if len(gap.strip(" ")) > len(self._gap.strip(" ")) or not self._gap:
            self._gap = gap


def _without_closing(text: str) -> str:
    """Return a text without what is left at its end of CLOSING, of which a page may use a part."""
    closing = CLOSING.strip()
    for at in range(len(closing)):
        if text.endswith(closing[at:]):
            return text.removesuffix(closing[at:]).rstrip()
    return text
