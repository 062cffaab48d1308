"""Time from nothing to the first token of a reply: `make chat` in a fresh clone, and the page.

    python bench/first_token.py [chat] [page]

`make chat` includes setting up its environment with pip. The page is that of `webgemma web`, in
Chromium with an empty profile, from opening its address, with a message sent as soon as there is a
box for it; later visits are new browsers on the same profile. Needs what `make browser` needs."""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser.chromium import launched, storing  # noqa: E402
from browser.person import LAST, SLOW_MS  # noqa: E402
from web.client import serving  # noqa: E402
from web.page import Visitor  # noqa: E402

from webgemma.web.site import Site  # noqa: E402

QUESTION = "Hi"
HAS_TEXT = "([selector]) => document.querySelector(selector)?.textContent.trim().length > 0"


def make_chat(clone: Path) -> float:
    """Return the seconds of `make chat` until the first byte of its reply."""
    start = time.perf_counter()
    process = subprocess.Popen(
        ["make", "--silent", "chat"],
        cwd=clone,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin
    assert process.stdout
    process.stdin.write(QUESTION.encode())
    process.stdin.close()
    first = process.stdout.read(1)
    seconds = time.perf_counter() - start
    process.stdout.read()
    if process.wait() or not first:
        raise SystemExit("make chat failed; run it in a fresh clone to see why")
    return seconds


def visit(browser: Any, profile: Path, url: str) -> float:
    """Return the seconds from opening the page until the first text of its reply."""
    with storing(browser, profile) as context:
        visitor = Visitor(context, url)
        visitor.page.set_default_timeout(SLOW_MS)
        start = time.perf_counter()
        visitor.page.goto(url)
        visitor.say(QUESTION)
        visitor.page.wait_for_function(HAS_TEXT, arg=[f"{LAST} .body"], polling=20)
        seconds = time.perf_counter() - start
        visitor.page.locator(f"{LAST} .facts:not(:empty)").wait_for()
        visitor.page.wait_for_timeout(2000)  # until the visit has stored its files
    return seconds


def print_times(name: str, seconds: list[float]) -> None:
    """Print the first time, and those after it."""
    first, *later = seconds
    print(f"{name}: {first:.1f} s, then " + ", ".join(f"{s:.1f}" for s in later), flush=True)


def main() -> None:
    """Print a line for each door."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("doors", nargs="*", default=["chat", "page"], metavar="chat|page")
    doors = parser.parse_args().doors
    with tempfile.TemporaryDirectory() as folder:
        if "chat" in doors:
            clone = Path(folder) / "clone"
            subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
            print_times("make chat", [make_chat(clone) for _ in range(4)])
        if "page" in doors:
            profile = Path(folder) / "profile"
            with launched() as browser, serving(Site(Path(folder) / "store")) as client:
                url = f"http://localhost:{client.port}/"
                print_times("the page", [visit(browser, profile, url) for _ in range(4)])


if __name__ == "__main__":
    main()
