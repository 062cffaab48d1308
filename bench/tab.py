"""Time the browser in this Chromium: start-up, submitting dispatches, uploading files to the GPU.

    python bench/tab.py

Needs what `make browser` needs. bench/tab.mjs times models on a hardware GPU."""

import argparse
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
  const start = performance.now();
  const worker = new Worker("/worker.js", { type: "module" });
  worker.onmessage = ({ data }) => {
    if (data.type === "ready") resolve(performance.now() - start);
  };
})"""


def start_up(browser: Any, profile: Path, visits: int) -> list[float]:
    """Return the seconds of each visit from the start of the page's worker until it has a GPU.

    The first visit has an empty profile; each is a new browser on the same profile."""
    seconds = []
    with serving(Site(profile / "store")) as client:
        for _ in range(visits):
            with storing(browser, profile) as context:
                page = context.new_page()
                page.goto(f"http://localhost:{client.port}/manifest.webmanifest")
                seconds.append(page.evaluate(READY) / 1000)
                page.wait_for_timeout(2000)  # until the first visit has stored its files
    return seconds


def measure_inside(browser: Any, profile: Path) -> None:
    """Print what Python measures in the tab."""
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
            print(f"to the GPU: chosen file {chosen:.2f} GB/s, stored file {stored:.2f} GB/s")


def main() -> None:
    """Print a line for each measurement."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    with launched() as browser, tempfile.TemporaryDirectory() as folder:
        first, *later = start_up(browser, Path(folder) / "a", 5)
        print(f"Python and engine: {first:.2f} s, then " + ", ".join(f"{s:.2f}" for s in later))
        measure_inside(browser, Path(folder) / "b")


if __name__ == "__main__":
    main()
