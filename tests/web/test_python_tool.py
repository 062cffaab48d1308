"""Python as a tool of the page: the user's consent, its limits, and what it cannot reach."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser.axe import AXE, violations
from browser.chromium import CHROMIUM
from web.client import serving
from web.page import FAKE_WORKER, Visitor
from web.test_tools import states, switch

from webgemma.web.libraries import library_files
from webgemma.web.site import STATIC, Site

pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = [
    pytest.mark.skipif(not CHROMIUM, reason="needs chromium"),
    pytest.mark.skipif("pyodide/pyodide.mjs" not in library_files(), reason="needs npm ci"),
]

# Each way out of Python: what it prints, if it is open, is "OPEN".
WAYS_OUT = """
import gc, sys

def attempt(name, act):
    try:
        act()
        print(name, "OPEN")
    except BaseException as error:
        print(name, type(error).__name__)

def again(module):
    sys.modules.pop(module, None)
    __import__(module)

for module in ("js", "pyodide_js", "pyodide", "pyodide.http", "pyodide.code", "_pyodide_core"):
    attempt(module, lambda: __import__(module))
attempt("js again", lambda: again("js"))
attempt("pyodide_js again", lambda: again("pyodide_js"))

def fetch():
    import urllib.request
    urllib.request.urlopen(ADDRESS, timeout=5)

def connect():
    import socket
    socket.create_connection(("localhost", PORT), timeout=5)

def run():
    import subprocess
    subprocess.run(["ls"])

def fill_memory():
    held = [bytes(2 ** 24) for _ in range(100)]

def fill_files():
    with open("/tmp/large", "wb") as file:
        for _ in range(100):
            file.write(bytes(2 ** 20))

def stretch_file():
    with open("/tmp/long", "wb") as file:
        file.truncate(2 ** 40)

for act in (fetch, connect, run, fill_memory, fill_files, stretch_file):
    attempt(act.__name__, act)
def recurse():
    recurse()
