"""The configuration of a Gemma 3: both layouts, what files leave out, and what is refused."""

from dataclasses import replace

import pytest
from helpers.sessions import open_tiny
from helpers.tiny import GEMMA3, Tiny, tiny_metadata, tiny_tensors

from webgemma import GgufError
from webgemma.gemma.config import Config
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import NewTensor, gguf_bytes
from webgemma.sync import run_sync

PATTERN = "gemma3.attention.sliding_window_pattern"
UNSCALED = {"gemma3.rope.scaling.type": None, "gemma3.rope.scaling.factor": None}


def config_of(tiny: Tiny, **changes: object) -> Config:
    return open_tiny(replace(tiny, **changes))[1]


def with_keys(keys: dict[str, object], tiny: Tiny = GEMMA3) -> Config:
    return config_of(tiny, metadata=tiny.metadata | keys)


def with_layers(number: int) -> Config:
    """Return the configuration of a model of so many layers whose file says as little as it may."""
    pattern = ("sssssf" * number)[:number]
    return config_of(GEMMA3, pattern=pattern, metadata={**UNSCALED, PATTERN: None})


def opened(tiny: Tiny, *more: NewTensor, without: str = "") -> Gguf:
    tensors = [tensor for tensor in tiny_tensors(tiny) if tensor.name != without]
    data = gguf_bytes(tiny_metadata(tiny), [*tensors, *more])
    return run_sync(Gguf.aopen(BytesSource(data, "tiny.gguf")))


def test_the_layers_are_those_of_gemma_3() -> None:
    config = config_of(GEMMA3)
    assert config.generation == 3
    assert [layer.sliding for layer in config.layers] == [True] * 5 + [False, True]
    assert {(x.heads, x.kv_heads, x.head_dim) for x in config.layers} == {(4, 2, 32)}
    assert not any(x.shares_kv or x.k_is_v or x.experts for x in config.layers)
    assert (config.softcap, config.ple, config.value_norm) == (0, 0, False)
    assert config.query_scale == pytest.approx(32**-0.5)
    assert (config.rope_base, config.rope_base_sliding, config.rope_scale) == (1e6, 1e4, 8)
    assert not config.bidirectional_images


def test_what_files_leave_out() -> None:
    """Neither pattern nor bases nor scaling: the 270M's file."""
    left_out = {PATTERN: None, "gemma3.rope.freq_base": None, "gemma3.rope.freq_base_swa": None}
    config = with_keys(UNSCALED | left_out)
    assert config == replace(config_of(GEMMA3), rope_scale=1.0)


@pytest.mark.parametrize(("pattern", "full"), [(2, [1, 3, 5]), (7, [6]), ([True, False] * 4, None)])
def test_a_pattern_is_a_number_or_a_list(pattern: object, full: list[int] | None) -> None:
    if full is None:
        with pytest.raises(GgufError, match="8 entries for 7 layers"):
            with_keys({PATTERN: pattern})
        return
    layers = with_keys({PATTERN: pattern}).layers
    assert [layer.index for layer in layers if not layer.sliding] == full


def test_ollamas_names_of_the_bases() -> None:
    names = {"gemma3.rope.local.freq_base": 2e4, "gemma3.rope.global.freq_base": 3e6}
    config = with_keys(names | {"gemma3.rope.freq_base": None, "gemma3.rope.freq_base_swa": None})
    assert (config.rope_base, config.rope_base_sliding) == (3e6, 2e4)


def test_ollamas_files_have_a_softcap_that_the_model_has_not() -> None:
    assert with_keys({"gemma3.final_logit_softcapping": 30.0}).softcap == 0


@pytest.mark.parametrize(
    ("layers", "rope_scale", "query_scale"),
    [(18, 1, 32**-0.5), (26, 1, 32**-0.5), (34, 8, 32**-0.5), (48, 8, 32**-0.5), (62, 8, 0.25)],
)
def test_what_only_the_number_of_layers_says(
    layers: int, rope_scale: float, query_scale: float
) -> None:
    """4B and larger scale positions; the 27B's queries are scaled by its width: 1 / √(64 / 4)."""
    config = with_layers(layers)
    assert config.rope_scale == rope_scale
    assert config.query_scale == pytest.approx(query_scale)


def test_ollamas_vocabulary_may_be_longer_than_the_table() -> None:
    tokens = tiny_metadata(GEMMA3)["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    more = {"tokenizer.ggml.tokens": [*tokens, "<image_soft_token>"]}
    assert with_keys(more).vocab == len(tokens)
    with pytest.raises(GgufError, match=r"319 tokens, but token_embd.weight has 320 rows"):
        with_keys({"tokenizer.ggml.tokens": tokens[:-1]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gemma3.rope.scaling.type": "yarn"}, "scaling.type is 'yarn'; webgemma supports the lin"),
        ({"gemma3.rope.scaling.factor": 0.0}, "scaling.factor is 0.0; it must be a finite number"),
        ({"gemma3.attention.sliding_window": None}, "no gemma3.attention.sliding_window"),
        ({"gemma3.attention.head_count_kv": 3}, "not a multiple"),
        ({"gemma3.attention.value_length": 16}, "are not Gemma's"),
        ({"general.architecture": "gemma3n"}, "it is Gemma 3n"),
        ({PATTERN: 0}, "sliding_window_pattern is 0"),
    ],
    ids=str,
)
def test_contradictions_raise_an_error(changes: dict[str, object], message: str) -> None:
    with pytest.raises(GgufError, match=message) as caught:
        with_keys(changes)
    assert str(caught.value).startswith("tiny.gguf: ")


def test_every_layer_needs_its_values() -> None:
    """A Gemma 4 could do without: its keys would be its values."""
    with pytest.raises(GgufError, match=r"the tensor blk.5.attn_v.weight is missing"):
        Config.from_gguf(opened(GEMMA3, without="blk.5.attn_v.weight"))


def test_vision_tensors_of_the_same_file_are_no_part_of_the_text_model() -> None:
    patch = NewTensor("v.patch_embedding.weight", (4, 4), "F32", bytes(64))
    assert Config.from_gguf(opened(GEMMA3, patch)) == config_of(GEMMA3)
