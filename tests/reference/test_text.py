"""Reference text model against transformers, and against itself in several calls."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import FIXTURES, SHARED, needs_shared
from helpers.tiny import KINDS, LARGE, MOE, SMALL, Tiny, tiny_gguf, tiny_metadata, tiny_tensors
from tolerance import (
    HIDDEN_OF_TRANSFORMERS,
    LOGITS_IN_PIECES,
    LOGITS_INCREMENTAL,
    LOGITS_OF_TRANSFORMERS,
)

from webgemma.gemma.config import Config
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import NewTensor, gguf_bytes
from webgemma.reference.text import Cache, TextModel
from webgemma.reference.weights import Weights
from webgemma.sync import run_sync


def model_of(data: bytes, budget_nbytes: int | None = None) -> TextModel:
    gguf = run_sync(Gguf.aopen(BytesSource(data, "tiny.gguf")))
    return TextModel(Config.from_gguf(gguf), Weights(gguf, budget_nbytes))


def model_at(path: Path) -> TextModel:
    gguf = Gguf.open(path)
    return TextModel(Config.from_gguf(gguf), Weights(gguf))


def greedy(model: TextModel, ids: list[int], count: int) -> list[int]:
    cache = Cache(model.config)
    logits = model.forward(ids, cache, last_only=True)
    tokens = []
    while len(tokens) < count:
        tokens.append(int(logits[-1].argmax()))
        logits = model.forward(tokens[-1:], cache)
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_tiny_models_agree_with_transformers(kind: str) -> None:
    recorded = np.load(FIXTURES / "tiny" / f"{kind}.npz")
    model = model_of(tiny_gguf(KINDS[kind]))
    ids = recorded["ids"].tolist()
    np.testing.assert_allclose(
        model.forward(ids), recorded["logits"], rtol=0, atol=LOGITS_OF_TRANSFORMERS
    )
    assert greedy(model, ids, len(recorded["greedy"])) == recorded["greedy"].tolist()


SHARED_MODELS = {
    "e2b": ("e2b/e2b-Q4_K_M.gguf", "e2b/ids.txt", "e2b/Q4_K_M"),
    "moe": ("moe/moe-Q4_K_M.gguf", "moe/ids.txt", "moe/Q4_K_M"),
    "mm": ("mm/mm-f16.gguf", "mm/text/ids.txt", "mm/text/"),
}


def numbers(path: Path) -> list[int]:
    return [int(word) for word in path.read_text().split()]


@needs_shared
@pytest.mark.parametrize("name", SHARED_MODELS)
def test_llama_cpp_files_agree_with_transformers(name: str) -> None:
    file, ids_file, stem = SHARED_MODELS[name]
    dot = "" if stem.endswith("/") else "."
    model = model_at(SHARED / file)
    ids = numbers(SHARED / ids_file)
    recorded = np.load(SHARED / f"{stem}{dot}logits.npy")
    expected = numbers(SHARED / f"{stem}{dot}greedy.txt")
    assert len(expected) == 48
    np.testing.assert_allclose(model.forward(ids), recorded, rtol=0, atol=LOGITS_OF_TRANSFORMERS)
    assert greedy(model, ids, len(expected)) == expected


@needs_shared
def test_hidden_states_agree_with_transformers() -> None:
    model = model_at(SHARED / "mm" / "mm-f16.gguf")
    trace: list[np.ndarray] = []
    model.forward(numbers(SHARED / "mm" / "text" / "ids.txt"), trace=trace)
    *before, last, normed = trace
    recorded = np.load(SHARED / "mm" / "text" / "hidden.npy")
    np.testing.assert_allclose(
        np.stack([*before, normed]), recorded, rtol=0, atol=HIDDEN_OF_TRANSFORMERS
    )
    prenorm = np.load(SHARED / "mm" / "text" / "hidden_last_prenorm.npy")
    np.testing.assert_allclose(last, prenorm, rtol=0, atol=HIDDEN_OF_TRANSFORMERS)


@pytest.mark.parametrize("counts", [[1] * 40, [7, 1, 25, 7], [39, 1]], ids=str)
@pytest.mark.parametrize("tiny", [SMALL, LARGE, MOE], ids=["small", "large", "moe"])
def test_several_calls_give_the_logits_of_one(tiny: Tiny, counts: list[int]) -> None:
    model = model_of(tiny_gguf(tiny))
    ids = [2, *range(30, 69)]
    in_one = model.forward(ids)
    cache, calls, start = Cache(model.config), [], 0
    for count in counts:
        calls.append(model.forward(ids[start : start + count], cache))
        start += count
    np.testing.assert_allclose(np.concatenate(calls), in_one, rtol=0, atol=LOGITS_INCREMENTAL)


def test_a_long_prompt_spans_several_query_chunks() -> None:
    model = model_of(tiny_gguf(SMALL))
    ids = [2, *(24 + i * 7 % 280 for i in range(400))]
    in_one = model.forward(ids)
    cache = Cache(model.config)
    model.forward(ids[:-1], cache)
    last = model.forward(ids[-1:], cache)
    np.testing.assert_allclose(last, in_one[-1:], rtol=0, atol=LOGITS_INCREMENTAL)


def test_a_truncated_cache_drops_its_positions() -> None:
    model = model_of(tiny_gguf(SMALL))
    cache = Cache(model.config)
    model.forward([2, 30, 31, 32, 33], cache)
    cache.truncate(3)
    again = model.forward([40], cache)
    np.testing.assert_allclose(
        again, model.forward([2, 30, 31, 40])[-1:], rtol=0, atol=LOGITS_INCREMENTAL
    )


def test_split_experts_equal_fused_ones() -> None:
    """A fused tensor holds the gate rows of each expert, then its up rows."""
    count, _, ffn = MOE.experts or (0, 0, 0)
    split = []
    for tensor in tiny_tensors(MOE):
        if "ffn_gate_up_exps" in tensor.name:
            both = np.frombuffer(tensor.data, np.float32).reshape(count, 2 * ffn, MOE.width)
            for name, rows in (("gate", both[:, :ffn]), ("up", both[:, ffn:])):
                part = tensor.name.replace("gate_up", name)
                split.append(NewTensor(part, (MOE.width, ffn, count), "F32", rows.tobytes()))
        else:
            split.append(tensor)
    ids = [2, 50, 51, 52]
    fused = model_of(tiny_gguf(MOE)).forward(ids)
    np.testing.assert_array_equal(
        model_of(gguf_bytes(tiny_metadata(MOE), split)).forward(ids), fused
    )


@pytest.mark.parametrize("tiny", [SMALL, MOE], ids=["small", "moe"])
def test_logits_are_the_same_without_memory_to_cache_weights(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [2, 50, 51, 52]
    cached = model_of(tiny_gguf(tiny)).forward(ids)
    monkeypatch.setattr("webgemma.reference.weights.CHUNK_NBYTES", 1000)
    uncached = model_of(tiny_gguf(tiny), 0).forward(ids)
    np.testing.assert_allclose(uncached, cached, rtol=0, atol=LOGITS_IN_PIECES)


def test_logits_of_suppressed_tokens_are_minus_infinity() -> None:
    logits = model_of(tiny_gguf(LARGE)).forward([2, 30])
    assert np.isneginf(logits[:, [7, 9]]).all()
    assert np.isfinite(np.delete(logits, [7, 9], axis=1)).all()


def test_rope_is_partial_without_rope_freqs() -> None:
    tensors = [tensor for tensor in tiny_tensors(SMALL) if tensor.name != "rope_freqs.weight"]
    without = model_of(gguf_bytes(tiny_metadata(SMALL), tensors)).forward([2, 30, 31, 32])
    np.testing.assert_allclose(
        without, model_of(tiny_gguf(SMALL)).forward([2, 30, 31, 32]), atol=1e-5
    )


def test_an_untied_head_and_a_missing_output_scale() -> None:
    head = replace(tiny_tensors(SMALL)[0], name="output.weight")
    kept = [t for t in tiny_tensors(SMALL) if not t.name.endswith("layer_output_scale.weight")]
    ones = [
        replace(t, data=np.ones(1, "<f4").tobytes())
        if t.name.endswith("layer_output_scale.weight")
        else t
        for t in tiny_tensors(SMALL)
    ]
    ids = [2, 30, 31]
    missing = model_of(gguf_bytes(tiny_metadata(SMALL), kept)).forward(ids)
    np.testing.assert_array_equal(
        missing, model_of(gguf_bytes(tiny_metadata(SMALL), ones)).forward(ids)
    )
    untied = model_of(gguf_bytes(tiny_metadata(SMALL), [*ones, head]))
    assert not untied.config.tied
    np.testing.assert_array_equal(untied.forward(ids), missing)


@needs_shared
@pytest.mark.parametrize("name", ["plain/plain-Q4_K_M", "scaled/scaled-F16"])
def test_llama_cpp_files_of_gemma_3_agree_with_transformers(name: str) -> None:
    path = SHARED / "gemma3" / f"{name}.gguf"
    model, ids = model_at(path), numbers(path.parent / "ids.txt")
    recorded = np.load(path.parent / "logits.npy")
    expected = numbers(path.parent / "greedy.txt")
    np.testing.assert_allclose(model.forward(ids), recorded, rtol=0, atol=LOGITS_OF_TRANSFORMERS)
    assert greedy(model, ids, len(expected)) == expected
