"""The device without a GPU: what it rejects, and the memory and dispatches of a real model."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from helpers.blank import BlankGguf, a4b, b31, e2b, g3_1b, op_counts, with_better_values

from webgemma.device import Buffer, Dispatch, Kernel, MatrixShape, Plan
from webgemma.device.null import DEFAULT_LIMITS, NullDevice
from webgemma.engine.plans import PlanKey
from webgemma.engine.session import PLAN_ROWS, Session
from webgemma.errors import DeviceError
from webgemma.gemma.config import Config
from webgemma.gemma.weights import Model, weights_nbytes
from webgemma.graph import Recorder
from webgemma.lora.adapter import TARGETS, new_adapter
from webgemma.sampler import SampledToken
from webgemma.settings import resolve
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


def test_reading_returns_zeros() -> None:
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
    """Bind a part of a buffer three times."""
    device.bind(COPY, [(buffer, offset, nbytes)] * 3)


def dispatched(device: NullDevice, buffer: Buffer, x: int) -> None:
    """Run a dispatch of so many workgroups."""
    device.run(Plan([Dispatch("copy", COPY, ((buffer, 0, 16),), (x, 1, 1))]))


REJECTED: dict[str, tuple[Callable[[NullDevice, Buffer], object], str]] = {
    "large buffer": (lambda d, _: d.buffer((256 << 20) + 1, "all"), "no 268435472 bytes for all"),
    "no memory left": (lambda d, _: d.buffer(200 << 20, "more"), "no 209715200 bytes for more"),
    "odd write": (lambda d, b: d.write(b, b"abc"), "are not whole words"),
    "odd offset": (lambda d, b: d.write(b, b"abcd", 2), "are not whole words"),
    "write too far": (lambda d, b: d.write(b, bytes(8), 1020), "1020 to 1028 are outside"),
    "read too far": (lambda d, b: d.read(b, 0, 1025), "has 1024 bytes"),
    "copy too far": (lambda d, b: d.copy(b, d.buffer(16, "small"), 32), "small has 16 bytes"),
    "foreign buffer": (lambda d, _: d.read(Buffer("mine", 4)), "mine belongs to another device"),
    "freed twice": (lambda d, b: (d.free(b), d.free(b)), "or is freed"),
    "freed and run": (lambda d, b: (d.free(b), dispatched(d, b, 1)), "or is freed"),
    "binding offset": (lambda d, b: bound(d, b, 16, 16), "cannot bind 16 bytes at 16"),
    "empty binding": (lambda d, b: bound(d, b, 0, 0), "cannot bind 0 bytes"),
    "binding too far": (lambda d, b: bound(d, b, 768, 512), "768 to 1280"),
    "large binding": (
        lambda d, _: bound(d, d.buffer(129 << 20), 0, 129 << 20),
        "copy cannot bind 135266304 bytes",
    ),
    "bindings": (lambda d, b: d.bind(COPY, [(b, 0, 16)]), "has 3 bindings, not 1"),
    "too many bindings": (
        lambda d, _: d.pipeline(Kernel("wide", "", ("uniform", *["read"] * 9))),
        "wide binds more than 8",
    ),
    "large grid": (lambda d, b: dispatched(d, b, 65536), r"grid of \(65536, 1, 1\)"),
    "empty grid": (lambda d, b: dispatched(d, b, 0), r"grid of \(0, 1, 1\)"),
}


@pytest.mark.parametrize("kind", REJECTED)
def test_what_webgpu_rejects_is_rejected(kind: str) -> None:
    device = NullDevice(memory_nbytes=200 << 20)
    attempt, message = REJECTED[kind]
    with pytest.raises(DeviceError, match=message):
        attempt(device, device.buffer(1024))


def load(config: Config) -> Model:
    """Load a model of zeros."""
    return run_sync(Model.load(BlankGguf(config), config, NullDevice()))


@pytest.fixture(scope="module")
def e2b_session() -> Session:
    return Session(load(e2b()), 32768)


def test_dispatches_of_an_e2b_decode_step(e2b_session: Session) -> None:
    """Expect so few that launching them costs less than reading the weights."""
    plan = e2b_session.plans.get(PlanKey("decode", greedy=True))
    table = e2b_session.model.matrices["per_layer_token_embd.weight"]
    parts = len(table.parts) - 1  # a device with larger bindings needs none of these
    assert 35 * 7 < len(plan.dispatches) - parts <= 35 * 8
    counts = op_counts(plan)
    assert counts["attention_decode"] == 35
    assert counts["residual"] == 1  # after the last layer; all others are in products
    assert counts["attention_merge"] == 7  # of full layers, which have more splits
    assert counts["matmul"] == 0  # one token fills no tile, whatever a matrix's format is


# As a large GPU has them: no matrix is in parts, and threads shuffle.
LARGE = replace(
    DEFAULT_LIMITS, binding_nbytes=4 << 30, buffer_nbytes=16 << 30, workgroup_nbytes=48 << 10
)
SHUFFLES = frozenset({"packed-dots", *(f"shuffle{size}" for size in (4, 8, 16, 32))})
MOST_DISPATCHES = {e2b: 260, a4b: 250, b31: 380, g3_1b: 135}  # of Gemma 3, 5 a layer


@pytest.mark.parametrize("make", MOST_DISPATCHES, ids=lambda make: make.__name__)
def test_dispatches_of_a_large_gpu(make: Callable[[], Config]) -> None:
    """A slow host records a few hundred a token, however fast the GPU is."""
    config = make()
    gguf = BlankGguf(config, with_better_values)
    model = Model.allocate_all(gguf, config, NullDevice(SHUFFLES, LARGE))
    run_sync(model.derive(gguf))
    plan = Session(model, 8192).plans.get(PlanKey("decode", greedy=True))
    assert 0 < len(plan.dispatches) <= MOST_DISPATCHES[make]
    counts = op_counts(plan)
    assert counts["residual"] == 1
    assert counts["matvec_two"] > 0


@pytest.mark.parametrize("precision", ["exact", "int16"])
@pytest.mark.parametrize("make", MOST_DISPATCHES, ids=lambda make: make.__name__)
def test_adapted_steps_add_up_in_the_order_of_others(
    make: Callable[[], Config], precision: str
) -> None:
    """So that a conversation without adapters is the same beside one with some."""
    config = make()
    gguf = BlankGguf(config, with_better_values)
    model = Model.allocate_all(gguf, config, NullDevice(SHUFFLES, LARGE))
    run_sync(model.derive(gguf))
    targets = [name for name in TARGETS if name not in ("token_embd", "output")]
    adapter = new_adapter(config, targets, rank=4, layers=(0, 1, len(config.layers) - 1))
    model.set_adapters([], {"one": (adapter.pairs, 1.0)})
    plans = Session(model, 8192, precision=precision, slots=4).plans

    def orders(adapted: bool) -> tuple[list[str], list[str]]:
        """Return the threads of sums and the lanes of products, in their order."""
        recorder = Recorder(model.device)
        plans.record(recorder, PlanKey("decode", 4, greedy=True, adapted=adapted))
        sums, products = list[str](), list[str]()
        for call in recorder.calls:
            op = re.split("[ /]", call.kernel.name)[0]
            if op in ("norm", "residual", "attention_merge"):
                sums += re.findall(r"const THREADS\b.*", call.kernel.wgsl)
            elif op in ("matvec", "gate_up"):
                products += re.findall(r"const LANES\b.*", call.kernel.wgsl)
        return sums, products

    with_them, without = orders(True), orders(False)
    assert with_them == without
    assert min(map(len, without)) > 3 * len(config.layers)


def test_what_makes_rows_for_matrix_units_rounds_them() -> None:
    """In a prompt's layer, only gelu(gate) * up has ops for it: they add sums up, too."""
    config = e2b()
    gpu = NullDevice(SHUFFLES | {"subgroup-matrix", "shader-f16", "subgroups"}, LARGE)
    gpu.subgroup_sizes, gpu.matrix_shapes = (32, 32), (MatrixShape(16, 16, 16),)
    gguf = BlankGguf(config, with_better_values)
    model = Model.allocate_all(gguf, config, gpu)
    run_sync(model.derive(gguf))
    plan = Session(model, 8192, precision="f16").plans.get(PlanKey("read", 512))
    sources = Counter(d.name.split()[1] for d in plan.dispatches if d.name.startswith("round_f16"))
    assert sources == {"row_source=geglu": 2 * 35, "row_source=plain": 2}


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sample"])
def test_top_logprobs_cost_one_dispatch_if_requested(e2b_session: Session, greedy: bool) -> None:
    without, requested = (
        op_counts(e2b_session.plans.get(key))
        for key in (
            PlanKey("decode", greedy=greedy),
            PlanKey("decode", greedy=greedy, top_logprobs=True),
        )
    )
    assert requested - without == Counter({"top_logprobs": 1})
    assert without["top_logprobs"] == 0


