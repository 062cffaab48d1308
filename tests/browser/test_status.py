"""The server's status page in a browser: it asks for the key, then follows the numbers."""

from pathlib import Path
from typing import Any

from helpers.live_server import live_server, tiny_model

KEY = "0123456789abcdef"


def test_the_status_page(chromium: Any, tmp_path: Path) -> None:
    problems = []
    context = chromium.new_context()
    page = context.new_page()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if "401" not in said.text else None)
    with live_server(tiny_model(tmp_path), keys=[KEY]) as live:
        page.goto(f"{live.url}/status")
        for key in ("wrong", KEY):
            page.get_by_label("API key").fill(key)
            page.get_by_role("button").click()
            if key == "wrong":
                page.get_by_text("not one of the server's API keys").wait_for()
        page.get_by_text("None: a model is loaded when").wait_for()
        assert page.locator("#ask").is_hidden()
        body = {"model": "small", "prompt": "hello", "max_tokens": 7}
        live.post("/v1/completions", body, headers={"x-api-key": KEY})
        page.locator("#models", has_text="0 of 1 busy").wait_for()  # without a reload
        assert page.locator("#written").inner_text() == "7"
        page.reload()  # the tab still has the key
        page.locator("#models", has_text="small").wait_for()
        assert KEY not in page.url
    page.get_by_text("does not answer").wait_for()
    context.close()
    assert [problem for problem in problems if "ERR_CONNECTION" not in problem] == []
