"""The JupyterLite site of examples/jupyterlite: built, opened in a sub-folder, its notebook run."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from browser.serving import folder_server
from playwright.sync_api import expect

from webgemma import Gemma

BUILD = Path(__file__).resolve().parents[2] / "examples" / "jupyterlite" / "build.py"
SLOW_MS = 240_000  # IPython is imported without a snapshot


def test_the_notebook_installs_loads_and_shows_a_reply(chromium: Any, tmp_path: Path) -> None:
    subprocess.run([sys.executable, BUILD, tmp_path / "below" / "site"], check=True)
    with Gemma.load(device="gpu") as gemma:
        pieces = gemma.chat("What are you?", temperature=0, max_tokens=40)
        text = "".join(piece.text for piece in pieces)
    with folder_server(tmp_path) as origin:
        context, others = chromium.new_context(), []
        context.route(
            lambda url: not url.startswith((f"{origin}/", "blob:", "data:")),
            lambda route: (others.append(route.request.url), route.abort()),
        )
        page = context.new_page()
        page.set_default_timeout(SLOW_MS)
        page.goto(f"{origin}/below/site/notebooks/index.html?path=webgemma.ipynb")
        page.locator(".jp-CodeCell").nth(2).wait_for()
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_text("Run All Cells", exact=True).first.click()
        output = page.locator(".jp-OutputArea-output")
        expect(output.last).to_have_text(text, timeout=SLOW_MS)
        shown = output.all_inner_texts()
        assert any("gemma.gguf" in each and "GPU memory" in each for each in shown)
        assert output.locator("progress").count() == 1
        page.screenshot(path=tmp_path / "notebook.png")
        assert others == []
        context.close()
