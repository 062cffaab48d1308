"""Which encoders a file has, in either layout."""

import pytest
from conftest import SHARED, needs_shared

from webgemma import GgufError
from webgemma.gemma.encoder_config import EncoderConfigs
from webgemma.gemma.tensors import canonical_tensors
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import NewTensor, gguf_bytes
from webgemma.sync import run_sync


def with_tensors(architecture: str, shapes: dict[str, tuple[int, ...]], **keys: int) -> Gguf:
    """Open a file with tensors of zeros; two underscores in a key stand for a dot."""
    prefix = "clip." if architecture == "clip" else "gemma4."
    metadata = {"general.architecture": architecture} | {
        prefix + key.replace("__", "."): value for key, value in keys.items()
    }
    tensors = []
    for name, shape in shapes.items():
        count = 1
        for size in shape:
            count *= size
        tensors.append(NewTensor(name, shape, "F32", bytes(4 * count)))
    return run_sync(Gguf.aopen(BytesSource(gguf_bytes(metadata, tensors), "encoders.gguf")))


VISION = {
    "v.patch_embd.weight": (2, 2, 3, 8),
    "v.position_embd.weight": (8, 10, 2),
    "v.blk.0.attn_q.weight": (8, 8),
    "v.blk.1.attn_q.weight": (8, 8),
    "mm.input_projection.weight": (8, 16),
}
OLLAMA_AUDIO = {
    "a.pre_encode.out.weight": (4, 4),
    "mm.a.fc.weight": (4, 6),
    "mm.a.fc.bias": (6,),
    "a.blk.0.ln1.weight": (4,),
    "a.blk.0.ln2.weight": (5,),
    "a.blk.0.layer_pre_norm.weight": (6,),
    "a.blk.0.linear_pos.weight": (4, 4),
    "a.blk.0.conv_norm.weight": (4,),
    "mm.a.input_projection.weight": (6, 16),
}
KEYS = {"attention__head_count": 2, "feed_forward_length": 12, "embedding_length": 4}


def keys_of(encoder: str) -> dict[str, int]:
    """Return the metadata of an encoder, "vision" or "audio"."""
    return {f"{encoder}__{key}": value for key, value in KEYS.items()}


@pytest.mark.parametrize("architecture", ["gemma4", "clip"])
def test_vision_encoder_in_either_layout(architecture: str) -> None:
    encoders = EncoderConfigs.from_gguf(with_tensors(architecture, VISION, **keys_of("vision")))
    assert encoders.audio is None
    assert encoders.vision is not None
    vision = encoders.vision
    assert (vision.layers, vision.width, vision.heads, vision.output) == (2, 8, 2, 16)
    assert (vision.patch, vision.pool, vision.positions) == (16, 3, 10)
    assert not vision.clipped


@pytest.mark.parametrize("clamp", ["v.clamp_data", "v.blk.0.attn_q.input_max"])
def test_either_form_of_clamps(clamp: str) -> None:
    encoders = EncoderConfigs.from_gguf(
        with_tensors("gemma4", VISION | {clamp: (1,)}, **keys_of("vision"))
    )
    assert encoders.vision is not None
    assert encoders.vision.clipped


def test_ollamas_audio_names_become_llama_cpps() -> None:
    gguf = with_tensors("gemma4", OLLAMA_AUDIO, **keys_of("audio"))
    names = {name: tensor.name for name, tensor in canonical_tensors(gguf).items()}
    assert names["a.input_projection.weight"] == "a.pre_encode.out.weight"
    assert names["a.pre_encode.out.weight"] == "mm.a.fc.weight"
    assert names["a.pre_encode.out.bias"] == "mm.a.fc.bias"
    assert names["a.blk.0.attn_pre_norm.weight"] == "a.blk.0.ln1.weight"
    assert names["a.blk.0.attn_post_norm.weight"] == "a.blk.0.ln2.weight"
    assert names["a.blk.0.ln2.weight"] == "a.blk.0.layer_pre_norm.weight"
    assert names["a.blk.0.attn_k_rel.weight"] == "a.blk.0.linear_pos.weight"
    assert names["a.blk.0.conv_norm.weight"] == "a.blk.0.conv_norm.weight"
    encoders = EncoderConfigs.from_gguf(gguf)
    assert encoders.audio is not None
    assert (encoders.audio.layers, encoders.audio.heads, encoders.audio.output) == (1, 2, 16)


def test_llama_cpps_audio_names_stay() -> None:
    own = {"a.blk.0.ln2.weight": (4,), "a.blk.0.attn_post_norm.weight": (4,)}
    gguf = with_tensors("clip", own | {"mm.a.input_projection.weight": (6, 16)}, **keys_of("audio"))
    assert all(name == tensor.name for name, tensor in canonical_tensors(gguf).items())


def test_embedders_of_the_12b_have_no_layers() -> None:
    shapes = {
        "v.patch_embd.weight": (27, 8),
        "v.position_embd.weight": (8, 20, 2),
        "mm.input_projection.weight": (8, 8),
        "mm.a.input_projection.weight": (640, 8),
    }
    encoders = EncoderConfigs.from_gguf(with_tensors("clip", shapes))
    assert encoders.vision is not None
    assert encoders.audio is not None
    assert (encoders.vision.layers, encoders.vision.patch, encoders.vision.pool) == (0, 48, 1)
    assert (encoders.audio.layers, encoders.audio.width) == (0, 640)


def test_a_model_without_encoders() -> None:
    encoders = EncoderConfigs.from_gguf(with_tensors("gemma4", {"token_embd.weight": (8, 8)}))
    assert (encoders.vision, encoders.audio, encoders.nbytes) == (None, None, 0)


@pytest.mark.parametrize("missing", ["mm.input_projection.weight", "v.position_embd.weight"])
def test_an_incomplete_encoder_raises_an_error(missing: str) -> None:
    shapes = {name: shape for name, shape in VISION.items() if name != missing}
    with pytest.raises(GgufError, match="incomplete"):
        EncoderConfigs.from_gguf(with_tensors("gemma4", shapes, **keys_of("vision")))


def test_two_names_of_one_tensor_raise_an_error() -> None:
    shapes = {"blk.0.ffn_down_exps.scale": (4,), "blk.0.ffn_gate_inp.per_expert_scale": (4,)}
    with pytest.raises(GgufError, match="two names of the same tensor"):
        canonical_tensors(with_tensors("gemma4", shapes))


@needs_shared
def test_llama_cpps_own_mmproj() -> None:
    with Gguf.open(SHARED / "mm" / "mmproj-mm-f16.gguf") as gguf:
        encoders = EncoderConfigs.from_gguf(gguf)
    assert encoders.vision is not None
    assert encoders.audio is not None
    vision, audio = encoders.vision, encoders.audio
    assert (vision.layers, vision.width, vision.clipped) == (3, 256, True)
    assert (audio.layers, audio.width, audio.output) == (3, 256, 256)
