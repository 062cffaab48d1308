"""The wheel for the browser: it can be installed, works, and is reproducible."""

import base64
import csv
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from web.client import serving

import webgemma
from webgemma.models import BUNDLED_PATH
from webgemma.web.site import Site
from webgemma.web.wheel import NAME, PACKAGE, Wheel


@pytest.fixture(scope="module")
def data() -> bytes:
    return Wheel().data()


def test_it_holds_the_package_without_the_bundled_model_and_the_page(data: bytes) -> None:
    with zipfile.ZipFile(io.BytesIO(data)) as wheel:
        assert wheel.testzip() is None
        names = wheel.namelist()
    assert len(names) == len(set(names))
    inside = {Path(name).relative_to("webgemma") for name in names if "dist-info" not in name}
    files = (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if path.is_file())
    expected = {path for path in files if "__pycache__" not in path.parts}
    page = {path for path in expected if path.parts[:2] in (("web", "static"), ("web", "lib"))}
    assert Path("web/static/index.html") in page
    # The page fetches both itself.
    assert expected - inside == page | {Path("demo") / BUNDLED_PATH.name}
    assert inside < expected
    assert Path("py.typed") in inside


def test_the_record_matches_the_files(data: bytes) -> None:
    info = f"webgemma-{webgemma.__version__}.dist-info"
    with zipfile.ZipFile(io.BytesIO(data)) as wheel:
        contents = {name: wheel.read(name) for name in wheel.namelist()}
    rows = list(csv.reader(contents[f"{info}/RECORD"].decode().splitlines()))
    assert [row[0] for row in rows] == list(contents)
    for name, digest, nbytes in rows[:-1]:
        sha256 = base64.urlsafe_b64encode(hashlib.sha256(contents[name]).digest()).decode()
        assert (digest, nbytes) == (f"sha256={sha256.rstrip('=')}", str(len(contents[name])))
    assert rows[-1] == [f"{info}/RECORD", "", ""]
    assert b"Root-Is-Purelib: true\nTag: py3-none-any\n" in contents[f"{info}/WHEEL"]
    metadata = contents[f"{info}/METADATA"].decode()
    assert f"\nName: webgemma\nVersion: {webgemma.__version__}\n" in metadata
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: ")]
    assert all("emscripten" in line or "extra ==" in line for line in required)


def test_pip_installs_it_and_it_imports(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_bytes(data)
    target = tmp_path / "target"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    options = ["--no-deps", "--no-index", "--no-compile", "--target", str(target), str(path)]
    subprocess.run([*pip, *options], check=True, timeout=60)
    code = "import webgemma; print(webgemma.__file__); webgemma.Gemma"
    env = {**os.environ, "PYTHONPATH": str(target)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert Path(result.stdout.strip()).is_relative_to(target)


def test_equal_files_give_an_equal_wheel(tmp_path: Path) -> None:
    package = tmp_path / "webgemma"
    shutil.copytree(PACKAGE, package)
    wheel = Wheel(package)
    first = wheel.data()
    assert wheel.data() is first
    os.utime(package / "api.py", (1, 1))
    assert wheel.data() == first
    (package / "api.py").write_text("changed")
    assert wheel.data() != first


def test_the_wheel_is_served_under_its_name(data: bytes, tmp_path: Path) -> None:
    with serving(Site(tmp_path)) as client:
        url = json.loads(client.get("/api/about").body)["wheel"]
        assert url == f"wheel/{NAME}"
        reply = client.get(f"/{url}")
        assert reply.body == data
        assert reply.headers["ETag"] == f'"{hashlib.sha256(data).hexdigest()}"'
        assert client.get(f"/{url}", If_None_Match=reply.headers["ETag"]).status == 304
        assert client.get("/wheel/other-1.0-py3-none-any.whl").status == 404
        assert client.get("/wheel/").status == 404
