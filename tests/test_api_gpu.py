"""The public API on a GPU: logits of transformers, conversations, damaged files, closing."""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import FIXTURES, SHARED, needs_shared
from helpers.gpu import device
from helpers.tiny import KINDS, SMALL, Tiny, tiny_gguf
from tolerance import F16_LOGITS_OF_TRANSFORMERS, GPU_LOGITS_OF_TRANSFORMERS

from webgemma import Gemma, InputError
from webgemma.engine.session import Session
from webgemma.errors import GgufError
from webgemma.gemma.config import Config
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.settings import resolve
from webgemma.sync import iterate_sync, run_sync


def check_logits(logits: np.ndarray, expected: np.ndarray, within: float) -> None:
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, expected, rtol=0, atol=within)


def tokens(gemma: Gemma, ids: list[int], count: int, **settings: object) -> list[int]:
    pieces = gemma.generate(ids, **{"temperature": 0, "max_tokens": count, **settings})
    return [piece.token for piece in pieces]


@pytest.mark.parametrize("kind", KINDS)
def test_tiny_models_agree_with_transformers(kind: str, tmp_path: Path) -> None:
    recorded = np.load(FIXTURES / "tiny" / f"{kind}.npz")
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf(KINDS[kind]))
    with Gemma.load(path, "gpu", kv="f32") as gemma:
        check_logits(gemma.logits(recorded["ids"]), recorded["logits"], GPU_LOGITS_OF_TRANSFORMERS)
        expected = recorded["greedy"].tolist()
        assert tokens(gemma, recorded["ids"], len(expected)) == expected


def test_logits_are_the_same_without_numpy(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [2, 30, 31, 32]
    with Gemma.load(path, "gpu", context=64) as gemma:
        gemma.config = replace(gemma.config, suppressed=(0, 7, 8, gemma.config.vocab - 1))
        expected = gemma.logits(ids)
        monkeypatch.setitem(sys.modules, "numpy", None)  # importing it fails
        found = gemma.logits(ids)
        monkeypatch.undo()
    assert len(found) == len(ids)
    assert [list(row) for row in found] == expected.tolist()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 1, 9])
