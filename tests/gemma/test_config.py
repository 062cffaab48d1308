"""The configuration of a file: every size, both layouts, and an error for every contradiction."""

from dataclasses import replace

import pytest
from helpers.tiny import LARGE, MOE, SMALL, Tiny, tiny_gguf, tiny_metadata, tiny_tensors

from webgemma import GgufError
from webgemma.gemma.config import Config
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import NewTensor, gguf_bytes
from webgemma.sync import run_sync


def opened(data: bytes) -> Gguf:
    """Open the bytes of a file."""
    return run_sync(Gguf.aopen(BytesSource(data, "tiny.gguf")))


def config_of(tiny: Tiny) -> Config:
    """Return the configuration of a tiny model's file."""
    return Config.from_gguf(opened(tiny_gguf(tiny)))


def test_small_model_with_shared_kv_and_per_layer_embeddings() -> None:
    config = config_of(SMALL)
    assert (config.width, config.vocab, config.window, config.ple) == (64, 320, 8, 16)
    assert [layer.sliding for layer in config.layers] == [True, True, False, True, True, False]
    assert [layer.kv_donor for layer in config.layers] == [0, 1, 2, 1, 1, 2]
    assert [layer.shares_kv for layer in config.layers] == [False] * 3 + [True] * 3
    assert [layer.head_dim for layer in config.layers] == [16, 16, 32, 16, 16, 32]
    assert [layer.ffn for layer in config.layers] == [96, 96, 96, 192, 192, 192]
    assert not any(layer.k_is_v for layer in config.layers)
    assert not config.bidirectional_images
    assert config.tied
    assert config.experts is None


def test_large_model_with_keys_as_values() -> None:
    config = config_of(LARGE)
    assert [layer.k_is_v for layer in config.layers] == [False, False, True] * 2
    assert [layer.kv_heads for layer in config.layers] == [2, 2, 1] * 2
    assert config.suppressed == (7, 9)
    assert config.bidirectional_images


@pytest.mark.parametrize("fused", [True, False])
def test_experts_fused_and_split(fused: bool) -> None:
    config = config_of(replace(MOE, fused=fused))
    assert config.experts is not None
    assert (config.experts.count, config.experts.used, config.experts.ffn) == (6, 2, 32)
    assert config.experts.fused is fused
    assert all(layer.experts for layer in config.layers)


def test_the_expert_scale_may_have_another_name() -> None:
    tensors = [
        replace(t, name=t.name.replace("ffn_down_exps.scale", "ffn_gate_inp.per_expert_scale"))
        for t in tiny_tensors(MOE)
    ]
    assert any(t.name.endswith("per_expert_scale") for t in tensors)
    assert Config.from_gguf(opened(gguf_bytes(tiny_metadata(MOE), tensors))) == config_of(MOE)


def test_unused_keys_of_sharing_layers_are_ignored() -> None:
    extra = NewTensor("blk.5.attn_k.weight", (8,), "F32", bytes(32))
    with_extra = gguf_bytes(tiny_metadata(SMALL), [*tiny_tensors(SMALL), extra])
    assert Config.from_gguf(opened(with_extra)).layers == config_of(SMALL).layers


def test_a_file_may_declare_that_it_has_no_vocabulary() -> None:
    removed = {f"tokenizer.ggml.{key}": None for key in ("tokens", "token_type", "merges")}
    declared = {**removed, "tokenizer.ggml.model": "none"}
    assert config_of(replace(SMALL, metadata=declared)).vocab == 320
    with pytest.raises(GgufError, match="the vocabulary is missing"):
        config_of(replace(SMALL, metadata=removed))


def test_kv_cache_of_e2b_at_32k() -> None:
    """Expect 15 caches: of 12 sliding layers the window and a chunk, of 3 full ones everything."""
    small = config_of(SMALL)
    sliding, full = small.layers[0], small.layers[2]
    layers = tuple(
        replace(
            full if (i + 1) % 5 == 0 else sliding,
            index=i,
            kv_donor=i if i < 15 else (14 if (i + 1) % 5 == 0 else 13),
            head_dim=512 if (i + 1) % 5 == 0 else 256,
        )
        for i in range(35)
    )
    e2b = replace(small, layers=layers, window=512)
    ring = 12 * 2 * 256 * (512 + 512) * 2
    everything = 3 * 2 * 512 * 32768 * 2
    assert e2b.kv_nbytes(32768) == ring + everything
    assert e2b.kv_nbytes(32768, element_nbytes=4) == 2 * (ring + everything)
    assert e2b.kv_nbytes(100) == 12 * 2 * 256 * 100 * 2 + 3 * 2 * 512 * 100 * 2


