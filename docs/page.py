"""Draw docs/page.png: the page of `webgemma web` in Chromium, with replies of the bundled model.

`PYTHONPATH=src:tests python docs/page.py` from the root; on a software GPU it takes minutes."""

import tempfile
from pathlib import Path

from browser.chromium import launched
from browser.person import visiting

from webgemma.web.site import Site

CONVERSATIONS = (
    ("What is the capital of France?",),
    ("How do I load a real model?",),
    ("What is webgemma?",),
    ("Tell me a story about a brave little cat.", "What can you do?"),
)
PINNED = "What is webgemma?"
SIZE = {"width": 1180, "height": 780}


def main() -> None:
    """Have the conversations, and save a picture of the last one."""
    with tempfile.TemporaryDirectory() as folder, launched() as browser:
        context = browser.new_context(viewport=SIZE, color_scheme="light")
        with visiting(context, Site(Path(folder))) as person:
            person.page.set_default_timeout(600_000)
            person.open()
            person.set(Temperature="0")  # the same picture every time
            for turns in CONVERSATIONS:
                person.button("New conversation").click()
                for text in turns:
                    print(f"{text}\n    {person.ask(text)}")
            person.act("Pin", PINNED)
            person.page.get_by_label("Message", exact=True).focus()
            person.page.mouse.move(0, 0)
            person.page.locator("#scroller").evaluate("(node) => { node.scrollTop = 0; }")
            person.page.screenshot(path=Path(__file__).with_suffix(".png"))


if __name__ == "__main__":
    main()
