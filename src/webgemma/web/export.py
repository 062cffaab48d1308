"""The page as a folder for any web server: the files of the offline listing, and models."""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from webgemma.errors import InputError
from webgemma.models import FoundModel
from webgemma.web.gpu_memory import gpu_size
from webgemma.web.http import Content
from webgemma.web.libraries import licence_files, missing_message
from webgemma.web.offline import listing, segments
from webgemma.web.server import HEADERS
from webgemma.web.site import Site

HOME, HOSTED = 'data-home="tab"', 'data-home="tab" data-hosted'  # by which scope.js knows it
CHARSET = '<meta charset="utf-8">'
# In the order in which they are moved into a folder that exists: the listing of all files first,
# by which another export knows what is its own.
LISTING = "api/offline"
UNLISTED = ("sw.js", "api/models", ".nojekyll")  # the last: GitHub then serves files as they are
UNFINISHED = (".webgemma-", ".export")  # begin and end of the name of what is being written
CHUNK_NBYTES = 8 << 20

Progress = Callable[[str, int, int], None]  # the file's name, bytes done, total


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    folder: Path
    files: int
    nbytes: int
    models: tuple[str, ...]


def export(
    site: Site,
    folder: Path,
    model: FoundModel | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write the page to a folder, and a model that it offers beside the bundled one.

    The folder may hold an earlier export. InputError if it holds anything else, unless `force`,
    with which other files stay. Until everything is written beside it, nothing in it changes."""
    if missing := missing_message(site.libraries):
        raise InputError(missing)
    earlier = _check_folder(folder, force)
    facts, sources = _describe(model) if model else (None, [])
    parent = folder if folder.is_dir() else folder.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    temporary = parent / secrets.token_hex(4).join(UNFINISHED)
    temporary.mkdir()  # with the permissions that new folders have
    try:
        digests = _add_models(temporary, sources, progress or (lambda *_: None))
        files = _page_files(site, _with_addresses(facts, digests))
        _check_space(temporary, sum(map(len, files.values())))
        for name, data in files.items():
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        names = [LISTING, *sorted(name for name in _file_names(temporary) if name != LISTING)]
        nbytes = sum((temporary / name).stat().st_size for name in names)
        _move(temporary, folder, names, earlier)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Exported(folder, len(names), nbytes, (facts["name"],) if facts else ())


def _page_files(site: Site, models: list[dict[str, Any]]) -> dict[str, bytes]:
    """Return the page's files by their paths in the folder."""
    read: dict[str, bytes] = {}

    def content_of(parts: tuple[str, ...]) -> Content:
        content = site.content(parts)
        data = content.data if isinstance(content.data, bytes) else content.data.read_bytes()
        data = data if parts else _hosted(data.decode()).encode()
        read["/".join(parts) or "index.html"] = data
        return replace(content, data=data)  # its version is that of the bytes, wherever it is

    offline = listing(site.page_urls(), content_of)
    content_of(("sw.js",))
    licences = {f"lib/{name}": path.read_bytes() for name, path in licence_files().items()}
    of_models = {"models": models, "problems": []}
    rest = {".nojekyll": b"", LISTING: _json(offline), "api/models": _json(of_models)}
    return read | licences | rest


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _hosted(page: str) -> str:
    """Return the page as it is in a folder: marked so, and with its own security policy.

    Web servers send none; frame-ancestors has no effect in a page."""
    directives = HEADERS["Content-Security-Policy"].split("; ")
    policy = "; ".join(each for each in directives if not each.startswith("frame-ancestors"))
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    if page.count(HOME) != 1 or page.count(CHARSET) != 1:
        raise InputError("index.html is not the page of this version: install webgemma again.")
    return page.replace(HOME, HOSTED).replace(CHARSET, f"{CHARSET}\n    {meta}")


# Models


def _describe(model: FoundModel) -> tuple[dict[str, Any], list[tuple[str, Path]]]:
    """Return what the page shows of a model, and its files by what they are.

    InputError unless it is a model in a file that can run."""
    if model.path is None:
        raise InputError(f"{model.label} is not a file: download it and name that.")
    with model.open() as gguf:
        architecture = str(gguf.metadata.get("general.architecture", ""))
        size_label = str(gguf.metadata.get("general.size_label", ""))
        if gguf.metadata.get("split.count", 1) != 1:
            raise InputError(
                f"{model.label} is split into several files, and a page opens only one: merge "
                "them first, with llama.cpp's gguf-split --merge."
            )
    name = model.label if model.ollama else model.path.name
    size = gpu_size(model.path, name)
    if size.problem:
        raise InputError(size.problem)
    facts = {
        "name": name,
        "family": architecture,
        "parameters": size_label,
        "quantisation": "",
        "format": "gguf",
        "gpu_nbytes": size.nbytes,
        "gpu_min_nbytes": size.min_nbytes,
        "problem": None,
    }
    parts = [("model", model), *(("projectors", each) for each in model.projectors()[:1])]
    if draft := model.draft():
        parts.append(("draft", draft))
    return facts, [(kind, each.path.resolve()) for kind, each in parts if each.path]


def _with_addresses(
    facts: dict[str, Any] | None, files: list[tuple[str, dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the list of models as the page reads it, with the files' addresses."""
    if facts is None:
        return []
    projectors = [address for kind, address in files if kind == "projectors"]
    by_kind = dict(files)
    return [
        facts | by_kind["model"] | {"projectors": projectors, "draft": by_kind.get("draft")},
    ]


def _add_models(
    folder: Path, sources: list[tuple[str, Path]], progress: Progress
) -> list[tuple[str, dict[str, Any]]]:
    """Link or copy files to `models`; return what each is, with digest, size and address."""
    models = folder / "models"
    linked = []
    for at, (_, path) in enumerate(sources):
        models.mkdir(exist_ok=True)
        try:
            os.link(path, models / str(at))
            linked.append(at)
        except OSError:  # another file system, or one without links
            pass
    copies = [path for at, (_, path) in enumerate(sources) if at not in linked]
    _check_space(folder, sum(path.stat().st_size for path in copies))
    added = []
    for at, (kind, path) in enumerate(sources):
        target = models / str(at)
        with open(os.devnull if at in linked else target, "wb") as out:
            digest, nbytes = _copy(path, out, progress)
        name = f"sha256-{digest}"
        os.replace(target, models / name)
        facts = {"digest": f"sha256:{digest}", "nbytes": nbytes, "url": f"models/{name}"}
        added.append((kind, facts))
    return added


def _copy(path: Path, out: Any, progress: Progress) -> tuple[str, int]:
    """Copy a file; return its SHA-256 and its size."""
    total, done, digest = path.stat().st_size, 0, hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_NBYTES):
            out.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            progress(path.name, done, total)
    if done != total:
        raise InputError(f"{path} was changed while it was read: try again.")
    return digest.hexdigest(), done


# The folder


def _check_folder(folder: Path, force: bool) -> set[str]:
    """Return the files in a folder that an export wrote; InputError if there are others."""
    if not folder.exists():
        return set()
    if not folder.is_dir():
        raise InputError(f"{folder} is a file: name a folder, which need not exist.")
    written = _written(folder)
    for name in _file_names(folder):
        if not force and name not in written:
            raise InputError(
                f"{folder} holds files that no export wrote, such as {name}: choose another "
                "folder, or --force, which leaves them there and replaces those of the same name."
            )
    return written


def _written(folder: Path) -> set[str]:
    """Return the names that the listing of an earlier export has, and those that it never has."""
    try:
        listed = json.loads((folder / LISTING).read_bytes())["files"]
        names = {"/".join(segments(url)) or "index.html" for url in listed}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()
    patterns = ("models/sha256-*", "lib/*/LICENSE*")
    others = {
        path.relative_to(folder).as_posix() for each in patterns for path in folder.glob(each)
    }
    inside = {name for name in names if ".." not in name.split("/") and not name.startswith("/")}
    return inside | others | {LISTING, *UNLISTED}


def _file_names(folder: Path) -> Iterator[str]:
    """Yield the paths of all files below a folder, except what an export left unfinished."""
    for root, folders, files in os.walk(folder):
        if Path(root) == folder:
            folders[:] = [name for name in folders if not _is_unfinished(name)]
        links = [name for name in folders if (Path(root) / name).is_symlink()]
        for name in (*files, *links):
            yield (Path(root) / name).relative_to(folder).as_posix()


def _is_unfinished(name: str) -> bool:
    return name.startswith(UNFINISHED[0]) and name.endswith(UNFINISHED[1])


def _check_space(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise InputError(
            f"The folder needs {nbytes / 1e6:.0f} MB more, and {free / 1e6:.0f} MB are free in "
            f"{folder.parent}: make room, or choose another folder."
        )


def _move(temporary: Path, folder: Path, names: list[str], earlier: set[str]) -> None:
    """Move all files to their places; delete what an earlier export wrote and this one did not."""
    if not folder.exists():
        temporary.rename(folder)
        return
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(temporary / name, folder / name)
    for name in earlier.difference(names):
        with suppress(OSError):
            (folder / name).unlink()
            (folder / name).parent.rmdir()  # if it is empty
    for unfinished in folder.iterdir():
        if _is_unfinished(unfinished.name):
            shutil.rmtree(unfinished, ignore_errors=True)
