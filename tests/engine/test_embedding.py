"""Embedding models on the GPU: transformers' vectors, packed texts, and what does not fit."""

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from conftest import SHARED, needs_shared
from helpers.blank import BlankGguf, embedding_300m, op_counts
from helpers.gpu import device, hardware
from helpers.sessions import open_tiny
from helpers.tiny import EMBEDDING, EMBEDDING2, OLLAMA_EMBEDDING
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import GPU_VECTORS

from webgemma.device.null import DEFAULT_LIMITS, NullDevice
from webgemma.engine.embedding import (
    EmbeddingEngine,
    check_longest_text,
    most_tokens,
    open_embedding_engine,
    packed,
    plan_rows,
)
from webgemma.engine.interface import EngineOptions
from webgemma.errors import DeviceError, DeviceMemoryError, InputError
from webgemma.gemma.config import Config
from webgemma.gemma.record import loop_limits
from webgemma.gemma.record.matrix_tiling import MatrixUnits
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.media.encoders import EncoderFiles, gpu_encoders
from webgemma.progress import ignore_progress
from webgemma.reference.embedding import EmbeddingModel, normalised
from webgemma.reference.weights import Floats, Weights
from webgemma.sync import run_sync

FILES = {name: SHARED / "embed" / name for name in ("v1", "v1-ollama", "v2")}
INTEGERS = replace(  # whose products are of integers, if asked for: rows of 256
    EMBEDDING, width=256, ffn=256, head_dims=(64, 64), formats=("Q8_0", "Q4_0"), pattern="sf"
)
KINDS = {
    "dense": EMBEDDING,
    "ollama": OLLAMA_EMBEDDING,
    "projection": EMBEDDING2,
    "integers": INTEGERS,
}
LENGTHS = (1, 2, 30, 7, 64, 1, 1, 33, 18, 90)
TEXTS = [[2, *(30 + i * (7 + n) % 280 for i in range(n - 1))] for n in LENGTHS]


@cache
def expected(kind: str) -> Floats:
    gguf, config = open_tiny(KINDS[kind])
    model = EmbeddingModel(config, Weights(gguf))
    return np.stack([model.raw_vector(ids) for ids in TEXTS])


@contextmanager
def engine_of(gguf: Gguf, precision: str = "exact", on: object = None):
    config, gpu = Config.from_gguf(gguf), on or device()
    model = run_sync(Model.load(gguf, config, gpu))
    encoders = gpu_encoders(EncoderFiles("tiny", gguf, config.width), gpu, None, precision)
    engine = EmbeddingEngine(gguf, model, config.context, precision, encoders)
    try:
        yield engine
    finally:
        engine.free()


def vectors(engine: EmbeddingEngine, texts: Sequence[Sequence[int]], batch: int | None) -> Floats:
    values = run_sync(engine.embed(texts, batch, ignore_progress))
    return np.frombuffer(values, np.float32).reshape(len(texts), engine.size)


def assert_close(found: Floats, wanted: Floats, precision: str) -> None:
    within = GPU_VECTORS[precision]
    np.testing.assert_allclose(normalised(found), normalised(wanted), rtol=0, atol=within)


@needs_shared
@pytest.mark.parametrize(
    ("name", "precision"),
    [("v1", "exact"), ("v1", "int16"), ("v1-ollama", "exact"), ("v2", "exact")],
)
def test_files_agree_with_transformers(name: str, precision: str) -> None:
    folder = FILES[name]
    texts = [list(map(int, line.split())) for line in (folder / "ids.txt").read_text().splitlines()]
    truth = dict(np.load(folder / "truth.npz"))
    with engine_of(Gguf.open(next(folder.glob("*.gguf"))), precision) as engine:
        found = vectors(engine, texts, None)
    engine.gguf.close()
    assert_close(found, truth["embeddings"], precision)
    for key in [key for key in truth if key.startswith("mrl")]:
        np.testing.assert_allclose(
            normalised(found[:, : int(key[3:])]), truth[key], rtol=0, atol=GPU_VECTORS[precision]
        )


