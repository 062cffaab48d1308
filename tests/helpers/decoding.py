"""Logits of a model that reads one token after the other, as when it decodes."""

import struct

import numpy as np

from helpers.gpu import get, put
from helpers.integers import inputs_of
from helpers.tiny import Tiny, tiny_gguf
from webgemma.device.native import NativeDevice
from webgemma.gemma.config import Config
from webgemma.gemma.kv_cache import LayerCache
from webgemma.gemma.text import TextRecorder
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.graph import Recorder
from webgemma.sync import run_sync


def opened(tiny: Tiny) -> Gguf:
    return run_sync(Gguf.aopen(BytesSource(tiny_gguf(tiny))))


def decoded(gguf: Gguf, ids: list[int], precision: str, on: NativeDevice) -> np.ndarray:
    """Return logits [ids, vocab], each id read by itself."""
    config = Config.from_gguf(gguf)
    model = run_sync(Model.load(gguf, config, on))
    inputs = inputs_of(1, on)
    for layer in config.layers:
        empty = np.zeros((len(ids), layer.kv_heads, layer.head_dim), np.float32)
        inputs.caches[layer.index] = LayerCache(put(empty, on), put(empty, on), len(ids))
    text = TextRecorder(model, Recorder(on), inputs, 1, "f32", precision)
    logits = text.softcap(text.head(text.body()))
    plan, rows = text.recorder.plan(), []
    for position, token in enumerate(ids):
        on.write(inputs.batch.buffer, struct.pack("<2I", position, 1))
        on.write(inputs.ids.buffer, struct.pack("<I", token))
        on.run(plan)
        rows.append(get(logits, on=on)[0])
    return np.stack(rows)
