"""Quantised activations: products of every format, the kernels that store them, whole models."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import SHARED, needs_shared
from helpers.decoding import decoded, opened
from helpers.gpu import device, get, hardware, put
from helpers.integers import (
    EVERY_FORMAT,
    EVERY_PRECISION,
    LARGEST,
    assert_close,
    inputs_of,
    load,
    numbers,
    quantised,
    recorder,
    truth,
    unplaced,
)
from helpers.matrices import matrix
from helpers.tiny import MIXED, MOE, SMALL, Tiny, random_tensor
from tolerance import F32_KERNEL, GPU_LOGITS, INT8_LOGITS, ROUNDING

from webgemma.engine.session import Session
from webgemma.errors import InputError
from webgemma.gemma.config import Config
from webgemma.gemma.kv_cache import LayerCache
from webgemma.gemma.record.columns import Columns
from webgemma.gemma.record.quantised import (
    GROUP_NBYTES,
    QuantisedTensor,
    multiplies_integers,
    providers,
)
from webgemma.gemma.record.tiling import MatvecTiling
from webgemma.gemma.text import TextRecorder
from webgemma.gemma.weights import Model
from webgemma.gguf.formats import FORMATS
from webgemma.gguf.reader import Gguf
from webgemma.graph import Recorder, Tensor
from webgemma.kernels import link
from webgemma.reference.text import TextModel, gelu
from webgemma.reference.weights import Weights
from webgemma.settings import resolve
from webgemma.sync import iterate_sync, run_sync

POISON = 77

PLAIN = frozenset({"subgroups", "shader-f16"})


def poisoned(width: int, precision: str = "") -> Tensor:
    """Return poisoned memory for two rows, of integers or floats."""
    tensor = Tensor((2, width), 8 * width)
    if precision:
        tensor = QuantisedTensor.scratch(2, width, precision)
    tensor.allocated = device().buffer(tensor.nbytes, "test")
    device().write(tensor.buffer, bytes([POISON]) * tensor.nbytes)
    return tensor


def assert_holds(stored: Tensor, x: np.ndarray) -> None:
    """Assert that the first row is x within half a step, with its sums; the second is untouched."""
    assert isinstance(stored, QuantisedTensor)
    size = 32 if stored.precision == "int8" else 64
    data = get(Tensor((stored.nbytes,), stored.nbytes, stored.buffer), np.int8)
    every = unplaced(data, size + 16)
    groups = every[: stored.shape[1] // 32]
    assert (every[len(groups) :] == POISON).all()
    v = groups[:, :32].astype(np.int64)
    if stored.precision == "int16":
        v = 256 * v + groups[:, 32:64]
    scale, *sums, padding = groups[:, size:].copy().view(np.float32).astype(np.float64).T
    x = x.reshape(-1, 32).astype(np.float64)
    peak = np.abs(x).max(1)
    np.testing.assert_allclose(scale, peak / LARGEST[stored.precision], rtol=F32_KERNEL)
    assert (np.abs(v * scale[:, None] - x) <= 0.5 * scale[:, None] + 1e-6 * peak[:, None]).all()
    expected = scale[:, None] * v.reshape(-1, 2, 16).sum(2)
    np.testing.assert_allclose(np.stack(sums, 1), expected, rtol=1e-6)
    assert (padding == 0).all()


@EVERY_FORMAT
@EVERY_PRECISION
def test_products_with_integers(name: str, precision: str) -> None:
    tensor = random_tensor(5, "w", (512, 37), name)
    model = load(tensor)
    x = numbers(2, 512)
    text = recorder(model, 2, 2)
    uploaded, represented = quantised(x, precision)
    y = text.linear(uploaded, model.matrices["w"])
    model.device.run(text.recorder.plan())
    weights = truth(tensor)
    assert_close(get(y), represented @ weights.T, F32_KERNEL)
    assert_close(get(y), x.astype(np.float64) @ weights.T, ROUNDING[precision])


@EVERY_PRECISION
def test_products_of_many_rows_and_of_extremes(precision: str) -> None:
    """Two rows share what is read of x; the largest possible sums do not overflow."""
    tensor = random_tensor(6, "w", (64, 1031), "Q8_0")
    weights = truth(tensor)
    x = np.where(weights[:1] < 0, -1, 1).astype(np.float32) * 3
    model = load(tensor)
    text = recorder(model)
    y = text.linear(quantised(x, precision)[0], model.matrices["w"])
    model.device.run(text.recorder.plan())
    assert_close(get(y)[0], x[0] @ weights.T, F32_KERNEL)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("teams", [2, 4])
def test_teams_add_a_row_up_as_neighbours_do(teams: int, tokens: int) -> None:
    """Bit for bit, in a last round that has fewer rows, too."""
    if "shuffle8" not in hardware().features:
        pytest.skip("eight threads of this GPU cannot shuffle")
    tensor = matrix("Q4_K", 1280, 37)
    x, represented = quantised(numbers(tokens, 1280), "int16")
    found = []
    with load(tensor) as model:
        weight = model.matrices[tensor.name]
        for count in (1, teams):
            text, y = recorder(model, tokens, tokens), put(np.full((tokens, 37), np.nan, "f4"))
            team = MatvecTiling(32, 8, 2, tokens, count)
            columns = {"y": y, "first_row": 0, "stride": 37, "rows": 37}
            text.recorder.call(
                "matvec",
                (2, 1, 1),
                **weight.arguments(weight.parts[0]),
                **team.constants,
                **providers("input", x),
                **columns,
                epilogue="none",
                live="counted",
                operand="buffer",
                row_products=team.products,
                batch=text.batch,
                x=x,
            )
            model.device.run(text.recorder.plan())
            found.append(get(y))
    assert_close(found[0], represented @ truth(tensor).T, F32_KERNEL)
    assert (found[0].view(np.uint32) == found[1].view(np.uint32)).all()


def test_a_token_alone_has_workgroups_of_one_subgroup() -> None:
    """Of 32 threads; elsewhere, and where more share a row, they stay as they are."""
    assert MatvecTiling(256, 32, 2).of_one_token(32) == MatvecTiling(32, 32, 2)
    assert MatvecTiling(256, 64, 2).of_one_token(32).threads == 256
    assert MatvecTiling(256, 32, 2).of_one_token(64).threads == 256


@pytest.mark.parametrize("tokens", [2, 4, 8])
def test_teams_need_shuffles(tokens: int) -> None:
    """The lanes stay, whatever their teams."""
    team, rows, shuffles = MatvecTiling(256, 32, 2), 1 << 14, frozenset({"shuffle32"})
    divided = team.of_tokens(tokens, rows, shuffles, floats=False)
    assert (divided.teams, divided.lanes, divided.constants["LANES"]) == (4, 32, 8)
    assert team.of_tokens(tokens, rows, frozenset(), floats=False).teams == 1
    assert team.of_tokens(tokens, rows, shuffles, floats=True).teams == 1
    assert MatvecTiling(64, 8, 2).of_tokens(tokens, rows, shuffles, floats=False).teams == 1


def test_there_is_a_product_for_every_quantised_format() -> None:
    for name, fmt in FORMATS.items():
        if fmt.usable and multiplies_integers(fmt):
            program = link(
                "matvec",
                frozenset(),
                constants={"THREADS": 64, "LANES": 4, "EACH": 1},
                providers={
                    "format": name,
                    "epilogue": "none",
                    "input": "integer",
                    "operand": "buffer",
                    "live": "counted",
                    "row_products": "two_units",
                    "integer_width": "int16",
                },
            )
            assert "fn integer_unit" in program.kernel.wgsl


class NormConfig:
    """All that a norm reads of a model's configuration."""

    eps = 1e-6


