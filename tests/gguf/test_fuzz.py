"""Fuzzing: any bytes open or raise a GgufError, in little time and memory."""

import struct
import time
import tracemalloc
from contextlib import suppress

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.gguf.malformed import ARRAY, CASES, GOOD, LITTLE, STRING
from webgemma.errors import GgufError
from webgemma.gguf.header import MoreNeededError, parse_header
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.sync import run_sync

BOUNDED = settings(deadline=2000)  # milliseconds; no file may take longer
EXTREMES = [0, 1, 2, 7, 12, 13, 31, 33, 127, 128, 255, 256, 65535, 65536]
EXTREMES += [(1 << bits) + plus for bits in (31, 32, 61, 62, 63, 64) for plus in (-8, -1, 0, 1)]
SEEDS = st.sampled_from([case.data for case in CASES.values() if case.good])


def opens(data: bytes) -> bool:
    """Return whether a file opens, and assert that all in it can be read or gets a GgufError."""
    try:
        gguf = run_sync(Gguf.aopen(BytesSource(data)))
    except GgufError:
        return False
    for key in gguf.metadata:
        with suppress(GgufError):
            gguf.metadata[key]
    for info in gguf.tensors.values():
        assert len(gguf.data(info)) == info.nbytes <= len(data)
        assert info.width * info.rows == info.weights > 0
    return True


@BOUNDED
@given(st.binary(max_size=300))
@example(GOOD)
def test_any_bytes_open_or_raise_a_gguf_error(data):
    opens(data)  # fails at any other error, and at tensors outside the file


@BOUNDED
@given(st.integers(0, 40), st.integers(0, 40), st.binary(max_size=2000))
def test_any_bytes_after_a_valid_start(tensor_count, key_count, data):
    opens(b"GGUF" + struct.pack("<IQQ", 3, tensor_count, key_count) + data)


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """Return a valid file after a few random changes."""
    data = bytearray(draw(SEEDS))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data) - 1))
        match draw(st.sampled_from(["flip", "cut", "insert", "remove", "number", "swap"])):
            case "flip":
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[max(at, 1) :]
            case "insert":
                data[at:at] = draw(st.binary(max_size=40))
            case "remove":
                del data[at : min(at + draw(st.integers(1, 40)), len(data) - 1)]
            case "number":
                code = draw(st.sampled_from("IQ"))
                number = draw(st.sampled_from(EXTREMES)) % (1 << 8 * struct.calcsize("<" + code))
                new = struct.pack("<" + code, number)
                data[at : at + len(new)] = new
            case "swap":
                other = draw(st.integers(0, len(data) - 1))
                data[at], data[other] = data[other], data[at]
    return bytes(data)


@settings(BOUNDED, max_examples=1500)
@given(mutations())
def test_mutated_files_open_or_raise_a_gguf_error(data):
    opens(data)


def parsed(data: bytes, nbytes: int) -> object:
    """Return the content of a header, or the message of its error."""
    try:
        header = parse_header(data, "fuzz.gguf", nbytes)
    except GgufError as error:
        return str(error)
    return header.tensors, header.alignment, list(header.metadata)


@BOUNDED
@given(mutations(), st.integers(0, 5000))
def test_a_window_gives_the_same_header_or_needs_more(data, window):
    try:
        header = parsed(data[:window], len(data))
    except MoreNeededError as more:
        assert window < more.end <= len(data)  # noqa: PT017
    else:
        assert header == parsed(data, len(data))


def test_extreme_numbers_at_every_offset_of_the_header():
    """Every offset that may hold a length, a count, a type or an offset."""
    opened = 0
    for at in range(4, GOOD.index(b"blk.0.attn_q.weight") + 64):
        for number in (0, 13, 1 << 31, 1 << 63, (1 << 64) - 1):
            opened += opens(GOOD[:at] + struct.pack("<Q", number) + GOOD[at + 8 :])
    assert opened > 0


@BOUNDED
@given(st.lists(st.binary(max_size=12), max_size=20))
def test_strings_of_any_bytes(texts):
    """An array is valid exactly if each of its strings is, decoded in bulk or one by one."""
    packed = b"".join(map(LITTLE.text, texts))
    data = LITTLE.file(keys=[("k", ARRAY, LITTLE.array(STRING, len(texts), packed))])
    gguf = run_sync(Gguf.aopen(BytesSource(data)))
    try:
        expected = [text.decode() for text in texts]
    except UnicodeDecodeError:
        expected = None
    try:
        assert gguf.metadata["k"] == expected
    except GgufError:
        assert expected is None


def hostile() -> dict[str, bytes]:
    """Return files of up to some megabytes that need as much work as possible."""
    count = 150_000
    empty_strings = LITTLE.array(STRING, count, bytes(8 * count))
    keys = [(f"{index:x}", 0, b"\0") for index in range(20_000)]
    return {
        "empty strings": LITTLE.file(keys=[("k", ARRAY, empty_strings)]),
        "bytes": LITTLE.file(keys=[("k", ARRAY, LITTLE.array(0, 1 << 20, bytes(1 << 20)))]),
        "small keys": LITTLE.file(keys=keys, tensors=[]),
        "one long text": LITTLE.file(keys=[("k", STRING, LITTLE.text(b"\xe2" * (1 << 20)))]),
    }


def test_hostile_files_take_little_time_and_memory():
    for name, data in hostile().items():
        start = time.perf_counter()
        opens(data)
        assert time.perf_counter() - start < 2, name
        tracemalloc.start()
        opens(data)
        peak_nbytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_nbytes < 200_000 + 25 * len(data), name
