"""Replies are read aloud by the voices of the device, and not without any."""

from collections.abc import Iterator
from typing import Any

import pytest
from browser.chromium import CHROMIUM
from web.sender import Sender, sending

pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")

VOICES = """
globalThis.spoken = [];
const voices = [["en-GB", "Ann"], ["de-DE", "Anna"], ["ja-JP", "Aya"]]
  .map(([lang, name]) => ({ lang, name, default: lang === "en-GB" }));
const synthesis = Object.assign(new EventTarget(), {
  voices: [],
  getVoices() { return this.voices; },
  speak(utterance) { spoken.push(utterance); },
  cancel() { spoken.push("cancel"); },
});
Object.defineProperty(globalThis, "speechSynthesis", { value: synthesis });
globalThis.SpeechSynthesisUtterance = class { constructor(text) { this.text = text; } };
setTimeout(() => {
  synthesis.voices = voices;
  synthesis.dispatchEvent(new Event("voiceschanged"));
}, 50);
"""
SPOKEN = """() => spoken.splice(0).map((each) =>
  (each === "cancel" ? each : `${each.lang} ${each.voice?.name}: ${each.text}`))"""
REPLY = """echo # Das Wetter

Es ist **heute** nicht `warm`, und die Sonne scheint. Morgen auch!

```
print("nicht lesen")
```

- eins
- zwei"""


@pytest.fixture
def listener(context: Any, url: str) -> Iterator[Sender]:
    context.add_init_script(VOICES)
    with sending(context, url) as listener:
        yield listener


def test_a_reply_is_read_in_its_language_without_markup_and_code(listener: Sender) -> None:
    page, read = listener.page, listener.button("Read aloud")
    listener.ask(REPLY)
    read.click()
    sentences = ["Das Wetter", "Es ist heute nicht warm, und die Sonne scheint.", "Morgen auch!"]
    expected = [f"de Anna: {text}" for text in (*sentences, "eins", "zwei")]
    assert page.evaluate(SPOKEN) == expected
    listener.button("Stop reading").click()
    assert page.evaluate(SPOKEN) == ["cancel"]
    read.click()
    page.evaluate("() => spoken.at(-1).onend()")
    read.wait_for()  # all is read
    page.evaluate(SPOKEN)
    read.click()
    listener.button("New conversation").click()
    assert page.evaluate(SPOKEN)[-1] == "cancel"
    languages = """async (texts) => texts.map((await import("./speech.js")).languageOf)"""
    texts = {
        "The end is in sight and it is good.": "en",
        "今日は天気がいいですね。": "ja",
        "Bonjour, il est dans la rue avec une amie.": "fr",
        "مرحبا بالعالم": "ar",
        "42": "en",
        "¿Dónde está el libro de la profesora?": "es",
    }
    assert page.evaluate(languages, list(texts)) == list(texts.values())


def test_nothing_is_offered_without_voices(context: Any, url: str) -> None:
    context.add_init_script("Object.defineProperty(globalThis, 'speechSynthesis', { value: null })")
    with sending(context, url) as visitor:
        visitor.ask("hello")
        assert visitor.page.locator(".read").count() == 1
        assert visitor.button("Read aloud").is_hidden()
