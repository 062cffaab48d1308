"""The gradients of whole texts on the GPU against the reference's: every matrix that learns."""

from dataclasses import replace

import numpy as np
import pytest
from gpu import device, get, put
from tiny import LARGE, MIXED, SMALL, tiny_gguf
from tiny_adapter import ALPHA, LAYER, RANK, tiny_adapter, tiny_pairs
from tolerance import GRADIENTS_OF_TRANSFORMERS

from webgemma.blocking import finish
from webgemma.gemma.adapters import HEAD, matrix_members
from webgemma.gemma.config import Config
from webgemma.gemma.learning import Learner, Lesson
from webgemma.gemma.text import Inputs
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.graph import Recorder, Tensor
from webgemma.reference.backward import Backward, Example
from webgemma.reference.text import TextModel
from webgemma.reference.weights import Weights

KINDS = {
    "small": SMALL,
    "large": replace(LARGE, suppressed=()),
    "mixed": replace(MIXED, pattern="sf", formats=("Q6_K", "Q4_K", "Q8_0")),
}
BATCH, COUNT = 24, 20  # more than the window of 8
IDS = [2, *(24 + i * 7 % 280 for i in range(1, COUNT))]
SUPERVISED = [t >= 5 for t in range(COUNT)]


def zeros(*shape: int) -> Tensor:
    return put(np.zeros(shape, np.float32))


def lesson_of(model: Model) -> Lesson:
    spans = np.zeros((BATCH, 2), np.uint32)
    spans[:COUNT, 1] = COUNT
    weights, targets = np.zeros(BATCH, np.float32), np.zeros(BATCH, np.uint32)
    weights[: COUNT - 1] = np.array(SUPERVISED[1:], np.float32) / sum(SUPERVISED)
    targets[: COUNT - 1] = IDS[1:]
    owed = {
        x.index: (zeros(BATCH, x.kv_heads * x.head_dim), zeros(BATCH, x.kv_heads * x.head_dim))
        for x in model.config.layers
        if not x.shares_kv
    }
    made = {name: (zeros(*low.a.shape), zeros(*low.b.shape)) for name, low in model.low.items()}
    return Lesson(put(spans), put(targets), put(weights), zeros(BATCH), owed, made, ALPHA / RANK)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_a_text(kind: str) -> None:
    gguf = finish(Gguf.aopen(BytesSource(tiny_gguf(KINDS[kind]), "tiny.gguf")))
    config = Config.from_gguf(gguf)
    pairs = tiny_pairs(gguf, (*LAYER, HEAD))
    reference = Backward(TextModel(config, Weights(gguf)), pairs)
    loss, wanted = reference.gradients([Example(IDS, SUPERVISED)])

    model = finish(Model.load(gguf, config, device()))
    model.set_adapters([(tiny_adapter(pairs).pairs, 1.0)])
    lesson = lesson_of(model)
    state, ids = put(np.array([0, COUNT], np.uint32)), put(np.array([*IDS, 0, 0, 0, 0], np.uint32))
    caches = {
        x.index: (zeros(BATCH, x.kv_heads * x.head_dim), zeros(BATCH, x.kv_heads * x.head_dim))
        for x in config.layers
        if not x.shares_kv
    }
    recorder = Recorder(device())
    inputs = Inputs(state, ids, caches, dict.fromkeys(caches, BATCH))
    Learner(model, recorder, inputs, BATCH, lesson).record()
    plan = recorder.plan()
    device().run(plan)

    losses = get(lesson.losses)[: COUNT - 1]
    assert losses[np.array(SUPERVISED[1:])].mean() == pytest.approx(loss, rel=1e-4)
    seen = set()
    for matrix, members in matrix_members(model):
        if matrix not in model.low:
            continue
        low = model.low[matrix]
        da, db = (get(x) for x in lesson.gradients[matrix])
        for segment, (member, row) in enumerate(zip(members, low.firsts, strict=True)):
            mine = (
                da[segment * low.ranks : segment * low.ranks + RANK],
                db[row : row + member.rows, :RANK],
            )
            for got, expected in zip(mine, wanted[member.name], strict=True):
                bound = GRADIENTS_OF_TRANSFORMERS * np.abs(expected).max()
                np.testing.assert_allclose(got, expected, rtol=0, atol=bound, err_msg=member.name)
            seen.add(member.name)
    assert seen == pairs.keys()
    plan.close(device())
    model.close()