attempt("recurse", recurse)
"the last line"
"""
REFUSED = {
    "js": "ModuleNotFoundError",
    "pyodide_js": "ModuleNotFoundError",
    "pyodide": "ModuleNotFoundError",
    "pyodide.http": "ModuleNotFoundError",
    "pyodide.code": "ModuleNotFoundError",
    "_pyodide_core": "ModuleNotFoundError",
    "fetch": "URLError",
    "fill_memory": "MemoryError",
    "fill_files": "OSError",
    "stretch_file": "OSError",
    "recurse": "RecursionError",
}
# The same with JavaScript in Python's worker, before it is enclosed.
AS_JAVASCRIPT = """
const address = ADDRESS;
const reach = (Kind, ...given) => new Promise((resolve, reject) => {
  const source = new Kind(...given);
  source.onopen = source.onmessage = resolve;
  source.onerror = reject;
});
const opened = (request) => new Promise((resolve, reject) => {
  request.onsuccess = resolve;
  request.onerror = () => reject(request.error);
});
const WAYS = {
  fetch: () => fetch(address),
  request: () => {
    const request = new XMLHttpRequest();
    request.open("GET", address, false);
    request.send();
  },
  socket: () => reach(WebSocket, address.replace("http", "ws")),
  events: () => reach(EventSource, address),
  database: () => opened(indexedDB.open("webgemma")),
  caches: () => caches.keys(),
  files: () => navigator.storage.getDirectory(),
  import: () => import(`${address}dom.js`),
  data: () => import("data:text/javascript,1"),
  eval: () => eval("1"),
  worker: () => reach(Worker, `${address}worker.js`),
  messages: () => {
    new BroadcastChannel("webgemma.conversations").postMessage({ type: "removed", id: ID });
    throw new Error("nobody listens");
  },
};
globalThis.onmessage = async ({ data: { port } }) => {
  const open = [];
  const ways = Object.entries(WAYS);
  for (const [name, way] of ways) {
    await Promise.resolve().then(way).then(() => open.push(name), () => {});
  }
  port.postMessage({ isStarted: true });
  const output = `${origin}: ${ways.length} ways, ${open.length} open: ${open}`;
  port.postMessage({ hasFailed: false, isCut: false, output });
};
globalThis.postMessage("ready");
"""
RUN = """async (code) => {
  const { runPython } = await import("./python_tool.js");
  try {
    return (await runPython({ code }, "/lib/pyodide/", new AbortController().signal)).text;
  } catch (error) {
    return `Error: ${error.message}`;
  }
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a page with a fake worker and real Pyodide, and its scripts' folder."""
    folder = tmp_path_factory.mktemp("site")
    static = folder / "static"
    shutil.copytree(STATIC, static)
    (static / "worker.js").write_text(FAKE_WORKER)
    with serving(Site(folder / "store", static)) as client:
        yield f"http://localhost:{client.port}/", static


@pytest.fixture
def visitor(context: Any, site: tuple[str, Path]) -> Iterator[Visitor]:
    visitor = Visitor(context, site[0])
    visitor.page.set_default_timeout(150_000)  # for Python to start on a busy machine
    visitor.open()
    yield visitor
    assert visitor.errors == []


def call(code: str) -> str:
    """Return the message that makes the fake worker call Python."""
    return f"tool python {json.dumps({'code': code})}"


def test_python_runs_only_when_the_user_agrees(visitor: Visitor) -> None:
    page = visitor.page
    switch(visitor, "Python")
    visitor.say(call("print('hi')\n1 / 0"))
    question = page.get_by_role("group", name="Run this program?")
    question.wait_for()
    assert states(visitor) == ["Python asking"]
    assert page.locator(".call[open] pre").inner_text() == "print('hi')\n1 / 0"
    assert "asks to run a program" in page.locator("#announcer").inner_text()
    if AXE.is_file():
        assert violations(page) == []
    visitor.button("Don’t run").press("Enter")
    page.locator(".message.assistant:last-child .facts:not(:empty)").wait_for()
    assert visitor.reply() == "The tools said: The user declined this call."
    assert states(visitor) == ["Python refused"]
    assert page.locator("iframe").count() == 0  # nothing was started

    visitor.button("Regenerate").click()
    question.wait_for()
    visitor.button("Run always in this conversation").click()
    page.locator(".message.assistant:last-child .facts:not(:empty)").wait_for()
    reply = visitor.reply()
    assert reply.startswith("The tools said: hi\nTraceback")
    assert reply.endswith("ZeroDivisionError: division by zero")
    assert states(visitor) == ["Python failed"]
    assert page.locator("iframe").count() == 0  # it has ended

    # The next one does not ask, and Stop ends it, whatever it does.
    visitor.say(call("while True: pass"))
    page.locator(".call.running").wait_for()
    visitor.button("Stop").click()
    page.locator(".message.assistant:last-child .facts:not(:empty)").wait_for()
    assert states(visitor)[-1] == "Python stopped"
    assert page.locator("iframe").count() == 0

    # Another conversation asks again, and so does this one after Python was switched off.
    visitor.button("New conversation").click()
    switch(visitor, "Python")
    visitor.say(call("1"))
    question.wait_for()
    page.keyboard.press("Escape")
    page.locator(".message.assistant:last-child .facts:not(:empty)").wait_for()
    assert states(visitor) == ["Python stopped"]
    assert not visitor.page.locator(".answers").count()


def test_a_program_reaches_nothing(visitor: Visitor) -> None:
    port = visitor.url.rstrip("/").rsplit(":", 1)[1]
    code = WAYS_OUT.replace("ADDRESS", repr(visitor.url)).replace("PORT", port)
    text = visitor.page.evaluate(RUN, code)
    *lines, last = text.splitlines()
    assert last == "'the last line'", text
    found = dict(line.rsplit(" ", 1) for line in lines)
    assert "OPEN" not in found.values(), text
    assert {name: found[name] for name in REFUSED} == REFUSED
    assert len(found) == 15
    own = visitor.url, "data:", "about:srcdoc"
    assert [url for url in visitor.requests if not url.startswith(own)] == []


def test_javascript_in_the_worker_of_python_reaches_nothing(
    visitor: Visitor, site: tuple[str, Path]
) -> None:
    """What if a program found a way from Python to JavaScript: then only the browser is left."""
    sandbox = site[1] / "python_sandbox.js"
    before = sandbox.read_text()
    visitor.ask("Hello")
    script = AS_JAVASCRIPT.replace("ADDRESS", f'"{visitor.url}"').replace("ID", '"x"')
    try:
        sandbox.write_text(script)
        text = visitor.page.evaluate(RUN, "1")
    finally:
        sandbox.write_text(before)
    assert text == "null: 12 ways, 0 open:"
    visitor.errors.clear()  # the policy reports what it refuses


def test_a_program_ends_and_so_does_its_output(visitor: Visitor) -> None:
    """The limits are shorter here, and the page stays usable meanwhile."""
    page = visitor.page

    def short(route: Any) -> None:
        text = route.fetch().text().replace("RUN_SECONDS = 20", "RUN_SECONDS = 1")
        route.fulfill(body=text, content_type="text/javascript")

    page.route("**/python_tool.js", short)
    page.reload()
    page.locator("#model-name", has_text="Bundled model").wait_for()
    ended = page.evaluate(RUN, "print('x' * 10 ** 6)\nwhile True: pass")
    assert ended == "Error: The program was stopped after 1 seconds."
    cut = page.evaluate(RUN, "for _ in range(10 ** 4): print('x' * 99)\nprint('end')")
    assert len(cut) < 20_100
    assert cut.endswith("[The output was cut here: it is too long.]")
