"""The offline listing: the files that the page needs without its server, and their version."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from webgemma.web.http import Content, RefusalError
from webgemma.web.wheel import PACKAGE

# The first is served as "./"; browsers store the second; the third is what a server without the
# cookie responds.
_UNLISTED = ("index.html", "sw.js", "locked.html")


def page_urls(static: Path, libraries: Mapping[str, Path], wheel: str) -> list[str]:
    """Return the URLs of the page, its scripts, its libraries, the wheel and the bundled model.

    They are relative to where the page is."""
    page = [name for name in file_names(static, "*") if name not in _UNLISTED]
    scripts = file_names(PACKAGE, "*.js")
    package = [name for name in scripts if not name.startswith(("web/static/", "web/lib/"))]
    package += file_names(PACKAGE, "*.gguf")
    return [
        "./",
        "api/about",
        "api/settings",
        f"wheel/{wheel}",
        *map(quote, page),
        *(f"lib/{quote(name)}" for name in libraries),
        *(f"package/{quote(name)}" for name in package),
    ]


def segments(url: str) -> tuple[str, ...]:
    """Return the segments by which a request for this URL of the listing is served."""
    return () if url == "./" else tuple(unquote(url).split("/"))


def listing(
    urls: Iterable[str], content_of: Callable[[tuple[str, ...]], Content]
) -> dict[str, Any]:
    """Return those of the URLs that are served, and a version that changes with any of them."""
    files, version = [], hashlib.sha256()
    for url in urls:
        try:
            content = content_of(segments(url))
        except RefusalError:  # a link to outside the folder
            continue
        tag = content.tag
        if isinstance(content.data, bytes):
            tag = hashlib.sha256(content.data).hexdigest()
        version.update(f"{url} {tag}\n".encode())
        files.append(url)
    return {"version": version.hexdigest()[:16], "files": files}


def file_names(folder: Path, pattern: str) -> list[str]:
    """Return the sorted paths of matching files below a folder, without hidden ones."""
    paths = (path.relative_to(folder) for path in folder.rglob(pattern) if path.is_file())
    return sorted(
        path.as_posix() for path in paths if not any(part.startswith(".") for part in path.parts)
    )
