"""Sources in a browser, tested without one: reads, retries and errors."""

import asyncio

import pytest
from helpers.pretend_files import JsError, PretendFile, PretendFiles
from helpers.standin import standin_gguf

from webgemma.errors import GgufError, ModelNotFoundError
from webgemma.gguf import browser
from webgemma.gguf.browser import BrowserSource, open_address, open_file
from webgemma.gguf.reader import Gguf

DATA = standin_gguf()


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browser, "WAIT_SECONDS", (0.0, 0.0))


def test_tensors_are_read_raw_and_the_header_once() -> None:
    file = PretendFile("mine.gguf", DATA + bytes(3 << 20))

    async def read() -> None:
        gguf = await Gguf.aopen(await open_file(file, PretendFiles()))
        tensor = max(gguf.tensors.values(), key=lambda tensor: tensor.nbytes)
        raw = await gguf.read_raw(tensor, 16, 64)
        assert bytes(raw) == await gguf.read(tensor, 16, 64)
        assert bytes(raw) == DATA[tensor.offset + 16 : tensor.offset + 80]
        gguf.close()

    asyncio.run(read())
    assert file.reads[0] == (0, 1 << 20)
    assert file.closed


@pytest.mark.parametrize(
    "error", [JsError("http", status=503), JsError("TypeError"), JsError("Error")]
)
def test_transient_errors_are_retried(error: JsError) -> None:
    file = PretendFile("a", b"0123456789")
    file.failures = [error, error]
    assert asyncio.run(BrowserSource(file).read(2, 3)) == b"234"
    assert file.reads == [(2, 5)] * 3


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (JsError("http", "the server answers 404", 404), "a does not exist"),
        (JsError("http", "the server answers 403", 403), "it requires a login"),
        (
            JsError("http", "the server answers 400", 400),
            "a cannot be read: the server answers 400.",
        ),
        (JsError("changed"), "a was changed on the server"),
        (JsError("NotReadableError"), "choose it again"),
        (JsError("TypeError", "Failed to fetch"), "cannot be reached, or does not allow pages"),
        (JsError("http", "the server answers 500", 500), "the server answers 500"),
        (JsError("body", "Failed to fetch"), "a was not received completely"),
    ],
)
def test_permanent_errors_are_raised(error: JsError, message: str) -> None:
    file = PretendFile("a", b"0123456789")
    file.failures = [error] * 9
    with pytest.raises((GgufError, ModelNotFoundError), match=message):
        asyncio.run(BrowserSource(file).read(0, 1))


def test_reads_outside_the_file_are_rejected() -> None:
    source = BrowserSource(PretendFile("a", b"0123", size=10))
    with pytest.raises(GgufError, match="became shorter"):
        asyncio.run(source.read(2, 4))
    with pytest.raises(GgufError, match="bytes 8 to 12 were requested"):
        asyncio.run(source.read(8, 4))
    assert asyncio.run(source.read(10, 0)) == b""
    with pytest.raises(ModelNotFoundError, match="part of a split model and needs b beside it"):
        asyncio.run(source.sibling("b"))


def test_a_missing_address_is_not_found() -> None:
    with pytest.raises(ModelNotFoundError, match="https://here/a does not exist"):
        asyncio.run(open_address("https://here/a", PretendFiles()))