@EVERY_PRECISION
@pytest.mark.parametrize("op", ["norm", "residual"])
@pytest.mark.parametrize("width", [32, 2816])
def test_norms_store_integers(op: str, width: int, precision: str) -> None:
    model = Model(NormConfig, device())
    w, x = numbers(1, width)[0], 1 + numbers(1, width)
    model.vectors = {"w": put(w), "post": put(w[::-1]), "scale": put(np.float32([0.7]))}
    floats, integers = poisoned(width), poisoned(width, precision)
    for out in (floats, integers):
        text = recorder(model)
        if op == "norm":
            text.norm(put(x), model.vector("w"), out)
        else:
            text.residual(put(x), put(x[:, ::-1]), "post", "w", "scale", out)
        model.device.run(text.recorder.plan())
    assert_holds(integers, get(floats)[0])


@EVERY_PRECISION
@pytest.mark.parametrize("head_dim", [32, 512])
def test_attention_stores_integers(head_dim: int, precision: str) -> None:
    heads, splits = 3, 4
    rng = np.random.default_rng(head_dim)
    parts = numbers(heads * splits, head_dim)
    sums = rng.uniform(0.5, 3, (heads * splits, 2)).astype(np.float32)
    factors = np.exp(sums[:, 0].astype(np.float64)).reshape(heads, splits)
    total = (sums[:, 1].reshape(heads, splits) * factors).sum(1)
    summed = (parts.reshape(heads, splits, head_dim) * factors[:, :, None]).sum(1)
    out = poisoned(heads * head_dim, precision)
    calls = Recorder(device())
    calls.call(
        "attention_merge",
        (heads, -(-head_dim // 128), 2),
        **providers("store", out),
        batch=inputs_of(1).batch,
        parts=put(parts),
        sums=put(sums),
        h=out,
        heads=heads,
        THREADS=64,
        COLUMNS=32,
        HEAD_DIM=head_dim,
        SPLITS=splits,
    )
    device().run(calls.plan())
    assert_holds(out, summed / total[:, None])


@EVERY_PRECISION
@pytest.mark.parametrize(
    ("width", "ffn", "tiling"),
    [
        (64, 96, (32, 1)),
        (512, 32, (256, 8)),
        (2048, 64, (256, 8)),
        (512, 96, (256, 4)),  # two groups of pairs, of which the last workgroup has one
        (2048, 64, (512, 16)),
    ],
)
def test_gate_up_reads_and_stores_integers(
    width: int,
    ffn: int,
    tiling: tuple[int, int],
    precision: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With so many threads in a workgroup and for a pair of rows."""
    if tiling[0] > device().limits.workgroup_threads:
        pytest.skip("a workgroup of this GPU has fewer threads")
    monkeypatch.setattr(MatvecTiling, "for_gate_up", lambda *_: MatvecTiling(*tiling, 1))
    model = load(random_tensor(9, "w", (width, 2 * ffn), "Q4_0"))
    uploaded, represented = quantised(numbers(2, width), precision)
    floats, integers = poisoned(ffn), poisoned(ffn, precision)
    for x, out in ((put(represented.astype(np.float32)), floats), (uploaded, integers)):
        text = recorder(model, 2)
        text.matmul.gate_up(x, model.matrices["w"], out)
        model.device.run(text.recorder.plan())
    assert_holds(integers, get(floats)[0])


@EVERY_PRECISION
@pytest.mark.parametrize("width", [32, 352])
def test_geglu_stores_integers(width: int, precision: str) -> None:
    """The integers are those that quantise makes of the floats."""
    model = load(random_tensor(9, "w", (width, 5), "Q8_0"))
    both = numbers(2, 2 * width)
    floats, integers = poisoned(width), poisoned(width, precision)
    text = recorder(model, 2)
    uploaded = put(both)
    gate, up = Columns(uploaded, 2 * width, 0), Columns(uploaded, 2 * width, width)
    for out in (floats, integers):
        text.geglu(gate, up, width, out)
    text.matmul.precision = precision
    requantised = text.matmul.quantised(floats, model.matrices["w"])
    model.device.run(text.recorder.plan())
    found = get(floats)[0]
    assert_close(found, gelu(both[0, :width]) * both[0, width:], F32_KERNEL)
    assert_holds(integers, found)
    row, expected = (
        unplaced(get(Tensor((tensor.nbytes,), tensor.nbytes, tensor.buffer), np.int8), group)
        for tensor in (integers, requantised)
        for group in [GROUP_NBYTES[precision]]
    )
    assert (row == expected)[: width // 32].all()


TINY = {
    "all formats": MIXED,
    "experts": replace(MOE, formats=("Q4_1", "Q5_0")),
    "narrow": replace(SMALL, ple=32, formats=("Q8_0", "Q4_0")),  # heads of half a group
}


@pytest.mark.parametrize("without", [frozenset(), PLAIN], ids=["features", "plain"])
@pytest.mark.parametrize("tiny", TINY.values(), ids=TINY)
def test_a_model_with_int16_has_the_logits_of_the_reference(
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
    model = run_sync(Model.load(gguf, Config.from_gguf(gguf), device()))
    session = Session(model, 256, kv="f32", precision="int16")
    written = iterate_sync(session.generate(saved_ids("ids"), resolve({"temperature": 0}), 0))
    expected = saved_ids("Q4_K_M.greedy")[:32]
    assert [sampled.token for sampled, _ in zip(written, expected, strict=False)] == expected


@needs_shared
@pytest.mark.parametrize("name", ["e2b", "moe"])
def test_logits_are_those_of_transformers(name: str) -> None:
    folder = SHARED / name
    gguf = Gguf.open(folder / f"{name}-Q4_K_M.gguf")
    ids = saved_ids("ids", folder)[:32]
    expected = np.load(folder / "Q4_K_M.logits.npy")[:32]
    found = decoded(gguf, ids, "int16", device())
    assert_close(found, expected, GPU_LOGITS)
    np.testing.assert_array_equal(found.argmax(1), expected.argmax(1))
    if name == "moe":
        return  # rounding to int8 routes tokens of random weights to other experts
    rough = decoded(gguf, ids, "int8", device())
    assert np.sqrt(np.mean((rough - expected) ** 2)) <= INT8_LOGITS * expected.std()


def saved_ids(name: str, folder: Path = E2B) -> list[int]:
    return [int(token) for token in (folder / f"{name}.txt").read_text().replace(",", " ").split()]


def products(tiny: Tiny, rows: int, precision: str) -> tuple[int, int]:
    """Return how many matrices a pass multiplies with floats, and how many with integers."""
    gguf = opened(tiny)
    config = Config.from_gguf(gguf)
    model = run_sync(Model.load(gguf, config, hardware()))
    text = TextRecorder(model, Recorder(hardware()), inputs_of(1), rows, "f32", precision)
    for layer in config.layers:
        text.inputs.caches[layer.index] = LayerCache(text.inputs.ids, text.inputs.ids, 1)
    text.head(text.body())
    kernels = [call.kernel for call in text.recorder.calls]
    ops = (
        "matvec",
        "matmul",
        "fork_scores",
        "gate_up",
        "expert_up",
        "expert_down",
        "expert_matmul",
    )
    linked = [k.wgsl for k in kernels if k.name.startswith(tuple(f"{op}/" for op in ops))]
    with_integers = sum("fn integer_unit" in wgsl for wgsl in linked)
    return len(linked) - with_integers, with_integers


def test_all_large_products_are_with_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row: with integers four products in each of six layers and the head; with floats the two
    of per-layer embeddings in each layer, and one before the layers.

    A batch multiplies everything with integers; its gate and up are one product, too."""
    tiny = replace(SMALL, ple=32, head_dims=(32, 64), formats=("Q8_0",))
    assert products(tiny, 1, "int16") == (13, 25)
    assert products(tiny, 8, "int16") == (0, 38)
    assert products(tiny, 1, "exact")[1] == products(tiny, 8, "exact")[1] == 0
    for rows in (1, 8):
        assert products(replace(tiny, formats=("F16",)), rows, "int16")[1] == 0
    # In each of two layers four and the experts' two, and the head; the router is float32.
    experts = replace(MOE, pattern="sf", formats=("Q8_0",))
    assert products(experts, 8, "int16") == (2, 13)
    monkeypatch.setattr(hardware(), "features", hardware().features - {"packed-dots"})
    assert products(tiny, 1, "int16") == (13, 25)
    assert products(tiny, 8, "int16") == (38, 0)


def test_all_but_the_router_of_a_layer_with_experts_is_with_integers() -> None:
    """With integers six products in each of five layers, and the head."""
    tiny = replace(MOE, head_dims=(32, 64), formats=("Q8_0",))
    assert products(tiny, 1, "int16") == (5, 31)
    assert products(tiny, 1, "exact") == (36, 0)


def test_a_session_chooses_its_precision() -> None:
    gguf = opened(replace(SMALL, ple=32, formats=("Q8_0",)))
    model = run_sync(Model.load(gguf, Config.from_gguf(gguf), device()))
    assert Session(model, 16).precision == ("exact" if device().software else "int16")
    session = Session(model, 16, precision="int8")
    assert session.precision == session.fork().precision == "int8"
    with pytest.raises(
        InputError, match="'int4' does not exist; use auto, exact, int16, int8 or f16"
    ):
        Session(model, 16, precision="int4")
