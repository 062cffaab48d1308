"""Models of random shapes on the GPU against the reference, with every mix of layer kinds."""

import numpy as np
from helpers.gpu import device
from helpers.tiny import Tiny, tiny_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tolerance import GPU_LOGITS

from webgemma.engine.session import Session
from webgemma.gemma.config import Config
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.reference.text import TextModel
from webgemma.reference.weights import Weights
from webgemma.settings import resolve
from webgemma.sync import iterate_sync, run_sync

IDS = [2, *range(40, 59)]
DECODED = 4


@st.composite
def shapes(draw: st.DrawFn) -> Tiny:
    """Draw the shape of a small model that a Gemma 4 file may describe."""
    own = draw(st.text("sf", min_size=1, max_size=4))
    shared = draw(
        st.text(sorted(set(own)), max_size=3)
    )  # each reads the cache of a layer of its kind
    kv_heads = draw(st.tuples(*[st.sampled_from([1, 2])] * 2))
    return Tiny(
        pattern=own + shared,
        shared=len(shared),
        heads=2 * draw(st.sampled_from([1, 2])),
        kv_heads=kv_heads,
        head_dims=draw(st.sampled_from([(16, 16), (16, 32), (32, 64)])),
        width=draw(st.sampled_from([32, 64])),
        ffn=draw(st.sampled_from([32, 96])),
        double_wide=draw(st.booleans()),
        window=draw(st.integers(1, 12)),
        ple=draw(st.sampled_from([0, 16, 32])),
        k_is_v=draw(st.booleans()),
        experts=draw(st.sampled_from([None, (4, 2, 32), (9, 1, 64), (16, 4, 32)])),
        fused=draw(st.booleans()),
        formats=draw(st.sampled_from([("F32",), ("F16", "BF16"), ("F32", "F16")])),
        suppressed=draw(st.sampled_from([(), (7, 9)])),
        seed=draw(st.integers(1, 1000)),
    )


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(shapes())
def test_any_shape_of_model_agrees_with_the_reference(tiny: Tiny) -> None:
    gguf = run_sync(Gguf.aopen(BytesSource(tiny_gguf(tiny), "random.gguf")))
    config = Config.from_gguf(gguf)
    model = run_sync(Model.load(gguf, config, device()))
    session = Session(model, 64, kv="f32", precision="exact")
    try:
        logits = np.frombuffer(run_sync(session.logits(IDS)), np.float32).reshape(len(IDS), -1)
        stream = iterate_sync(session.generate(IDS, resolve({"temperature": 0}), 1))
        tokens = [next(stream)[0] for _ in range(DECODED)]
        stream.close()
    finally:
        session.close()
        model.close()
    expected = TextModel(config, Weights(gguf)).forward([*IDS, *tokens])
    finite = np.isfinite(expected)
    assert (np.isfinite(logits) == finite[: len(IDS)]).all()
    bound = GPU_LOGITS * np.abs(expected[finite]).max()
    compared = finite[: len(IDS)]
    assert np.abs(logits[compared] - expected[: len(IDS)][compared]).max() <= bound
    for step, token in enumerate(tokens):  # the best one, or within the bound of it
        row = expected[len(IDS) - 1 + step]
        assert row.max() - row[token] <= bound
