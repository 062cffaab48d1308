"""Sources: memory, local files, and web servers that behave well or badly."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.gguf.malformed import GOOD
from tests.gguf.server import Site, serve
from webgemma.errors import GgufError, ModelNotFoundError
from webgemma.gguf.http import HttpSource
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource, FileSource
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


def test_a_long_read_takes_several_calls(path, monkeypatch):
    monkeypatch.setattr("webgemma.gguf.sources._MAX_READ_NBYTES", 1000)
    source = FileSource(path)
    assert run_sync(source.read(7, 5000)) == DATA[7:5007]


def test_reads_without_pread(path, monkeypatch):
    monkeypatch.delattr(os, "pread")
    source = FileSource(path)
    assert run_sync(source.read(7, 5000)) == DATA[7:5007]
    os.truncate(path, 4000)
    with pytest.raises(GgufError, match="became shorter"):
        run_sync(source.read(7, 5000))


@pytest.mark.parametrize("nbytes", [0, 100, len(DATA) - 1])
def test_a_truncated_file_is_reported(path, nbytes):
    source = FileSource(path)
    os.truncate(path, nbytes)
    message = f"became shorter while it was read: it had {len(DATA)} bytes and has {nbytes}"
    with pytest.raises(GgufError, match=message):
        run_sync(source.read(0, len(DATA)))
    with pytest.raises(GgufError, match=message):  # also for bytes that still exist
        run_sync(source.read(0, 1))


def test_an_overwritten_file_is_reported(path):
    source = FileSource(path)
    path.write_bytes(DATA[::-1])
    os.utime(path, ns=(0, 0))
    with pytest.raises(GgufError, match=r"model\.gguf was written to while it was read"):
        run_sync(source.read(0, 1))


@pytest.mark.parametrize("act", [Path.unlink, lambda path: path.with_name("new").replace(path)])
def test_a_deleted_or_replaced_file_can_still_be_read(path, act):
    path.with_name("new").write_bytes(b"another")
    source = FileSource(path)
    act(path)
    assert run_sync(source.read(1000, 10)) == DATA[1000:1010]


def test_a_failing_drive_is_reported(path, monkeypatch):
    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    source = FileSource(path)
    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(GgufError, match=r"gguf: bytes 3 to 8 cannot be read: .*Input/output"):
        run_sync(source.read(3, 5))


def test_an_unreferenced_file_is_closed(path):
    source = FileSource(path)
    file = source._file
    del source
    assert file.closed


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(-1, 2), (0, len(DATA) + 1), (len(DATA), 1), (5, -2), (1 << 64, 1)]
)
def test_bytes_outside_the_file_are_rejected(path, offset, nbytes):
    for source in (BytesSource(DATA), FileSource(path)):
        with pytest.raises(GgufError, match=f"bytes {offset} to {offset + nbytes} were requested"):
            run_sync(source.read(offset, nbytes))
        source.close()


def test_an_empty_read_is_empty():
    assert run_sync(BytesSource(DATA).read(len(DATA), 0)) == b""


def test_files_that_cannot_be_opened_raise_an_error(tmp_path, path, monkeypatch):
    empty, pipe = tmp_path / "empty.gguf", tmp_path / "pipe"
    empty.touch()
    os.mkfifo(pipe)
    for file, error, message in (
        (tmp_path / "none.gguf", ModelNotFoundError, "There is no file"),
        (path / "inside", ModelNotFoundError, "There is no file"),
        (tmp_path, GgufError, "is a folder"),
        (empty, GgufError, "is empty"),
        (pipe, GgufError, "not a regular file"),
        ("a\0b", GgufError, "cannot be opened"),
        ("x" * 5000, GgufError, "cannot be opened"),
    ):
        with pytest.raises(error, match=message):
            FileSource(file)

    def deny(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", deny)
    with pytest.raises(GgufError, match=r"model\.gguf may not be read"):
        FileSource(path)


def test_siblings_are_opened(tmp_path, path):
    (tmp_path / "other.gguf").write_bytes(b"other")
    here = FileSource(path)
    sibling = run_sync(here.sibling("other.gguf"))
    assert (sibling.name, run_sync(sibling.read(0, 5))) == ("other.gguf", b"other")
    with pytest.raises(ModelNotFoundError):
        run_sync(here.sibling("none.gguf"))
    with pytest.raises(GgufError, match="not a file name"):
        run_sync(here.sibling("../other.gguf"))
    here.close()
    sibling.close()
    in_memory = BytesSource(b"x", siblings={"y": b"yy"})
    assert run_sync(in_memory.sibling("y")).nbytes == 2
    with pytest.raises(ModelNotFoundError, match="no z beside"):
        run_sync(in_memory.sibling("z"))


# HTTP


def fetch(
    site: Site, act: Callable[[HttpSource], Awaitable[object]], path: str = "/model.gguf"
) -> object:
    """Open a file of the site with short time-outs and pass it to `act`."""

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


def test_ranges_are_read_over_one_connection():
    async def act(source: HttpSource) -> None:
        assert source.nbytes == len(DATA)
        assert source.name == site.url + "/model.gguf"
        assert await source.read(1000, 24) == DATA[1000:1024]
        assert await source.read(len(DATA) - 1, 1) == DATA[-1:]
        assert await source.read(7, 0) == b""
        with pytest.raises(GgufError, match="were requested"):
            await source.read(len(DATA), 1)

    with serve({"/model.gguf": DATA}) as site:
        fetch(site, act)
    assert site.ranges == [(0, 1), (1000, 1024), (len(DATA) - 1, len(DATA))]
    assert site.connections == 1


def test_reads_may_run_concurrently():
    async def act(source: HttpSource) -> None:
        chunks = await asyncio.gather(*(source.read(i * 1000, 1000) for i in range(20)))
        assert b"".join(chunks) == DATA[:20_000]

    with serve({"/model.gguf": DATA}) as site:
        fetch(site, act)


@pytest.mark.parametrize(
    ("faults", "resumed_at"),
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
def test_transient_failures_are_resumed(faults, resumed_at):
    with serve({"/model.gguf": DATA}, "", *faults) as site:
        assert fetch(site, read_all) == DATA
    assert [first for first, _ in site.ranges[1:]] == resumed_at


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("cut:0", "the connection was cut after 4 tries"),
        ("stall:0", "the connection failed"),
        ("hang-up", "the connection failed"),
        ("status:503", "the server answers 503 after 4 tries"),
    ],
)
def test_retries_are_limited(fault, message):
    with serve({"/model.gguf": DATA}, "", *[fault] * 9) as site, pytest.raises(GgufError) as error:
        fetch(site, read_all)
    assert message in str(error.value)
    assert site.url in str(error.value)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("grown", "was changed on the server"),
        ("other-tag", "was changed on the server"),
        ("whole", "was changed on the server"),
        ("status:416", "was changed on the server"),
        ("shifted", "bytes 0-262143 were requested, but 'bytes 1-262143/262144' were sent"),
        ("no-content-range", "sent no valid Content-Range"),
        ("compressed", "sends something else"),
        ("long", "sends something else"),
        ("status:403", "answers 403: it requires a login"),
        ("status:400", "answers 400"),
    ],
)
def test_wrong_answers_are_rejected_without_a_retry(fault, message):
    with serve({"/model.gguf": DATA}, "", fault) as site, pytest.raises(GgufError) as error:
        fetch(site, read_all)
    assert message in str(error.value)
    assert len(site.ranges) == 2


def test_a_missing_file_is_not_found():
    with serve({}) as site, pytest.raises(ModelNotFoundError, match=r"/model\.gguf does not exist"):
        fetch(site, read_all)


@pytest.mark.parametrize("fault", ["whole", "endless"])
def test_small_files_are_read_whole_from_a_server_without_ranges(fault):
    with serve({"/model.gguf": DATA}, fault) as site:
        assert fetch(site, read_all) == DATA
    assert len(site.ranges) == 1


def test_a_whole_file_is_requested_again_after_a_cut():
    with serve({"/model.gguf": DATA}, "whole-cut", "whole-cut", "whole") as site:
        assert fetch(site, read_all) == DATA
    assert len(site.ranges) == 3


@pytest.mark.parametrize("fault", ["whole", "endless"])
def test_large_files_need_ranges(fault, monkeypatch):
    monkeypatch.setattr("webgemma.gguf.http._MAX_WHOLE_NBYTES", len(DATA) - 1)
    with (
        serve({"/model.gguf": DATA}, fault) as site,
        pytest.raises(GgufError, match="cannot send parts of a file"),
    ):
        fetch(site, read_all)


@pytest.mark.parametrize("fault", ["whole", "status:416"])
def test_an_empty_file_is_rejected(fault):
    with (
        serve({"/model.gguf": b""}, fault) as site,
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


def test_an_expired_redirect_is_requested_again():
    files = {"/one": DATA, "/two": DATA}
    with serve(files, "redirect:/one", "", "status:403", "redirect:/two") as site:
        assert fetch(site, read_all) == DATA
    assert site.paths == ["/model.gguf", "/one", "/one", "/model.gguf", "/two"]


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("/model.gguf", "redirected more than 5 times"),
        ("file:///etc/passwd", "not an http or https address"),
        ("ftp://127.0.0.1/x", "not an http or https address"),
        ("http://[", "cannot be fetched"),
    ],
)
def test_invalid_redirects_are_rejected(location, message):
    with (
        serve({"/model.gguf": DATA}, *[f"redirect:{location}"] * 9) as site,
        pytest.raises(GgufError, match=message),
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
def test_other_addresses_than_http_are_rejected(url):
    with pytest.raises(GgufError, match="not an http or https address"):
        asyncio.run(HttpSource.open(url))


@pytest.mark.parametrize(
    "url", [f"http://{'a' * 70}.b/", "http://a\u2028b/", "http://127.0.0.1:1/"]
)
def test_an_unreachable_server_is_reported(url):
    with pytest.raises(GgufError, match=r"cannot be fetched|the connection failed"):
        asyncio.run(HttpSource.open(url, retries=1, backoff_seconds=0.001))


def test_the_name_contains_no_secret():
    source = HttpSource("https://user:secret@host/m.gguf?token=secret", 0, 1.0, 0.0)
    assert source.name == "https://host/m.gguf"


def test_a_closed_source_is_reported():
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
