"""Weights on the device: whole, in parts, the table on the host; little memory, and too little."""

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
from webgemma.engine.session import CHUNK, Session
from webgemma.errors import DeviceError, InputError
from webgemma.gemma import matrices
from webgemma.gemma.config import Config
from webgemma.gemma.stacks import TABLE, stacks, weights_nbytes
from webgemma.gemma.weights import BATCH_ROWS, Model
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import gguf_bytes
from webgemma.sampler import Chosen, Sampling
from webgemma.sync import iterate_sync, run_sync

IDS = [2, 270, 31, 31, 300, 5, 270, 319, 0, 2, 64]


def opened(data: bytes) -> Gguf:
    return run_sync(Gguf.aopen(BytesSource(data, "tiny.gguf")))


def load(gguf: Gguf, on: Device | None = None, **options: object) -> Model:
    return run_sync(Model.load(gguf, Config.from_gguf(gguf), on or device(), **options))


def logits_of(model: Model, ids: list[int] = IDS) -> np.ndarray:
    session = Session(model, 512, kv="f32")
    found = np.frombuffer(run_sync(session.logits(ids)), np.float32).reshape(len(ids), -1)
    session.close()
    model.close()
    return found


def assert_close(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(
        found, wanted, rtol=0, atol=GPU_LOGITS_OF_ITSELF * np.abs(wanted).max()
    )


# Parts


@pytest.fixture
def limited() -> Iterator[Callable[[int], NativeDevice]]:
    """The test device as if its bindings were small."""
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
    whole = load(gguf)
    assert all(len(weight.parts) == 1 for weight in whole.matrices.values())
    wanted = logits_of(whole)
    on = limited(binding_nbytes)
    split = load(gguf, on)
    parts = [part for weight in split.matrices.values() for part in weight.parts]
    assert len(parts) > len(split.matrices)
    assert all(part.data.buffer.nbytes <= binding_nbytes for part in parts)
    on.limits = replace(on.limits, binding_nbytes=1 << 20)  # activations stay whole
    assert_close(logits_of(split), wanted)


@pytest.mark.parametrize("fmt", ["Q8_0", "MXFP4", "F16"])
def test_parts_of_stacked_matrices_hold_every_row(
    fmt: str, limited: Callable[[int], NativeDevice]
) -> None:
    """A part may end within a tensor, or hold the end of one and the top of the next."""
    shapes = {"blk.0.attn_q.weight": 64, "blk.0.attn_k.weight": 16, "blk.0.attn_v.weight": 16}
    tensors = [random_tensor(3, name, (96, rows), fmt) for name, rows in shapes.items()]
    gguf = opened(gguf_bytes({}, tensors))
    model = Model(None, limited(1600))
    stacked = stacks(dict(gguf.tensors))
    assert list(stacked) == ["blk.0.attn_qkv.weight"]
    weight = model.room("qkv", stacked["blk.0.attn_qkv.weight"])
    run_sync(model.fill_matrix(gguf, weight, stacked["blk.0.attn_qkv.weight"]))
    assert len(weight.parts) > 3
    assert [p.first_row for p in weight.parts[1:]] == [p.first_row + p.rows for p in weight.parts][
        :-1
    ]
    blocks = np.frombuffer(b"".join(t.data for t in tensors), np.uint8).reshape(96, -1)
    for part in weight.parts:
        held = run_sync(device().read(part.data.buffer).bytes())
        own = blocks[part.first_row : part.first_row + part.rows]
        planes = weight.format.planes or ((0, weight.format.nbytes),)
        for (offset, nbytes), start in zip(planes, (0, *part.planes), strict=False):
            cut = own.reshape(-1, weight.format.nbytes)[:, offset : offset + nbytes].tobytes()
            assert held[4 * start : 4 * start + len(cut)] == cut
    model.close()


def test_a_binding_too_small_for_a_row() -> None:
    limits = replace(DEFAULT_LIMITS, binding_nbytes=256)
    on = NullDevice(limits=limits)
    with pytest.raises(DeviceError, match=r"at most 256 bytes .* too few for the rows of token"):
        load(opened(tiny_gguf(SMALL)), on)
    assert not on.buffers


# The table on the host


def with_table(fmt: str) -> Gguf:
    """The small model, its table in a format whose rows may end anywhere; 192 wide."""
    tiny = replace(SMALL, ple=32)
    tensors = [
        random_tensor(3, t.name, t.shape, fmt) if t.name == TABLE else t for t in tiny_tensors(tiny)
    ]
    return opened(gguf_bytes(tiny_metadata(tiny), tensors))


def greedy(model: Model, ids: list[int], count: int) -> list[Chosen]:
    session = Session(model, 512)
    stream = iterate_sync(session.generate(ids, Sampling(temperature=0), 1))
    found = [next(stream) for _ in range(count)]
    stream.close()
    again = iterate_sync(session.generate([*ids, found[0][0], 7], Sampling(temperature=0), 1))
    found += [next(again) for _ in range(3)]  # going on from a common beginning
    again.close()
    session.close()
    model.close()
    return found


@pytest.mark.parametrize("fmt", ["F32", "BF16", "Q8_0", "MXFP4", "Q5_0"])
def test_the_table_on_the_host_gives_the_same_logits(fmt: str) -> None:
    gguf = with_table(fmt)
    here, there = load(gguf, table="device"), load(gguf, table="host")
    assert here.table is None
    assert there.table is not None
    np.testing.assert_array_equal(logits_of(there), logits_of(here))


def test_the_table_on_the_host_gives_the_same_conversation() -> None:
    gguf = with_table("Q5_0")
    wanted = greedy(load(gguf, table="device"), IDS, 12)
    assert greedy(load(gguf, table="host"), IDS, 12) == wanted
    assert len({step.token for step in wanted}) > 3  # the rows brought were different ones


def test_a_long_prompt_brings_each_row_once() -> None:
    """Two chunks, the first of them as large as the table's window; tokens come up again."""
    gguf = with_table("Q8_0")
    ids = [2, *(7 * i % 320 for i in range(CHUNK + 20))]
    model = load(gguf, table="host")
    asked: list[int] = []
    read = gguf.read

    async def watched(tensor, offset=0, nbytes=None):
        asked.append(offset // nbytes)
        return await read(tensor, offset, nbytes)

    gguf.read = watched
    session = Session(model, 600, kv="f32")
    run_sync(session.logits(ids[:CHUNK]))
    assert sorted(asked) == sorted(set(ids[:CHUNK]))
    session.close()
    model.close()


def test_a_session_hands_over_no_more_than_the_table_holds() -> None:
    assert CHUNK <= BATCH_ROWS


def test_a_table_on_the_host_takes_a_window_of_the_device() -> None:
    config = e2b()
    gguf, on = BlankGguf(config), NullDevice()
    _, rest = weights_nbytes(gguf, config)
    model = run_sync(Model.load(gguf, config, on, table="host"))
    window = BATCH_ROWS * 35 * 210  # Q6_K: the rows, and their planes
    assert rest + 2 * window <= on.nbytes < rest + 2 * window + 200_000
    model.close()


def test_a_model_without_a_table_has_none_on_the_host() -> None:
    model = load(opened(tiny_gguf(KINDS["moe"])), NullDevice(), table="host")
    assert model.table is None


def test_no_such_place_for_the_table() -> None:
    with pytest.raises(InputError, match="no table 'disk'; choose device or host"):
        load(opened(tiny_gguf(SMALL)), NullDevice(), table="disk")


# Memory


def test_loading_holds_a_few_chunks_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert peak < 3 << 20  # a chunk, the next one while the first is let go, and small things


def test_the_device_is_waited_for_while_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queue keeps what is written until it is copied; a whole model would be in there."""
    monkeypatch.setattr(matrices, "CHUNK_NBYTES", 1 << 16)
    on = NullDevice()
    held, most = 0, 0
    write = on.write

    def counted_write(buffer, data, offset=0):
        nonlocal held, most
        held += len(data)
        most = max(most, held)
        write(buffer, data, offset)

    class Reading:
        def __init__(self) -> None:
            self.copied = held

        async def bytes(self) -> bytes:
            nonlocal held
            held -= min(held, self.copied)
            return bytes(4)

    on.write, on.read = counted_write, lambda *_: Reading()
    load(opened(tiny_gguf(MIXED)), on)
    assert on.written_nbytes > 3 << 20
    assert most < (matrices.CHUNKS_AHEAD + 6) << 16


@pytest.mark.parametrize("memory_nbytes", [10, 500_000, 1_000_000])
def test_no_memory_left_while_loading(memory_nbytes: int) -> None:
    on = NullDevice(memory_nbytes=memory_nbytes)
    with pytest.raises(DeviceError, match="The GPU has no"):
        load(opened(tiny_gguf(SMALL)), on)
    assert not on.buffers


def test_no_memory_left_for_the_cache() -> None:
    on = NullDevice(memory_nbytes=1_200_000)
    model = load(opened(tiny_gguf(SMALL)), on)
    before = set(on.buffers)
    with pytest.raises(DeviceError, match="bytes for cache"):
        Session(model, 512)
    assert on.buffers == before


@pytest.mark.parametrize(
    ("make", "kv", "largest"),
    [(e2b, "f16", 1 << 17), (e2b, "f32", 1 << 16), (a4b, "f16", 1 << 16)],
)
def test_a_cache_larger_than_a_binding(make: Callable[[], Config], kv: str, largest: int) -> None:
    """Only full layers keep every position: 512 numbers of E2B's, 1024 of 26B's, in 128 MiB."""
    model = Model(make(), NullDevice())
    Session(model, largest, kv=kv).close()
    with pytest.raises(DeviceError, match=f"a context of {largest} or less"):
        Session(model, largest + 1, kv=kv)
