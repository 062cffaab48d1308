"""The microphone of the chat page, with a fake device that beeps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser.chromium import CHROMIUM, FLAGS
from web.page import serving_page
from web.sender import sending

pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")


@pytest.fixture(scope="module")
def beeping(browser: Any) -> Iterator[Any]:
    """A browser whose microphone records beeps."""
    flags = [*FLAGS, "--use-fake-device-for-media-stream"]
    beeping = browser.browser_type.launch(executable_path=CHROMIUM, args=flags)
    yield beeping
    beeping.close()


def test_a_recording_is_attached_and_sent(beeping: Any, url: str) -> None:
    context = beeping.new_context(permissions=["microphone"])
    with sending(context, url) as visitor:
        visitor.button("Record audio").click()
        visitor.page.locator("#recording-time", has_text="0:02").wait_for()
        assert visitor.page.locator("#writing").is_hidden()
        visitor.page.wait_for_function(
            "() => document.getElementById('recording-level').value > 0.1"
        )
        visitor.button("Done").click()
        visitor.wait_for_tray(["Recording 1.wav"])
        part, _ = visitor.parts()
        assert 2 * 16_000 <= part["audio"]["samples"] < 30 * 16_000
        assert part["audio"]["loudest"] > 0.05
    context.close()


def test_a_recording_can_be_cancelled(beeping: Any, url: str) -> None:
    context = beeping.new_context(permissions=["microphone"])
    with sending(context, url) as visitor:
        for key in ("Escape", "Enter"):
            visitor.button("Record audio").click()
            visitor.button("Cancel").focus()
            visitor.page.keyboard.press(key)
            visitor.page.locator("#recording").wait_for(state="hidden")
        assert visitor.tray() == []
        assert visitor.parts() == "request"
    context.close()


def test_a_recording_ends_at_the_limit(beeping: Any, tmp_path: Path) -> None:
    context = beeping.new_context(permissions=["microphone"])
    with serving_page(tmp_path) as url:
        script = tmp_path / "static" / "microphone.js"
        script.write_text(script.read_text().replace("MAX_SECONDS = 600", "MAX_SECONDS = 1"))
        with sending(context, url) as visitor:
            visitor.button("Record audio").click()
            visitor.wait_for_tray(["Recording 1.wav"])
            assert visitor.notice().startswith("A recording is limited to")
    context.close()


def test_a_microphone_that_is_not_allowed_is_reported(beeping: Any, url: str) -> None:
    context = beeping.new_context()
    with sending(context, url) as visitor:
        visitor.button("Record audio").click()
        assert visitor.notice().startswith("The microphone is not allowed: allow it next to")
        assert visitor.page.locator("#recording").is_hidden()
        assert visitor.button("Record audio").is_enabled()
    context.close()