@needs_shared
@pytest.mark.parametrize("name", FILES)
def test_files_on_matrix_units(name: str, matrix_units: MatrixUnits) -> None:
    assert matrix_units
    folder = FILES[name]
    texts = [list(map(int, line.split())) for line in (folder / "ids.txt").read_text().splitlines()]
    with engine_of(Gguf.open(next(folder.glob("*.gguf"))), "f16") as engine:
        found = vectors(engine, texts, None)
    engine.gguf.close()
    assert_close(found, np.load(folder / "truth.npz")["embeddings"], "f16")


def test_packed_texts_on_matrix_units(matrix_units: MatrixUnits) -> None:
    assert matrix_units
    with engine_of(open_tiny(INTEGERS)[0], "f16") as engine:
        assert_close(vectors(engine, TEXTS, None), expected("integers"), "f16")


@pytest.mark.parametrize(
    ("kind", "precision"),
    [("dense", "exact"), ("ollama", "exact"), ("projection", "exact"), ("integers", "int16")],
)
def test_packed_texts_do_not_attend_to_each_other(kind: str, precision: str) -> None:
    """In one pass, in several, and alone; a pass's tokens fill its plan or not."""
    with engine_of(open_tiny(KINDS[kind])[0], precision) as engine:
        for batch in (None, 64, 1):
            assert_close(vectors(engine, TEXTS, batch), expected(kind), precision)
        backwards = vectors(engine, TEXTS[::-1], None)
        assert_close(backwards, expected(kind)[::-1], precision)


@pytest.mark.parametrize("kind", ["dense", "projection"])
def test_work_divided_as_on_a_hardware_gpu(kind: str) -> None:
    with engine_of(open_tiny(KINDS[kind])[0], on=hardware()) as engine:
        assert_close(vectors(engine, TEXTS, None), expected(kind), "exact")


