"""Bytes from a file, from memory and from web servers of every temper."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.gguf.malformed import GOOD
from tests.gguf.server import Site, serve
from webgemma.errors import GgufError, ModelNotFoundError
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource, FileSource, HttpSource
from webgemma.sync import run_sync

DATA = bytes(range(256)) * 1024


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "model.gguf"
    file.write_bytes(DATA)
    return file


# Memory and files


def test_bytes_are_viewed_not_copied():
    source = BytesSource(DATA)
    view = run_sync(source.read(3, 5))
    assert (view, view.obj, view.readonly) == (DATA[3:8], DATA, True)
    assert (source.name, source.nbytes) == ("<bytes>", len(DATA))


def test_a_file_is_read(path):
    source = FileSource(path)
    assert run_sync(source.read(1000, 10)) == DATA[1000:1010]
    assert run_sync(source.read(len(DATA), 0)) == b""
    assert (source.name, source.nbytes) == ("model.gguf", len(DATA))
    source.close()


def test_bytes_outlive_the_file(path):
    source = FileSource(path)
    data = run_sync(source.read(0, 256))
    source.close()
    source.close()
    assert data == DATA[:256]
    with pytest.raises(GgufError, match=r"model\.gguf is closed"):
        run_sync(source.read(0, 1))


def test_a_read_may_take_several_calls(path, monkeypatch):
    monkeypatch.setattr("webgemma.gguf.sources._PIECE_NBYTES", 1000)
    source = FileSource(path)
    assert run_sync(source.read(7, 5000)) == DATA[7:5007]


def test_a_system_without_pread(path, monkeypatch):
    monkeypatch.delattr(os, "pread")
    source = FileSource(path)
    assert run_sync(source.read(7, 5000)) == DATA[7:5007]
    os.truncate(path, 4000)
    with pytest.raises(GgufError, match="became shorter"):
        run_sync(source.read(7, 5000))


@pytest.mark.parametrize("nbytes", [0, 100, len(DATA) - 1])
def test_a_file_that_is_cut(path, nbytes):
    source = FileSource(path)
    os.truncate(path, nbytes)
    words = f"became shorter while it was read: it had {len(DATA)} bytes and has {nbytes}"
    with pytest.raises(GgufError, match=words):
        run_sync(source.read(0, len(DATA)))
    with pytest.raises(GgufError, match=words):  # and a place that is still there
        run_sync(source.read(0, 1))


def test_a_file_that_is_overwritten(path):
    source = FileSource(path)
    path.write_bytes(DATA[::-1])
    os.utime(path, ns=(0, 0))
    with pytest.raises(GgufError, match=r"model\.gguf was written to while it was read"):
        run_sync(source.read(0, 1))


@pytest.mark.parametrize("act", [Path.unlink, lambda path: path.with_name("new").replace(path)])
def test_a_file_that_loses_its_name_can_be_read(path, act):
    path.with_name("new").write_bytes(b"another")
    source = FileSource(path)
    act(path)
    assert run_sync(source.read(1000, 10)) == DATA[1000:1010]


def test_a_drive_that_fails(path, monkeypatch):
    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    source = FileSource(path)
    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(GgufError, match=r"gguf: bytes 3 to 8 cannot be read: .*Input/output"):
        run_sync(source.read(3, 5))


def test_a_forgotten_file_is_closed(path):
    source = FileSource(path)
    file = source._file
    del source
    assert file.closed


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(-1, 2), (0, len(DATA) + 1), (len(DATA), 1), (5, -2), (1 << 64, 1)]
)
def test_no_byte_outside_the_file(path, offset, nbytes):
    for source in (BytesSource(DATA), FileSource(path)):
        with pytest.raises(GgufError, match=f"bytes {offset} to {offset + nbytes} were asked"):
            run_sync(source.read(offset, nbytes))
        source.close()


def test_nothing_is_read_as_nothing():
    assert run_sync(BytesSource(DATA).read(len(DATA), 0)) == b""


def test_files_that_cannot_be_opened(tmp_path, path, monkeypatch):
    empty, pipe = tmp_path / "empty.gguf", tmp_path / "pipe"
    empty.touch()
    os.mkfifo(pipe)
    for file, error, words in (
        (tmp_path / "none.gguf", ModelNotFoundError, "There is no file"),
        (path / "inside", ModelNotFoundError, "There is no file"),
        (tmp_path, GgufError, "is a folder"),
        (empty, GgufError, "is empty"),
        (pipe, GgufError, "not a regular file"),
        ("a\0b", GgufError, "cannot be opened"),
        ("x" * 5000, GgufError, "cannot be opened"),
    ):
        with pytest.raises(error, match=words):
            FileSource(file)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(GgufError, match=r"model\.gguf may not be read"):
        FileSource(path)


def test_siblings(tmp_path, path):
    (tmp_path / "other.gguf").write_bytes(b"other")
    here = FileSource(path)
    beside = run_sync(here.sibling("other.gguf"))
    assert (beside.name, run_sync(beside.read(0, 5))) == ("other.gguf", b"other")
    with pytest.raises(ModelNotFoundError):
        run_sync(here.sibling("none.gguf"))
    with pytest.raises(GgufError, match="not a file name"):
        run_sync(here.sibling("../other.gguf"))
    here.close()
    beside.close()
    in_memory = BytesSource(b"x", siblings={"y": b"yy"})
    assert run_sync(in_memory.sibling("y")).nbytes == 2
    with pytest.raises(ModelNotFoundError, match="no z beside"):
        run_sync(in_memory.sibling("z"))


# HTTP


def fetch(
    site: Site, act: Callable[[HttpSource], Awaitable[object]], path: str = "/model.gguf"
) -> object:
    """Opens a file of the site, impatiently, and does something with it."""

    async def run() -> object:
        source = await HttpSource.open(
            site.url + path, retries=3, timeout_seconds=0.2, backoff_seconds=0.001
        )
        try:
            return await act(source)
        finally:
            source.close()

    return asyncio.run(run())


async def read_all(source: HttpSource) -> bytes:
    return bytes(await source.read(0, source.nbytes))


def test_ranges_come_over_one_connection():
    async def act(source: HttpSource) -> None:
        assert source.nbytes == len(DATA)
        assert source.name == site.url + "/model.gguf"
        assert await source.read(1000, 24) == DATA[1000:1024]
        assert await source.read(len(DATA) - 1, 1) == DATA[-1:]
        assert await source.read(7, 0) == b""
        with pytest.raises(GgufError, match="were asked for"):
            await source.read(len(DATA), 1)

    with serve({"/model.gguf": DATA}) as site:
        fetch(site, act)
    assert site.ranges == [(0, 1), (1000, 1024), (len(DATA) - 1, len(DATA))]
    assert site.connections == 1


def test_reads_may_run_at_once():
    async def act(source: HttpSource) -> None:
        pieces = await asyncio.gather(*(source.read(i * 1000, 1000) for i in range(20)))
        assert b"".join(pieces) == DATA[:20_000]

    with serve({"/model.gguf": DATA}) as site:
        fetch(site, act)


@pytest.mark.parametrize(
    ("tricks", "resumed_at"),
    [
        (["cut:1000"], [0, 1000]),
        (["cut:1000", "cut:0", "cut:5"], [0, 1000, 1000, 1005]),
        (["stall:70000"], [0, 70_000]),
        (["hang-up"], [0, 0]),
        (["status:503", "status:429", "status:500"], [0, 0, 0, 0]),
        (["half"], [0, len(DATA) // 2]),
        (["cut:66000"] * 3 + ["cut:3"] * 2, [0, 66_000, 132_000, 198_000, 198_003, 198_006]),
    ],
    ids=str,
)
def test_failures_that_pass_are_resumed(tricks, resumed_at):
    with serve({"/model.gguf": DATA}, "", *tricks) as site:
        assert fetch(site, read_all) == DATA
    assert [first for first, _ in site.ranges[1:]] == resumed_at


@pytest.mark.parametrize(
    ("trick", "words"),
    [
        ("cut:0", "the connection was cut after 4 tries"),
        ("stall:0", "the connection failed"),
        ("hang-up", "the connection failed"),
        ("status:503", "the server answers 503 after 4 tries"),
    ],
)
def test_patience_ends(trick, words):
    with serve({"/model.gguf": DATA}, "", *[trick] * 9) as site, pytest.raises(GgufError) as error:
        fetch(site, read_all)
    assert words in str(error.value)
    assert site.url in str(error.value)


@pytest.mark.parametrize(
    ("trick", "words"),
    [
        ("grown", "was changed on the server"),
        ("other-tag", "was changed on the server"),
        ("whole", "was changed on the server"),
        ("status:416", "was changed on the server"),
        ("shifted", "bytes 0-262143 were asked for, 'bytes 1-262143/262144' came"),
        ("no-content-range", "does not say what it sends"),
        ("packed", "sends something else"),
        ("long", "sends something else"),
        ("status:403", "answers 403: it wants a login"),
        ("status:400", "answers 400"),
    ],
)
def test_wrong_answers_are_refused_at_once(trick, words):
    with serve({"/model.gguf": DATA}, "", trick) as site, pytest.raises(GgufError) as error:
        fetch(site, read_all)
    assert words in str(error.value)
    assert len(site.ranges) == 2


def test_a_missing_file_is_named():
    with serve({}) as site, pytest.raises(ModelNotFoundError, match=r"/model\.gguf does not exist"):
        fetch(site, read_all)


@pytest.mark.parametrize("trick", ["whole", "endless"])
def test_small_files_are_taken_whole_from_a_server_without_ranges(trick):
    with serve({"/model.gguf": DATA}, trick) as site:
        assert fetch(site, read_all) == DATA
    assert len(site.ranges) == 1


def test_a_whole_file_is_asked_for_again_after_a_cut():
    with serve({"/model.gguf": DATA}, "whole-cut", "whole-cut", "whole") as site:
        assert fetch(site, read_all) == DATA
    assert len(site.ranges) == 3


@pytest.mark.parametrize("trick", ["whole", "endless"])
def test_large_files_need_ranges(trick, monkeypatch):
    monkeypatch.setattr("webgemma.gguf.http._WHOLE_NBYTES", len(DATA) - 1)
    with (
        serve({"/model.gguf": DATA}, trick) as site,
        pytest.raises(GgufError, match="cannot send parts of a file"),
    ):
        fetch(site, read_all)


@pytest.mark.parametrize("trick", ["whole", "status:416"])
def test_an_empty_file_is_refused(trick):
    with (
        serve({"/model.gguf": b""}, trick) as site,
        pytest.raises(GgufError, match=r"model\.gguf is empty"),
    ):
        fetch(site, read_all)


def test_redirects_are_followed_and_remembered():
    with serve(
        {"/moved/a b.gguf": DATA}, "redirect:/old", "redirect:/moved/a b.gguf?key=1"
    ) as site:
        assert fetch(site, read_all) == DATA
    moved = "/moved/a%20b.gguf?key=1"
    assert site.paths == ["/model.gguf", "/old", moved, moved]


def test_a_redirect_that_expired_is_asked_for_again():
    files = {"/one": DATA, "/two": DATA}
    with serve(files, "redirect:/one", "", "status:403", "redirect:/two") as site:
        assert fetch(site, read_all) == DATA
    assert site.paths == ["/model.gguf", "/one", "/one", "/model.gguf", "/two"]


@pytest.mark.parametrize(
    ("goal", "words"),
    [
        ("/model.gguf", "redirected more than 5 times"),
        ("file:///etc/passwd", "not an http or https address"),
        ("ftp://127.0.0.1/x", "not an http or https address"),
        ("http://[", "cannot be fetched"),
    ],
)
def test_redirects_to_nowhere_are_refused(goal, words):
    with (
        serve({"/model.gguf": DATA}, *[f"redirect:{goal}"] * 9) as site,
        pytest.raises(GgufError, match=words),
    ):
        fetch(site, read_all)


@pytest.mark.parametrize(
    "url",
    [
        "model.gguf",
        "file:///model.gguf",
        "http://",
        "http://h:99999/",
        "http://[::1",
        "http://h:0/",
    ],
)
def test_only_web_addresses_are_opened(url):
    with pytest.raises(GgufError, match="not an http or https address"):
        asyncio.run(HttpSource.open(url))


@pytest.mark.parametrize(
    "url", [f"http://{'a' * 70}.b/", "http://a\u2028b/", "http://127.0.0.1:1/"]
)
def test_a_server_that_is_not_there(url):
    with pytest.raises(GgufError, match=r"cannot be fetched|the connection failed"):
        asyncio.run(HttpSource.open(url, retries=1, backoff_seconds=0.001))


def test_the_name_tells_no_secret():
    source = HttpSource("https://user:secret@host/m.gguf?token=secret", 0, 1.0, 0.0)
    assert source.name == "https://host/m.gguf"


def test_a_closed_source_says_so():
    async def act(source: HttpSource) -> None:
        source.close()
        with pytest.raises(GgufError, match="is closed"):
            await source.read(0, 1)

    with serve({"/model.gguf": DATA}) as site:
        fetch(site, act)


def test_a_model_is_opened_over_http():
    async def act(source: HttpSource) -> None:
        with await Gguf.aopen(source) as gguf:
            local = run_sync(Gguf.aopen(BytesSource(GOOD)))
            assert dict(gguf.metadata) == dict(local.metadata)
            for name, info in gguf.tensors.items():
                assert await gguf.read(info) == local.data(local.tensors[name])

    with serve({"/model.gguf": GOOD}) as site:
        fetch(site, act)
    assert site.ranges == [(0, 1), (0, len(GOOD))]
