"""The notebook sites of examples/: built, opened in a sub-folder, and chatted with."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browser.serving import folder_server
from playwright.sync_api import expect

from webgemma import Gemma

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
QUESTION = "What are you?"
SLOW_MS = 240_000  # Python and its packages are imported without a snapshot


@pytest.fixture(scope="module")
def reply() -> str:
    """Return the bundled model's reply, as it is natively."""
    with Gemma.load(device="gpu") as gemma:
        return "".join(piece.text for piece in gemma.chat(QUESTION, temperature=0, max_tokens=40))


def test_jupyterlite_installs_loads_and_shows_a_reply(
    chromium: Any, tmp_path: Path, reply: str
) -> None:
    with visited(
        chromium, "jupyterlite", tmp_path, "notebooks/index.html?path=webgemma.ipynb"
    ) as page:
        page.locator(".jp-CodeCell").nth(2).wait_for()
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_text("Run All Cells", exact=True).first.click()
        output = page.locator(".jp-OutputArea-output")
        expect(output.last).to_have_text(reply, timeout=SLOW_MS)
        shown = output.all_inner_texts()
        assert any("gemma.gguf" in each and "GPU memory" in each for each in shown)
        assert output.locator("progress").count() == 1
        page.screenshot(path=tmp_path / "notebook.png")


def test_marimo_loads_and_chats(chromium: Any, tmp_path: Path, reply: str) -> None:
    with visited(chromium, "marimo", tmp_path) as page:
        chat = page.locator("marimo-chatbot")
        box = chat.get_by_role("textbox").last
        box.wait_for()
        expect(page.locator("table").first).to_contain_text("gemma.gguf")
        box.fill(QUESTION)
        box.press("Enter")
        expect(chat).to_contain_text(reply, timeout=SLOW_MS)
        page.screenshot(path=tmp_path / "notebook.png")


@contextmanager
def visited(chromium: Any, example: str, folder: Path, address: str = "") -> Iterator[Any]:
    """Build an example's site; give its page, whose requests to other servers fail and are told."""
    build, site = EXAMPLES / example / "build.py", folder / "below" / "site"
    subprocess.run([sys.executable, build, site], check=True)
    with folder_server(folder) as origin:
        context, others = chromium.new_context(), []
        context.route(
            lambda url: not url.startswith((f"{origin}/", "blob:", "data:")),
            lambda route: (others.append(route.request.url), route.abort()),
        )
        page = context.new_page()
        page.set_default_timeout(SLOW_MS)
        page.goto(f"{origin}/below/site/{address}")
        yield page
        context.close()
        assert others == []
