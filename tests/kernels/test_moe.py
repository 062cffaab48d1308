"""The mixture of experts against the reference: who is asked and what they answer."""

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from helpers.gpu import device, get, put
from helpers.tiny import MOE, Tiny, random_tensor, tiny_metadata, tiny_tensors, uniform
from tolerance import F32_KERNEL, ROUNDING

from webgemma.device import DeviceError
from webgemma.device.native import NativeDevice
from webgemma.gemma.config import Config, Experts
from webgemma.gemma.moe import Mixture, feed_forward_with_experts
from webgemma.gemma.text import Inputs, TextRecorder
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import NewTensor, gguf_bytes
from webgemma.graph import Recorder, Tensor
from webgemma.reference.text import TextModel, rms
from webgemma.reference.weights import Weights
from webgemma.sync import run_sync

ONE_LAYER = replace(MOE, pattern="f")  # 6 experts, 2 used, of width 32
MANY = replace(ONE_LAYER, experts=(32, 4, 32))
LAYER = "blk.0."


class Both:
    """One layer of experts twice: in the reference and on the device."""

    def __init__(self, tiny: Tiny, tensors: list[NewTensor] | None = None) -> None:
        data = gguf_bytes(tiny_metadata(tiny), tensors or tiny_tensors(tiny))
        self.gguf = run_sync(Gguf.aopen(BytesSource(data, "tiny.gguf")))
        self.config = Config.from_gguf(self.gguf)
        self.layer = self.config.layers[0]
        self.reference = TextModel(self.config, Weights(self.gguf))

    def run(
        self,
        x: np.ndarray,
        record: Callable[[TextRecorder, Tensor], Tensor],
        count: int | None = None,
        on: NativeDevice | None = None,
        precision: str = "exact",
    ) -> np.ndarray:
        """What `record` leaves of x [batch, width] when `count` of its tokens are real."""
        on = on or device()
        model = run_sync(Model.load(self.gguf, self.config, on))
        state = put(np.array([0, len(x) if count is None else count], np.uint32), on)
        inputs = Inputs(state, put(np.zeros(len(x), np.uint32), on), {}, {})
        recorder = Recorder(on)
        text = TextRecorder(model, recorder, inputs, len(x), "kv_f32", precision)
        out = record(text, put(x, on))
        on.run(recorder.plan())
        result = get(out, on=on)
        model.close()
        return result

    def experts(
        self,
        x: np.ndarray,
        count: int | None = None,
        on: NativeDevice | None = None,
        precision: str = "exact",
    ) -> np.ndarray:
        def record(text: TextRecorder, t: Tensor) -> Tensor:
            mixture = Mixture(text, self.layer)
            _, m, s = mixture.fork(t, put(0 * x, on))
            return mixture.answer(m, mixture.scores(s))

        return self.run(x, record, count, on, precision)

    def route(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids and shares: two of [batch, used]."""

        def record(text: TextRecorder, t: Tensor, which: int) -> Tensor:
            mixture = Mixture(text, self.layer)
            return mixture.route(mixture.scores(mixture.fork(t, put(0 * x))[2]))[which]

        ids, shares = (self.run(x, lambda text, t, w=w: record(text, t, w)) for w in (0, 1))
        return ids.view(np.uint32), shares


def residual(tiny: Tiny, batch: int) -> np.ndarray:
    """A residual stream, a little different in size from token to token."""
    x = uniform(11, "residual", batch * tiny.width).reshape(batch, tiny.width)
    return (x * np.linspace(1, 5, batch)[:, None]).astype(np.float32)


def assert_close(found: np.ndarray, wanted: np.ndarray, bound: float = F32_KERNEL) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=bound * np.abs(wanted).max())


@pytest.mark.parametrize("batch", [1, 2, 7, 40])
@pytest.mark.parametrize("tiny", [ONE_LAYER, MANY], ids=["6", "32"])
def test_experts_agree_with_the_reference(tiny: Tiny, batch: int) -> None:
    both, x = Both(tiny), residual(tiny, batch)
    assert_close(both.experts(x), both.reference.experts(LAYER, x))


@pytest.mark.parametrize("batch", [1, 40])
@pytest.mark.parametrize("used", [1, 3, 4])
def test_any_number_of_experts_is_used(used: int, batch: int) -> None:
    tiny = replace(ONE_LAYER, experts=(6, used, 32), fused=False)
    both, x = Both(tiny), residual(tiny, batch)
    assert_close(both.experts(x), both.reference.experts(LAYER, x))


def in_formats(tiny: Tiny, up: str, down: str) -> list[NewTensor]:
    """The tiny model with its experts' tensors stored otherwise."""
    return [
        random_tensor(tiny.seed, t.name, t.shape, down if "_down_" in t.name else up)
        if t.name.endswith("_exps.weight")
        else t
        for t in tiny_tensors(tiny)
    ]


@pytest.mark.parametrize("batch", [1, 40])
@pytest.mark.parametrize(("up", "down"), [("Q8_0", "Q8_0"), ("Q4_K", "Q8_0")])
def test_experts_in_blocks(up: str, down: str, batch: int) -> None:
    tiny = replace(ONE_LAYER, width=256, experts=(6, 2, 96))
    both, x = Both(tiny, in_formats(tiny, up, down)), residual(tiny, batch)
    assert_close(both.experts(x), both.reference.experts(LAYER, x))


@pytest.mark.parametrize("batch", [1, 40])
@pytest.mark.parametrize("down", ["F32", "Q8_0", "Q4_K"])
def test_experts_with_long_rows(down: str, batch: int) -> None:
    tiny = replace(ONE_LAYER, experts=(2, 1, 21504))
    both, x = Both(tiny, in_formats(tiny, "F32", down)), residual(tiny, batch)
    assert_close(both.experts(x), both.reference.experts(LAYER, x))


@pytest.mark.parametrize("batch", [1, 40])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("rows", [16, 64])
def test_weights_in_parts_that_split_experts(rows: int, fused: bool, batch: int) -> None:
    tiny = replace(ONE_LAYER, head_dims=(16, 16), ffn=64, experts=(6, 2, 36), fused=fused)
    small = copy.copy(device())  # with its compiled kernels
    small.limits = replace(small.limits, binding_nbytes=(rows + 4) * 4 * tiny.width)
    both, x = Both(tiny), residual(tiny, batch)
    model = run_sync(Model.load(both.gguf, both.config, small))
    assert model.matrices[LAYER + "ffn_down_exps.weight"].parts[1].first_row % tiny.width
    model.close()
    assert_close(both.experts(x, on=small), both.reference.experts(LAYER, x))


FORMATS = [
    *[("Q4_K", "Q5_0"), ("Q6_K", "Q8_0"), ("Q5_K", "Q5_1"), ("Q3_K", "Q4_0"), ("Q2_K", "Q4_1")],
    *[("IQ4_XS", "IQ4_NL"), ("MXFP4", "F16"), ("BF16", "MXFP4")],
]


@pytest.mark.parametrize("precision", ["int16", "int8"])
@pytest.mark.parametrize(("up", "down"), FORMATS)
def test_experts_with_integers(up: str, down: str, precision: str) -> None:
    tiny = replace(ONE_LAYER, width=256, experts=(6, 2, 96), formats=("Q8_0",))
    both, x = Both(tiny, in_formats(tiny, up, down)), residual(tiny, 1)
    found, wanted = both.experts(x, precision=precision), both.reference.experts(LAYER, x)
    assert_close(found, wanted, ROUNDING[precision])
    assert np.abs(found - both.experts(x)).max() > 0


@pytest.mark.parametrize("precision", ["int16", "int8"])
@pytest.mark.parametrize(("up", "down"), [FORMATS[0], *FORMATS[-2:]])
@pytest.mark.parametrize(("batch", "count", "fused"), [(2, 6, True), (40, 6, True), (19, 3, False)])
def test_batches_with_integers(
    batch: int, count: int, fused: bool, up: str, down: str, precision: str
) -> None:
    """One by one and gathered; formats of which only one multiplies integers, too."""
    tiny = replace(ONE_LAYER, width=256, experts=(count, 2, 96), fused=fused, formats=("Q8_0",))
    both, x = Both(tiny, in_formats(tiny, up, down)), residual(tiny, batch)
    found, wanted = both.experts(x, precision=precision), both.reference.experts(LAYER, x)
    assert_close(found, wanted, ROUNDING[precision])
    assert np.abs(found - both.experts(x)).max() > 0


@pytest.mark.parametrize("batch", [1, 40])
@pytest.mark.parametrize("fused", [True, False])
def test_parts_with_integers(fused: bool, batch: int) -> None:
    tiny = replace(ONE_LAYER, experts=(6, 2, 96), fused=fused, formats=("Q8_0",))
    small = copy.copy(device())
    small.limits = replace(small.limits, binding_nbytes=4096)
    both, x = Both(tiny), residual(tiny, batch)
    wanted = both.reference.experts(LAYER, x)
    assert_close(both.experts(x, on=small, precision="int16"), wanted, ROUNDING["int16"])
    assert_close(both.experts(x, precision="int16"), wanted, ROUNDING["int16"])


def changed(tiny: Tiny, ending: str, change: Callable[[np.ndarray], None]) -> list[NewTensor]:
    """The tiny model's tensors, float32, those with this ending changed in place."""
    tensors = []
    for tensor in tiny_tensors(tiny):
        values = np.frombuffer(tensor.data, np.float32).copy()
        if tensor.name.endswith(ending):
            change(values)
        tensors.append(NewTensor(tensor.name, tensor.shape, "F32", values.tobytes()))
    return tensors


@pytest.mark.parametrize("batch", [1, 12])
def test_experts_nobody_asks_are_never_touched(batch: int) -> None:
    x = residual(MANY, batch)
    asked = set(Both(MANY).reference.route(LAYER, x)[0].flat)
    unasked = [expert for expert in range(32) if expert not in asked]
    assert unasked

    def poison(values: np.ndarray) -> None:
        values.reshape(32, -1)[unasked] = np.nan

    both = Both(MANY, changed(MANY, "_exps.weight", poison))
    found = both.experts(x)
    assert np.isfinite(found).all()
    assert_close(found, both.reference.experts(LAYER, x))


@pytest.mark.parametrize(
    ("tiny", "batch", "count"), [(MANY, 2, 1), (MANY, 40, 19), (ONE_LAYER, 7, 3)]
)
def test_tokens_beyond_the_count_do_not_matter(tiny: Tiny, batch: int, count: int) -> None:
    both, x = Both(tiny), residual(tiny, batch)
    x[count:] = np.nan
    found = both.experts(x, count=count)[:count]
    assert_close(found, both.reference.experts(LAYER, x[:count]))


@pytest.mark.parametrize("scaled", [True, False])
def test_route(scaled: bool) -> None:
    tensors = [t for t in tiny_tensors(MANY) if scaled or "exps.scale" not in t.name]
    both, x = Both(MANY, tensors), residual(MANY, 7)
    ids, shares = both.route(x)
    wanted_ids, wanted_shares = both.reference.route(LAYER, x)
    np.testing.assert_array_equal(ids, wanted_ids)
    assert_close(shares, wanted_shares)


def test_of_equal_experts_the_first_come_first() -> None:
    def in_twos(values: np.ndarray) -> None:
        rows = values.reshape(32, -1)
        rows[16:] = rows[:16]

    both, x = Both(MANY, changed(MANY, "ffn_gate_inp.weight", in_twos)), residual(MANY, 7)
    weights = both.reference.weights
    normed = rms(x, weights[LAYER + "ffn_gate_inp.scale"], both.config.eps)
    scores = normed @ weights[LAYER + "ffn_gate_inp.weight"][:16].T
    best, second = np.argsort(-scores)[:, :2].T
    ids, _ = both.route(x)
    np.testing.assert_array_equal(ids.T, [best, best + 16, second, second + 16])


def test_when_all_are_equal_the_first_are_asked() -> None:
    def nothing(values: np.ndarray) -> None:
        values[:] = 0

    both, x = Both(MANY, changed(MANY, "ffn_gate_inp.weight", nothing)), residual(MANY, 2)
    ids, shares = both.route(x)
    np.testing.assert_array_equal(ids, [[0, 1, 2, 3]] * 2)
    assert_close(shares, both.reference.route(LAYER, x)[1])


@pytest.mark.parametrize(
    ("dense", "chosen", "precision", "batch"),
    [
        ("F32", "F32", "exact", 1),
        ("F32", "F32", "exact", 7),
        ("Q8_0", "Q4_0", "exact", 40),
        ("Q8_0", "Q4_0", "int16", 1),
        ("Q8_0", "F16", "int16", 1),
        ("F16", "Q8_0", "int16", 1),
        ("Q8_0", "Q4_0", "int16", 40),
        ("Q8_0", "F16", "int16", 40),
        ("F16", "Q8_0", "int16", 40),
    ],
)
def test_a_layer_forks_and_joins(dense: str, chosen: str, precision: str, batch: int) -> None:
    """With what attention gave, through both branches, to what the next layer reads."""
    tiny = replace(ONE_LAYER, width=1056, formats=(dense,))
    both, x = Both(tiny, in_formats(tiny, chosen, chosen)), residual(tiny, batch)
    a = x[:, ::-1] / np.float32(3)
    names = ("post_ffw_norm.weight", "attn_norm.weight", "layer_output_scale.weight")
    model = both.reference

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return rms(x, model.weights[f"{LAYER}{name}.weight"], both.config.eps)

    def record(text: TextRecorder, t: Tensor) -> Tensor:
        branches = feed_forward_with_experts(text, both.layer, t, put(a))
        return text.residual(t, branches, *(LAYER + name for name in names))

    found = both.run(x, record, precision=precision)
    x = x + norm(a, "post_attention_norm")
    f = norm(model.feed_forward(LAYER, norm(x, "ffn_norm")), "post_ffw_norm_1")
    x = x + norm(f + norm(model.experts(LAYER, x), "post_ffw_norm_2"), "post_ffw_norm")
    x = x * model.weights[LAYER + "layer_output_scale.weight"]
    assert_close(found, norm(x, "attn_norm"), ROUNDING.get(precision, F32_KERNEL))


@pytest.mark.parametrize("many", [Experts(257, 8, 32, True), Experts(64, 17, 32, True)])
def test_more_experts_than_the_kernels_hold(many: Experts) -> None:
    both = Both(ONE_LAYER)
    both.config = replace(both.config, experts=many)
    model = Model(both.config, device())
    text = TextRecorder(model, Recorder(device()), Inputs(*[model.one] * 2, {}, {}), 1, "kv_f32")
    with pytest.raises(DeviceError, match=f"uses {many.used} of {many.count} experts"):
        Mixture(text, both.layer)
    model.close()
