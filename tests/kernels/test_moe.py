"""The mixture of experts against the reference: the routing and the experts' sum."""

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from helpers.gpu import device, get, put
from helpers.tiny import MOE, Tiny, random_tensor, tiny_metadata, tiny_tensors, uniform
from tolerance import F32_KERNEL, ROUNDING

from webgemma.device.native import NativeDevice
from webgemma.errors import DeviceError
from webgemma.gemma.config import Config, Experts
from webgemma.gemma.moe import ExpertLayer
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


class Case:
    """One layer of experts, in the reference and on the device."""

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
        """Return what is recorded for x [rows, width] of which `count` rows are tokens."""
        on = on or device()
        model = run_sync(Model.load(self.gguf, self.config, on))
        batch = put(np.array([0, len(x) if count is None else count], np.uint32), on)
        inputs = Inputs(batch, put(np.zeros(len(x), np.uint32), on), {})
        recorder = Recorder(on)
        text = TextRecorder(model, recorder, inputs, len(x), "f32", precision)
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
            layer = ExpertLayer(text, text.model, self.layer)
            _, _, m, s = layer.fork(t, put(0 * x, on))
            return layer.record(m, layer.scores(s))

        return self.run(x, record, count, on, precision)

    def route(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and shares: two of [rows, used]."""

        def record(text: TextRecorder, t: Tensor, name: str) -> Tensor:
            layer = ExpertLayer(text, text.model, self.layer)
            routing = layer.route(layer.scores(layer.fork(t, put(0 * x))[3]))
            return getattr(routing, name)

        ids, shares = (
            self.run(x, lambda text, t, name=name: record(text, t, name))
            for name in ("ids", "shares")
        )
        return ids.view(np.uint32), shares


def residual(tiny: Tiny, rows: int) -> np.ndarray:
    """Return a residual stream whose size varies a little from token to token."""
    x = uniform(11, "residual", rows * tiny.width).reshape(rows, tiny.width)
    return (x * np.linspace(1, 5, rows)[:, None]).astype(np.float32)


def assert_close(found: np.ndarray, expected: np.ndarray, bound: float = F32_KERNEL) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound * np.abs(expected).max())


@pytest.mark.parametrize("rows", [1, 2, 7, 40])
@pytest.mark.parametrize("tiny", [ONE_LAYER, MANY], ids=["6", "32"])
def test_experts_agree_with_the_reference(tiny: Tiny, rows: int) -> None:
    case, x = Case(tiny), residual(tiny, rows)
    assert_close(case.experts(x), case.reference.experts(LAYER, x))


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("used", [1, 3, 4])
def test_any_number_of_experts_is_used(used: int, rows: int) -> None:
    tiny = replace(ONE_LAYER, experts=(6, used, 32), fused=False)
    case, x = Case(tiny), residual(tiny, rows)
    assert_close(case.experts(x), case.reference.experts(LAYER, x))


def in_formats(tiny: Tiny, up: str, down: str) -> list[NewTensor]:
    """Return the tiny model with its experts' tensors in other formats."""
    return [
        random_tensor(tiny.seed, t.name, t.shape, down if "_down_" in t.name else up)
        if t.name.endswith("_exps.weight")
        else t
        for t in tiny_tensors(tiny)
    ]


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize(("up", "down"), [("Q8_0", "Q8_0"), ("Q4_K", "Q8_0")])
def test_experts_in_blocks(up: str, down: str, rows: int) -> None:
    tiny = replace(ONE_LAYER, width=256, experts=(6, 2, 96))
    case, x = Case(tiny, in_formats(tiny, up, down)), residual(tiny, rows)
    assert_close(case.experts(x), case.reference.experts(LAYER, x))


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("down", ["F32", "Q8_0", "Q4_K"])
def test_experts_with_long_rows(down: str, rows: int) -> None:
    tiny = replace(ONE_LAYER, experts=(2, 1, 21504))
    case, x = Case(tiny, in_formats(tiny, "F32", down)), residual(tiny, rows)
    assert_close(case.experts(x), case.reference.experts(LAYER, x))


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("part_rows", [16, 64])
def test_weights_in_parts_that_split_experts(part_rows: int, fused: bool, rows: int) -> None:
    tiny = replace(ONE_LAYER, head_dims=(16, 16), ffn=64, experts=(6, 2, 36), fused=fused)
    small = copy.copy(device())  # with its compiled kernels
    small.limits = replace(small.limits, binding_nbytes=(part_rows + 4) * 4 * tiny.width)
    case, x = Case(tiny), residual(tiny, rows)
    model = run_sync(Model.load(case.gguf, case.config, small))
    assert model.matrices[LAYER + "ffn_down_exps.weight"].parts[1].first_row % tiny.width
    model.close()
    assert_close(case.experts(x, on=small), case.reference.experts(LAYER, x))


FORMATS = [
    *[("Q4_K", "Q5_0"), ("Q6_K", "Q8_0"), ("Q5_K", "Q5_1"), ("Q3_K", "Q4_0"), ("Q2_K", "Q4_1")],
    *[("IQ4_XS", "IQ4_NL"), ("MXFP4", "F16"), ("BF16", "MXFP4")],
]


@pytest.mark.parametrize("precision", ["int16", "int8"])
@pytest.mark.parametrize(("up", "down"), FORMATS)
def test_experts_with_integers(up: str, down: str, precision: str) -> None:
    tiny = replace(ONE_LAYER, width=256, experts=(6, 2, 96), formats=("Q8_0",))
    case, x = Case(tiny, in_formats(tiny, up, down)), residual(tiny, 1)
    found, expected = case.experts(x, precision=precision), case.reference.experts(LAYER, x)
    assert_close(found, expected, ROUNDING[precision])
    assert np.abs(found - case.experts(x)).max() > 0


@pytest.mark.parametrize("precision", ["int16", "int8"])
@pytest.mark.parametrize(("up", "down"), [FORMATS[0], *FORMATS[-2:]])
@pytest.mark.parametrize(("rows", "count", "fused"), [(2, 6, True), (40, 6, True), (19, 3, False)])
def test_batches_with_integers(
    rows: int, count: int, fused: bool, up: str, down: str, precision: str
) -> None:
    """Slot by slot and sorted by expert; also formats of which only one multiplies integers."""
    tiny = replace(ONE_LAYER, width=256, experts=(count, 2, 96), fused=fused, formats=("Q8_0",))
    case, x = Case(tiny, in_formats(tiny, up, down)), residual(tiny, rows)
    found, expected = case.experts(x, precision=precision), case.reference.experts(LAYER, x)
    assert_close(found, expected, ROUNDING[precision])
    assert np.abs(found - case.experts(x)).max() > 0


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("fused", [True, False])
def test_parts_with_integers(fused: bool, rows: int) -> None:
    tiny = replace(ONE_LAYER, experts=(6, 2, 96), fused=fused, formats=("Q8_0",))
    small = copy.copy(device())
    small.limits = replace(small.limits, binding_nbytes=4096)
    case, x = Case(tiny), residual(tiny, rows)
    expected = case.reference.experts(LAYER, x)
    assert_close(case.experts(x, on=small, precision="int16"), expected, ROUNDING["int16"])
    assert_close(case.experts(x, precision="int16"), expected, ROUNDING["int16"])


def changed(tiny: Tiny, ending: str, change: Callable[[np.ndarray], None]) -> list[NewTensor]:
    """Return the tiny model's tensors in float32, with those of this ending changed in place."""
    tensors = []
    for tensor in tiny_tensors(tiny):
        values = np.frombuffer(tensor.data, np.float32).copy()
        if tensor.name.endswith(ending):
            change(values)
        tensors.append(NewTensor(tensor.name, tensor.shape, "F32", values.tobytes()))
    return tensors


@pytest.mark.parametrize("rows", [1, 12])
def test_unrouted_experts_are_never_read(rows: int) -> None:
    x = residual(MANY, rows)
    routed = set(Case(MANY).reference.route(LAYER, x)[0].flat)
    unrouted = [expert for expert in range(32) if expert not in routed]
    assert unrouted

    def poison(values: np.ndarray) -> None:
        values.reshape(32, -1)[unrouted] = np.nan

    case = Case(MANY, changed(MANY, "_exps.weight", poison))
    found = case.experts(x)
    assert np.isfinite(found).all()
    assert_close(found, case.reference.experts(LAYER, x))


@pytest.mark.parametrize(
    ("tiny", "rows", "count"), [(MANY, 2, 1), (MANY, 40, 19), (ONE_LAYER, 7, 3)]
)
def test_tokens_beyond_the_count_do_not_matter(tiny: Tiny, rows: int, count: int) -> None:
    case, x = Case(tiny), residual(tiny, rows)
    x[count:] = np.nan
    found = case.experts(x, count=count)[:count]
    assert_close(found, case.reference.experts(LAYER, x[:count]))


@pytest.mark.parametrize("scaled", [True, False])
def test_route(scaled: bool) -> None:
    tensors = [t for t in tiny_tensors(MANY) if scaled or "exps.scale" not in t.name]
    case, x = Case(MANY, tensors), residual(MANY, 7)
    ids, shares = case.route(x)
    expected_ids, expected_shares = case.reference.route(LAYER, x)
    np.testing.assert_array_equal(ids, expected_ids)
    assert_close(shares, expected_shares)


def test_equal_scores_are_ordered_by_expert() -> None:
    def in_pairs(values: np.ndarray) -> None:
        rows = values.reshape(32, -1)
        rows[16:] = rows[:16]

    case, x = Case(MANY, changed(MANY, "ffn_gate_inp.weight", in_pairs)), residual(MANY, 7)
    weights = case.reference.weights
    normed = rms(x, weights[LAYER + "ffn_gate_inp.scale"], case.config.eps)
    scores = normed @ weights[LAYER + "ffn_gate_inp.weight"][:16].T
    best, second = np.argsort(-scores)[:, :2].T
    ids, _ = case.route(x)
    np.testing.assert_array_equal(ids.T, [best, best + 16, second, second + 16])


def test_when_all_scores_are_equal_the_first_experts_are_used() -> None:
    def zero(values: np.ndarray) -> None:
        values[:] = 0

    case, x = Case(MANY, changed(MANY, "ffn_gate_inp.weight", zero)), residual(MANY, 2)
    ids, shares = case.route(x)
    np.testing.assert_array_equal(ids, [[0, 1, 2, 3]] * 2)
    assert_close(shares, case.reference.route(LAYER, x)[1])


@pytest.mark.parametrize(
    ("dense", "experts", "precision", "rows"),
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
def test_a_layer_forks_and_joins(dense: str, experts: str, precision: str, rows: int) -> None:
    """From what attention adds, through both branches, to what the next layer reads."""
    tiny = replace(ONE_LAYER, width=1056, formats=(dense,))
    case, x = Case(tiny, in_formats(tiny, experts, experts)), residual(tiny, rows)
    a = x[:, ::-1] / np.float32(3)
    names = ("post_ffw_norm.weight", "attn_norm.weight", "layer_output_scale.weight")
    model = case.reference

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return rms(x, model.weights[f"{LAYER}{name}.weight"], case.config.eps)

    def record(text: TextRecorder, t: Tensor) -> Tensor:
        t, branches = text.feed_forward_with_experts(case.layer, t, put(a))
        out = text.scratch(*a.shape)
        text.residual(t, branches, *(LAYER + name for name in names), out=out)
        return out

    found = case.run(x, record, precision=precision)
    x = x + norm(a, "post_attention_norm")
    f = norm(model.feed_forward(LAYER, norm(x, "ffn_norm")), "post_ffw_norm_1")
    x = x + norm(f + norm(model.experts(LAYER, x), "post_ffw_norm_2"), "post_ffw_norm")
    x = x * model.weights[LAYER + "layer_output_scale.weight"]
    assert_close(found, norm(x, "attn_norm"), ROUNDING.get(precision, F32_KERNEL))


@pytest.mark.parametrize("many", [Experts(257, 8, 32, True), Experts(64, 17, 32, True)])
def test_more_experts_than_the_kernels_support(many: Experts) -> None:
    case = Case(ONE_LAYER)
    case.config = replace(case.config, experts=many)
    model = Model(case.config, device())
    text = TextRecorder(model, Recorder(device()), Inputs(*[model.one] * 2, {}), 1, "f32")
    with pytest.raises(DeviceError, match=f"uses {many.used} of {many.count} experts"):
        ExpertLayer(text, model, case.layer)
    model.close()
