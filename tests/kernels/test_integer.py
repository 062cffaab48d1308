"""Activations as integers: every format's products, whoever makes them, and whole models."""

import struct
from dataclasses import replace

import numpy as np
import pytest
from conftest import SHARED, needs_shared
from gpu import device, get, hardware, put
from tiny import MIXED, MOE, SMALL, Tiny, random_tensor, tiny_gguf
from tolerance import F32_KERNEL, GPU_LOGITS, INT8_LOGITS

from webgemma.blocking import each, finish
from webgemma.device.native import NativeDevice
from webgemma.errors import InputError
from webgemma.gemma.config import Config
from webgemma.gemma.integers import Integers, multiplies_integers, pieces_of
from webgemma.gemma.text import Inputs, TextRecorder
from webgemma.gemma.weights import Model
from webgemma.gguf.formats import FORMATS
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import NewTensor, gguf_bytes
from webgemma.graph import Recorder, Tensor
from webgemma.kernels import link
from webgemma.reference.dequantise import dequantise
from webgemma.reference.text import TextModel
from webgemma.reference.weights import Weights
from webgemma.sampler import Sampling
from webgemma.session import Session

ROUNDING = {"int16": 1e-4, "int8": 2e-2}  # of a product, relative to the largest
LARGEST = {"int16": 32512, "int8": 127}
POISON = 77

FORMATS_IN_TURN = [name for name, fmt in FORMATS.items() if fmt.usable and fmt.block > 1]
EVERY_FORMAT = pytest.mark.parametrize("name", FORMATS_IN_TURN)
EVERY_PRECISION = pytest.mark.parametrize("precision", ["int16", "int8"])
PLAIN = frozenset({"subgroups", "shader-f16"})


def numbers(*shape: int) -> np.ndarray:
    """Values whose size differs from group to group; some groups are all zeros."""
    rng = np.random.default_rng(shape)
    x = rng.standard_normal(shape, np.float32).reshape(-1, 32)
    x *= rng.choice([0, 1e-3, 1, 40], len(x), p=[0.1, 0.2, 0.6, 0.1]).astype(np.float32)[:, None]
    return x.reshape(shape)


def integers(x: np.ndarray, precision: str) -> tuple[Integers, np.ndarray]:
    """x as the kernels read it, and the values that this stands for."""
    groups = x.reshape(-1, 32).astype(np.float64)
    scales = (np.abs(groups).max(1) / LARGEST[precision]).astype(np.float32)
    v = np.round(groups / np.where(scales == 0, 1, scales)[:, None]).astype(np.int32)
    meant = v * scales[:, None].astype(np.float64)
    sums = meant.reshape(-1, 2, 16).sum(2)
    sizes = np.concatenate([scales[:, None], sums, 0 * scales[:, None]], 1).astype(np.float32)
    halves = [v] if precision == "int8" else [(v + 128) >> 8, v]
    parts = [*(half.astype(np.int8) for half in halves), sizes.view(np.int8)]
    tensor = put(np.concatenate(parts, 1))
    made = Integers(x.shape, tensor.nbytes, tensor.placed, precision=precision)
    return made, meant.reshape(x.shape)


def room(width: int, precision: str = "") -> Tensor:
    """Poisoned memory for two rows, as integers or floats."""
    shape = (2, width)
    tensor = Integers.of(shape, precision) if precision else Tensor(shape, 8 * width)
    tensor.placed = device().buffer(tensor.nbytes, "kept")
    device().write(tensor.buffer, bytes([POISON]) * tensor.nbytes)
    return tensor


