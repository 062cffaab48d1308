"""A tiny model with both encoders in its own file, as Ollama has them."""

from dataclasses import replace

from helpers.tiny import SMALL, tiny_metadata, tiny_tensors
from helpers.tiny_audio import TINY_AUDIO, as_ollama, audio_metadata, audio_weights
from helpers.tiny_vision import SMALL_VISION, vision_metadata, vision_weights
from webgemma.gguf.writer import gguf_bytes

TEXT = replace(SMALL, context=1024)
VISION = replace(SMALL_VISION, positions=96)
AUDIO = replace(TINY_AUDIO, output=SMALL.width)


def with_encoders() -> bytes:
    """Return the bytes of the file."""
    metadata = tiny_metadata(TEXT) | vision_metadata(VISION, "gemma4.")
    metadata |= audio_metadata(AUDIO, "gemma4")
    tensors = [*tiny_tensors(TEXT), *vision_weights(VISION), *as_ollama(audio_weights(AUDIO))]
    return gguf_bytes(metadata, tensors)
