"""The reference of embedding models against transformers, and what it must not depend on."""

from functools import cache

import numpy as np
import pytest
from conftest import SHARED, needs_shared
from helpers.sessions import open_tiny
from helpers.tiny import EMBEDDING, EMBEDDING2, OLLAMA_EMBEDDING, tiny_metadata, tiny_tensors
from tolerance import HIDDEN_OF_TRANSFORMERS, VECTORS_OF_TRANSFORMERS

from webgemma import GgufError
from webgemma.gemma.config import Config
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import NewTensor, gguf_bytes
from webgemma.reference.embedding import EmbeddingModel, normalised
from webgemma.reference.text import TextModel
from webgemma.reference.weights import Weights
from webgemma.sync import run_sync

FILES = {name: SHARED / "embed" / name for name in ("v1", "v1-ollama", "v2")}
KINDS = {"dense": EMBEDDING, "ollama": OLLAMA_EMBEDDING, "projection": EMBEDDING2}
IDS = [2, *(30 + i * 7 % 280 for i in range(40)), 1]


@cache
def model_of(kind: str) -> EmbeddingModel:
    gguf, config = open_tiny(KINDS[kind])
    return EmbeddingModel(config, Weights(gguf))


@needs_shared
@pytest.mark.parametrize("name", FILES)
def test_vectors_agree_with_transformers(name: str) -> None:
    folder = FILES[name]
    truth = dict(np.load(folder / "truth.npz"))
    texts = [list(map(int, line.split())) for line in (folder / "ids.txt").read_text().splitlines()]
    cuts = {int(key[3:]): expected for key, expected in truth.items() if key.startswith("mrl")}
    assert len(texts) == 12
    assert len(cuts) >= 2
    with Gguf.open(next(folder.glob("*.gguf"))) as gguf:
        model = EmbeddingModel(Config.from_gguf(gguf), Weights(gguf))
        raw = np.stack([model.raw_vector(ids) for ids in texts])
        states = model.states(next(ids for ids in texts if len(ids) == 33))
        if name == "v2":
            tokens = model.weights.linear(states, "embedding_projection.weight")
    for size, expected in {raw.shape[1]: truth["embeddings"], **cuts}.items():
        found = normalised(raw[:, :size])
        np.testing.assert_allclose(found, expected, rtol=0, atol=VECTORS_OF_TRANSFORMERS)
    if name == "v2":
        expected = truth["token_embeddings_33"]
        np.testing.assert_allclose(tokens, expected, rtol=0, atol=HIDDEN_OF_TRANSFORMERS)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_attend_to_those_after_them(kind: str) -> None:
    """The first token's state depends on the last token; in a Gemma 3 or 4 it would not."""
    model = model_of(kind)
    states, changed = model.states(IDS), model.states([*IDS[:-1], 50])
    assert np.abs(states[0] - changed[0]).max() > 1e-3
    causal = TextModel.attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmbeddingModel, "attention", causal)
        states, changed = model.states(IDS), model.states([*IDS[:-1], 50])
    np.testing.assert_array_equal(states[0], changed[0])


@pytest.mark.parametrize("kind", KINDS)
def test_sliding_layers_attend_to_both_sides_of_a_radius(kind: str) -> None:
    """One sliding layer carries a change 5 positions far, not 6, in both directions."""
    model = model_of(kind)
    layer = model.config.layers[0]
    h = np.random.default_rng(3).normal(size=(40, model.config.width)).astype(np.float32)
    changed = h.copy()
    changed[20] += 1
    cache, ends = None, np.zeros(0)
    before, after = (model.attention(layer, x, cache, ends) for x in (h, changed))  # type: ignore[arg-type]
    moved = np.flatnonzero(np.abs(before - after).max(axis=1) > 1e-5).tolist()
    assert moved == list(range(15, 26))


@pytest.mark.parametrize("kind", KINDS)
def test_a_vector_has_length_one_and_so_has_its_beginning(kind: str) -> None:
    model = model_of(kind)
    for size in (None, 32):
        vector = model.vector(IDS, size)
        assert len(vector) == (size or model.embedding.size)
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
    np.testing.assert_array_equal(normalised(np.zeros(4, np.float32)), np.zeros(4))


def test_the_mean_of_all_tokens_goes_through_the_dense_layers() -> None:
    for kind, names in (
        ("dense", ("dense_2.weight", "dense_3.weight")),
        ("ollama", ("dense_2.weight", "dense_3.weight")),
        ("projection", ("embedding_projection.weight",)),
    ):
        model = model_of(kind)
        vector = np.mean(model.states(IDS), axis=0, dtype=np.float64)
        for name in names:
            vector = model.weights[name].astype(np.float64) @ vector
        vector /= np.sqrt(np.sum(vector**2))
        np.testing.assert_allclose(model.vector(IDS), vector, rtol=0, atol=VECTORS_OF_TRANSFORMERS)


def test_per_layer_embeddings_are_those_of_the_context_alone() -> None:
    model = model_of("projection")
    x = np.random.default_rng(5).normal(size=(3, 64)).astype(np.float32)
    context = x.astype(np.float64) @ model.weights["per_layer_model_proj.weight"].T / 8
    context = context.reshape(3, 4, 16)
    context /= np.sqrt(np.mean(context**2, axis=-1, keepdims=True) + model.config.eps)
    expected = context * model.weights["per_layer_proj_norm.weight"]
    found = model.per_layer_embeddings(x, [2, 3, 4])
    assert found is not None
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_both_layouts_are_the_same_model() -> None:
    """Their weights are random by name: those of the dense layers alone differ."""
    states = [model_of(kind).states(IDS) for kind in ("dense", "ollama")]
    scale = [model_of(kind).weights["output_norm.weight"] for kind in ("dense", "ollama")]
    np.testing.assert_allclose(states[0] / scale[0], states[1] / scale[1], rtol=1e-5, atol=1e-5)


def test_damaged_weights_raise_an_error() -> None:
    tensors = [tensor for tensor in tiny_tensors(EMBEDDING) if tensor.name != "dense_3.weight"]
    shape = next(t.shape for t in tiny_tensors(EMBEDDING) if t.name == "dense_3.weight")
    nan = np.full(shape, np.nan, "<f4").tobytes()
    data = gguf_bytes(
        tiny_metadata(EMBEDDING), [*tensors, NewTensor("dense_3.weight", shape, "F32", nan)]
    )
    gguf = run_sync(Gguf.aopen(BytesSource(data, "tiny.gguf")))
    model = EmbeddingModel(Config.from_gguf(gguf), Weights(gguf))
    with pytest.raises(GgufError, match="computes NaN or infinity"):
        model.vector(IDS)