def assert_holds(made: Tensor, x: np.ndarray) -> None:
    """The first row is x within half a step and says the right sums; the second is untouched."""
    assert isinstance(made, Integers)
    data = get(Tensor((2, made.nbytes // 2), made.nbytes, made.buffer), np.int8)
    assert (data[1] == POISON).all()
    size = 32 if made.precision == "int8" else 64
    groups = data[0].reshape(-1, size + 16)
    v = groups[:, :32].astype(np.int64)
    if made.precision == "int16":
        v = 256 * v + groups[:, 32:64]
    scale, *sums, nothing = groups[:, size:].copy().view(np.float32).astype(np.float64).T
    x = x.reshape(-1, 32).astype(np.float64)
    peak = np.abs(x).max(1)
    np.testing.assert_allclose(scale, peak / LARGEST[made.precision], rtol=F32_KERNEL)
    assert (np.abs(v * scale[:, None] - x) <= 0.5 * scale[:, None] + 1e-6 * peak[:, None]).all()
    meant = scale[:, None] * v.reshape(-1, 2, 16).sum(2)
    np.testing.assert_allclose(np.stack(sums, 1), meant, rtol=1e-6)
    assert (nothing == 0).all()


def load(tensor: NewTensor) -> Model:
    """A model of this matrix alone."""
    gguf = finish(Gguf.aopen(BytesSource(gguf_bytes({}, [tensor]))))
    model = Model(None, hardware())
    stack = [gguf.tensors[tensor.name]]
    model.matrices[tensor.name] = finish(model._matrix(gguf, tensor.name, stack))
    return model


def truth(tensor: NewTensor) -> np.ndarray:
    """The weights of a matrix: [rows, width]."""
    width, rows = tensor.shape
    return dequantise(tensor.data, FORMATS[tensor.format], (rows, width)).astype(np.float64)


def inputs_of(count: int, on: NativeDevice | None = None) -> Inputs:
    """A batch of so many tokens at the beginning."""
    return Inputs(put(np.array([0, count], np.uint32), on), put(np.zeros(4, np.uint32), on), {}, {})


def recorder(model: Model, batch: int = 1, count: int = 1) -> TextRecorder:
    """Records over a batch that has so many tokens."""
    return TextRecorder(model, Recorder(model.device), inputs_of(count), batch, "kv_f32")


def assert_close(found: np.ndarray, expected: np.ndarray, bound: float) -> None:
    assert np.abs(found - expected).max() <= bound * np.abs(expected).max()


@EVERY_FORMAT
@EVERY_PRECISION
def test_products_with_integers(name: str, precision: str) -> None:
    tensor = random_tensor(5, "w", (512, 37), name)
    model = load(tensor)
    x = numbers(2, 512)
    text = recorder(model, 2, 2)
    given, meant = integers(x, precision)
    y = text.linear(given, model.matrices["w"])
    model.device.run(text.recorder.plan())
    weights = truth(tensor)
    assert_close(get(y), meant @ weights.T, F32_KERNEL)
    assert_close(get(y), x.astype(np.float64) @ weights.T, ROUNDING[precision])


@EVERY_PRECISION
def test_products_of_many_rows_and_of_extremes(precision: str) -> None:
    """Two rows share what is read of x; the largest sums there are do not overflow."""
    tensor = random_tensor(6, "w", (64, 1031), "Q8_0")
    weights = truth(tensor)
    x = np.where(weights[:1] < 0, -1, 1).astype(np.float32) * 3
    model = load(tensor)
    text = recorder(model)
    y = text.linear(integers(x, precision)[0], model.matrices["w"])
    model.device.run(text.recorder.plan())
    assert_close(get(y)[0], x[0] @ weights.T, F32_KERNEL)


def test_there_is_a_product_for_every_quantised_format() -> None:
    for name, fmt in FORMATS.items():
        if fmt.usable and multiplies_integers(fmt):
            kernel = link("matvec", frozenset(), format=name, pieces=("x_integer",))
            assert "fn integer_dot" in kernel.wgsl


class Blueprint:
    """All that a norm asks of a model's configuration."""

    eps = 1e-6


@EVERY_PRECISION
@pytest.mark.parametrize("op", ["norm", "residual"])
@pytest.mark.parametrize("width", [32, 2816])
def test_norms_make_integers(op: str, width: int, precision: str) -> None:
    model = Model(Blueprint, device())
    w, x = numbers(1, width)[0], 1 + numbers(1, width)
    model.vectors = {"w": put(w), "post": put(w[::-1]), "scale": put(np.float32([0.7]))}
    floats, made = room(width), room(width, precision)
    for out in (floats, made):
        text = recorder(model)
        if op == "norm":
            text.norm(put(x), "w", out)
        else:
            text.residual(put(x), put(x[:, ::-1]), "post", "w", "scale", out)
        model.device.run(text.recorder.plan())
    assert_holds(made, get(floats)[0])


@EVERY_PRECISION
@pytest.mark.parametrize("head_dim", [32, 512])
def test_attention_makes_integers(head_dim: int, precision: str) -> None:
    heads, shares = 3, 4
    rng = np.random.default_rng(head_dim)
    parts = numbers(heads * shares, head_dim)
    sums = rng.uniform(0.5, 3, (heads * shares, 2)).astype(np.float32)
    fade = np.exp(sums[:, 0].astype(np.float64)).reshape(heads, shares)
    total = (sums[:, 1].reshape(heads, shares) * fade).sum(1)
    summed = (parts.reshape(heads, shares, head_dim) * fade[:, :, None]).sum(1)
    out = room(heads * head_dim, precision)
    constants = {"THREADS": 64, "HEAD_DIM": head_dim, "SHARES": shares}
    pieces = ("state", *pieces_of("put", out))
    kernel = link("attention_merge", device().features, constants=constants, pieces=pieces)
    calls = Recorder(device())
    calls.call(kernel, (heads, 2), [heads], inputs_of(1).state, put(parts), put(sums), out)
    device().run(calls.plan())
    assert_holds(out, summed / total[:, None])


@EVERY_PRECISION
@pytest.mark.parametrize(("width", "ffn"), [(64, 96), (512, 32), (2048, 64)])
def test_gate_up_reads_and_makes_integers(width: int, ffn: int, precision: str) -> None:
    """With 1, 4 and 8 threads for a pair of rows."""
    model = load(random_tensor(9, "w", (width, 2 * ffn), "Q4_0"))
    given, meant = integers(numbers(2, width), precision)
    floats, made = room(ffn), room(ffn, precision)
    for x, out in ((put(meant.astype(np.float32)), floats), (given, made)):
        text = recorder(model, 2)
        text.gate_up(x, model.matrices["w"], out)
        model.device.run(text.recorder.plan())
    assert_holds(made, get(floats)[0])


def opened(tiny: Tiny) -> Gguf:
    return finish(Gguf.aopen(BytesSource(tiny_gguf(tiny))))


def decoded(gguf: Gguf, ids: list[int], precision: str, on: NativeDevice) -> np.ndarray:
    """Logits [ids, vocab], each id read by itself."""
    config = Config.from_gguf(gguf)
    model = finish(Model.load(gguf, config, on))
    inputs = inputs_of(1, on)
    for layer in config.layers:
        empty = np.zeros((len(ids), layer.kv_heads, layer.head_dim), np.float32)
        inputs.caches[layer.index] = (put(empty, on), put(empty, on))
        inputs.ring[layer.index] = len(ids)
    text = TextRecorder(model, Recorder(on), inputs, 1, "kv_f32", precision)
    logits = text.softcap(text.head(text.body()))
    plan, rows = text.recorder.plan(), []
    for position, token in enumerate(ids):
        on.write(inputs.state.buffer, struct.pack("<2I", position, 1))
        on.write(inputs.ids.buffer, struct.pack("<I", token))
        on.run(plan)
        rows.append(get(logits, on=on)[0])
    return np.stack(rows)


TINY = {
    "all formats": MIXED,
    "experts": replace(MOE, formats=("Q4_1", "Q5_0")),
    "narrow": replace(SMALL, ple=32, formats=("Q8_0", "Q4_0")),  # heads of half a group
}


@pytest.mark.parametrize("without", [frozenset(), PLAIN], ids=["features", "plain"])
@pytest.mark.parametrize("tiny", TINY.values(), ids=TINY)
def test_a_model_with_int16_gives_the_logits_of_the_reference(
    tiny: Tiny, without: frozenset[str]
) -> None:
    ids = [2, *range(30, 41)]
    gguf = opened(tiny)
    found = decoded(gguf, ids, "int16", device(without))
    expected = TextModel(Config.from_gguf(gguf), Weights(gguf)).forward(ids)
    assert_close(found, expected, GPU_LOGITS)
    np.testing.assert_array_equal(found.argmax(1), expected.argmax(1))


E2B = SHARED / "e2b"


@needs_shared
def test_e2b_with_int16_writes_what_transformers_writes() -> None:
    gguf = Gguf.open(E2B / "e2b-Q4_K_M.gguf")
    model = finish(Model.load(gguf, Config.from_gguf(gguf), device()))
    session = Session(model, 256, kv="f32", precision="int16")
    written = each(session.generate(saved_ids("ids"), Sampling(temperature=0), 0))
    expected = saved_ids("Q4_K_M.greedy")[:32]
    assert [token for (token, _), _ in zip(written, expected, strict=False)] == expected


@needs_shared
def test_e2b_logits_are_those_of_transformers() -> None:
    gguf = Gguf.open(E2B / "e2b-Q4_K_M.gguf")
    ids = saved_ids("ids")[:32]
    expected = np.load(E2B / "Q4_K_M.logits.npy")[:32]
    found = decoded(gguf, ids, "int16", device())
    assert_close(found, expected, GPU_LOGITS)
    np.testing.assert_array_equal(found.argmax(1), expected.argmax(1))
    rough = decoded(gguf, ids, "int8", device())
    assert np.sqrt(np.mean((rough - expected) ** 2)) <= INT8_LOGITS * expected.std()


def saved_ids(name: str) -> list[int]:
    return [int(token) for token in (E2B / f"{name}.txt").read_text().replace(",", " ").split()]


def products(tiny: Tiny, batch: int, precision: str) -> tuple[int, int]:
    """How many matrices a step multiplies with floats, and how many with integers."""
    gguf = opened(tiny)
    config = Config.from_gguf(gguf)
    model = finish(Model.load(gguf, config, hardware()))
    text = TextRecorder(model, Recorder(hardware()), inputs_of(1), batch, "kv_f32", precision)
    for layer in config.layers:
        text.inputs.caches[layer.index] = (text.inputs.ids, text.inputs.ids)
        text.inputs.ring[layer.index] = 1
    text.head(text.body())
    kernels = [call.kernel for call in text.recorder.calls]
    linked = [k.wgsl for k in kernels if k.name.startswith(("matvec/", "matmul/", "gate_up/"))]
    with_integers = sum("fn integer_dot" in wgsl for wgsl in linked)
    return len(linked) - with_integers, with_integers


def test_all_big_products_of_a_decode_step_are_with_integers() -> None:
    """In each of six layers four, and the head; exact: two of per-layer embeddings, one before."""
    tiny = replace(SMALL, ple=32, head_dims=(32, 64), formats=("Q8_0",))
    assert products(tiny, 1, "int16") == (13, 25)
    assert products(tiny, 1, "exact")[1] == products(tiny, 8, "int16")[1] == 0
    assert products(replace(tiny, formats=("F16",)), 1, "int16")[1] == 0


def test_a_session_chooses_its_precision() -> None:
    gguf = opened(replace(SMALL, ple=32, formats=("Q8_0",)))
    model = finish(Model.load(gguf, Config.from_gguf(gguf), device()))
    assert Session(model, 16).precision == ("exact" if device().software else "int16")
    session = Session(model, 16, precision="int8")
    assert session.precision == session.fork().precision == "int8"
    with pytest.raises(InputError, match="no precision 'int4'; choose auto, exact, int16 or int8"):
        Session(model, 16, precision="int4")
