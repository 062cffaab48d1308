"""Weights on the device: in one part or several, the table on the host, and memory."""

import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from helpers.blank import BlankGguf, a4b, e2b
from helpers.gpu import device
from helpers.tiny import KINDS, MIXED, SMALL, random_tensor, tiny_gguf, tiny_metadata, tiny_tensors
from tolerance import GPU_LOGITS_OF_ITSELF

from webgemma.device import Device, Limits
from webgemma.device.native import NativeDevice
from webgemma.device.null import DEFAULT_LIMITS, NullDevice
from webgemma.engine.session import Session
from webgemma.engine.slots import CHUNK
from webgemma.errors import DeviceError, InputError
from webgemma.gemma import matrices
from webgemma.gemma.config import Config
from webgemma.gemma.weights import BATCH_ROWS, PLE_TABLE, Model, stacks, weights_nbytes
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import gguf_bytes
from webgemma.sampler import SampledToken
from webgemma.settings import resolve
from webgemma.sync import iterate_sync, run_sync

GREEDY = resolve({"temperature": 0})
IDS = [2, 270, 31, 31, 300, 5, 270, 319, 0, 2, 64]


def opened(data: bytes) -> Gguf:
    """Open the bytes of a file."""
    return run_sync(Gguf.aopen(BytesSource(data, "tiny.gguf")))


def load(gguf: Gguf, on: Device | None = None, **options: object) -> Model:
    """Load a model on a device, by default the tests' GPU."""
    return run_sync(Model.load(gguf, Config.from_gguf(gguf), on or device(), **options))


def logits_of(model: Model, ids: list[int] = IDS) -> np.ndarray:
    """Return the logits after each of the ids, and close the model."""
    session = Session(model, 512, kv="f32")
    logits = np.frombuffer(run_sync(session.logits(ids)), np.float32).reshape(len(ids), -1)
    session.close()
    model.close()
    return logits


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    bound = GPU_LOGITS_OF_ITSELF * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)


# Parts


@pytest.fixture
def limited() -> Iterator[Callable[[int], NativeDevice]]:
    """Return a function that gives the tests' device a smaller limit of a binding."""
    on = device()
    before: Limits = on.limits

    def limit(binding_nbytes: int) -> NativeDevice:
        on.limits = replace(before, binding_nbytes=binding_nbytes)
        return on

    yield limit
    on.limits = before


@pytest.mark.parametrize("binding_nbytes", [8192, 65536])
@pytest.mark.parametrize("kind", ["small", "moe", "mixed"])
def test_a_model_in_parts_computes_the_same(
    kind: str, binding_nbytes: int, limited: Callable[[int], NativeDevice]
) -> None:
    gguf = opened(tiny_gguf(KINDS[kind]))
    unsplit = load(gguf)
    assert all(len(weight.parts) == 1 for weight in unsplit.matrices.values())
    expected = logits_of(unsplit)
    on = limited(binding_nbytes)
    split = load(gguf, on)
    parts = [part for weight in split.matrices.values() for part in weight.parts]
    assert len(parts) > len(split.matrices)
    assert all(part.data.buffer.nbytes <= binding_nbytes for part in parts)
    on.limits = replace(on.limits, binding_nbytes=1 << 20)  # activations are not split
    assert_close(logits_of(split), expected)


