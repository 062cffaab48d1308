"""Accessibility of the page by axe-core's rules, in every state: start, chat, dialogs, locked."""

from pathlib import Path

import pytest
from browser.axe import AXE, violations
from browser.chromium import CHROMIUM
from web.page import Visitor

MARKDOWN = """echo # One

### Two[^1]

```python
@decorated
class A(B):  # comment
    def f(self, x: int = 0x1F) -> str:
        return f"a{x}" if None else print(True)
```
```diff
+ a
- b
```
```html
<a href="x">&lt;</a>
```
```css
a.b > #c:hover { color: red; }
```

| a | b |
|---|---|
| 1 | $x$ |

- [ ] Task
- [x] Done
    - https://a.example

> quote $$y$$ and $\\error$

[^1]: Note.
"""

pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = [
    pytest.mark.skipif(not CHROMIUM, reason="needs chromium"),
    pytest.mark.skipif(not AXE.is_file(), reason="needs npm ci"),
]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 320])
def test_the_page_breaks_no_rule(visitor: Visitor, tmp_path: Path, scheme: str, width: int) -> None:
    page = visitor.page
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.set_viewport_size({"width": width, "height": 800})
    assert violations(page) == []
    visitor.ask(MARKDOWN)
    page.locator(".hljs-addition").wait_for()
    page.locator("math").first.wait_for()
    assert violations(page) == []
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    page.locator("#model-file").set_input_files(broken)
    visitor.notice()
    assert violations(page) == []
    if width < 720:
        visitor.button("Conversations").click()
        assert violations(page) == []
    page.locator("#conversations .more").click()
    assert violations(page) == []
    page.keyboard.press("Escape")
    page.locator("#search").fill("one")
    page.locator("#results mark").first.wait_for()
    assert violations(page) == []
    page.locator("#results button").last.click()
    page.locator(".found").wait_for()
    assert violations(page) == []
    for opener in ("Settings", "Fine-tune", "Answer from documents", "Model: Bundled model"):
        visitor.button(opener).click()
        assert violations(page) == [], opener
        page.keyboard.press("Escape")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("?")
    page.locator("#keys-dialog[open]").wait_for()
    assert violations(page) == []


CUT = """() => [...document.querySelectorAll("dialog[open] *, #composer *")].filter((node) =>
  node.checkVisibility() && !node.closest("pre, textarea, .visually-hidden")
  && (node.scrollWidth > node.clientWidth + 8 || node.getBoundingClientRect().right > innerWidth)
  && getComputedStyle(node).display !== "inline").map((node) => node.outerHTML.slice(0, 100))"""


@pytest.mark.parametrize(("scheme", "direction"), [("light", "ltr"), ("dark", "rtl")])
def test_settings_and_tuning_fit_a_small_phone(
    visitor: Visitor, scheme: str, direction: str
) -> None:
    page = visitor.page
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.set_viewport_size({"width": 320, "height": 640})
    page.evaluate("(direction) => { document.documentElement.dir = direction; }", direction)
    visitor.button("Thinking").click()
    visitor.ask("lose the device afterwards")
    visitor.notice()
    assert violations(page) == page.evaluate(CUT) == []
    page.locator("#settings-button").click()
    page.get_by_label("This conversation only").check()
    page.locator("[name=temperature]").fill("0.5")
    assert violations(page) == page.evaluate(CUT) == []
    visitor.button("Save as preset …").click()
    page.get_by_label("Name", exact=True).fill("Mine")
    assert violations(page) == page.evaluate(CUT) == []
    page.keyboard.press("Enter")
    visitor.button("Rename …").wait_for()
    assert violations(page) == page.evaluate(CUT) == []
    page.keyboard.press("Escape")
    page.locator("#tune-button").click()
    assert page.evaluate(CUT) == []


WIDE = """([dialog, parts]) => [...document.querySelectorAll(`${dialog} ${parts}`)].filter(
  (node) => node.getBoundingClientRect().right
    > document.querySelector(`${dialog} h2`).parentNode.getBoundingClientRect().right
  ).map((node) => node.textContent)"""


@pytest.mark.parametrize("language", ["Deutsch", "Español"])
def test_long_words_are_not_cut_on_a_small_phone(visitor: Visitor, language: str) -> None:
    page = visitor.page
    page.get_by_label("Language").select_option(language)
    page.wait_for_function("() => document.documentElement.lang !== 'en'")
    page.locator("#keys-button").click()
    page.set_viewport_size({"width": 320, "height": 640})
    assert page.evaluate(WIDE, ["#keys-dialog", "dd"]) == []
    page.keyboard.press("Escape")
    page.locator("#settings-button").click()
    assert page.evaluate(WIDE, ["#settings-dialog", "label, #settings-dialog button"]) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_locked_page_breaks_no_rule(visitor: Visitor, scheme: str) -> None:
    visitor.page.context.clear_cookies()
    visitor.page.emulate_media(color_scheme=scheme)
    visitor.page.evaluate(
        "async () => (await navigator.serviceWorker.getRegistration())?.unregister()"
    )
    visitor.page.goto(visitor.url)
    visitor.page.get_by_text("webgemma is locked").wait_for()
    assert violations(visitor.page) == []
    visitor.errors.clear()  # the status 403 is one
