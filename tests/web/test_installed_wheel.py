"""The wheel alone: it has what the page needs, is reproducible, and serves without a checkout."""

import hashlib
import json
import runpy
import shutil
import tarfile
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import urljoin
from urllib.request import HTTPCookieProcessor, build_opener

import pytest
from helpers.installed import ROOT, build_sources, build_wheel, install, serving_installed

from webgemma.models import BUNDLED_PATH
from webgemma.web.libraries import LIBRARIES, library_files, licence_files

pytestmark = pytest.mark.skipif(
    not (ROOT / "node_modules").is_dir(), reason="needs `npm ci`, whose files the wheel has"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_it_has_the_libraries_with_their_licences_and_the_model(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        for name, path in {**library_files(), **licence_files()}.items():
            assert archive.read(f"webgemma/web/lib/{name}") == path.read_bytes(), name
    assert f"webgemma/demo/{BUNDLED_PATH.name}" in names
    in_lib = [name for name in names if name.startswith("webgemma/web/lib/")]
    assert len(in_lib) == len({**library_files(), **licence_files()})
    assert {name.split("/")[3] for name in in_lib} == set(LIBRARIES)


def test_a_build_from_the_source_distribution_is_equal(wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(build_sources(tmp_path / "sources")) as archive:
        archive.extractall(tmp_path, filter="data")
    (sources,) = tmp_path.glob("webgemma-*")
    (sources / "src" / "webgemma" / "py.typed").touch()  # another time, the same bytes
    assert build_wheel(tmp_path / "dist", sources).read_bytes() == wheel.read_bytes()


def test_it_serves_every_file_of_the_page_away_from_the_checkout(
    wheel: Path, tmp_path: Path
) -> None:
    installed = install(wheel, tmp_path / "installed")

    browser = build_opener(HTTPCookieProcessor())

    def get(url: str) -> bytes:
        with browser.open(urljoin(address, url), timeout=10) as reply:
            assert reply.status == 200
            return bytes(reply.read())

    with serving_installed(installed, tmp_path / "home") as address:
        browser.open(address, timeout=10).close()  # which gives the cookie
        files = {url: get(url) for url in json.loads(get("api/offline"))["files"]}
        about = json.loads(files["api/about"])
    assert {about["pyodide"] + "pyodide.asm.wasm", about["xgrammar"], about["wheel"]} < set(files)
    for name, path in library_files().items():
        assert hashlib.sha256(files[f"lib/{name}"]).digest() == (
            hashlib.sha256(path.read_bytes()).digest()
        )
    assert (
        files["package/gguf/files.js"]
        == (installed / "webgemma" / "gguf" / "files.js").read_bytes()
    )
    assert len(files[about["wheel"]]) < 3 << 20  # without the model and the libraries


@pytest.mark.parametrize(("has_some", "required"), [(False, False), (False, True), (True, False)])
def test_a_build_without_all_libraries(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    has_some: bool,
    required: bool,
) -> None:
    table = tmp_path / "src" / "webgemma" / "web" / "libraries.py"
    table.parent.mkdir(parents=True)
    shutil.copy(ROOT / "src" / "webgemma" / "web" / "libraries.py", table)
    (tmp_path / "package-lock.json").touch()
    if has_some:
        library = LIBRARIES["temml"]
        file = tmp_path / "node_modules" / library.package / library.folder / library.files[0]
        file.parent.mkdir(parents=True)
        file.touch()
    monkeypatch.setenv("WEBGEMMA_LIBRARIES", "required" if required else "")
    hook_class: Any = runpy.run_path(str(ROOT / "hatch_build.py"))["LibrariesHook"]
    hook = hook_class(str(tmp_path), {}, None, None, str(tmp_path), "wheel")
    data: dict[str, Any] = {"force_include": {}}
    hook.initialize("editable", data)
    if has_some or required:
        with pytest.raises(SystemExit, match="`npm ci`"):
            hook.initialize("standard", data)
        return
    hook.initialize("standard", data)
    assert "`npm ci`" in capfd.readouterr().err
    assert data["force_include"] == {}