@pytest.mark.parametrize("fmt", ["Q8_0", "MXFP4", "F16"])
def test_parts_of_stacked_matrices_hold_every_row(
    fmt: str, limited: Callable[[int], NativeDevice]
) -> None:
    """Use parts that end within a tensor, and parts with the end of one and the top of the next."""
    shapes = {"blk.0.attn_q.weight": 64, "blk.0.attn_k.weight": 16, "blk.0.attn_v.weight": 16}
    tensors = [random_tensor(3, name, (96, rows), fmt) for name, rows in shapes.items()]
    gguf = opened(gguf_bytes({}, tensors))
    model = Model(None, limited(1600))
    stacked = stacks(dict(gguf.tensors))
    assert list(stacked) == ["blk.0.attn_qkv.weight"]
    model.allocate("qkv", stacked["blk.0.attn_qkv.weight"])
    run_sync(model.load_tensors(gguf, "qkv", stacked["blk.0.attn_qkv.weight"]))
    weight = model.matrices["qkv"]
    assert len(weight.parts) > 3
    assert [p.first_row for p in weight.parts[1:]] == [p.first_row + p.rows for p in weight.parts][
        :-1
    ]
    blocks = np.frombuffer(b"".join(t.data for t in tensors), np.uint8).reshape(96, -1)
    for part in weight.parts:
        stored = run_sync(device().read(part.data.buffer).bytes())
        own = blocks[part.first_row : part.first_row + part.rows]
        planes = weight.format.planes or ((0, weight.format.nbytes),)
        for (offset, nbytes), start in zip(planes, (0, *part.planes), strict=False):
            plane = own.reshape(-1, weight.format.nbytes)[:, offset : offset + nbytes].tobytes()
            assert stored[4 * start : 4 * start + len(plane)] == plane
    model.close()


def test_a_binding_too_small_for_a_row() -> None:
    limits = replace(DEFAULT_LIMITS, binding_nbytes=256)
    on = NullDevice(limits=limits)
    with pytest.raises(DeviceError, match=r"at most 256 bytes .* too few for one row of token"):
        load(opened(tiny_gguf(SMALL)), on)
    assert not on.buffers


# The table on the host


def with_table(fmt: str) -> Gguf:
    """Return the small model with a table in this format, 192 wide; rows may end within a word."""
    tiny = replace(SMALL, ple=32)
    tensors = [
        random_tensor(3, t.name, t.shape, fmt) if t.name == PLE_TABLE else t
        for t in tiny_tensors(tiny)
    ]
    return opened(gguf_bytes(tiny_metadata(tiny), tensors))


def greedy(model: Model, ids: list[int], count: int) -> list[SampledToken]:
    """Return tokens of two prompts with a common beginning, and close the model."""
    session = Session(model, 512)
    stream = iterate_sync(session.generate(ids, GREEDY, 1))
    found = [next(stream) for _ in range(count)]
    stream.close()
    again = iterate_sync(session.generate([*ids, found[0][0], 7], GREEDY, 1))
    found += [next(again) for _ in range(3)]
    again.close()
    session.close()
    model.close()
    return found


@pytest.mark.parametrize("fmt", ["F32", "BF16", "Q8_0", "MXFP4", "Q5_0"])
def test_the_table_on_the_host_gives_the_same_logits(fmt: str) -> None:
    gguf = with_table(fmt)
    on_device, on_host = load(gguf, table="device"), load(gguf, table="host")
    assert on_device.table is None
    assert on_host.table is not None
    np.testing.assert_array_equal(logits_of(on_host), logits_of(on_device))


def test_the_table_on_the_host_gives_the_same_conversation() -> None:
    gguf = with_table("Q5_0")
    expected = greedy(load(gguf, table="device"), IDS, 12)
    assert greedy(load(gguf, table="host"), IDS, 12) == expected
    assert len({step.token for step in expected}) > 3  # different rows were uploaded