def test_logits_that_are_not_finite_are_found_without_numpy(
    at: int, value: float, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [2, 30, 31]
    with Gemma.load(path, "gpu", context=64) as gemma:
        gemma.config = replace(gemma.config, suppressed=(3, 8))
        values = np.zeros((len(ids), gemma.config.vocab), np.float32)
        values[:, [3, 8]] = -math.inf
        values[1, [4, 5]] = 3e38  # their sum is not finite in float32

        async def logits(_: object) -> bytes:
            return values.tobytes()

        monkeypatch.setattr(gemma._engine, "logits", logits)
        monkeypatch.setitem(sys.modules, "numpy", None)
        assert list(gemma.logits(ids)[1])[:5] == [0, 0, 0, -math.inf, values[1, 4]]
        values[-1, at] = value
        with pytest.raises(GgufError, match="computes NaN or infinity"):
            gemma.logits(ids)
        monkeypatch.undo()


@needs_shared
@pytest.mark.parametrize("name", ["e2b", "moe"])
def test_files_of_llama_cpp_agree_with_transformers(name: str) -> None:
    def numbers(file: str) -> list[int]:
        return [int(word) for word in (SHARED / name / file).read_text().split()]

    recorded = np.load(SHARED / name / "Q4_K_M.logits.npy")
    ids, greedy = numbers("ids.txt"), numbers("Q4_K_M.greedy.txt")
    with Gemma.load(SHARED / name / f"{name}-Q4_K_M.gguf", "gpu", kv="f32") as gemma:
        check_logits(gemma.logits(ids), recorded, GPU_LOGITS_OF_TRANSFORMERS)
        assert tokens(gemma, ids, len(greedy)) == greedy


def session_of(kind: str, kv: str = "f32", without: frozenset[str] = frozenset()) -> Session:
    gguf = run_sync(Gguf.aopen(BytesSource(tiny_gguf(KINDS[kind]), "tiny.gguf")))
    model = run_sync(Model.load(gguf, Config.from_gguf(gguf), device(without)))
    return Session(model, 512, kv=kv)


def check_session(session: Session, kind: str, within: float) -> None:
    recorded = np.load(FIXTURES / "tiny" / f"{kind}.npz")
    ids = recorded["ids"].tolist()
    logits = np.frombuffer(run_sync(session.logits(ids)), np.float32).reshape(len(ids), -1)
    check_logits(logits, recorded["logits"], within)
    session.close()
    session.model.close()


@pytest.mark.parametrize("plan_rows", [(32,), (1, 7), (3, 5), (1,)], ids=str)
@pytest.mark.parametrize("kind", ["small", "large", "moe"])
def test_chunks_of_any_size_give_the_same_logits(
    kind: str, plan_rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webgemma.engine.slots.CHUNK", plan_rows[-1])
    monkeypatch.setattr("webgemma.engine.session.PLAN_ROWS", plan_rows)
    check_session(session_of(kind), kind, GPU_LOGITS_OF_TRANSFORMERS)


@pytest.mark.parametrize("kind", ["small", "large", "moe"])
def test_keys_and_values_may_be_float16(kind: str) -> None:
    check_session(session_of(kind, "f16"), kind, F16_LOGITS_OF_TRANSFORMERS)


@pytest.mark.parametrize("kind", ["small", "moe"])
def test_webgpu_without_optional_features_suffices(kind: str) -> None:
    without = frozenset({"subgroups", "shader-f16", "timestamp-query", "packed-dots"})
    assert device(without).features <= {"params-in-storage"}  # which needs nothing
    check_session(session_of(kind, without=without), kind, GPU_LOGITS_OF_TRANSFORMERS)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small.gguf"
    path.write_bytes(tiny_gguf(SMALL))
    return path


@pytest.fixture(scope="module")
def gemma(path: Path) -> Iterator[Gemma]:
    with Gemma.load(path, "gpu", context=400, kv="f32") as loaded:
        yield loaded


def test_the_device_is_named(gemma: Gemma) -> None:
    assert gemma.device == device().name


def test_the_cpu_generates_the_same_tokens(gemma: Gemma, path: Path) -> None:
    settings = {"seed": 3, "temperature": 1.5, "top_k": 20, "repetition_penalty": 1.2}
    with Gemma.load(path, "cpu") as cpu:
        assert tokens(gemma, [2, 30], 20, **settings) == tokens(cpu, [2, 30], 20, **settings)


def test_a_saved_conversation_continues(gemma: Gemma, path: Path, tmp_path: Path) -> None:
    first = tokens(gemma, [2, 30, 31, 32], 8)
    gemma.save(tmp_path / "saved")
    expected = tokens(gemma, [2, 30, 31, 32, *first, 40], 8)
    with Gemma.load(path, "gpu", context=100, kv="f32") as other:
        assert other.restore(tmp_path / "saved") == [2, 30, 31, 32, *first]
        assert tokens(other, [2, 30, 31, 32, *first, 40], 8) == expected


def test_a_fork_is_a_separate_conversation(path: Path) -> None:
    gemma = Gemma.load(path, "gpu", context=100)
    first = tokens(gemma, [2, 30, 31], 4)
    fork = gemma.fork()
    streams = [
        gemma.generate([2, 30, 31, *first, 50], temperature=0, max_tokens=6),
        fork.generate([2, 30, 31, *first, 60], temperature=0, max_tokens=6),
    ]
    pairs = [(a.token, b.token) for a, b in zip(*streams, strict=True)]
    gemma.close()
    gemma.close()
    assert tokens(fork, [2, 30, 31, *first, 50], 6) == [a for a, _ in pairs]
    assert tokens(fork, [2, 30, 31, *first, 60], 6) == [b for _, b in pairs]
    fork.close()
    with pytest.raises(InputError, match="This session is closed"):
        tokens(fork, [2, 30], 1)


def test_two_generations_at_once_have_a_slot_each(gemma: Gemma) -> None:
    expected = [tokens(gemma, ids, 9, temperature=0) for ids in ([2, 30], [2, 50])]
    one = gemma.generate([2, 30], temperature=0, max_tokens=9)
    first = next(one).token
    two = gemma.generate([2, 50], temperature=0, max_tokens=9)
    second = next(two).token
    assert [first, *(piece.token for piece in one)] == expected[0]
    assert [second, *(piece.token for piece in two)] == expected[1]


GPU_ONLY: list[Callable[[Gemma, Path], object]] = [
    lambda gemma, path: gemma.save(path),
    lambda gemma, path: gemma.restore(path),
    lambda gemma, _: gemma.fork(),
]


@pytest.mark.parametrize("attempt", GPU_ONLY)
def test_operations_of_the_gpu_raise_an_error_on_the_cpu(
    attempt: Callable[[Gemma, Path], object], path: Path, tmp_path: Path
) -> None:
    with (
        Gemma.load(path, "cpu") as cpu,
        pytest.raises(InputError, match=r"needs the GPU; this model is loaded on the CPU"),
    ):
        attempt(cpu, tmp_path / "saved")


# Damage


def damaged(path: Path, tiny: Tiny, name: str, value: float) -> Path:
    """Write a model with one wrong number, in the first of a tensor's floats."""
    data = bytearray(tiny_gguf(tiny))
    with Gguf.open(_write(path, data)) as gguf:
        tensor = gguf.tensors[name]
    dtype = {"F32": np.float32, "Q8_0": np.float16}[tensor.format.name]  # Q8_0: a block's scale
    number = dtype(value).tobytes()
    data[tensor.offset : tensor.offset + len(number)] = number
    return _write(path, data)


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


BLOCKS = replace(SMALL, width=128, ffn=128, heads=4, head_dims=(32, 64), ple=32, formats=("Q8_0",))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("tiny", "name", "precision"),
    [
        (SMALL, "token_embd.weight", "exact"),  # one logit of many
        (BLOCKS, "blk.1.ffn_down.weight", "exact"),
        (BLOCKS, "blk.1.attn_q.weight", "int16"),
        (BLOCKS, "blk.1.ffn_gate.weight", "int8"),
    ],
)
def test_values_that_are_not_finite_raise_an_error(
    tiny: Tiny, name: str, precision: str, value: float, tmp_path: Path
) -> None:
    """Both engines raise it, whatever the settings."""
    path = damaged(tmp_path / "bad.gguf", tiny, name, value)
    with Gemma.load(path, "gpu", context=64, precision=precision) as gemma:
        message = (
            r"bad\.gguf computes NaN or infinity on .*"
            "arithmetic of this GPU is broken; `webgemma check`"
        )
        # A single token is read by the plan that decodes: in the requested precision.
        for ids, temperature in (([2], 0.0), ([2, 30, 31], 0.0), ([2, 30, 31], 1.0)):
            with pytest.raises(GgufError, match=message):
                list(gemma.generate(ids, max_tokens=5, temperature=temperature))
        with pytest.raises(GgufError, match=message):
            gemma.logits([2, 30, 31])
    with Gemma.load(path, "cpu") as gemma:
        message = r"bad\.gguf computes NaN or infinity: its weights are damaged"
        with pytest.raises(GgufError, match=message):
            list(gemma.generate([2, 30, 31], max_tokens=5))
        with pytest.raises(GgufError, match=message):
            gemma.logits([2, 30, 31])


# Closing


@pytest.mark.parametrize("device_name", ["gpu", "cpu"])
def test_a_closed_model_raises_an_error(path: Path, device_name: str) -> None:
    gemma = Gemma.load(path, device_name, context=64)
    stream = gemma.generate([2, 30], temperature=0, max_tokens=9)
    next(stream)
    gemma.close()
    gemma.close()
    attempts = [
        lambda: next(stream),
        lambda: gemma.logits([2, 30]),
        lambda: next(gemma.generate([2, 30])),
    ]
    for attempt in attempts:
        with pytest.raises(InputError, match="is closed"):
            attempt()


def test_a_model_may_be_closed_before_its_session() -> None:
    session = session_of("small")
    run_sync(session.logits([2, 30]))
    session.model.close()
    session.model.close()
    attempts = [
        lambda: run_sync(session.logits([2, 30])),
        lambda: next(iterate_sync(session.generate([2, 30], resolve({}), 1))),
        lambda: session.rewind(0),
        session.fork,
        lambda: Session(session.model, 64),
    ]
    for attempt in attempts:
        with pytest.raises(InputError, match="model of this session is closed"):
            attempt()
    session.close()
    session.close()
