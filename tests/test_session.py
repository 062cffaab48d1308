"""Sessions: nothing is read twice, going back, stopping anywhere, forks, files, several at once."""

import gc
import hashlib
import io
import json
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import wgpu
from gpu import device
from tiny import SMALL, Tiny, tiny_gguf
from tolerance import GPU_LOGITS_OF_TRANSFORMERS

from webgemma.blocking import finish
from webgemma.device.null import NullDevice
from webgemma.errors import DeviceError, DeviceMemoryError, InputError
from webgemma.gemma.config import Config
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.reference.engine import ReferenceEngine
from webgemma.sampler import Sampling
from webgemma.session import Session

GREEDY = Sampling(temperature=0)
RANDOM = Sampling(temperature=1.5, top_k=0, top_p=1.0, presence_penalty=0.5)
# Sliding and full layers, some of which share their caches; SHORT is soon past its rings.
SHORT = replace(SMALL, pattern="sfsf", shared=2)
IDS = [2, *(24 + i * 7 % 280 for i in range(1, 120))]
CHUNK, WINDOW = 16, SHORT.window
RING = CHUNK + WINDOW


@pytest.fixture(scope="module", autouse=True)
def small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("webgemma.session.CHUNK", CHUNK)
        patch.setattr("webgemma.session.BATCHES", (1, 4, CHUNK))
        yield


def open_tiny(tiny: Tiny) -> tuple[Gguf, Config]:
    gguf = finish(Gguf.aopen(BytesSource(tiny_gguf(tiny), "tiny.gguf")))
    return gguf, Config.from_gguf(gguf)


@pytest.fixture(scope="module")
def model() -> Model:
    gguf, config = open_tiny(SHORT)
    return finish(Model.load(gguf, config, device()))


@cache
def reference() -> ReferenceEngine:
    return ReferenceEngine(*open_tiny(SHORT))


@pytest.fixture
def session(model: Model) -> Iterator[Session]:
    made = Session(model, 256, kv="f32")
    yield made
    made.close()


def take(
    engine: Session | ReferenceEngine, ids: list[int], count: int, sampling: Sampling = GREEDY
) -> list[int]:
    """The first tokens of a generation, which is then closed."""
    stream = engine.generate(ids, sampling, 5)
    tokens = [next_token(stream) for _ in range(count)]
    finish(closed(stream))
    return tokens


def next_token(stream) -> int:
    async def one() -> int:
        token, logprob, _ = await anext(stream)
        assert logprob <= 0
        return token

    return finish(one())


async def closed(stream) -> None:
    await stream.aclose()


def truth(ids: list[int], count: int, sampling: Sampling = GREEDY) -> list[int]:
    return take(reference(), ids, count, sampling)


