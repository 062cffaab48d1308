"""Documents in a message: attached, read as text, refused, shown, sent, kept."""

import json
from base64 import b64encode
from typing import Any

import pytest
from browser.chromium import CHROMIUM
from helpers.pdf import pdf_of
from web.sender import DROP, FILES, Sender, as_base64, sending

pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")

LEASE = "My papers.\n\nThe lease ends in May 2031.\n"
DOCUMENTS = {
    "lease.md": ("text/markdown", LEASE.encode()),
    "app.ts": ("video/mp2t", b"const x = `a`;\r\n```\r\nend"),
    "wide.txt": ("text/plain", "Grüße".encode("utf-16")),
    "old.csv": ("text/csv", "Stra\xdfe;M\xfcnchen \x80".encode("latin-1")),
    "contract.pdf": ("application/pdf", pdf_of(["The lease", "ends in May"], "Contract")),
    "<img src=x onerror=alert(1)>.py": ("", b"<script>alert(1)</script>"),
    "scan.pdf": ("application/pdf", pdf_of(["", ""])),
    "torn.pdf": ("application/pdf", b"%PDF-1.4 torn"),
    "zip.docx": ("", b"PK\3\4\0\0\0\0"),
    "film.mp4": ("video/mp4", b"film"),
    "empty.txt": ("text/plain", b" \n"),
    "long.txt": ("text/plain", b"word " * 40_000),
    "large.txt": ("text/plain", b"x" * 8_000_001),
}


@pytest.fixture(autouse=True)
def _documents(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, file in DOCUMENTS.items():
        monkeypatch.setitem(FILES, name, file)


def test_documents_go_into_the_message_with_their_names(visitor: Sender) -> None:
    visitor.attach("lease.md", "red.png", "app.ts")
    visitor.attach("contract.pdf", "wide.txt")
    assert visitor.texts("#tray .document .size") == ["40 B", "24 B", "2 pages", "12 B"]
    image, part = visitor.parts()
    assert image["type"] == "image"
    assert part["text"] == (
        f"File: lease.md\n```\n{LEASE}```\n\n"
        "File: app.ts\n````\nconst x = `a`;\n```\nend\n````\n\n"
        "File: contract.pdf\n```\n[Page 1]\nThe lease\n\n[Page 2]\nends in May\n```\n\n"
        "File: wide.txt\n```\nGrüße\n```\n\nrequest"
    )
    assert visitor.texts(".message.user .body") == ["request"]
    visitor.open()
    visitor.button("Regenerate").click()
    visitor.page.locator(".message.assistant:last-child .facts:not(:empty)").wait_for()
    assert visitor.last_request()["messages"][0]["content"][1] == part


def test_a_document_is_shown(visitor: Sender) -> None:
    visitor.attach("contract.pdf")
    visitor.page.locator("#tray .document").get_by_role("button", name="contract.pdf").first.click()
    dialog = visitor.page.locator("#document-dialog")
    dialog.locator("pre").first.wait_for()
    assert dialog.locator("h2").inner_text() == "contract.pdf"
    assert dialog.locator("pre").all_text_contents() == ["The lease", "ends in May"]
    assert dialog.locator(".label").all_inner_texts() == ["Page 1", "Page 2"]


def test_names_and_texts_are_no_markup(visitor: Sender) -> None:
    name = "<img src=x onerror=alert(1)>.py"
    visitor.attach(name)
    assert visitor.parts() == f"File: {name}\n```\n<script>alert(1)</script>\n```\n\nrequest"
    visitor.page.locator(".media .document").click()
    visitor.page.locator("#document-text pre", has_text="<script>alert(1)</script>").wait_for()
    assert visitor.page.locator("#document-dialog img, #document-dialog script").count() == 0


def test_old_encodings_are_read_with_a_remark(visitor: Sender) -> None:
    visitor.attach("old.csv")
    assert visitor.notice().startswith("old.csv is not UTF-8: it was read as Windows-1252.")
    assert visitor.parts() == "File: old.csv\n```\nStraße;München €\n```\n\nrequest"


REFUSED = {
    "scan.pdf": "scan.pdf has no text: its pages are images",
    "torn.pdf": "torn.pdf is damaged or not a PDF that can be read.",
    "zip.docx": "zip.docx is neither text nor a PDF",
    "film.mp4": "film.mp4 is not an image, audio, a document or a model (.gguf).",
    "empty.txt": "empty.txt is empty.",
    "long.txt": "long.txt has about 50,000 tokens, but conversation and reply together may have 32",
    "large.txt": "large.txt has 8.0 MB, but a document may have 8.0 MB: split it.",
}


def test_what_cannot_be_read_is_refused_with_a_reason(visitor: Sender) -> None:
    visitor.page.evaluate(DROP, [*as_base64(*REFUSED), *as_base64("lease.md")])
    visitor.wait_for_tray(["lease.md"])
    for sentence in REFUSED.values():
        assert sentence in visitor.notice()


def test_export_and_import_include_documents(visitor: Sender, browser: Any, url: str) -> None:
    visitor.attach("contract.pdf")
    visitor.parts()
    archive = visitor.exported()
    (file,) = json.loads(archive)["conversations"][0]["files"]
    data = "data:text/plain;base64," + b64encode(b"The lease\x0cends in May").decode()
    assert (file["nbytes"], file["pages"], file["data"]) == (
        len(DOCUMENTS["contract.pdf"][1]),
        2,
        data,
    )
    context = browser.new_context()
    with sending(context, url) as other:
        wrong = archive.replace('"pages": 2', '"pages": "2"')
        assert "cannot be read" in other.import_text(wrong)
        assert "cannot be read" in other.import_text(archive.replace("text/plain", "text/html"))
        other.import_text(archive)
        other.page.locator("#notice-text", has_text="One conversation was imported.").wait_for()
        other.page.locator(".conversation").click()
        other.page.locator(".media .document .size", has_text="2 pages").wait_for()
    context.close()
