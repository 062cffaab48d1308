"""How the page's Python begins: by itself, or from a picture of its memory, also a bad one."""

from pathlib import Path
from typing import Any

from browser.person import PYODIDE, Person
from web.client import serving

from webgemma.web.site import Site

PICTURE = """async () => {
  const cache = await caches.open("webgemma-python");
  const sizes = {};
  for (const key of await cache.keys()) {
    sizes[new URL(key.url).pathname] = (await (await cache.match(key)).arrayBuffer()).byteLength;
  }
  return sizes;
}"""
SPOIL = """async (path) => {
  const cache = await caches.open("webgemma-python");
  await cache.put(path, new Response(new Uint8Array(1 << 20).fill(7)));
}"""


def test_python_begins_from_a_picture_and_without_one(chromium: Any, tmp_path: Path) -> None:
    warnings: list[str] = []
    with serving(Site(tmp_path, PYODIDE)) as client:
        context = chromium.new_context()
        visitor = Person(context, f"http://localhost:{client.port}/")
        visitor.page.on("console", lambda message: warnings.append(message.text))
        visitor.open()
        first = visitor.page.evaluate(PICTURE)
        ((path, nbytes),) = first.items()
        assert nbytes > 20 << 20
        visitor.set(Most_tokens="4")
        visitor.open()
        assert visitor.ask("Hello")
        assert visitor.page.evaluate(PICTURE) == first
        assert warnings == []
        visitor.page.evaluate(SPOIL, path)
        visitor.open()
        assert visitor.ask("Hello")
        assert visitor.page.evaluate(PICTURE) == first
        assert any("the picture of Python does not work" in text for text in warnings)
        context.close()