@pytest.fixture
def read(session: Session, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens the session hands to the device, chunk by chunk."""
    counts: list[int] = []
    write = session.device.write

    def spy(buffer, data, offset: int = 0) -> None:
        if buffer is session._inputs.state.buffer:
            counts.append(struct.unpack("<4I", data)[1])
        write(buffer, data, offset)

    monkeypatch.setattr(session.device, "write", spy)
    return counts


@pytest.mark.parametrize("length", [1, 2, 4, 15, 16, 17, 32, 33, 90])
def test_prompts_of_any_length(session: Session, length: int) -> None:
    assert take(session, IDS[:length], 3) == truth(IDS[:length], 3)
    assert session.tokens[:length] == IDS[:length]


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_past_the_rings_end(session: Session, sampling: Sampling) -> None:
    assert take(session, IDS[:7], 50, sampling) == truth(IDS[:7], 50, sampling)


def test_logits_of_any_length_on_one_session(session: Session) -> None:
    import numpy as np

    for length in (3, 40, 2, 16, 33, 3):
        logits = np.frombuffer(finish(session.logits(IDS[:length])), np.float32)
        wanted = finish(reference().logits(IDS[:length])).ravel()
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=GPU_LOGITS_OF_TRANSFORMERS)


def test_logits_and_generations_take_turns(session: Session) -> None:
    finish(session.logits(IDS[:20]))
    assert take(session, IDS[:20], 4) == truth(IDS[:20], 4)
    finish(session.logits(IDS[50:60]))
    assert take(session, IDS[:20], 4) == truth(IDS[:20], 4)


def test_turns_are_appended(session: Session, read: list[int]) -> None:
    history = IDS[:20]
    for turn, new in enumerate((0, 3, 1, 17)):
        history += IDS[20 : 20 + new]
        read.clear()
        tokens = take(session, history, 5)
        assert sum(read) == (20 if turn == 0 else max(new, 1))
        assert tokens == truth(history, 5)
        history += tokens


def test_the_same_prompt_again_reads_its_last_token(session: Session, read: list[int]) -> None:
    tokens = take(session, IDS[:20], 5)
    read.clear()
    assert take(session, IDS[:20], 5) == tokens
    assert read == [1]


def test_another_end_reads_from_there_on(session: Session, read: list[int]) -> None:
    take(session, IDS[:20], 2)
    read.clear()
    other = [*IDS[:16], 99, 98]
    assert take(session, other, 5) == truth(other, 5)
    assert sum(read) == 2


# With all of IDS read, the rings hold the last RING positions: a token at `length` looks back
# WINDOW - 1 further ones, which are there down to length = 120 - CHUNK - 1.
@pytest.mark.parametrize(
    ("back", "kept"),
    [
        *((0, True), (1, True), (5, True), (CHUNK, True), (CHUNK + 1, True)),
        *((CHUNK + 2, False), (RING, False), (100, False), (120, False)),
    ],
)
def test_going_back(session: Session, back: int, kept: bool) -> None:
    finish(session.logits(IDS))
    length = len(IDS) - back
    session.rewind(length)
    assert session.tokens == (IDS[:length] if kept else [])
    history = [*IDS[:length], 40, 41]
    assert take(session, history, 4) == truth(history, 4)


def test_going_back_twice(session: Session) -> None:
    take(session, IDS[:60], 8)
    session.rewind(58)
    take(session, [*IDS[:58], 30, 31, 32], 1)
    for length in (55, 50, 30):
        session.rewind(min(length, len(session.tokens)))
        history = [*IDS[:length], 44]
        assert take(session, history, 3) == truth(history, 3)


def test_a_context_within_the_ring_goes_back_anywhere(model: Model) -> None:
    session = Session(model, RING, kv="f32")
    finish(session.logits(IDS[:RING]))
    session.rewind(1)
    assert session.tokens == IDS[:1]
    assert take(session, IDS[:9], 3) == truth(IDS[:9], 3)
    session.close()


@pytest.mark.parametrize("length", [-1, 21])
def test_going_back_to_nowhere(session: Session, length: int) -> None:
    finish(session.logits(IDS[:20]))
    with pytest.raises(InputError, match=f"cannot go back to {length} tokens; it has 20"):
        session.rewind(length)


@pytest.mark.parametrize("count", range(1, 8))
def test_stopping_at_any_token(session: Session, read: list[int], count: int) -> None:
    whole = truth(IDS[:6], 8)
    assert take(session, IDS[:6], count) == whole[:count]
    assert session.tokens == [*IDS[:6], *whole[:count]]
    read.clear()
    history = [*IDS[:6], *whole[:count], 77]
    assert take(session, history, 3) == truth(history, 3)
    assert read == [1]


def test_stopping_submits_nothing(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = session.generate(IDS[:6], GREEDY, 5)
    next_token(stream)
    monkeypatch.setattr(session.device, "run", None)
    finish(closed(stream))
    monkeypatch.undo()
    assert len(take(session, IDS[:9], 2)) == 2


def test_a_failing_caller(session: Session) -> None:
    stream = session.generate(IDS[:6], GREEDY, 5)
    first = next_token(stream)

    async def fail() -> None:
        await stream.athrow(RuntimeError("the caller's own"))

    with pytest.raises(RuntimeError, match="the caller's own"):
        finish(fail())
    history = [*IDS[:6], first, 50]
    assert take(session, history, 3) == truth(history, 3)


def test_a_forgotten_generation(session: Session) -> None:
    next_token(session.generate(IDS[:6], GREEDY, 5))
    assert take(session, IDS[:9], 3) == truth(IDS[:9], 3)


@pytest.mark.parametrize("begin", [lambda s: take(s, [2, 3], 1), lambda s: s.rewind(2)])
def test_one_thing_at_a_time(session: Session, begin: Callable[[Session], object]) -> None:
    stream = session.generate(IDS[:6], GREEDY, 5)
    next_token(stream)
    begin(session)
    with pytest.raises(InputError, match="need a session each"):
        next_token(stream)


@pytest.mark.parametrize("length", [17, 20, 23, 24])
def test_the_context_is_full(model: Model, length: int) -> None:
    session = Session(model, 24, kv="f32")
    stream = session.generate(IDS[:length], GREEDY, 5)
    wanted = truth(IDS[:length], 24 - length)
    assert [next_token(stream) for _ in range(24 - length)] == wanted
    with pytest.raises(StopAsyncIteration):
        next_token(stream)
    assert session.tokens == [*IDS[:length], *wanted][: max(length, 23)]
    session.rewind(10)
    assert take(session, IDS[:12], 3) == truth(IDS[:12], 3)
    session.close()


def test_prompts_that_cannot_be_read(session: Session) -> None:
    with pytest.raises(InputError, match="empty"):
        take(session, [], 1)
    with pytest.raises(InputError, match="257 tokens, but the context holds 256"):
        take(session, [2] * 257, 1)
    with pytest.raises(InputError, match="257 tokens"):
        finish(session.logits([2] * 257))


def test_a_closed_session_says_so(model: Model, tmp_path: Path) -> None:
    session = Session(model, 64)
    stream = session.generate(IDS[:3], GREEDY, 5)
    next_token(stream)
    session.close()
    session.close()
    for attempt in (
        lambda: next_token(stream),
        lambda: take(session, [2], 1),
        lambda: finish(session.logits([2])),
        lambda: session.rewind(0),
        session.fork,
        lambda: finish(session.save(tmp_path / "never")),
        lambda: finish(session.take_over(tmp_path / "never")),
    ):
        with pytest.raises(InputError, match="This session is closed"):
            attempt()
    assert list(tmp_path.iterdir()) == []


def test_sessions_that_cannot_be(model: Model) -> None:
    with pytest.raises(InputError, match="no kv 'f64'"):
        Session(model, 64, kv="f64")
    with pytest.raises(DeviceError, match="with a context of 2097152 or less"):
        Session(model, 1 << 24, kv="f16")


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_two_conversations_step_by_step(model: Model, sampling: Sampling) -> None:
    prompts = [IDS[:5], IDS[40:63]]
    sessions = [Session(model, 128, kv="f32") for _ in prompts]
    streams = [
        session.generate(ids, sampling, 5) for session, ids in zip(sessions, prompts, strict=True)
    ]
    made: list[list[int]] = [[], []]
    for _ in range(12):
        for stream, tokens in zip(streams, made, strict=True):
            tokens.append(next_token(stream))
    assert made == [truth(ids, 12, sampling) for ids in prompts]
    for session in sessions:
        session.close()


def test_conversations_in_threads_of_their_own(model: Model) -> None:
    """They wait for the same device, one of them in the library at a time."""
    prompts = [[2, 30 + i, 31] for i in range(4)]
    sessions = [Session(model, 64, kv="f32") for _ in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        found = list(threads.map(take, sessions, prompts, [20] * len(prompts)))
    assert found == [take(reference(), prompt, 20) for prompt in prompts]
    for made in sessions:
        made.close()


@pytest.mark.parametrize("length", [5, RING, 60], ids=["short", "ring", "wrapped"])
def test_a_fork_goes_its_own_way(session: Session, length: int) -> None:
    ids = IDS[:length]
    first = take(session, ids, 4)
    fork = session.fork()
    assert take(fork, [*ids, *first, 50], 6) == truth([*ids, *first, 50], 6)
    assert take(session, [*ids, *first, 60], 6) == truth([*ids, *first, 60], 6)
    session.close()
    assert take(fork, [*ids, 70], 3) == truth([*ids, 70], 3)
    fork.close()


def test_a_fork_amid_a_generation(session: Session) -> None:
    whole = truth(IDS[:30], 8)
    stream = session.generate(IDS[:30], GREEDY, 5)
    made = [next_token(stream) for _ in range(4)]
    fork = session.fork()
    assert fork.tokens == [*IDS[:30], *made]
    made += [next_token(stream) for _ in range(4)]
    assert made == whole
    assert take(fork, [*IDS[:30], *whole[:4]], 4) == whole[4:]
    fork.close()


def saved_by(session: Session, path: Path) -> Path:
    finish(session.save(path))
    return path


@pytest.mark.parametrize("kv", ["f16", "f32"])
@pytest.mark.parametrize("length", [0, 5, 60], ids=["empty", "short", "wrapped"])
def test_saved_and_restored(
    model: Model, tmp_path: Path, length: int, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webgemma.gemma.cache.PIECE_NBYTES", 1000)
    session = Session(model, 256, kv=kv)
    history = [*IDS[:length], *take(session, IDS[:length], 4)] if length else []
    path = saved_by(session, tmp_path / "a")
    restored = finish(Session.restore(model, path))
    assert (restored.tokens, restored.context, restored.kv) == (history, 256, kv)
    assert saved_by(restored, tmp_path / "b").read_bytes() == path.read_bytes()
    assert take(restored, [*history, 50], 6, RANDOM) == take(session, [*history, 50], 6, RANDOM)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b"]
    session.close()
    restored.close()


def test_saved_to_an_open_file(model: Model, tmp_path: Path) -> None:
    session = Session(model, 256)
    take(session, IDS[:5], 3)
    file = io.BytesIO()
    finish(session.save(file))
    assert file.getvalue() == saved_by(session, tmp_path / "a").read_bytes()
    restored = finish(Session.restore(model, file))
    assert restored.tokens == session.tokens
    assert not file.closed
    file.close()
    with pytest.raises(InputError, match="cannot be written"):
        finish(session.save(file))
    with pytest.raises(InputError, match="cannot be read"):
        finish(session.take_over(file))
    session.close()
    restored.close()


def test_restored_it_is_not_read_again(
    session: Session, model: Model, read: list[int], tmp_path: Path
) -> None:
    other = Session(model, 128, kv="f32")  # with another context
    history = [*IDS[:60], *take(other, IDS[:60], 4)]
    finish(session.take_over(saved_by(other, tmp_path / "saved")))
    assert take(session, [*history, 50], 6) == truth([*history, 50], 6)
    assert read == [1]
    session.rewind(len(history) - 5)
    assert take(session, [*history[:-5], 50], 6) == truth([*history[:-5], 50], 6)
    assert read == [1, 1]
    other.close()


def test_files_that_do_not_fit(session: Session, model: Model, tmp_path: Path) -> None:
    finish(session.logits(IDS[:60]))
    path = saved_by(session, tmp_path / "saved")
    small, half = Session(model, 59, kv="f32"), Session(model, 256, kv="f16")
    with pytest.raises(InputError, match="holds 60 tokens, but the context holds 59"):
        finish(small.take_over(path))
    with pytest.raises(InputError, match="saved with kv f32"):
        finish(half.take_over(path))
    gguf, config = open_tiny(replace(SHORT, seed=4))
    other = finish(Model.load(gguf, config, device()))
    with pytest.raises(InputError, match="belongs to another model"):
        finish(Session.restore(other, path))
    with pytest.raises(InputError, match="There is no file"):
        finish(session.take_over(tmp_path / "missing"))
    with pytest.raises(InputError, match="There is no file"):
        finish(session.take_over(tmp_path))
    with pytest.raises(InputError, match="cannot be written"):
        finish(session.save(tmp_path / "missing" / "saved"))
    assert session.tokens == IDS[:60]
    for each in (small, half, other):
        each.close()


@pytest.fixture(scope="module")
def saved(model: Model, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    session = Session(model, 64)
    finish(session.logits(IDS[:40]))
    path = saved_by(session, tmp_path_factory.mktemp("saved") / "saved")
    session.close()
    return path.read_bytes()


def refused(session: Session, path: Path, data: bytes) -> str:
    """What a session says to a file; it is then empty or as before, and works."""
    path.write_bytes(data)
    with pytest.raises(InputError) as caught:
        finish(session.take_over(path))
    return str(caught.value)


def test_damaged_files(model: Model, saved: bytes, tmp_path: Path) -> None:
    session = Session(model, 64)
    wanted = take(session, IDS[:40], 3)
    path = tmp_path / "saved"
    for cut in (0, 7, 15, 16, 17, 100, len(saved) // 2, len(saved) - 1):
        said = refused(session, path, saved[:cut])
        assert "no saved conversation" in said if cut < 16 else "is damaged" in said
    for at in range(0, len(saved), len(saved) // 60):
        changed = saved[:at] + bytes([saved[at] ^ 0x10]) + saved[at + 1 :]
        assert refused(session, path, changed).startswith(str(path))
    assert "is damaged" in refused(session, path, saved + b"\0")
    assert "of version 9" in refused(session, path, saved[:8] + b"\x09" + saved[9:])
    assert take(session, IDS[:40], 3) == wanted
    session.close()


@pytest.mark.parametrize(
    "change",
    [
        {"kv": "f64"},
        {"kv": 3},
        {"context": 0},
        {"context": 1 << 40},
        {"context": "64"},
        {"tokens": 5},
        {"tokens": [2] * 41},
        {"tokens": [2] * 39},
        {"tokens": [2.5] * 40},
        {"tokens": [320] * 40},
        {"tokens": [-1] * 40},
        {"lost": 0},
        {"lost": 17},
        {"lost": 40},
        {"shapes": [[1]]},
        {"shapes": 1},
        {"more": 1},
        "[]",
        "[" * 100000,
        "\udcff",
    ],
    ids=lambda change: str(change)[:24].encode("ascii", "replace").decode(),
)
def test_headers_that_make_no_sense(
    model: Model, saved: bytes, tmp_path: Path, change: dict[str, object] | str
) -> None:
    """Their checksum is right."""
    magic, version, nbytes = struct.unpack("<8sII", saved[:16])
    header = json.loads(saved[16 : 16 + nbytes])
    text = json.dumps(header | change) if isinstance(change, dict) else change
    packed = text.encode(errors="surrogateescape")
    data = struct.pack("<8sII", magic, version, len(packed)) + packed + saved[16 + nbytes : -32]
    path = tmp_path / "saved"
    path.write_bytes(data + hashlib.sha256(data).digest())
    with pytest.raises(InputError, match=r"is damaged|belongs to another model"):
        finish(Session.restore(model, path))


def test_a_table_that_stays_in_the_file() -> None:
    gguf, config = open_tiny(SHORT)
    hosted = finish(Model.load(gguf, config, device(), table="host"))
    session = Session(hosted, 256, kv="f32")
    assert take(session, IDS[:40], 6) == truth(IDS[:40], 6)
    history = [*session.tokens, 50]
    assert len(history) == 46  # the last token's keys and values were not needed yet
    assert take(session, history, 6) == truth(history, 6)
    session.close()
    hosted.close()


def buffers() -> int:
    """Buffers that are alive on any device."""
    gc.collect()
    count: int = wgpu.diagnostics.object_counts.get_dict()["Buffer"]["count"]
    return count


def test_nothing_is_left_behind(session: Session) -> None:
    counts = []
    for _ in range(4):
        take(session, IDS[:10], 75)
        other = session.fork()
        take(other, IDS[:44], 5)
        finish(other.logits(IDS[:20]))
        other.close()
        del other
        counts.append(buffers())
    assert counts[1:] == counts[1:2] * 3  # the first round leaves small buffers for the next


def use(model: Model) -> None:
    """Every kind of plan, once."""
    session = Session(model, 64)
    try:
        take(session, IDS[:20], 2)
        take(session, IDS[:3], 2, RANDOM)
        finish(session.logits(IDS[:5]))
    finally:
        session.close()


@pytest.mark.parametrize("table", ["device", "host"])
def test_closing_frees_without_a_garbage_collector(table: str) -> None:
    """A browser frees a buffer late, or never, unless it is told to."""
    on = NullDevice()
    model = finish(Model.load(*open_tiny(SHORT), on, table=table))
    kept = len(on.buffers)
    use(model)
    assert len(on.buffers) == kept
    model.close()
    assert not on.buffers


def test_memory_that_ends_at_any_moment() -> None:
    """While the session is made or a plan recorded: all but the model is freed."""
    on = NullDevice()
    model = finish(Model.load(*open_tiny(SHORT), on))
    kept = set(on.buffers)
    use(model)
    assert on.buffers == kept
    steps = range(0, on.peak_nbytes - on.nbytes, 5000)
    for spare_nbytes in steps:
        on.memory_nbytes = on.nbytes + spare_nbytes
        with pytest.raises(DeviceMemoryError, match="The GPU has no"):
            use(model)
        assert on.buffers == kept
    assert len(steps) > 20
    on.memory_nbytes = None
    use(model)
