"""Tiny audio towers whose weights come from a seed and a name: both layouts, and without layers."""

from dataclasses import replace

import numpy as np

from helpers.tiny import random_tensor, uniform
from webgemma.gemma.encoder_config import RAW_SAMPLES, AudioConfig, EncoderConfigs, audio_tensors
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import NewTensor, gguf_bytes
from webgemma.sync import run_sync

EARS = AudioConfig(width=32, layers=2, heads=2, ffn=48, features=40, output=24)
RAW_EARS = AudioConfig(width=RAW_SAMPLES, layers=0, heads=0, ffn=0, features=RAW_SAMPLES, output=24)
BOUND = 0.5  # of what goes into and comes out of the clamped linears: some of it is beyond

# llama.cpp's names -> Ollama's.
OLLAMA_BLOCK = {
    "attn_pre_norm": "ln1",
    "attn_post_norm": "ln2",
    "ln2": "layer_pre_norm",
    "attn_k_rel": "linear_pos",
}
OLLAMA = {
    "a.input_projection.weight": "a.pre_encode.out.weight",
    "a.pre_encode.out.weight": "mm.a.fc.weight",
    "a.pre_encode.out.bias": "mm.a.fc.bias",
}


def ears_tensors(audio: AudioConfig, *, clamped: bool = True) -> list[NewTensor]:
    """All weights, in float32."""
    made = []
    for name, shape, needed in audio_tensors(audio):
        if name.endswith(("_min", "_max")):
            if clamped:
                bound = BOUND if name.endswith("_max") else -BOUND
                made.append(NewTensor(name, shape, "F32", np.float32(bound).tobytes()))
        elif needed and len(shape) > 1:
            made.append(random_tensor(3, name, shape, "F32"))
        elif needed:
            values = 1 + 0.1 * uniform(3, name, shape[0])
            made.append(NewTensor(name, shape, "F32", values.astype("<f4").tobytes()))
    return made


def as_ollama(tensors: list[NewTensor]) -> list[NewTensor]:
    """The same tensors under Ollama's names."""
    renamed = []
    for tensor in tensors:
        parts = tensor.name.split(".")
        if parts[1] == "blk":
            parts[3] = OLLAMA_BLOCK.get(parts[3], parts[3])
        renamed.append(replace(tensor, name=OLLAMA.get(tensor.name, ".".join(parts))))
    return renamed


def ears_metadata(audio: AudioConfig, architecture: str = "clip") -> dict[str, object]:
    """What an mmproj says of them, or a model's own file."""
    prefix = "clip.audio." if architecture == "clip" else "gemma4.audio."
    return {
        "general.architecture": architecture,
        prefix + "embedding_length": audio.width,
        prefix + "feed_forward_length": audio.ffn,
        prefix + "attention.head_count": audio.heads,
    }


def ears_bytes(audio: AudioConfig, tensors: list[NewTensor], architecture: str = "clip") -> bytes:
    """The whole file."""
    return gguf_bytes(ears_metadata(audio, architecture), tensors)


def ears_gguf(audio: AudioConfig, tensors: list[NewTensor], architecture: str = "clip") -> Gguf:
    """The file, open."""
    data = ears_bytes(audio, tensors, architecture)
    return run_sync(Gguf.aopen(BytesSource(data, "ears.gguf")))


def audio_of(gguf: Gguf) -> AudioConfig:
    """The blueprint that the file gives."""
    audio = EncoderConfigs.from_gguf(gguf).audio
    assert audio is not None
    return audio