def test_memory_of_e2b_on_the_device() -> None:
    """Expect the bytes of the file and a few for aligning planes; no chunk stays."""
    config = e2b()
    model = load(config)
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
    cached = [buffer for buffer in session.device.buffers if buffer.raw == "KV cache"]
    expected = config.kv_nbytes(context, element_nbytes=element_nbytes)
    assert sum(buffer.nbytes for buffer in cached) == expected


@pytest.mark.parametrize("make", [e2b, a4b])
def test_every_plan_stays_within_the_limits_of_every_device(make: Callable[[], Config]) -> None:
    model = load(make())
    assert model.device.limits == DEFAULT_LIMITS
    session = Session(model, 8192)
    run_sync(session.logits([2] * 600))
    sampling = [
        PlanKey(kind, greedy=greedy, top_logprobs=top_logprobs)
        for kind in ("sample", "decode")
        for greedy in (True, False)
        for top_logprobs in (True, False)
    ]
    for key in (*(PlanKey("read", rows) for rows in PLAN_ROWS), *sampling):
        model.device.run(session.plans.get(key))


def test_a_conversation_without_a_gpu(e2b_session: Session) -> None:
    """Expect token 0 with a log-probability of 0, which is what zeros decode to."""

    async def first(count: int) -> list[SampledToken]:
        found = []
        async for token in (stream := e2b_session.generate([2, 5], resolve({"top_k": 1}), 1)):
            found.append(token)
            if len(found) == count:
                break
        await stream.aclose()
        return found

    assert run_sync(first(5)) == [SampledToken(0, 0.0)] * 5
    assert e2b_session.tokens[:4] == [2, 5, 0, 0]
