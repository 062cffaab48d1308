"""What the page's server serves: the page, Pyodide, models, and byte ranges of them."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.standin import standin_gguf
from helpers.store import add_model, manifest_path
from web.client import ACCESS, Client, serving

from webgemma.gguf.http import HttpSource
from webgemma.gguf.reader import Gguf
from webgemma.web.http import parse_range
from webgemma.web.libraries import LIBRARIES, library_files, licence_files, missing_message
from webgemma.web.site import MIME, Site

GGUF = bytes(range(256)) * 40  # 10240 bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = tmp_path / "store"
    parts = [("projector", b"mmproj"), ("draft", b"drafter")]
    add_model(store, "gemma4:e2b", gguf=GGUF, layers=parts)
    add_model(store, "cloud:latest", gguf=None, config={"remote_host": "far away"})
    return tmp_path


@pytest.fixture
def client(folder: Path) -> Iterator[Client]:
    with serving(Site(folder / "store")) as client:
        yield client


@pytest.fixture
def blob(folder: Path) -> str:
    (path,) = (p for p in (folder / "store" / "blobs").iterdir() if p.read_bytes() == GGUF)
    return path.name


def test_the_page_and_its_files_are_served(client: Client) -> None:
    page = client.get("/")
    assert page.status == 200
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "<script>" not in page.text
    for name in ("page.js", "style.css", "icon.svg"):
        assert f'"{name}"' in page.text
        assert client.get(f"/{name}?v=1").status == 200


@pytest.mark.parametrize(
    ("name", "mime"),
    [
        ("a.js", "text/javascript; charset=utf-8"),
        ("a.mjs", "text/javascript; charset=utf-8"),
        ("a.css", "text/css; charset=utf-8"),
        ("a.wasm", "application/wasm"),
        ("a.json", "application/json"),
        ("a.svg", "image/svg+xml"),
        ("a.webmanifest", "application/manifest+json"),
        ("a.unknown", "application/octet-stream"),
        ("deep/er/a.HTML", MIME[".html"]),
        ("ümlaut & more.txt", MIME[".txt"]),
    ],
)
def test_files_have_their_mime_type(tmp_path: Path, name: str, mime: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"something")
    with serving(Site(tmp_path, tmp_path)) as client:
        reply = client.get("/" + name.replace("ü", "%C3%BC").replace(" ", "%20"))
    assert (reply.status, reply.body) == (200, b"something")
    assert reply.headers["Content-Type"] == mime


def test_an_unchanged_page_is_not_sent_again(folder: Path) -> None:
    page = folder / "index.html"
    page.write_text("old")
    with serving(Site(folder, folder)) as client:
        tag = client.get("/").headers["ETag"]
        for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
            reply = client.get("/", If_None_Match=known)
            assert (reply.status, reply.body, reply.headers["ETag"]) == (304, b"", tag)
        page.write_text("newer")
        assert client.get("/", If_None_Match=tag).text == "newer"


def test_the_files_of_libraries_are_served_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "a.wasm").write_bytes(b"\0asm")
    (tmp_path / "b.js").write_text("library")
    libraries = {"pyodide/pyodide.mjs": tmp_path / "b.js", "pyodide/a.wasm": tmp_path / "a.wasm"}
    with serving(Site(tmp_path, libraries=libraries)) as client:
        about = json.loads(client.get("/api/about").body)
        reply = client.get(f"/{about['pyodide']}a.wasm")
        assert (reply.body, reply.headers["Content-Type"]) == (b"\0asm", "application/wasm")
        assert client.get(f"/{about['pyodide']}pyodide.mjs").text == "library"
        assert about["xgrammar"] is None
        for name in ("pyodide/b.js", "pyodide/", "pyodide", "", "xgrammar/index.js"):
            assert client.get(f"/lib/{name}").status == 404


def test_missing_libraries_are_named_with_what_to_do(tmp_path: Path) -> None:
    with serving(Site(tmp_path, libraries={})) as client:
        reply = client.get("/lib/pyodide/pyodide.mjs")
        assert json.loads(client.get("/api/about").body)["pyodide"] is None
    assert reply.status == 404
    assert "pyodide" in reply.text
    assert "`npm ci`" in reply.text
    some = library_files()
    del some["xgrammar/index.js"]
    assert "are missing (xgrammar): run" in missing_message(some)
    assert missing_message(library_files()) == ""


def test_a_licence_belongs_to_every_library() -> None:
    files = licence_files()
    assert {name.split("/")[0] for name in files} == set(LIBRARIES)
    assert all("icen" in path.read_text() or "ICEN" in path.read_text() for path in files.values())
    assert {"pyodide/LICENSE-PYTHON", "pdfjs/LICENSE-PDFJS"} < set(files)


def test_scripts_of_the_package_are_served_as_files(client: Client) -> None:
    reply = client.get("/package/web/static/page.js")
    assert reply.headers["Content-Type"] == MIME[".js"]
    assert reply.body == client.get("/page.js").body
    for path in ("api.py", "web/static/index.html", "%2e%2e/x.js", ".js", "js", ""):
        assert client.get(f"/package/{path}").status in (400, 404)


def test_models_are_listed_with_what_is_needed_to_fetch_them(client: Client) -> None:
    listing = json.loads(client.get("/api/models").body)
    cloud, gemma = listing["models"]
    assert listing["problems"] == []
    assert gemma["name"] == "gemma4:e2b"
    assert gemma["nbytes"] == len(GGUF)
    assert (gemma["quantisation"], gemma["format"], gemma["family"]) == ("Q4_K_M", "gguf", "gemma4")
    assert gemma["problem"].startswith("gemma4:e2b is not a GGUF file")
    assert client.get(f"/{gemma['url']}").body == GGUF
    assert client.get(f"/models/{gemma['digest']}").body == GGUF
    assert client.get(f"/{gemma['projectors'][0]['url']}").body == b"mmproj"
    assert client.get(f"/{gemma['draft']['url']}").body == b"drafter"
    assert (cloud["projectors"], cloud["draft"]) == ([], None)
    assert cloud["digest"] is cloud["url"] is None
    assert "no weights on this machine" in cloud["problem"]


def test_the_gguf_reader_opens_a_model_by_its_url(tmp_path: Path) -> None:
    data = standin_gguf()
    add_model(tmp_path, gguf=data)

    async def read(port: int, url: str) -> tuple[int, bytes]:
        gguf = await Gguf.aopen(await HttpSource.open(f"http://localhost:{port}/{url}"))
        with gguf:
            tensor = gguf.tensors["blk.0.ffn_down.weight"]
            return gguf.nbytes, bytes(await gguf.read(tensor))

    with serving(Site(tmp_path)) as client:
        url = json.loads(client.get("/api/models").body)["models"][0]["url"]
        nbytes, weights = asyncio.run(read(client.port, f"{url}?token={ACCESS.token}"))
    assert nbytes == len(data)
    assert weights in data


def test_a_missing_store_is_empty(tmp_path: Path) -> None:
    with serving(Site(tmp_path / "absent")) as client:
        assert json.loads(client.get("/api/models").body) == {"models": [], "problems": []}


WHOLE = (200, 0, len(GGUF))


@pytest.mark.parametrize(
    ("header", "status", "first", "end"),
    [
        ("bytes=0-0", 206, 0, 1),
        ("bytes=100-299", 206, 100, 300),
        ("bytes=10239-", 206, 10239, 10240),
        ("bytes=10000-99999", 206, 10000, 10240),
        ("bytes=10000-" + "9" * 900, 206, 10000, 10240),
        ("bytes=-5", 206, 10235, 10240),
        ("bytes=-99999", 206, 0, 10240),
        ("bytes=10240-", 416, 0, 0),
        ("bytes=10240-10250", 416, 0, 0),
        ("bytes=" + "9" * 900 + "-", 416, 0, 0),
        ("bytes=-0", 416, 0, 0),
        ("bytes=5-4", *WHOLE),  # the rest is not one valid range: HTTP requires it to be ignored
        ("bytes=0-1,4-5", *WHOLE),
        ("bytes=-", *WHOLE),
        ("bytes=1", *WHOLE),
        ("bytes=a-b", *WHOLE),
        ("bytes=--1", *WHOLE),
        ("lines=0-1", *WHOLE),
        ("", *WHOLE),
    ],
)
def test_ranges(client: Client, blob: str, header: str, status: int, first: int, end: int) -> None:
    reply = client.get(f"/models/{blob}", Range=header)
    assert reply.status == status
    assert reply.body == GGUF[first:end]
    assert reply.headers["Content-Length"] == str(end - first)
    expected = {200: None, 206: f"bytes {first}-{end - 1}/10240", 416: "bytes */10240"}[status]
    assert reply.headers["Content-Range"] == expected


def test_ranges_of_empty_content_are_empty() -> None:
    for header in ("bytes=0-", "bytes=0-0", "bytes=-1"):
        first, end = parse_range(header, 0) or (0, 1)
        assert first >= end


@pytest.mark.parametrize(
    ("condition", "status"),
    [
        ('"{tag}"', 206),
        ('"other"', 200),
        ('W/"{tag}"', 200),
        ("{tag}", 200),
        ("Wed, 21 Oct 2026 07:28:00 GMT", 200),
    ],
)
def test_if_range_requires_the_same_blob(
    client: Client, blob: str, condition: str, status: int
) -> None:
    tag = blob.replace("-", ":")
    reply = client.get(f"/models/{blob}", Range="bytes=1-2", If_Range=condition.format(tag=tag))
    assert reply.status == status
    assert reply.headers["ETag"] == f'"{tag}"'
    assert reply.body == (GGUF[1:3] if status == 206 else GGUF)


def test_head_reports_the_size_without_a_body(client: Client, blob: str) -> None:
    reply = client.get(f"/models/{blob}", "HEAD", Range="bytes=0-1")
    assert (reply.status, reply.body) == (200, b"")
    assert reply.headers["Content-Length"] == "10240"
    assert reply.headers["Accept-Ranges"] == "bytes"
    assert reply.headers["Cache-Control"] == "no-store"
    assert client.get("/absent", "HEAD").body == b""


def test_added_and_removed_models_are_noticed(client: Client, folder: Path, blob: str) -> None:
    assert client.get(f"/models/{blob}").status == 200
    add_model(folder / "store", "new:e2b", gguf=b"new")
    new = json.loads(client.get("/api/models").body)["models"][-1]
    assert client.get(f"/{new['url']}").body == b"new"
    manifest_path(folder / "store", "gemma4:e2b").unlink()
    assert client.get(f"/models/{blob}").status == 404


@pytest.mark.parametrize("damage", ["cut", "gone", "folder", "link", "loop"])
def test_damaged_blobs_are_reported(client: Client, folder: Path, blob: str, damage: str) -> None:
    path = folder / "store" / "blobs" / blob
    path.unlink()
    if damage == "cut":
        path.write_bytes(GGUF[:-1])
    elif damage == "folder":
        path.mkdir()
    elif damage == "link":
        (folder / "secret").write_bytes(GGUF)
        path.symlink_to(folder / "secret")
    elif damage == "loop":
        path.symlink_to(path)
    reply = client.get(f"/models/{blob}")
    assert reply.status == 404
    expected = {"cut": "10239 of 10240", "link": "a link to outside the store"}
    assert expected.get(damage, "pull") in reply.text
    model = json.loads(client.get("/api/models").body)["models"][1]
    assert model["problem"]
    assert model["url"] is None


def test_a_linked_folder_of_blobs_is_served(folder: Path, blob: str) -> None:
    os.rename(folder / "store" / "blobs", folder / "disk")
    (folder / "store" / "blobs").symlink_to(folder / "disk")
    with serving(Site(folder / "store")) as client:
        assert client.get(f"/models/{blob}").body == GGUF
