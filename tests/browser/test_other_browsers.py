"""The page in Firefox and WebKit, which have no WebGPU here: it says so, and its scripts run."""

import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser.firefox import FIREFOX, firefox
from browser.webkit import WEBKIT, webkit
from web.client import ACCESS, serving
from web.page import page_site

from webgemma.web.site import Site

SOCKETS = importlib.util.find_spec("websockets") is not None
BROWSERS = [
    pytest.param(
        firefox,
        marks=pytest.mark.skipif(not (FIREFOX and SOCKETS), reason="needs firefox, websockets"),
    ),
    pytest.param(
        webkit,
        marks=pytest.mark.skipif(not WEBKIT, reason="needs webkit2gtk-driver, xvfb"),
    ),
]
SEND = """(() => {
  const box = document.getElementById("prompt");
  box.value = "hello";
  box.dispatchEvent(new InputEvent("input"));
  document.getElementById("think").click();
  document.getElementById("send").click();
})()"""
TEXT = "[...document.querySelectorAll('{} {}')].map((node) => node.textContent).join(' ')"


@pytest.fixture(params=BROWSERS)
def tab(request: pytest.FixtureRequest) -> Iterator[Any]:
    with request.param() as tab:
        yield tab


def test_the_page_says_that_there_is_no_gpu(tab: Any, tmp_path: Path) -> None:
    with serving(Site(tmp_path / "store")) as client:
        tab.open(f"http://localhost:{client.port}/", ACCESS.cookie(client.port))
        if tab.evaluate("Boolean(navigator.gpu)"):
            pytest.skip("this browser has WebGPU")
        wait_for(tab, "!document.getElementById('notice').hidden")
        sentence = str(tab.evaluate("document.getElementById('notice-text').textContent"))
        assert sentence.startswith("This browser offers no GPU: use a browser with WebGPU (a ")
        assert tab.evaluate("document.getElementById('send').disabled") is True


def test_its_scripts_run_with_a_pretended_engine(tab: Any, tmp_path: Path) -> None:
    with serving(page_site(tmp_path)) as client:
        tab.open(f"http://localhost:{client.port}/", ACCESS.cookie(client.port))
        wait_for(tab, "document.getElementById('model-name').textContent === 'Bundled model'")
        tab.evaluate(SEND)
        wait_for(tab, "document.querySelector('.assistant .facts')?.textContent")
        assert tab.evaluate(TEXT.format(".assistant", ".body")) == "You said hello."
        assert tab.evaluate(TEXT.format(".assistant", "summary")) == "Thought for 1 s"


def wait_for(tab: Any, expression: str, seconds: float = 90) -> None:
    """Wait until an expression is true."""
    end = time.monotonic() + seconds
    while not (value := tab.evaluate(expression)):
        assert time.monotonic() < end, f"{expression} is {value!r}"
        time.sleep(0.2)
