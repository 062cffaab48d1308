"""Tiny audio encoders, with layers and without, under llama.cpp's or Ollama's tensor names.

Seed and tensor name determine the weights.
"""

from dataclasses import replace

import numpy as np

from helpers.tiny import random_tensor, uniform
from webgemma.gemma.encoder_config import RAW_SAMPLES, AudioConfig, EncoderConfigs, audio_tensors
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import NewTensor, gguf_bytes
from webgemma.sync import run_sync

TINY_AUDIO = AudioConfig(width=32, layers=2, heads=2, ffn=48, features=40, output=24)
RAW_AUDIO = AudioConfig(
    width=RAW_SAMPLES, layers=0, heads=0, ffn=0, features=RAW_SAMPLES, output=24
)
BOUND = 0.5  # of inputs and outputs of the clipped linears: some values are beyond it

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


def audio_weights(
    audio: AudioConfig, *, clamped: bool = True, format: str = "F32"
) -> list[NewTensor]:
    """Return all weights, the matrices in a format."""
    tensors = []
    for name, shape, needed in audio_tensors(audio):
        if name.endswith(("_min", "_max")):
            if clamped:
                bound = BOUND if name.endswith("_max") else -BOUND
                tensors.append(NewTensor(name, shape, "F32", np.float32(bound).tobytes()))
        elif needed and len(shape) > 1:
            kept = "conv" in name and "pw" not in name  # kernels of convolutions
            tensors.append(random_tensor(3, name, shape, "F32" if kept else format))
        elif needed:
            values = 1 + 0.1 * uniform(3, name, shape[0])
            tensors.append(NewTensor(name, shape, "F32", values.astype("<f4").tobytes()))
    return tensors


def as_ollama(tensors: list[NewTensor]) -> list[NewTensor]:
    """Return the same tensors under Ollama's names."""
    renamed = []
    for tensor in tensors:
        parts = tensor.name.split(".")
        if parts[1] == "blk":
            parts[3] = OLLAMA_BLOCK.get(parts[3], parts[3])
        renamed.append(replace(tensor, name=OLLAMA.get(tensor.name, ".".join(parts))))
    return renamed


def audio_metadata(audio: AudioConfig, architecture: str = "clip") -> dict[str, object]:
    """Return the metadata of an mmproj ("clip") or of a model file ("gemma4")."""
    prefix = "clip.audio." if architecture == "clip" else "gemma4.audio."
    return {
        "general.architecture": architecture,
        prefix + "embedding_length": audio.width,
        prefix + "feed_forward_length": audio.ffn,
        prefix + "attention.head_count": audio.heads,
    }


def audio_bytes(audio: AudioConfig, tensors: list[NewTensor], architecture: str = "clip") -> bytes:
    """Return the bytes of a file."""
    return gguf_bytes(audio_metadata(audio, architecture), tensors)


def audio_gguf(audio: AudioConfig, tensors: list[NewTensor], architecture: str = "clip") -> Gguf:
    """Return an open file."""
    data = audio_bytes(audio, tensors, architecture)
    return run_sync(Gguf.aopen(BytesSource(data, "audio.gguf")))


def audio_config(gguf: Gguf) -> AudioConfig:
    """Return the configuration of the audio encoder in a file."""
    audio = EncoderConfigs.from_gguf(gguf).audio
    assert audio is not None
    return audio
