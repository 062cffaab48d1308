"""Draw docs/page.png: the chat page in Chromium, where the bundled model computes in the tab."""

import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent / "tests"))

from browser.chromium import launched  # noqa: E402
from browser.person import ControlledSite, Person, visiting  # noqa: E402

SEED = "6"  # of eight tried, that of the best story
CONVERSATIONS = (
    ("What are you?",),
    ("What is the capital of France?",),
    ("hi!!", "Tell me a story about a cat."),
)


def main() -> None:
    """Have some conversations and save what the page then shows."""
    with tempfile.TemporaryDirectory() as folder, launched() as browser:
        size = {"width": 1180, "height": 780}
        context = browser.new_context(viewport=size, color_scheme="light")
        with visiting(context, ControlledSite(Path(folder)), who=Person) as person:
            person.page.set_default_timeout(600_000)  # a software GPU writes a token a second
            person.open()
            person.set(Seed=SEED)
            for messages in CONVERSATIONS:
                person.button("New conversation").click()
                for message in messages:
                    person.ask(message)
            person.page.mouse.move(0, 0)
            person.page.screenshot(path=FOLDER / "page.png")


if __name__ == "__main__":
    main()
