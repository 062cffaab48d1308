"""The page as a folder: what is written, what is refused, and pages in two folders of one host."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from browser.chromium import CHROMIUM
from browser.serving import folder_server
from helpers.command import answer, refused, webgemma
from helpers.store import add_model
from helpers.tiny import KINDS, tiny_gguf
from web.page import Visitor, page_site

import webgemma.web.export as export_module
from webgemma.errors import InputError
from webgemma.models import BUNDLED_PATH, find_model
from webgemma.web.export import export
from webgemma.web.libraries import LIBRARIES
from webgemma.web.server import HEADERS
from webgemma.web.site import STATIC, Site
from webgemma.web.wheel import NAME


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf(KINDS["small"]))
    return path


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_folder_has_every_file_of_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "site"
    made = answer("web", "--export", folder)
    assert made["folder"] == str(folder)
    assert (made["files"], made["models"]) == (len(files_of(folder)), [])
    assert made["nbytes"] == sum((folder / name).stat().st_size for name in files_of(folder))
    listing = json.loads((folder / "api" / "offline").read_text())
    about = json.loads((folder / "api" / "about").read_text())
    listed = {"index.html" if url == "./" else url for url in listing["files"]}
    assert listed <= files_of(folder)
    assert {about["wheel"], f"{about['pyodide']}pyodide.mjs", about["xgrammar"]} < listed
    assert f"package/demo/{BUNDLED_PATH.name}" in listed
    assert (folder / "wheel" / NAME).stat().st_size > 100_000
    licences = {f"lib/{name}/LICENSE" for name in LIBRARIES}
    rest = files_of(folder) - listed - licences
    assert {"sw.js", "api/offline", "api/models", ".nojekyll"} <= rest
    assert all("LICENSE" in name for name in rest if name.startswith("lib/"))
    assert json.loads((folder / "api" / "models").read_text()) == {"models": [], "problems": []}
    page = (folder / "index.html").read_text()
    assert "data-hosted" in page
    (policy,) = [line for line in page.splitlines() if "Content-Security-Policy" in line]
    parts = HEADERS["Content-Security-Policy"].split("; ")
    assert all((part in policy) != part.startswith("frame-ancestors") for part in parts)
    assert page.index(policy) < page.index("<link")
    for name in ("index.html", "manifest.webmanifest", *(p.name for p in STATIC.glob("*.js"))):
        text = (folder / name).read_text()
        for quote in "\"'`":
            for absolute in ("lib/", "api/", "package/", "models/", "wheel/", "worker", "sw."):
                if name != "models.js":  # which reads absolute addresses of older entries
                    assert f"{quote}/{absolute}" not in text, name
    assert os.stat(folder).st_mode & 0o777 == 0o777 & ~current_umask()


def current_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def test_another_export_replaces_the_first_and_leaves_nothing_of_it(
    tmp_path: Path, model: Path
) -> None:
    folder = tmp_path / "site"
    assert answer("web", "--export", folder, "--model", model)["models"] == ["tiny.gguf"]
    (facts,) = json.loads((folder / "api" / "models").read_text())["models"]
    served = folder / facts["url"]
    assert served.read_bytes() == model.read_bytes()
    assert served.samefile(model)  # a link: on one disk a model is not copied
    assert facts["digest"] == f"sha256:{served.name.removeprefix('sha256-')}"
    assert (facts["name"], facts["nbytes"]) == ("tiny.gguf", model.stat().st_size)
    assert facts["gpu_nbytes"] > 0
    before = (folder / "api" / "offline").read_text()
    (folder / ".webgemma-1234.export").mkdir()  # what a killed export left
    answer("web", "--export", folder)
    assert not (folder / "models").exists()
    assert not list(folder.glob(".webgemma-*"))
    assert (folder / "api" / "offline").read_text() == before
    assert model.is_file()


def test_a_model_of_ollama_comes_with_its_files_and_is_copied_to_other_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise OSError("not on this file system")

    parts = [("projector", b"mmproj")]
    add_model(tmp_path / "store", "e2b:tiny", gguf=tiny_gguf(KINDS["small"]), layers=parts)
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "store"))
    monkeypatch.setattr(export_module.os, "link", no_links)
    seen: list[int] = []
    site = Site(tmp_path)
    found = find_model("e2b:tiny")
    made = export(site, tmp_path / "site", found, progress=lambda *done: seen.append(done[1]))
    (facts,) = json.loads((tmp_path / "site" / "api" / "models").read_text())["models"]
    assert made.models == (facts["name"],)
    (projector,) = facts["projectors"]
    assert (tmp_path / "site" / projector["url"]).read_bytes() == b"mmproj"
    assert facts["draft"] is None
    assert seen == [facts["nbytes"], len(b"mmproj")]


def test_what_is_in_a_folder_is_not_touched_without_force(tmp_path: Path) -> None:
    folder = tmp_path / "site"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "HEAD").write_text("mine")
    message = refused("web", "--export", folder)
    assert f"{folder} holds files that no export wrote, such as .git/HEAD" in message
    assert files_of(folder) == {".git/HEAD"}
    answer("web", "--export", folder, "--force")
    assert (folder / ".git" / "HEAD").read_text() == "mine"
    assert (folder / "index.html").is_file()
    assert "such as .git/HEAD" in refused("web", "--export", folder)
    (folder / "api" / "offline").write_text('{"files": ["../../x", "/etc/passwd", 3]}')
    assert "holds files" in refused("web", "--export", folder)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--export", "{tmp}/tiny.gguf"], "is a file: name a folder"),
        (["--export", "{tmp}/site", "--model", "{tmp}/absent.gguf"], "absent.gguf"),
        (["--export", "{tmp}/site", "--model", "{tmp}/text.gguf"], "not a GGUF file"),
        (["--model", "{tmp}/tiny.gguf"], "--model and --force are options of --export"),
        (["--force"], "name a folder, too"),
    ],
)
@pytest.mark.usefixtures("model")
def test_bad_input_ends_in_a_sentence(tmp_path: Path, given: list[str], sentence: str) -> None:
    (tmp_path / "text.gguf").write_text("nothing of the kind")
    assert sentence in refused("web", *(part.format(tmp=tmp_path) for part in given))
    assert not (tmp_path / "site").exists()


@pytest.mark.parametrize("lacking", ["libraries", "space", "time"])
def test_a_failed_export_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    site = Site(tmp_path, libraries={} if lacking == "libraries" else None)
    if lacking == "space":
        usage = shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr(export_module.shutil, "disk_usage", lambda _: usage)
    if lacking == "time":

        def fail(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(export_module, "_move", fail)
    with pytest.raises((InputError, KeyboardInterrupt)) as error:
        export(site, tmp_path / "site")
    if lacking != "time":
        assert {"libraries": "`npm ci`", "space": "make room"}[lacking] in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_the_help_has_an_example() -> None:
    assert "webgemma web --export site/ --model gemma.gguf" in webgemma("web", "--help").output


@pytest.mark.skipif(not CHROMIUM, reason="needs chromium")
def test_two_folders_of_one_host_keep_their_pages_apart(
    context: Any, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "missing_message", lambda _: "")  # the worker is not real
    site = page_site(tmp_path / "source")
    export(site, tmp_path / "host" / "a", find_model(str(model)))
    export(site, tmp_path / "host" / "b")
    export(site, tmp_path / "host" / "b" / "c")
    with folder_server(tmp_path / "host") as origin:
        first, second, third = (Visitor(context, f"{origin}/{f}/") for f in ("a", "b/c", "b"))
        for visitor in (first, second, third):
            visitor.open()
            visitor.page.evaluate("navigator.serviceWorker.ready.then(() => true)")
        first.ask("only in a")
        assert "This page offers tiny.gguf (" in first.notice()
        first.button("Load tiny.gguf").click()
        first.page.locator("#model-name", has_text="tiny.gguf").wait_for()
        first.page.locator("#model-button").click()
        assert first.page.locator("#ollama-title").inner_text() == "On this page"
        assert first.texts("#ollama .model .name") == ["tiny.gguf"]
        first.button("Close").click()
        second.page.locator("#model-button").click()
        assert second.page.locator("#ollama-title").is_hidden()
        assert second.page.locator("#ollama-state").inner_text() == ""
    for visitor in (first, second, third):
        visitor.open("tiny.gguf" if visitor is first else "Bundled model")
    assert first.texts(".user .body") == ["only in a"]
    assert second.texts(".user .body") == third.texts(".user .body") == []
    names = [name.rpartition("/")[0] for name in first.page.evaluate("caches.keys()")]
    pages = sorted(name for name in names if name.startswith("webgemma-page"))
    assert pages == ["webgemma-page/a", "webgemma-page/b", "webgemma-page/b/c"]
    scopes = "navigator.serviceWorker.ready.then(({ scope }) => scope)"
    assert second.page.evaluate(scopes) == second.url
    unexpected = [e for v in (first, second, third) for e in v.errors]
    assert [error for error in unexpected if "Failed to load resource" not in error] == []
