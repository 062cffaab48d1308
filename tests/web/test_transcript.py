"""One conversation as a file, and on paper."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
from browser.chromium import CHROMIUM
from web.sender import Sender

pytest.importorskip("playwright.sync_api", reason="needs playwright")
pypdf = pytest.importorskip("pypdf")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")

REPLY = (
    "echo ### Title\n\nA **reply** with $x^2$, a note[^n] and `code`.\n\n"
    "```python\nprint('<b>')\n```\n\n[^n]: The note.\n"
)


def test_a_conversation_is_saved_and_printed(visitor: Sender, tmp_path: Path) -> None:
    page = visitor.page
    visitor.attach("red.png", "song.wav")
    visitor.ask("What *is* </title><script>attacked()</script> /this?")
    visitor.ask(REPLY)
    visitor.ask("echo " + "\n\n".join(f"Paragraph {i} of many." for i in range(120)))

    name, path = visitor.saved("Save as Markdown")
    text = path.read_text("utf-8")
    assert re.fullmatch(r"What [^/*<>]+\.md", name)
    assert text.startswith("# What \\*is\\* \\</title\\>\\<script\\>")
    assert "\n\n## You\n\n" in text
    assert "\n\n## Bundled model\n\n" in text
    assert "Attachments: red.png, song.wav" in text
    assert REPLY.removeprefix("echo ").strip() in text

    name, path = visitor.saved("Save as a web page")
    assert name.endswith(".html")
    copy = tmp_path / "copy.html"
    copy.write_bytes(path.read_bytes())
    reader = page.context.browser.new_page()
    errors: list[str] = []
    requests: list[str] = []
    reader.on("console", lambda message: errors.append(message.text))
    reader.on("request", lambda request: requests.append(request.url))
    reader.goto(copy.as_uri())
    assert reader.locator("h2").all_inner_texts()[1].startswith("Bundled model")
    assert "Attachments: red.png, song.wav" in reader.locator(".attachments").inner_text()
    assert reader.locator("script, button, img, link, iframe, form").count() == 0
    assert reader.locator("math").count() == 1
    assert reader.locator("figure.code .hljs-string").inner_text() == "'<b>'"
    assert colour(reader, ".hljs-string") == colour(page, ".hljs-string")
    reader.get_by_role("link", name="Footnote 1", exact=True).click()
    assert reader.locator("li:target").inner_text().startswith("The note.")
    assert (errors, requests) == ([], [copy.as_uri()])
    reader.close()

    page.get_by_role("link", name="Footnote 1", exact=True).click()
    assert page.evaluate("document.activeElement.localName") == "li"
    assert "#" not in page.url

    file = pypdf.PdfReader(io.BytesIO(page.pdf()))
    printed = re.sub(r"\s+", " ", " ".join(sheet.extract_text() for sheet in file.pages))
    for part in ("What *is*", "reply with", "Paragraph 0 of many", "Paragraph 119 of many"):
        assert part in printed
    for part in ("Export", "Write a message", "Copy", "Regenerate"):
        assert part not in printed
    assert len(file.pages) > 2


def colour(page: Any, selector: str) -> str:
    """Return the colour of the first element that matches."""
    return str(page.locator(selector).first.evaluate("(node) => getComputedStyle(node).color"))
