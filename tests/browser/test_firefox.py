"""The page in Firefox, which has no WebGPU here: it starts, says so, and its scripts run."""

from pathlib import Path

import pytest
from browser.firefox import FIREFOX, firefox
from web.client import ACCESS, serving
from web.page import page_site

from webgemma.web.site import Site

pytest.importorskip("websockets", reason="needs websockets")
pytestmark = pytest.mark.skipif(not FIREFOX, reason="needs firefox")
SEND = """(() => {
  const box = document.getElementById("prompt");
  box.value = "hello";
  box.dispatchEvent(new InputEvent("input"));
  document.getElementById("think").click();
  document.getElementById("send").click();
})()"""
TEXT = "[...document.querySelectorAll('{} {}')].map((node) => node.textContent).join(' ')"


def test_the_page_starts_in_firefox(tmp_path: Path) -> None:
    profile = tmp_path / "profile"
    profile.mkdir()
    folder = tmp_path / "page"
    folder.mkdir()
    with (
        firefox(profile) as tab,
        serving(Site(tmp_path / "store")) as real,
        serving(page_site(folder)) as pretended,
    ):
        tab.open(f"http://localhost:{real.port}/", ACCESS.cookie(real.port))
        if not tab.evaluate("Boolean(navigator.gpu)"):
            shown = "!document.getElementById('notice').hidden"
            tab.wait_for(shown)
            sentence = str(tab.evaluate("document.getElementById('notice-text').textContent"))
            assert sentence.startswith("This browser offers no GPU: use a browser with WebGPU (a ")
            assert tab.evaluate("document.getElementById('send').disabled") is True
        tab.open(f"http://localhost:{pretended.port}/", ACCESS.cookie(pretended.port))
        tab.wait_for("document.getElementById('model-name').textContent === 'Bundled model'")
        tab.evaluate(SEND)
        tab.wait_for("document.querySelector('.assistant .facts')?.textContent")
        assert tab.evaluate(TEXT.format(".assistant", ".body")) == "You said hello."
        assert tab.evaluate(TEXT.format(".assistant", "summary")) == "Thought for 1 s"
