"""The device without a GPU: what it refuses, and what a real model costs, counted with it."""

from collections import Counter
from collections.abc import Callable

import pytest
from helpers.blank import BlankGguf, a4b, e2b

from webgemma.device import Buffer, Dispatch, Kernel, Plan
from webgemma.device.null import DEFAULT_LIMITS, NullDevice
from webgemma.engine.session import BATCHES, Session
from webgemma.errors import DeviceError
from webgemma.gemma.config import Config
from webgemma.gemma.stacks import weights_nbytes
from webgemma.gemma.weights import Model
from webgemma.sampler import Chosen, Sampling
from webgemma.sync import run_sync

COPY = Kernel("copy", "", ("uniform", "read", "write"))


def test_memory_is_counted_until_it_is_freed() -> None:
    device = NullDevice()
    first, second = device.buffer(16, "first"), device.buffer(5, "second")
    assert (second.nbytes, device.nbytes) == (16, 32)
    device.free(first)
    assert (device.nbytes, device.peak_nbytes, device.buffers) == (16, 32, {second})
    device.close()
    assert device.nbytes == 0


def test_what_is_read_is_zero() -> None:
    device = NullDevice()
    buffer = device.buffer(16)
    device.write(buffer, b"abcd", 8)
    assert run_sync(device.read(buffer, 8, 4).bytes()) == bytes(4)
    assert run_sync(device.read(buffer, 4).bytes()) == bytes(12)
    assert device.written_nbytes == 4


def test_plans_are_kept() -> None:
    device = NullDevice()
    buffer = device.buffer(64)
    group = device.bind(device.pipeline(COPY), [(buffer, 0, 64)] * 3)
    plan = Plan([Dispatch("copy", COPY, group, (1, 2, 3))])
    assert device.run(plan) is None
    reading = device.run(plan, (buffer, 0, 8))
    assert reading is not None
    assert run_sync(reading.bytes()) == bytes(8)
    assert device.plans == [plan, plan]


def bound(device: NullDevice, buffer: Buffer, offset: int, nbytes: int) -> None:
    device.bind(COPY, [(buffer, offset, nbytes)] * 3)


def dispatched(device: NullDevice, buffer: Buffer, x: int) -> None:
    device.run(Plan([Dispatch("copy", COPY, ((buffer, 0, 16),), (x, 1, 1))]))


