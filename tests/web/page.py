"""The chat page in Chromium, served by the real server, with a fake worker without a model."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from web.client import ACCESS, serving

from webgemma.web.libraries import library_files
from webgemma.web.site import STATIC, Site

FAKE_WORKER = (Path(__file__).parent / "fake_worker.js").read_text()


def page_site(folder: Path, worker: str | None = FAKE_WORKER) -> Site:
    """Return a site of the page with `worker` as its worker's script; None: without a worker."""
    static = folder / "static"
    shutil.copytree(STATIC, static)
    (static / "worker.js").unlink(missing_ok=True)
    if worker is not None:
        (static / "worker.js").write_text(worker)
    return Site(folder / "store", static, libraries=page_libraries())


def page_libraries() -> dict[str, Path]:
    """Return the libraries that the page itself imports; its worker is not real."""
    files = library_files()
    of_engine = ("pyodide/", "xgrammar/")
    return {name: path for name, path in files.items() if not name.startswith(of_engine)}


@contextmanager
def serving_page(folder: Path, worker: str | None = FAKE_WORKER) -> Iterator[str]:
    """Serve the site of `page_site`; the value is its address."""
    with serving(page_site(folder, worker)) as client:
        yield f"http://localhost:{client.port}/"


def give_access(context: Any, url: str) -> None:
    """Give a browser the cookie of those who have opened the address with the token."""
    name, value = ACCESS.cookie(urlsplit(url).port or 80)
    context.add_cookies([{"name": name, "value": value, "url": url}])


TRASH_IS_EMPTY = """() => new Promise((resolve) => {
  indexedDB.open("webgemma").onsuccess = ({ target: { result: database } }) => {
    const heads = database.transaction("conversations").objectStore("conversations").getAll();
    heads.onsuccess = () => {
      database.close();
      resolve(heads.result.every(({ deleted, restored }) => deleted <= restored));
    };
  };
})"""


class Visitor:
    """A person at the page; records errors and requests."""

    def __init__(self, context: Any, url: str) -> None:
        self.url = url
        give_access(context, url)
        self.page = context.new_page()
        self.page.set_default_timeout(30_000)  # the machine may be busy
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._on_console)
        context.on("request", lambda request: self.requests.append(request.url))
        self.page.on("dialog", lambda dialog: self.errors.append(f"dialog: {dialog.message}"))

    def _on_console(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def open(self, model: str = "Bundled model") -> None:
        """Open the page and wait until the model is loaded."""
        self.page.goto(self.url)
        self.page.locator("#model-name", has_text=model).wait_for()

    def say(self, text: str) -> None:
        """Send a message without waiting for the reply."""
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def ask(self, text: str) -> str:
        """Send a message, wait for the complete reply, and return its text."""
        self.say(text)
        self.page.locator(".message.assistant:last-child .facts:not(:empty)").wait_for()
        return self.reply()

    def reply(self) -> str:
        """Return the text of the last reply."""
        return str(self.page.locator(".message.assistant .body").last.inner_text())

    def request(self) -> Any:
        """Return the chat request that the worker receives for the message "request"."""
        self.ask("request")
        return self.last_request()

    def last_request(self) -> Any:
        """Return the chat request that the last reply repeats."""
        return json.loads(self.page.locator(".message:last-child pre").inner_text())

    def button(self, name: str) -> Any:
        """Return the button with this name."""
        return self.page.get_by_role("button", name=name, exact=True)

    def act(self, entry: str, title: str = "") -> None:
        """Choose an entry of the menu of a conversation: the one that is shown, or another."""
        item = self.page.locator("#conversations li" if title else "#conversations .current")
        item = item.filter(has_text=title).first
        item.hover()
        item.locator(".more").click()
        self.page.get_by_role("menuitem", name=entry, exact=True).click()

    def rename(self, new: str, title: str = "") -> None:
        """Rename a conversation in the list."""
        self.act("Rename", title)
        self.page.get_by_label("Title of this conversation").fill(new)
        self.page.keyboard.press("Enter")

    def pass_undo(self) -> None:
        """Let the time pass in which deleting is undone, and wait until all is deleted for good.

        The page's clock has to be installed before."""
        self.page.clock.fast_forward(16_000)
        self.page.wait_for_function(TRASH_IS_EMPTY)

    def notice(self) -> str:
        """Wait for a notice and return its text."""
        shown = self.page.locator("#notice:not([hidden]) #notice-text")
        shown.wait_for()
        return str(shown.inner_text())

    def saved(self, entry: str) -> tuple[str, Path]:
        """Save the conversation by its menu; return the name of the file, and where it is."""
        self.page.locator("#conversations .current button.more").click()
        with self.page.expect_download() as download:
            self.page.get_by_role("menuitem", name=entry).click()
        return download.value.suggested_filename, download.value.path()

    def exported(self) -> str:
        """Return the file that Export saves."""
        with self.page.expect_download() as download:
            self.page.locator("#export").click()
        return str(download.value.path().read_text(encoding="utf-8"))

    def import_text(self, text: str) -> str:
        """Import a file with this text, and return the notice."""
        file = {"name": "import.json", "mimeType": "application/json", "buffer": text.encode()}
        if self.button("Dismiss").is_visible():
            self.button("Dismiss").click()
        self.page.locator("#import-file").set_input_files(file)
        return self.notice()

    def release(self) -> None:
        """Let the fake worker finish what it holds back."""
        self.page.evaluate("new BroadcastChannel('release').postMessage(null)")

    def texts(self, selector: str) -> list[str]:
        """Return the texts of all elements that match, all of one moment."""
        texts = "(selector) => [...document.querySelectorAll(selector)].map((n) => n.innerText)"
        return list(self.page.evaluate(texts, selector))
