"""Adapters on the GPU, alone and several at once: logits and tokens of the reference."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from helpers.gpu import device, hardware
from helpers.tiny import GEMMA3, LARGE, MIXED, MOE, SMALL, Tiny, tiny_gguf
from helpers.tiny_adapter import ENDS, EXPERTS, LAYER, tiny_adapter, tiny_pairs
from tolerance import GPU_LOGITS, RANDOM_LOGITS

from webgemma.engine.session import Session
from webgemma.errors import InputError
from webgemma.gemma.config import Config
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.reference.lora import AdaptedWeights, Pair
from webgemma.reference.text import TextModel
from webgemma.settings import resolve
from webgemma.sync import run_sync

KINDS = {
    "small": replace(SMALL, pattern="sfsf", shared=2),
    "large": replace(LARGE, pattern="sf", suppressed=()),
    "mixed": replace(MIXED, pattern="sf", formats=("Q6_K", "Q4_K", "Q8_0")),
    "moe": replace(MOE, pattern="sf"),
    "unfused": replace(MOE, pattern="sf", fused=False),
    "gemma3": replace(GEMMA3, pattern="sf"),
    "integers": replace(MIXED, pattern="sf", formats=("Q8_0",)),
}
TARGETS = (*LAYER, *EXPERTS, *ENDS)
IDS = [2, *(24 + i * 7 % 280 for i in range(1, 24))]
GREEDY = resolve({"temperature": 0})


@pytest.fixture(scope="module", autouse=True)
def small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("webgemma.engine.slots.CHUNK", 16)
        patch.setattr("webgemma.engine.session.PLAN_ROWS", (1, 16))
        yield


def open_tiny(tiny: Tiny) -> tuple[Gguf, Config]:
    gguf = run_sync(Gguf.aopen(BytesSource(tiny_gguf(tiny), "tiny.gguf")))
    return gguf, Config.from_gguf(gguf)


def expected(tiny: Tiny, *adapters: dict[str, Pair]) -> np.ndarray:
    gguf, config = open_tiny(tiny)
    return TextModel(config, AdaptedWeights(gguf, adapters)).forward(IDS)


def scaled(pairs: dict[str, Pair], factor: float) -> dict[str, Pair]:
    return {name: pair._replace(scale=factor * pair.scale) for name, pair in pairs.items()}


def logits(session: Session) -> np.ndarray:
    data = run_sync(session.logits(IDS))
    return np.frombuffer(data, np.float32).reshape(len(IDS), -1)


def greedy(session: Session, count: int) -> list[int]:
    async def take() -> list[int]:
        tokens = []
        stream = session.generate(IDS, GREEDY, 1)
        async for sampled in stream:
            tokens.append(sampled.token)
            if len(tokens) == count:
                await stream.aclose()
                break
        return tokens

    return run_sync(take())


def assert_close(actual: np.ndarray, expected: np.ndarray, bound: float = GPU_LOGITS) -> None:
    assert np.abs(actual - expected).max() <= bound * np.abs(expected).max()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_tokens_are_those_of_the_reference(kind: str) -> None:
    gguf, config = open_tiny(KINDS[kind])
    pairs = tiny_pairs(gguf, TARGETS)
    model = run_sync(Model.load(gguf, config, device()))
    model.set_adapters([(tiny_adapter(pairs).pairs, 1.0)])
    session = Session(model, 128, kv="f32")
    assert_close(logits(session), expected(KINDS[kind], pairs))
    tokens = greedy(session, 5)
    adapted = TextModel(config, AdaptedWeights(gguf, [pairs]))
    for at in range(5):
        assert tokens[at] == int(adapted.forward(IDS + tokens[:at], last_only=True).argmax())
    model.close()


@pytest.mark.parametrize(("kind", "precision"), [("moe", "exact"), ("integers", "int16")])
def test_work_divided_as_for_hardware_gives_the_same(kind: str, precision: str) -> None:
    gguf, config = open_tiny(KINDS[kind])
    pairs = tiny_pairs(gguf, TARGETS, strength=0.1)
    model = run_sync(Model.load(gguf, config, hardware()))
    model.set_adapters([(tiny_adapter(pairs).pairs, 1.0)])
    session = Session(model, 128, kv="f32", precision=precision)
    bound = GPU_LOGITS if precision == "exact" else RANDOM_LOGITS[precision]
    reference = expected(KINDS[kind], pairs)
    assert_close(logits(session), reference, bound)
    assert greedy(session, 2)[0] == int(reference[-1].argmax())
    model.close()


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("small", ("attn_q", "inp_gate")),
        ("small", ("attn_output", "ffn_up")),
        ("moe", ("ffn_gate_inp", "attn_v")),
    ],
)
def test_adapted_products_read_what_others_make(kind: str, names: tuple[str, ...]) -> None:
    """An adapter reads the row, too: it is made before, while other products make theirs."""
    gguf, config = open_tiny(KINDS[kind])
    pairs = tiny_pairs(gguf, names)
    model = run_sync(Model.load(gguf, config, hardware()))
    model.set_adapters([(tiny_adapter(pairs).pairs, 1.0)])
    tokens = greedy(Session(model, 128, kv="f32", precision="exact"), 4)
    adapted = TextModel(config, AdaptedWeights(gguf, [pairs]))
    for at in range(4):
        assert tokens[at] == int(adapted.forward(IDS + tokens[:at], last_only=True).argmax())
    model.close()


@pytest.fixture(scope="module")
def model() -> Model:
    return run_sync(Model.load(*open_tiny(KINDS["small"]), device()))


def test_adapters_are_combined_replaced_and_removed(model: Model) -> None:
    gguf, tiny = open_tiny(KINDS["small"])[0], KINDS["small"]
    first = tiny_pairs(gguf, TARGETS)
    second = tiny_pairs(gguf, ("attn_k", "ffn_up", "proj", *ENDS), seed=2, rank=6)
    one, two = tiny_adapter(first).pairs, tiny_adapter(second).pairs
    session = Session(model, 128, kv="f32")
    plain = logits(session)
    for adapters, equivalent in (
        ([(one, 0.5), (two, -0.75)], [scaled(first, 0.5), scaled(second, -0.75)]),
        ([(two, 1.0)], [second]),
        ([(one, 0.0)], []),
        ([(one, 1.0)], [first]),
        ([], []),
    ):
        model.set_adapters(adapters)
        assert_close(logits(session), expected(tiny, *equivalent))
    np.testing.assert_array_equal(logits(session), plain)
    session.close()


def test_a_changed_adapter_empties_the_cache(model: Model) -> None:
    """A generation under way ends with an error."""
    gguf = open_tiny(KINDS["small"])[0]
    pairs = tiny_pairs(gguf, ("attn_k", "attn_v"))
    session = Session(model, 128, kv="f32")
    before = greedy(session, 3)
    model.set_adapters([(tiny_adapter(pairs).pairs, 1.0)])
    after = greedy(session, 3)
    assert after[0] == int(expected(KINDS["small"], pairs)[-1].argmax())
    model.set_adapters([])
    assert greedy(session, 3) == before

    async def change_meanwhile() -> None:
        async for _ in session.generate(IDS, GREEDY, 1):
            model.set_adapters([])

    with pytest.raises(InputError, match="adapters were changed meanwhile"):
        run_sync(change_meanwhile())
    assert greedy(session, 3) == before
    session.close()


def test_the_fingerprint_depends_on_the_adapters(model: Model) -> None:
    pairs = tiny_adapter(tiny_pairs(open_tiny(KINDS["small"])[0], ("attn_q",))).pairs
    plain = model.fingerprint
    fingerprints = {plain}
    for adapters in ([(pairs, 1.0)], [(pairs, 0.5)], [(pairs, 1.0), (pairs, 1.0)]):
        model.set_adapters(adapters)
        fingerprints.add(model.fingerprint)
    assert len(fingerprints) == 4
    model.set_adapters([])
    assert model.fingerprint == plain


def test_adapters_free_their_memory(model: Model) -> None:
    before = device().nbytes
    pairs = tiny_adapter(tiny_pairs(open_tiny(KINDS["small"])[0], TARGETS)).pairs
    model.set_adapters([(pairs, 1.0)])
    assert device().nbytes > before
    model.set_adapters([(pairs, 0.25)])
    model.set_adapters([])
    assert device().nbytes == before


def test_experts_with_several_adapters() -> None:
    gguf, config = open_tiny(KINDS["moe"])
    first = tiny_pairs(gguf, EXPERTS)
    second = tiny_pairs(gguf, EXPERTS[-1:], seed=2, rank=2)
    moe = run_sync(Model.load(gguf, config, device()))
    moe.set_adapters([(tiny_adapter(first).pairs, 0.5), (tiny_adapter(second).pairs, -1.0)])
    session = Session(moe, 128, kv="f32")
    assert_close(logits(session), expected(KINDS["moe"], scaled(first, 0.5), scaled(second, -1.0)))
    moe.close()


def test_pairs_that_the_gpu_cannot_apply_raise_an_error(model: Model) -> None:
    pairs = tiny_adapter(tiny_pairs(open_tiny(KINDS["small"])[0], ("attn_q",))).pairs
    stray = {"blk.0.no_such.weight": pairs["blk.0.attn_q.weight"]}
    before = device().nbytes
    with pytest.raises(InputError, match=r"blk\.0\.no_such\.weight, which the GPU cannot adapt"):
        model.set_adapters([(pairs | stray, 1.0)])
    assert device().nbytes == before
