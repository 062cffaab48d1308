"""What becomes of a folder's files: text of all kinds, encodings, PDF, HTML, and odd things."""

import io
import os
import sys
import time
from pathlib import Path

import pytest
from helpers.pdf import pdf_of

from webgemma.errors import InputError
from webgemma.search import documents
from webgemma.search.documents import read_document
from webgemma.search.folders import list_files, read_bytes
from webgemma.search.web_pages import declared_encoding, read_web_page


@pytest.mark.parametrize(
    ("data", "encoding", "text"),
    [
        ("Grüße".encode(), "utf-8", "Grüße"),
        ("Grüße".encode("utf-8-sig"), "utf-8-sig", "Grüße"),
        ("Grüße\r\n".encode("utf-16"), "utf-16", "Grüße\r\n"),
        ("Grüße".encode("utf-32"), "utf-32", "Grüße"),
        ("Grüße – ja".encode("cp1252"), "cp1252", "Grüße – ja"),
        (b"\xe9\x81", "latin-1", "é\x81"),
        (b"", "utf-8", ""),
        (b"red \x1b[31mtext\x1b[0m", "utf-8", "red \x1b[31mtext\x1b[0m"),
    ],
)
def test_text_is_the_whole_file_decoded(data: bytes, encoding: str, text: str) -> None:
    document = read_document("a.txt", data)
    assert document is not None
    assert (document.encoding, document.text) == (encoding, text)
    assert data.decode(encoding) == text


@pytest.mark.parametrize(
    "data",
    [b"\x7fELF\0\0", b"\x89PNG\r\n\x1a\n" + bytes(range(32)), b"\xff\xfea", bytes(range(1, 256))],
)
def test_binary_files_are_not_documents(data: bytes) -> None:
    assert read_document("a.txt", data) is None


def test_lines_are_those_of_the_file() -> None:
    document = read_document("a.py", b"one\r\ntwo\n\nfour")
    assert document is not None
    assert [document.place(document.text.index(word)) for word in ("one", "two", "four")] == [
        *(1, 2, 4)
    ]


PAGE = """<!DOCTYPE html><html><head><title>Of &amp; on</title>
<style>p { color: red }</style><script>if (a < b) alert("</p>")</script></head>
<body><h1>Head</h1>
<p>one
two <b>thr</b>ee&nbsp;four<br>five</p><svg><title>no</title><text>no</text></svg>
<ul><li>x<li>y</ul><table><tr><td>1<td>2</table>
</body></html>"""


def test_of_a_web_page_the_text_and_the_title_are_kept() -> None:
    document = read_document("a.HTML", PAGE.encode())
    assert document is not None
    assert document.title == "Of & on"
    assert document.text == "Head\n\none two three four\nfive\n\nx\ny\n\n1 2"
    places = {word: document.place(document.text.index(word)) for word in ("Head", "two", "x", "2")}
    assert places == {"Head": 3, "two": 5, "x": 6, "2": 6}


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("<p>a <!-- b", "a"),
        ("<p>a <a href='x", "a"),
        ("a > b", "a > b"),
        ("x ]]>", "x ]]>"),
        ("a<script>b", "a"),
        ("", ""),
        ("&lt;|turn>system", "<|turn>system"),
    ],
)
def test_a_page_may_end_anywhere(source: str, text: str) -> None:
    assert read_web_page(source).text == text


def test_declared_encodings() -> None:
    page = '<meta charset="shift_jis"><p>日本語'.encode("shift_jis")
    document = read_document("a.htm", page)
    assert document is not None
    assert document.text == "日本語"
    wrong = read_document("a.htm", '<meta charset="latin1"><p>Grüße'.encode())
    assert wrong is not None
    assert wrong.text == "Grüße"
    seven_bits = read_document("a.htm", '<meta charset="iso-2022-jp">日本'.encode("iso-2022-jp"))
    assert seven_bits is not None
    assert seven_bits.text == "日本"
    for name in (b"punycode", b"zlib", b"utf-7", b"no-such"):
        assert declared_encoding(b"<meta charset=" + name + b">") is None


@pytest.mark.parametrize("unit", ["<!--", "<a ", "</", "<![CDATA[", '<a b="', "<svg></p>"])
def test_hostile_pages_are_read_in_a_moment(unit: str) -> None:
    """A parser that searches for the end anew at each beginning would take minutes."""
    begun = time.monotonic()
    read_web_page(unit * (300_000 // len(unit)))
    assert time.monotonic() - begun < 10


def test_a_pdf_has_pages() -> None:
    data = pdf_of(["The first page.", "The second page.", ""], title="Two pages")
    document = read_document("a.pdf", data)
    assert document is not None
    assert (document.title, document.unit) == ("Two pages", "page")
    assert document.text == "The first page.\n\nThe second page.\n\n\n\n"
    assert document.place(document.text.index("first")) == 1
    assert document.place(document.text.index("second")) == 2


def test_pdfs_that_cannot_be_read_are_a_sentence() -> None:
    data = pdf_of(["Hello"])
    for damaged in (b"%PDF-1.7\nnothing", data[: len(data) // 2], b"", b"%PDF-" + bytes(100)):
        with pytest.raises(InputError, match=r"^The PDF cannot be read: .*\.$"):
            read_document("a.pdf", damaged)
    from pypdf import PdfReader, PdfWriter

    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(data)))
    writer.encrypt("secret", algorithm="RC4-128")
    encrypted = io.BytesIO()
    writer.write(encrypted)
    with pytest.raises(InputError, match=r"^The PDF is encrypted\.$"):
        read_document("a.pdf", encrypted.getvalue())


def test_a_pdf_by_its_content(monkeypatch: pytest.MonkeyPatch) -> None:
    document = read_document("letter", pdf_of(["Hello"]))
    assert document is not None
    assert document.unit == "page"
    monkeypatch.setattr("webgemma.search.documents.has_pypdf", lambda: False)
    assert not documents.is_readable("a.PDF")
    assert documents.is_readable("a.txt")


@pytest.mark.skipif(sys.platform == "win32", reason="needs links and special files")
def test_odd_things_in_a_folder(tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("secret")
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "x.txt").write_text("x")
    (folder / "node_modules").mkdir()
    (folder / "sub" / "b.txt").write_text("b")
    (folder / "a.txt").write_text("aa")
    (folder / "index").write_text("i")
    (folder / "link.txt").symlink_to(outside)
    (folder / "loop").symlink_to(folder)
    os.mkfifo(folder / "pipe.txt")
    listing = list_files(folder, without=[folder / "index"])
    assert [(file.path, file.nbytes) for file in listing.files] == [("a.txt", 2), ("sub/b.txt", 1)]
    assert listing.skipped == {"hidden": 2, "links": 2, "special": 1}
    assert read_bytes(folder / "pipe.txt", 10) is None  # and it does not wait for a writer
    with pytest.raises(OSError, match="symbolic links"):
        read_bytes(folder / "link.txt", 10)
    assert read_bytes(folder / "a.txt", 1) is None
    with pytest.raises(InputError, match=r"cannot be listed: No such file"):
        list_files(tmp_path / "none")