REFUSED: dict[str, tuple[Callable[[NullDevice, Buffer], object], str]] = {
    "large buffer": (lambda d, _: d.buffer((256 << 20) + 1, "all"), "no 268435472 bytes for all"),
    "no memory left": (lambda d, _: d.buffer(200 << 20, "more"), "no 209715200 bytes for more"),
    "odd write": (lambda d, b: d.write(b, b"abc"), "no whole words"),
    "odd offset": (lambda d, b: d.write(b, b"abcd", 2), "no whole words"),
    "write too far": (lambda d, b: d.write(b, bytes(8), 1020), "1020 to 1028 are not among them"),
    "read too far": (lambda d, b: d.read(b, 0, 1025), "has 1024 bytes"),
    "copy too far": (lambda d, b: d.copy(b, d.buffer(16, "small"), 32), "small has 16 bytes"),
    "foreign buffer": (lambda d, _: d.read(Buffer("mine", 4)), "mine is not of this device"),
    "freed twice": (lambda d, b: (d.free(b), d.free(b)), "or freed"),
    "freed and run": (lambda d, b: (d.free(b), dispatched(d, b, 1)), "or freed"),
    "binding offset": (lambda d, b: bound(d, b, 16, 16), "cannot see 16 bytes at 16"),
    "empty binding": (lambda d, b: bound(d, b, 0, 0), "cannot see 0 bytes"),
    "binding too far": (lambda d, b: bound(d, b, 768, 512), "768 to 1280"),
    "large binding": (
        lambda d, _: bound(d, d.buffer(129 << 20), 0, 129 << 20),
        "copy cannot see 135266304 bytes",
    ),
    "bindings": (lambda d, b: d.bind(COPY, [(b, 0, 16)]), "has 3 bindings, not 1"),
    "too many bindings": (
        lambda d, _: d.pipeline(Kernel("wide", "", ("uniform", *["read"] * 9))),
        "wide binds more than 8",
    ),
    "large grid": (lambda d, b: dispatched(d, b, 65536), r"grid of \(65536, 1, 1\)"),
    "empty grid": (lambda d, b: dispatched(d, b, 0), r"grid of \(0, 1, 1\)"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_webgpu_refuses(kind: str) -> None:
    device = NullDevice(memory_nbytes=200 << 20)
    attempt, sentence = REFUSED[kind]
    with pytest.raises(DeviceError, match=sentence):
        attempt(device, device.buffer(1024))


def loaded(config: Config) -> Model:
    return run_sync(Model.load(BlankGguf(config), config, NullDevice()))


@pytest.fixture(scope="module")
def e2b_session() -> Session:
    return Session(loaded(e2b()), 32768)


def test_dispatches_of_an_e2b_decode_step(e2b_session: Session) -> None:
    """Few enough that launching them costs less than reading the weights."""
    plan = e2b_session._plan("decode greedy", 1)
    table = e2b_session.model.matrices["per_layer_token_embd.weight"]
    parts = len(table.parts) - 1  # a device with larger bindings needs none of these
    assert 35 * 10 < len(plan.dispatches) - parts <= 35 * 12
    assert Counter(d.name for d in plan.dispatches)["attention"] == 35


@pytest.mark.parametrize("kind", ["greedy", "sample"])
def test_the_likeliest_tokens_cost_one_dispatch_if_asked_for(
    e2b_session: Session, kind: str
) -> None:
    plain, asked = (
        Counter(d.name for d in e2b_session._plan(f"decode {kind}{top}", 1).dispatches)
        for top in ("", " top")
    )
    assert asked - plain == Counter({"top": 1})
    assert plain["top"] == 0


def test_memory_of_e2b_on_the_device() -> None:
    """The bytes of the file, and a little for aligning planes; no chunk stays."""
    config = e2b()
    model = loaded(config)
    table, rest = weights_nbytes(BlankGguf(config), config)
    assert table == 262144 * 35 * 210
    assert table + rest <= model.device.nbytes < table + rest + 200_000
    assert model.device.peak_nbytes < table + rest + (64 << 20)
    model.close()
    assert not model.device.buffers


@pytest.mark.parametrize("context", [100, 32768])
@pytest.mark.parametrize(("kv", "element_nbytes"), [("f16", 2), ("f32", 4)])
def test_cache_of_a_session(context: int, kv: str, element_nbytes: int) -> None:
    config = e2b()
    session = Session(Model(config, NullDevice()), context, kv=kv)
    cached = [buffer for buffer in session.device.buffers if buffer.raw == "cache"]
    wanted = config.kv_nbytes(context, element_nbytes=element_nbytes)
    assert sum(buffer.nbytes for buffer in cached) == wanted


@pytest.mark.parametrize("make", [e2b, a4b])
def test_every_plan_keeps_to_the_limits_that_all_devices_have(make: Callable[[], Config]) -> None:
    model = loaded(make())
    assert model.device.limits == DEFAULT_LIMITS
    session = Session(model, 8192)
    run_sync(session.logits([2] * 600))
    for kind in ("read", "greedy", "sample", "greedy top", "sample top"):
        for batch in BATCHES:
            model.device.run(session._plan(kind, batch))
    for kind in ("decode greedy", "decode sample", "decode greedy top", "decode sample top"):
        model.device.run(session._plan(kind, 1))


def test_a_conversation_without_a_gpu(e2b_session: Session) -> None:
    """Zeros decode to token 0, with a log-probability of 0."""

    async def first(count: int) -> list[Chosen]:
        found = []
        async for piece in (stream := e2b_session.generate([2, 5], Sampling(top_k=1), 1)):
            found.append(piece)
            if len(found) == count:
                break
        await stream.aclose()
        return found

    assert run_sync(first(5)) == [Chosen(0, 0.0)] * 5
    assert e2b_session.tokens[:4] == [2, 5, 0, 0]