CONTRADICTIONS: list[tuple[dict[str, object], str]] = [
    ({"general.architecture": "llama"}, "architecture is 'llama', not Gemma 4"),
    ({"general.architecture": "clip"}, r"projector \(mmproj\)"),
    ({"general.architecture": "gemma4-assistant"}, "drafter"),
    ({"general.architecture": None}, "no general.architecture"),
    ({"gemma4.block_count": None}, "no gemma4.block_count"),
    ({"gemma4.block_count": 0}, "block_count is 0"),
    ({"gemma4.block_count": "six"}, "block_count is 'six'"),
    ({"gemma4.block_count": True}, "block_count is True"),
    ({"gemma4.block_count": 10**6}, "only .* tensors"),
    ({"gemma4.embedding_length": 32}, "token_embd.weight is 64 x 320; this model needs 32 x 320"),
    ({"gemma4.attention.head_count": 0}, "head_count is 0"),
    ({"gemma4.attention.head_count": 3, "gemma4.attention.head_count_kv": 2}, "not a multiple"),
    ({"gemma4.attention.head_count_kv": [1, 1]}, "2 entries for 6 layers"),
    ({"gemma4.attention.key_length_swa": 0}, "key_length_swa is 0"),
    ({"gemma4.attention.value_length": 64}, "rotary dimensions"),
    ({"gemma4.attention.sliding_window_pattern": [True] * 7}, "7 entries for 6 layers"),
    ({"gemma4.attention.sliding_window_pattern": ["a"] * 6}, "true or false"),
    ({"gemma4.attention.sliding_window_pattern": 5}, "an array of 6 entries"),
    ({"gemma4.attention.sliding_window": 0}, "sliding_window is 0"),
    ({"gemma4.attention.shared_kv_layers": 6}, "no earlier layer of its kind"),
    ({"gemma4.attention.layer_norm_rms_epsilon": float("nan")}, "finite number above zero"),
    ({"gemma4.rope.freq_base": -1.0}, "finite number above zero"),
    ({"gemma4.final_logit_softcapping": "30"}, "must be a number"),
    ({"tokenizer.ggml.tokens": ["a"] * 319}, "319 tokens"),
    ({"tokenizer.ggml.tokens": 5}, "the vocabulary is missing"),
    ({"gemma4.final_logit_softcapping": 3.4e38}, "between 1.2e-38 and 1e\\+09"),
    ({"gemma4.rope.freq_base_swa": 0.5}, "between 1 and 3.4e\\+38"),
    ({"tokenizer.ggml.suppress_tokens": [320]}, "ids below 320"),
    ({"tokenizer.ggml.suppress_tokens": [False, True]}, "ids below 320"),
    ({"tokenizer.ggml.suppress_tokens": 5}, "ids below 320"),
    ({"tokenizer.ggml.suppress_tokens": list(range(320))}, "leaves none to write"),
]


@pytest.mark.parametrize(("changes", "message"), CONTRADICTIONS, ids=lambda x: str(x)[:60])
def test_contradictions_raise_an_error(changes: dict[str, object], message: str) -> None:
    with pytest.raises(GgufError, match=message) as caught:
        config_of(replace(SMALL, metadata=changes))
    assert str(caught.value).startswith("tiny.gguf: ")


@pytest.mark.parametrize(
    "name",
    ["output_norm.weight", "blk.0.attn_k.weight", "blk.3.ffn_up.weight", "blk.2.proj.weight"],
)
def test_missing_tensors_are_named(name: str) -> None:
    kept = [tensor for tensor in tiny_tensors(SMALL) if tensor.name != name]
    with pytest.raises(GgufError, match=rf"tensor {name} is missing"):
        Config.from_gguf(opened(gguf_bytes(tiny_metadata(SMALL), kept)))


def test_an_unsupported_format_is_named() -> None:
    tensors = [
        NewTensor(t.name, (256, 320), "IQ2_XXS", bytes(320 * 66))
        if t.name == "token_embd.weight"
        else t
        for t in tiny_tensors(replace(SMALL, width=256))
    ]
    with pytest.raises(GgufError, match=r"token_embd.weight is stored as IQ2_XXS"):
        Config.from_gguf(opened(gguf_bytes(tiny_metadata(replace(SMALL, width=256)), tensors)))


def test_diffusion_gemma_is_read_with_its_constants() -> None:
    metadata = {
        k.replace("gemma4.", "diffusion-gemma.", 1) if k.startswith("gemma4.") else k: v
        for k, v in tiny_metadata(MOE).items()
    }
    metadata |= {"general.architecture": "diffusion-gemma", "diffusion.canvas_length": 32}
    width, ffn = MOE.width, 48
    shapes = {
        "self_cond_pre_norm.weight": (width,),
        "self_cond_gate.weight": (width, ffn),
        "self_cond_up.weight": (width, ffn),
        "self_cond_down.weight": (ffn, width),
        **{f"blk.{i}.enc_layer_output_scale.weight": (1,) for i in range(len(MOE.pattern))},
    }
    extra = [
        NewTensor(name, shape, "F32", bytes(4 * shape[0] * (shape[1] if len(shape) > 1 else 1)))
        for name, shape in shapes.items()
    ]
    config = Config.from_gguf(opened(gguf_bytes(metadata, [*tiny_tensors(MOE), *extra])))
    assert config.diffusion is not None
    assert (config.diffusion.canvas, config.diffusion.steps, config.diffusion.ffn) == (32, 48, 48)