@pytest.mark.parametrize("kind", ["dense", "projection"])
def test_attention_in_several_dispatches(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A software GPU ends long invocations: of a long text, each covers some of the keys."""
    monkeypatch.setattr(loop_limits, "attention_prefill_keys", lambda *_: 64)
    with engine_of(open_tiny(KINDS[kind])[0]) as engine:
        assert_close(vectors(engine, TEXTS, None), expected(kind), "exact")
        read, _ = engine.passes(0).plans(
            plan_rows(sum(LENGTHS)), plan_rows(len(TEXTS)), adapted=False
        )
        layers = len(engine.model.config.layers)
        assert op_counts(read)["attention_prefill"] > layers


def test_a_longer_text_gets_larger_buffers() -> None:
    with engine_of(open_tiny(EMBEDDING)[0]) as engine:
        for texts in (TEXTS[:1], TEXTS[-1:], TEXTS[:2]):
            index = [TEXTS.index(text) for text in texts]
            assert_close(vectors(engine, texts, None), expected("dense")[index], "exact")
        assert vectors(engine, [], None).size == 0


def test_a_pass_is_never_larger_than_the_device_allows() -> None:
    with engine_of(open_tiny(EMBEDDING)[0]) as engine:
        assert engine.most >= 1024
        engine.most = 128
        assert_close(vectors(engine, TEXTS, 10**9), expected("dense"), "exact")
        assert engine.passes(0).capacity == 128


def test_progress_counts_texts_and_may_end_it() -> None:
    seen: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        seen.append((done, total))
        if len(seen) == 3:
            raise KeyboardInterrupt

    with engine_of(open_tiny(EMBEDDING)[0]) as engine:
        with pytest.raises(KeyboardInterrupt):
            run_sync(engine.embed(TEXTS, 1, note))
        assert seen == [(1, 10), (2, 10), (3, 10)]
        assert_close(vectors(engine, TEXTS, None), expected("dense"), "exact")


def test_memory_is_freed() -> None:
    before = device().nbytes
    with engine_of(open_tiny(EMBEDDING)[0]) as engine:
        vectors(engine, TEXTS, 16)
        assert device().nbytes > before
    assert device().nbytes == before
    with pytest.raises(InputError, match="is closed"):
        vectors(engine, TEXTS, None)


# The real shapes


def test_dispatches_do_not_grow_with_the_texts() -> None:
    """9 a layer, and a few for all vectors: as many for one text as for a hundred."""
    config = embedding_300m()
    gguf = BlankGguf(config)
    model = Model.allocate_all(gguf, config, NullDevice())  # type: ignore[arg-type]
    run_sync(model.derive(gguf))  # type: ignore[arg-type]
    engine = EmbeddingEngine(gguf, model, 2048, "exact", None)  # type: ignore[arg-type]
    read, pool = engine.passes(2048).plans(128, 128, adapted=False)
    assert op_counts(read)["attention_prefill"] == 24
    assert len(read.dispatches) <= 9 * 24 + 3
    long, _ = engine.passes(2048).plans(2048, 128, adapted=False)
    assert len(long.dispatches) <= 13 * 24 + 3  # which dequantise four matrices of a layer
    assert op_counts(pool)["mean_rows"] == 1
    assert len(pool.dispatches) <= 5
    # A pass works in less memory than the weights of the model take.
    assert model.device.nbytes < 500 << 20


@pytest.mark.parametrize(("precision", "passes"), [("int16", 8), ("f16", 1)])
def test_matrix_units_get_many_texts_at_once(precision: str, passes: int) -> None:
    gguf, config = open_tiny(EMBEDDING)
    gpu = NullDevice(limits=replace(DEFAULT_LIMITS, binding_nbytes=1 << 30, buffer_nbytes=1 << 30))
    model = Model.allocate_all(gguf, config, gpu)
    run_sync(model.derive(gguf))
    engine = EmbeddingEngine(gguf, model, 512, precision, None)  # type: ignore[arg-type]
    run_sync(engine.embed([[5] * 512] * 32, None, ignore_progress))
    assert len(gpu.plans) == 2 * passes  # a pass is two plans: its tokens, its texts


@pytest.mark.parametrize("limit", [64 << 10, 1 << 20])
def test_a_context_that_kernels_cannot_bind_is_refused(limit: int) -> None:
    config = open_tiny(EMBEDDING2)[1]
    gpu = NullDevice(limits=replace(DEFAULT_LIMITS, binding_nbytes=limit))
    with pytest.raises(DeviceError, match="binds at most") as caught:
        check_longest_text(config, gpu, 8192)
    possible = int(str(caught.value).split("context of ")[1].split()[0])
    assert possible == most_tokens(config, gpu) == plan_rows(possible)
    assert 4 * possible * 2 * 96 <= limit < 4 * plan_rows(possible + 1) * 2 * 128
    check_longest_text(config, gpu, possible)
    with pytest.raises(DeviceError):
        check_longest_text(config, gpu, possible + 1)


def test_a_grid_has_an_end_too() -> None:
    gpu = NullDevice(limits=replace(DEFAULT_LIMITS, binding_nbytes=1 << 40))
    assert most_tokens(embedding_300m(), gpu) == 32768


def test_a_model_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def pass_all(device: object) -> None:
        """Judge nothing: there is no GPU."""

    monkeypatch.setattr("webgemma.engine.embedding.selftest", pass_all)
    gguf, config = open_tiny(EMBEDDING)
    options = EngineOptions(memory_gb=1e-5)
    with pytest.raises(DeviceMemoryError, match=r"for a cache of 128 tokens, but memory_gb=1e-05"):
        run_sync(open_embedding_engine(gguf, config, NullDevice(), 128, options))


# Packing


@settings(max_examples=60)
@given(st.lists(st.integers(1, 50)), st.integers(1, 120))
def test_passes_are_full_and_in_order(lengths: list[int], batch: int) -> None:
    passes = list(packed(lengths, batch))
    assert [n for first, end in passes for n in range(first, end)] == list(range(len(lengths)))
    for first, end in passes:
        assert end == first + 1 or sum(lengths[first:end]) <= batch
        assert end == len(lengths) or sum(lengths[first : end + 1]) > batch


def test_plans_have_few_sizes() -> None:
    sizes = {plan_rows(count) for count in range(1, 8193)}
    assert sizes == {8, 32, 128, 512, 1024, 2048, 4096, 8192}
    assert all(plan_rows(size) == size for size in sizes)
