"""The configuration of embedding models: both layouts of EmbeddingGemma, and EmbeddingGemma 2."""

from dataclasses import replace

import pytest
from helpers.sessions import open_tiny
from helpers.tiny import (
    DENSE,
    EMBEDDING,
    EMBEDDING2,
    GEMMA3,
    OLLAMA_EMBEDDING,
    PROJECTED,
    Tiny,
    tiny_metadata,
    tiny_tensors,
)

from webgemma import GgufError
from webgemma.gemma.config import Config, text_tensors
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import NewTensor, gguf_bytes
from webgemma.sync import run_sync

KEYS = {"dense": "gemma-embedding.", "ollama": "gemma3.", "projection": "embedding-gemma2."}


def config_of(tiny: Tiny, **keys: object) -> Config:
    """Return the configuration of a model with other metadata; `__` stands for a full stop."""
    prefix = KEYS[tiny.embedding]
    changes = {prefix + key.replace("__", "."): value for key, value in keys.items()}
    return open_tiny(replace(tiny, metadata=tiny.metadata | changes))[1]


def opened(tiny: Tiny, *more: NewTensor, without: tuple[str, ...] = ()) -> Config:
    tensors = [tensor for tensor in tiny_tensors(tiny) if tensor.name not in without]
    data = gguf_bytes(tiny_metadata(tiny), [*tensors, *more])
    return Config.from_gguf(run_sync(Gguf.aopen(BytesSource(data, "tiny.gguf"))))


@pytest.mark.parametrize("tiny", [EMBEDDING, OLLAMA_EMBEDDING], ids=["llama.cpp", "ollama"])
def test_embedding_gemma_is_a_gemma_3_with_dense_layers(tiny: Tiny) -> None:
    config, gemma3 = config_of(tiny), open_tiny(replace(GEMMA3, metadata={}))[1]
    assert config.embedding is not None
    assert (config.embedding.size, config.embedding.hidden) == (64, DENSE)
    assert config.embedding.dense == ("dense_2.weight", "dense_3.weight")
    assert config.embedding.ends_with_eos
    assert not config.embedding.is_cut
    assert config.window == 6  # itself and 5 to each side, of a stored window of 10
    assert config.layers == gemma3.layers
    assert config.query_scale == gemma3.query_scale
    assert (config.generation, config.value_norm, config.rope_share) == (3, False, 1.0)
    assert gemma3.embedding is None


def test_both_layouts_have_the_same_tensors() -> None:
    llama_cpp, ollama = config_of(EMBEDDING), config_of(OLLAMA_EMBEDDING)
    assert list(text_tensors(llama_cpp)) == list(text_tensors(ollama))
    assert replace(llama_cpp, architecture="gemma3") == ollama


def test_embedding_gemma_2_is_a_gemma_4_with_a_projection() -> None:
    config = config_of(EMBEDDING2)
    assert config.embedding is not None
    assert config.embedding.size == PROJECTED
    assert config.embedding.dense == ("embedding_projection.weight",)
    assert not config.embedding.ends_with_eos
    assert config.window == 6  # itself and 5 to each side: the stored window is a radius
    assert (config.generation, config.value_norm, config.query_scale) == (4, True, 1.0)
    assert config.rope_share == 1.0
    assert config.softcap == 0
    assert not any(layer.k_is_v or layer.shares_kv for layer in config.layers)
    assert not config.bidirectional_images
    names = [name for name, _, _ in text_tensors(config)]
    assert "per_layer_model_proj.weight" in names
    assert not {"per_layer_token_embd.weight", "rope_freqs.weight"} & set(names)


def test_a_file_without_dense_layers_has_other_vectors() -> None:
    """The published files of llama.cpp's authors are such."""
    config = opened(EMBEDDING, without=("dense_2.weight", "dense_3.weight"))
    assert config.embedding is not None
    assert config.embedding.is_cut
    assert (config.embedding.size, config.embedding.dense) == (64, ())
    ollama = opened(OLLAMA_EMBEDDING, without=("dense.0.weight", "dense.1.weight"))
    assert ollama.embedding is not None
    assert ollama.embedding.is_cut


def test_files_say_whether_eos_is_read() -> None:
    for flag in (True, False):
        metadata = {"tokenizer.ggml.add_eos_token": flag}
        for tiny in (EMBEDDING, EMBEDDING2):
            config = open_tiny(replace(tiny, metadata=metadata))[1]
            assert config.embedding is not None
            assert config.embedding.ends_with_eos is flag
    left_out = open_tiny(replace(EMBEDDING, metadata={"tokenizer.ggml.add_eos_token": None}))[1]
    assert left_out.embedding is not None
    assert left_out.embedding.ends_with_eos


def test_the_cache_is_that_of_one_layer() -> None:
    config = config_of(EMBEDDING)
    assert config.kv_nbytes(100, element_nbytes=4) == 2 * 4 * 2 * 32 * 100


@pytest.mark.parametrize("missing", ["dense_2.weight", "dense_3.weight"])
def test_one_dense_layer_alone_is_refused(missing: str) -> None:
    with pytest.raises(GgufError, match=f"two dense layers {missing} is missing"):
        opened(EMBEDDING, without=(missing,))


def test_dense_layers_that_do_not_fit_are_refused() -> None:
    narrow = NewTensor("dense_3.weight", (DENSE - 16, 64), "F32", bytes(4 * 64 * (DENSE - 16)))
    with pytest.raises(GgufError, match=r"dense_3.weight is 80 x 64; this model needs 96 x 64"):
        opened(EMBEDDING, narrow, without=("dense_3.weight",))


def test_two_names_of_one_tensor_are_refused() -> None:
    twice = NewTensor("dense_2.weight", (64, DENSE), "F32", bytes(4 * 64 * DENSE))
    with pytest.raises(GgufError, match="are two names of the same tensor"):
        opened(OLLAMA_EMBEDDING, twice)


def test_a_missing_projection_is_refused() -> None:
    with pytest.raises(GgufError, match=r"the tensor embedding_projection.weight is missing"):
        opened(EMBEDDING2, without=("embedding_projection.weight",))


@pytest.mark.parametrize(
    ("tiny", "changes", "message"),
    [
        (EMBEDDING, {"pooling_type": 2}, "pooling_type is 2, .* takes the mean"),
        (OLLAMA_EMBEDDING, {"pooling_type": 3}, "pooling_type is 3"),
        (EMBEDDING2, {"pooling_type": 0}, "pooling_type is 0"),
        (EMBEDDING2, {"attention__causal": True}, "attention is causal"),
        (EMBEDDING2, {"attention__shared_kv_layers": 2}, "share no keys and values"),
        (EMBEDDING2, {"embedding_length_out": 768}, "this model needs 64 x 768"),
        (EMBEDDING2, {"attention__sliding_window": None}, "no embedding-gemma2.attention.sliding"),
    ],
    ids=str,
)
def test_contradictions_raise_an_error(
    tiny: Tiny, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(GgufError, match=message) as caught:
        config_of(tiny, **changes)
    assert str(caught.value).startswith("tiny.gguf: ")


def test_experts_are_refused() -> None:
    router = NewTensor("blk.0.ffn_gate_inp.weight", (64, 4), "F32", bytes(4 * 64 * 4))
    for tiny in (EMBEDDING, EMBEDDING2):
        with pytest.raises(GgufError, match="it has experts, which no"):
            opened(tiny, router)
