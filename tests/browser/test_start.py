"""The start of the page's Python: without a snapshot of its memory, with one, with a bad one."""

from pathlib import Path
from typing import Any

from browser.person import Person
from web.client import serving

from webgemma.web.site import Site

SNAPSHOTS = """async () => {
  const cache = await caches.open("webgemma-python");
  const sizes = {};
  for (const key of await cache.keys()) {
    sizes[new URL(key.url).pathname] = (await (await cache.match(key)).arrayBuffer()).byteLength;
  }
  return sizes;
}"""
OVERWRITE = """async (path) => {
  const cache = await caches.open("webgemma-python");
  await cache.put(path, new Response(new Uint8Array(1 << 20).fill(7)));
}"""


def test_python_starts_from_a_snapshot_and_without_one(chromium: Any, tmp_path: Path) -> None:
    warnings: list[str] = []
    with serving(Site(tmp_path)) as client:
        context = chromium.new_context()
        visitor = Person(context, f"http://localhost:{client.port}/")
        visitor.page.on("console", lambda message: warnings.append(message.text))
        visitor.open()
        first = visitor.page.evaluate(SNAPSHOTS)
        ((path, nbytes),) = first.items()
        assert nbytes > 20 << 20
        visitor.set(Max_tokens="4")
        visitor.open()
        assert visitor.ask("Hello")
        assert visitor.page.evaluate(SNAPSHOTS) == first
        assert warnings == []
        visitor.page.evaluate(OVERWRITE, path)
        visitor.open()
        assert visitor.ask("Hello")
        again = visitor.page.evaluate(SNAPSHOTS)
        assert list(again) == [path]
        assert again[path] > 20 << 20  # not the same size: memory grows in steps of megabytes
        assert any("the snapshot of Python cannot be used" in text for text in warnings)
        context.close()
