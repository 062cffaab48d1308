"""Steps of training: the losses and weights of the reference, step for step; a text is learnt."""

import numpy as np
import pytest
from gpu import device
from tiny import MOE, SMALL, Tiny, tiny_gguf
from tiny_adapter import LAYER, tiny_adapter, tiny_pairs

from webgemma.blocking import finish
from webgemma.errors import InputError
from webgemma.gemma.adapters import HEAD
from webgemma.gemma.config import Config
from webgemma.gemma.optimiser import AdamW
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.lora.adapter import Adapter
from webgemma.lora.data import Example
from webgemma.lora.trainer import Trainer, fresh_pairs
from webgemma.reference import backward
from webgemma.reference.adamw import AdamW as ReferenceAdamW
from webgemma.reference.adamw import clip
from webgemma.reference.lora import Pair
from webgemma.reference.text import TextModel
from webgemma.reference.weights import Weights

TEXTS = [[2, *(24 + i * 7 % 280 for i in range(1, 20))], [2, *(300 - i for i in range(1, 9))]]
EXAMPLES = [
    Example(tuple(ids), tuple(t >= 4 for t in range(len(ids))), at)
    for at, ids in enumerate(TEXTS)
]  # fmt: skip


def opened(tiny: Tiny) -> tuple[Gguf, Config, Model]:
    gguf = finish(Gguf.aopen(BytesSource(tiny_gguf(tiny), "tiny.gguf")))
    config = Config.from_gguf(gguf)
    return gguf, config, finish(Model.load(gguf, config, device()))


def test_steps_are_the_references() -> None:
    gguf, config, model = opened(SMALL)
    pairs = tiny_pairs(gguf, (*LAYER, HEAD), strength=0.05)
    trainer = Trainer(model, tiny_adapter(pairs), AdamW(decay=0.01, longest=1.0))
    reference = ReferenceAdamW(decay=0.01)
    text_model = TextModel(config, Weights(gguf))
    weights = {name: (pair.a.copy(), pair.b.copy()) for name, pair in pairs.items()}
    examples = [backward.Example(e.ids, e.supervised) for e in EXAMPLES]
    for step in range(1, 4):
        now = {n: Pair(*weights[n], pair.scale) for n, pair in pairs.items()}
        wanted, sums = backward.Backward(text_model, now).gradients(examples)
        slopes = [half for name in weights for half in sums[name]]
        clip(slopes, 1.0)
        reference.update([h for pair in weights.values() for h in pair], slopes, 1e-3 * step)
        assert finish(trainer.step(EXAMPLES, 1e-3 * step)) == pytest.approx(wanted, rel=1e-4)
    learnt = finish(trainer.result())
    for name, pair in learnt.pairs.items():
        for mine, its in zip((pair.a, pair.b), weights[name], strict=True):
            got = np.frombuffer(mine, "<f4").reshape(its.shape)
            # Adam divides by a gradient's size: where that is almost nothing, its sign decides.
            assert np.mean(np.abs(got - its) > 1e-4) < 0.01, name
    trainer.close()
    model.close()


def test_a_text_is_learnt_and_memory_given_back() -> None:
    gguf, _, model = opened(SMALL)
    held = device().nbytes
    shapes = {
        name: (tensor.shape[0], tensor.shape[1])
        for name, tensor in gguf.tensors.items()
        if name.split(".")[-2] in LAYER
    }
    trainer = Trainer(model, Adapter("fresh", fresh_pairs(shapes, 4, 8.0, 1)))
    losses = [finish(trainer.step(EXAMPLES, 0.01)) for _ in range(12)]
    assert losses[-1] < 0.6 * losses[0], losses
    trainer.close()
    model.set_adapters([])
    assert device().nbytes == held
    model.close()


def test_what_cannot_be_trained_is_said() -> None:
    gguf, _, model = opened(SMALL)
    for names, sentence in ((("token_embd.weight",), "Embeddings"),):
        with pytest.raises(InputError, match=sentence):
            Trainer(model, tiny_adapter(tiny_pairs(gguf, names)))
    mixed = tiny_pairs(gguf, ("attn_q",)) | {
        name: pair._replace(scale=0.5) for name, pair in tiny_pairs(gguf, ("attn_k",)).items()
    }
    with pytest.raises(InputError, match="one scale"):
        Trainer(model, tiny_adapter(mixed))
    trainer = Trainer(model, tiny_adapter(tiny_pairs(gguf, ("attn_q",))))
    with pytest.raises(InputError, match="nothing to learn"):
        finish(trainer.step([Example((2, 30), (True, False), 1)], 0.1))
    trainer.close()
    model.close()
    gguf, _, model = opened(MOE)
    with pytest.raises(InputError, match="experts cannot be trained"):
        Trainer(model, tiny_adapter(tiny_pairs(gguf, ("attn_q",))))
    model.close()