def test_a_long_prompt_uploads_each_row_once() -> None:
    """Read a chunk as large as the table on the device holds, in which tokens repeat."""
    gguf = with_table("Q8_0")
    ids = [2, *(7 * i % 320 for i in range(CHUNK + 20))]
    model = load(gguf, table="host")
    rows: list[int] = []
    read = gguf.read

    async def noted_read(tensor, offset=0, nbytes=None):
        rows.append(offset // nbytes)
        return await read(tensor, offset, nbytes)

    gguf.read = noted_read
    session = Session(model, 600, kv="f32")
    run_sync(session.logits(ids[:CHUNK]))
    assert sorted(rows) == sorted(set(ids[:CHUNK]))
    session.close()
    model.close()


def test_a_chunk_of_a_session_fits_the_rows_of_a_host_table() -> None:
    assert CHUNK <= BATCH_ROWS


def test_a_table_on_the_host_needs_memory_for_the_rows_of_a_batch() -> None:
    config = e2b()
    gguf, on = BlankGguf(config), NullDevice()
    _, rest = weights_nbytes(gguf, config)
    model = run_sync(Model.load(gguf, config, on, table="host"))
    rows = BATCH_ROWS * 35 * 210  # Q6_K: as in the file, and in planes
    assert rest + 2 * rows <= on.nbytes < rest + 2 * rows + 200_000
    model.close()


def test_a_model_without_a_table_has_none_on_the_host() -> None:
    model = load(opened(tiny_gguf(KINDS["moe"])), NullDevice(), table="host")
    assert model.table is None


def test_an_unknown_location_of_the_table_raises_an_error() -> None:
    with pytest.raises(InputError, match="The table cannot be on 'disk'; use device or host"):
        load(opened(tiny_gguf(SMALL)), NullDevice(), table="disk")


# Memory


def test_loading_keeps_a_few_chunks_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "CHUNK_NBYTES", 1 << 20)
    config = replace(e2b(), layers=e2b().layers[:1], vocab=16384)
    gguf = BlankGguf(config)
    loading = Model.load(gguf, config, NullDevice())
    tracemalloc.start()
    run_sync(loading)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(weights_nbytes(gguf, config)) > 40 << 20
    assert gguf.largest_read_nbytes <= 1 << 20
    assert peak < 3 << 20  # a chunk, the next one before the first is freed, and small things


def test_loading_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit what the device's queue holds: it keeps what is written until it is copied."""
    monkeypatch.setattr(matrices, "CHUNK_NBYTES", 1 << 16)
    on = NullDevice()
    queued, peak = 0, 0
    write = on.write

    def counted_write(buffer, data, offset=0):
        nonlocal queued, peak
        queued += len(data)
        peak = max(peak, queued)
        write(buffer, data, offset)

    class Reading:
        def __init__(self) -> None:
            self.copied = queued

        async def bytes(self) -> bytes:
            nonlocal queued
            queued -= min(queued, self.copied)
            return bytes(4)

    on.write, on.read = counted_write, lambda *_: Reading()
    load(opened(tiny_gguf(MIXED)), on)
    assert on.written_nbytes > 3 << 20
    assert peak < (matrices.CHUNKS_AHEAD + 6) << 16


@pytest.mark.parametrize("memory_nbytes", [10, 500_000, 1_000_000])
def test_memory_is_freed_if_there_is_too_little_to_load(memory_nbytes: int) -> None:
    on = NullDevice(memory_nbytes=memory_nbytes)
    with pytest.raises(DeviceError, match="The GPU has no"):
        load(opened(tiny_gguf(SMALL)), on)
    assert not on.buffers


def test_memory_is_freed_if_there_is_too_little_for_the_cache() -> None:
    on = NullDevice(memory_nbytes=1_200_000)
    model = load(opened(tiny_gguf(SMALL)), on)
    before = set(on.buffers)
    with pytest.raises(DeviceError, match="bytes for KV cache"):
        Session(model, 512)
    assert on.buffers == before


@pytest.mark.parametrize(
    ("make", "kv", "largest"),
    [(e2b, "f16", 1 << 17), (e2b, "f32", 1 << 16), (a4b, "f16", 1 << 16)],
)
def test_a_cache_larger_than_a_binding_raises_an_error(
    make: Callable[[], Config], kv: str, largest: int
) -> None:
    """Fill a binding of 128 MiB with a full layer: 512 values a position of E2B, 1024 of 26B."""
    model = Model(make(), NullDevice())
    Session(model, largest, kv=kv).close()
    with pytest.raises(DeviceError, match=f"a context of {largest} or less"):
        Session(model, largest + 1, kv=kv)
