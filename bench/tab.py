"""How fast the browser's side is in this Chromium: start-up, submitting, files to the GPU.

    python bench/tab.py

Needs what `make browser` needs. The speed of models on a real GPU is bench/tab.mjs's."""

import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser.chromium import launched, storing  # noqa: E402
from browser.serving import serving as serving_files  # noqa: E402
from browser.test_tab import Tab, wheel  # noqa: E402
from web.client import serving  # noqa: E402

from webgemma.web.site import Site  # noqa: E402

PYODIDE = ROOT / "node_modules" / "pyodide"
READY = """() => new Promise((resolve) => {
  const begun = performance.now();
  const worker = new Worker("/worker.js", { type: "module" });
  worker.onmessage = ({ data }) => {
    if (data.type === "ready") resolve(performance.now() - begun);
  };
})"""


def start_up(browser: Any, profile: Path, visits: int) -> list[float]:
    """Seconds from the start of the page's worker until its engine has found the GPU, visit by
    visit: the first has nothing, each is a new browser on the same profile."""
    found = []
    with serving(Site(profile / "store", PYODIDE)) as client:
        for _ in range(visits):
            with storing(browser, profile) as context:
                page = context.new_page()
                page.goto(f"http://localhost:{client.port}/manifest.webmanifest")
                found.append(page.evaluate(READY) / 1000)
                page.wait_for_timeout(2000)  # what the first visit keeps is kept meanwhile
    return found


def inside(browser: Any, profile: Path) -> None:
    """What Python measures in the tab."""
    files = {f"pyodide/{path.name}": path for path in PYODIDE.iterdir() if path.is_file()}
    with (
        serving_files({**files, "webgemma.whl": wheel()}) as origin,
        storing(browser, profile) as context,
    ):
        page = context.new_page()
        page.goto(f"{origin}/python.html")
        tab = Tab(page, origin, [])
        host = tab.call("inside_bench.submitting", 400, 200)
        print(
            f"400 dispatches: submitted in {host['submit_ms']:.2f} ms (best "
            f"{host['submit_best_ms']:.2f}), the result {host['wait_ms']:.2f} ms later"
        )
        for _ in range(2):
            chosen, stored = tab.call("inside_bench.rates", 1 << 30)["gb_per_second"]
            print(f"to the GPU: a chosen file {chosen:.2f} GB/s, a stored one {stored:.2f} GB/s")


def main() -> None:
    """Print a line for each."""
    with launched() as browser, tempfile.TemporaryDirectory() as folder:
        first, *later = start_up(browser, Path(folder) / "a", 5)
        print(f"Python and engine: {first:.2f} s, then " + ", ".join(f"{s:.2f}" for s in later))
        inside(browser, Path(folder) / "b")


if __name__ == "__main__":
    main()
