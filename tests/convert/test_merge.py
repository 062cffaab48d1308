"""Merging adapters into a model: equal logits, other tensors unchanged, no file overwritten."""

import json
from dataclasses import replace
from pathlib import Path

import gguf as oracle
import numpy as np
import pytest
from helpers.tiny import KINDS, MOE, SMALL, Tiny, tiny_gguf
from helpers.tiny_adapter import tiny_adapter, tiny_pairs
from typer.testing import CliRunner

from webgemma.cli.program import app
from webgemma.convert.merge import merge
from webgemma.errors import InputError
from webgemma.gemma.config import Config
from webgemma.gguf.formats import FORMATS
from webgemma.gguf.reader import Gguf
from webgemma.lora.peft_folder import write_peft_folder
from webgemma.reference.dequantise import dequantise
from webgemma.reference.lora import AdaptedWeights
from webgemma.reference.quantise import QUANTISERS, quantise
from webgemma.reference.text import TextModel
from webgemma.reference.weights import Weights

IDS = [2, *(24 + i * 7 % 280 for i in range(1, 12))]


def model_of(folder: Path, tiny: Tiny) -> Gguf:
    (folder / "model.gguf").write_bytes(tiny_gguf(tiny))
    return Gguf.open(folder / "model.gguf")


@pytest.mark.parametrize(
    "tiny", [SMALL, MOE, replace(MOE, fused=False)], ids=["small", "moe", "unfused"]
)
def test_a_merged_model_has_the_logits_of_the_adapted_one(tiny: Tiny, tmp_path: Path) -> None:
    model = model_of(tmp_path, tiny)
    pairs = tiny_pairs(model)
    adapter = (tiny_adapter(pairs), 0.5)
    changed = merge(model, adapter, tmp_path / "merged.gguf")
    assert changed.keys() == pairs.keys()
    halves = {name: pair._replace(scale=0.5 * pair.scale) for name, pair in pairs.items()}
    config = Config.from_gguf(model)
    expected = TextModel(config, AdaptedWeights(model, [halves])).forward(IDS)
    merged = Gguf.open(tmp_path / "merged.gguf")
    assert not Config.from_gguf(merged).tied  # the head and the embedding differ after merging
    actual = TextModel(Config.from_gguf(merged), Weights(merged)).forward(IDS)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-4)


def test_other_tensors_are_copied_byte_for_byte(tmp_path: Path) -> None:
    model = model_of(tmp_path, KINDS["mixed"])
    pairs = tiny_pairs(model, ("attn_q", "ffn_down"))
    changed = merge(model, tiny_adapter(pairs), tmp_path / "merged.gguf")
    merged = Gguf.open(tmp_path / "merged.gguf")
    assert list(merged.tensors) == list(model.tensors)
    assert dict(merged.metadata) == dict(model.metadata)
    for key in model.metadata:
        assert merged.value_type(key) == model.value_type(key)
    for name, tensor in model.tensors.items():
        new = merged.tensors[name]
        if name not in changed:
            assert bytes(merged.data(new)) == bytes(model.data(tensor))
        else:
            kept = tensor.format.name in QUANTISERS
            assert new.format.name == (tensor.format.name if kept else "Q8_0") == changed[name]


@pytest.mark.parametrize("format", ["F16", "Q8_0"])
def test_changed_matrices_can_be_stored_in_another_format(format: str, tmp_path: Path) -> None:
    model = model_of(tmp_path, replace(SMALL, ple=0, shared=0))
    pairs = tiny_pairs(model, ("attn_q",))
    changed = merge(model, tiny_adapter(pairs), tmp_path / "merged.gguf", format=format)
    assert set(changed.values()) == {format}
    merged = Gguf.open(tmp_path / "merged.gguf")
    name = "blk.0.attn_q.weight"
    a, b, scale = pairs[name]
    expected = Weights(model)[name] + scale * b @ a
    np.testing.assert_allclose(Weights(merged)[name], expected, atol=np.abs(expected).max() / 120)


@pytest.mark.parametrize("format", list(QUANTISERS))
def test_weights_are_quantised_as_by_the_gguf_package(format: str) -> None:
    rng = np.random.default_rng(8)
    w = rng.normal(size=(7, 96)).astype(np.float32)
    w[3] = 0
    w[4, :40] = [0.5, -0.5] * 20
    kind = oracle.GGMLQuantizationType[format]
    actual, expected = quantise(w, format), oracle.quantize(w, kind).tobytes()
    assert actual == expected
    restored = dequantise(actual, FORMATS[format], w.shape)
    assert np.abs(restored - w).max() < np.abs(w).max() / 6


def test_the_merge_command(tmp_path: Path) -> None:
    model = model_of(tmp_path, SMALL)
    write_peft_folder(tiny_adapter(tiny_pairs(model, ("attn_q",))), tmp_path / "adapter")
    out = tmp_path / "merged.gguf"
    command = ["merge", str(tmp_path / "model.gguf"), str(tmp_path / "adapter")]
    result = CliRunner().invoke(app, [*command, str(out), "--format", "f16"])
    assert result.exit_code == 0, result.output
    assert "6 matrices changed (6 as F16)" in result.output
    assert Config.from_gguf(Gguf.open(out)).tied
    before = out.read_bytes()
    for options, message in (
        ([str(out)], "already exists"),
        ([str(tmp_path / "model.gguf"), "--force"], "is the model itself"),
        ([str(tmp_path / "new.gguf"), "--format", "Q9"], "cannot be written as 'Q9'"),
    ):
        result = CliRunner().invoke(app, [*command, *options])
        assert result.exit_code == 1
        assert message in " ".join(result.output.split())
    assert out.read_bytes() == before
    result = CliRunner().invoke(app, [*command, str(out), "--force", "--json"])
    assert result.exit_code == 0
    assert out.read_bytes() != before
    facts = json.loads(result.stdout)
    assert (facts["out"], facts["nbytes"]) == (str(out), out.stat().st_size)
    assert len(facts["changed"]) == 6
    assert set(facts["changed"].values()) == {"F32"}


def test_adapters_that_change_nothing_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="change nothing"):
        merge(model_of(tmp_path, SMALL), None, tmp_path / "merged.gguf")
    assert not (tmp_path / "merged.gguf").exists()
