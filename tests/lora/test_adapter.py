"""Adapters: written and read in both formats, fitted to a model; errors for invalid ones."""

import errno
import json
import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny import GEMMA3, LARGE, MOE, SMALL, tiny_gguf
from helpers.tiny_adapter import tiny_adapter, tiny_pairs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from webgemma.errors import GgufError, InputError, WebgemmaError
from webgemma.gemma.config import Config
from webgemma.gguf.reader import Gguf
from webgemma.gguf.safetensors import NewSafetensor, Safetensors, write_safetensors
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import NewTensor, write_gguf
from webgemma.lora.adapter import Adapter, Pair
from webgemma.lora.float32 import to_float32, transposed
from webgemma.lora.gguf_file import write_gguf_adapter
from webgemma.lora.loading import open_adapter
from webgemma.lora.peft_folder import write_peft_folder
from webgemma.sync import run_sync

MODELS = {"small": SMALL, "large": LARGE, "moe": MOE, "gemma3": GEMMA3}
QUERY = "blk.0.attn_q.weight"


def opened(kind: str) -> Gguf:
    return run_sync(Gguf.aopen(BytesSource(tiny_gguf(MODELS[kind]), "tiny.gguf")))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("text_only", [False, True])
def test_both_formats_round_trip(kind: str, text_only: bool, tmp_path: Path) -> None:
    gguf = opened(kind)
    adapter = tiny_adapter(tiny_pairs(gguf)).fitted(Config.from_gguf(gguf))
    write_gguf_adapter(adapter, tmp_path / "a.gguf")
    write_peft_folder(adapter, tmp_path / "a", text_only=text_only)
    for path in (tmp_path / "a.gguf", tmp_path / "a", tmp_path / "a" / "adapter_config.json"):
        read = open_adapter(path)
        assert dict(read.pairs) == dict(adapter.pairs)
        assert read.fitted(Config.from_gguf(gguf)).pairs.keys() == adapter.pairs.keys()


def test_pairs_may_differ_in_rank_and_scale(tmp_path: Path) -> None:
    gguf = opened("moe")
    pairs = dict(tiny_adapter(tiny_pairs(gguf, ("attn_q", "ffn_down_exps"))).pairs)
    other = tiny_adapter(tiny_pairs(gguf, rank=5)).pairs
    expert = "blk.1.ffn_down_exps.weight"
    pairs |= {QUERY: replace(other[QUERY], scale=0.7), expert: replace(other[expert], scale=3.0)}
    adapter = Adapter("mixed", pairs)
    write_peft_folder(adapter, tmp_path / "peft")
    read = open_adapter(tmp_path / "peft")
    assert read.pairs[expert] == pairs[expert]
    assert read.pairs[QUERY].scale == pytest.approx(0.7)
    write_gguf_adapter(adapter, tmp_path / "a.gguf")  # one alpha: other scales go into B
    read = open_adapter(tmp_path / "a.gguf")
    for name, expected in pairs.items():
        actual = read.pairs[name]
        assert actual.a == expected.a
        one, other = (np.frombuffer(p.b, "<f4") * np.float32(p.scale) for p in (actual, expected))
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_float16_and_bfloat16_become_float32_exactly() -> None:
    values = np.random.default_rng(1).normal(size=50).astype("<f2")
    assert to_float32(values.tobytes(), "F16") == values.astype("<f4").tobytes()
    words = np.random.default_rng(1).normal(size=50).astype("<f4").view("<u4") >> 16
    assert to_float32(words.astype("<u2").tobytes(), "BF16") == (words << 16).tobytes()


@given(st.integers(1, 9), st.integers(1, 9))
def test_matrices_are_transposed(rows: int, columns: int) -> None:
    matrix = np.random.default_rng(0).normal(size=(rows, columns)).astype("<f4")
    assert transposed(matrix.tobytes(), rows, columns) == matrix.T.tobytes()


def test_pairs_of_unused_matrices_are_dropped() -> None:
    """Files may hold matrices, unused, of layers that share keys and values."""
    config = Config.from_gguf(opened("small"))
    adapter = tiny_adapter(tiny_pairs(opened("small"), ("attn_k",)))
    extra = {"blk.5.attn_k.weight": adapter.pairs["blk.2.attn_k.weight"]}
    fitted = replace(adapter, pairs=adapter.pairs | extra).fitted(config)
    assert fitted.pairs.keys() == adapter.pairs.keys()


def test_an_adapter_of_another_model_raises_an_error() -> None:
    adapter = tiny_adapter(tiny_pairs(opened("moe")))
    with pytest.raises(InputError, match="which this model does not have"):
        adapter.fitted(Config.from_gguf(opened("large")))
    thin = Adapter("thin", {QUERY: Pair(bytes(128), bytes(4 * 64), 1, 32, 64, 1.0)})
    with pytest.raises(InputError, match="this model 64 x 64"):
        thin.fitted(Config.from_gguf(opened("large")))


def test_adapters_of_gemma_3_say_so(tmp_path: Path) -> None:
    gguf = opened("gemma3")
    adapter = tiny_adapter(tiny_pairs(gguf, ("attn_q",))).fitted(Config.from_gguf(gguf))
    write_gguf_adapter(adapter, tmp_path / "a.gguf")
    write_peft_folder(adapter, tmp_path / "a")
    with Gguf.open(tmp_path / "a.gguf") as file:
        assert file.metadata["general.architecture"] == "gemma3"
    with Safetensors.open(tmp_path / "a" / "adapter_model.safetensors") as weights:
        names = set(weights.names)
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    read = open_adapter(tmp_path / "a.gguf")
    with pytest.raises(InputError, match="the architecture gemma3, and this one is gemma4"):
        read.fitted(Config.from_gguf(opened("large")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "rank 0"),
        ({"rank": 2}, "bytes, not"),
        ({"scale": float("nan")}, "scale cannot be nan"),
    ],
)
def test_invalid_pairs_raise_an_error(changes: dict[str, float], message: str) -> None:
    good = Pair(bytes(12), bytes(8), 1, 3, 2, 1.0)
    with pytest.raises(InputError, match=message):
        replace(good, **changes)


ADAPTER_KEYS = {
    "general.type": "adapter",
    "general.architecture": "gemma4",
    "adapter.type": "lora",
    "adapter.lora.alpha": 4.0,
}
A, B = NewTensor(QUERY + ".lora_a", (4, 2), "F32", bytes(32)), NewTensor(
    QUERY + ".lora_b", (2, 3), "F32", bytes(24)
)  # fmt: skip
INVALID_GGUF = {
    "model": ({"general.type": "model"}, [A, B], "is a model, not an adapter"),
    "kind": ({"adapter.type": "loha"}, [A, B], "not 'lora'"),
    "architecture": ({"general.architecture": "llama"}, [A, B], "not for Gemma 4"),
    "alpha": ({"adapter.lora.alpha": "four"}, [A, B], "is not a number"),
    "activated": ({"adapter.alora.invocation_tokens": [1, 2]}, [A, B], "aLoRA"),
    "half": ({}, [A], "only one of"),
    "empty": ({}, [], "changes nothing"),
    "other tensor": ({}, [A, B, replace(A, name="x.weight")], "neither a lora_a"),
    "norm": ({}, [replace(A, name="blk.0.attn_norm.weight")], "changes nothing"),
    "unknown": (
        {},
        [replace(A, name="v.blk.0.x.weight.lora_a"), replace(B, name="v.blk.0.x.weight.lora_b")],
        "cannot adapt",
    ),
    "rank": ({}, [A, replace(B, shape=(3, 2))], "do not belong together"),
    "dims": ({}, [replace(A, shape=(8,)), B], "do not belong together"),
    "format": ({}, [replace(A, shape=(4, 2), format="I32"), B], "stored as I32"),
}


@pytest.mark.parametrize("case", INVALID_GGUF)
def test_invalid_gguf_adapters_raise_an_error(case: str, tmp_path: Path) -> None:
    keys, tensors, message = INVALID_GGUF[case]
    write_gguf(tmp_path / "a.gguf", ADAPTER_KEYS | keys, tensors)
    with pytest.raises(WebgemmaError, match=message):
        open_adapter(tmp_path / "a.gguf")


STEM = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
HALVES = [
    NewSafetensor(STEM + "A.weight", "F32", (2, 4), bytes(32)),
    NewSafetensor(STEM + "B.weight", "F32", (3, 2), bytes(24)),
]


def other_module(name: str) -> list[NewSafetensor]:
    return [
        replace(half, name=half.name.replace("layers.0.self_attn.q_proj", name)) for half in HALVES
    ]


INVALID_PEFT = {
    "dora": ({"use_dora": True}, HALVES, "use_dora is set"),
    "kind": ({"peft_type": "IA3"}, HALVES, "not LORA"),
    "bias": ({"bias": "all"}, HALVES, "biases"),
    "saved": ({"modules_to_save": ["lm_head"]}, HALVES, "whole modules"),
    "alpha": ({"lora_alpha": "x"}, HALVES, "lora_alpha of"),
    "infinite": ({"lora_alpha": float("inf")}, HALVES, "lora_alpha of"),
    "half": ({}, HALVES[:1], "only one of"),
    "none": ({}, [], "holds no lora_A and lora_B"),
    "rank": ({}, [HALVES[0], replace(HALVES[1], shape=(2, 3))], "do not belong together"),
    "dims": ({}, [replace(HALVES[0], shape=(8,)), HALVES[1]], "not a matrix"),
    "dtype": ({}, [replace(HALVES[0], dtype="I32"), HALVES[1]], "not a matrix"),
    "encoder": ({}, other_module("vision_tower.encoder.q_proj"), "only the text model"),
    "unknown": ({}, other_module("layers.0.self_attn.x_proj"), "only the text model"),
    "twice": (
        {},
        [*HALVES, *other_module("language_model.layers.0.self_attn.q_proj")],
        "two names",
    ),
    "experts": ({}, other_module("layers.0.experts"), "does not say which"),
    "expert rank": (
        {"target_parameters": ["experts.down_proj"], "r": 7},
        other_module("layers.0.experts"),
        "does not divide",
    ),
    "not lora": ({}, [replace(HALVES[0], name="weight")], "neither a lora_A"),
}


@pytest.mark.parametrize("case", INVALID_PEFT)
def test_invalid_peft_folders_raise_an_error(case: str, tmp_path: Path) -> None:
    keys, tensors, message = INVALID_PEFT[case]
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 4} | keys))
    write_safetensors(tmp_path / "adapter_model.safetensors", tensors)
    with pytest.raises(WebgemmaError, match=message):
        open_adapter(tmp_path)


def test_missing_files_raise_an_error(tmp_path: Path) -> None:
    with pytest.raises(WebgemmaError, match="There is no file"):
        open_adapter(tmp_path / "nothing.gguf")
    with pytest.raises(WebgemmaError, match=r"has no adapter_config\.json"):
        open_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(WebgemmaError, match=r"has no adapter_model\.safetensors"):
        open_adapter(tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from(["json", "safetensors", "gguf"]))
def test_damage_raises_an_error_or_is_harmless(tmp_path: Path, seed: int, which: str) -> None:
    adapter = tiny_adapter(tiny_pairs(opened("small"), ("attn_q", "token_embd.weight"), rank=1))
    write_peft_folder(adapter, tmp_path / "a")
    write_gguf_adapter(adapter, tmp_path / "a" / "a.gguf")
    names = {"json": "adapter_config.json", "safetensors": "adapter_model.safetensors"}
    path = tmp_path / "a" / names.get(which, "a.gguf")
    data, rng = bytearray(path.read_bytes()), random.Random(seed)
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(min(len(data), 3000))] = rng.randrange(256)
    path.write_bytes(data[: rng.choice([len(data), len(data) - 1])])
    try:
        adapter = open_adapter(path if which == "gguf" else path.parent)
    except WebgemmaError:
        return
    assert adapter.pairs


def test_copies_of_frozen_tables_in_a_peft_folder_are_ignored(tmp_path: Path) -> None:
    adapter = tiny_adapter(tiny_pairs(opened("small"), ("token_embd.weight", "output.weight")))
    write_peft_folder(adapter, tmp_path, text_only=True)
    with Safetensors.open(tmp_path / "adapter_model.safetensors") as file:
        tensors = [NewSafetensor(n, "F32", file.shape(n), file.read(n)) for n in file.names]
    frozen = NewSafetensor("base_model.model.lm_head.base_layer.weight", "F32", (1, 1), bytes(4))
    write_safetensors(tmp_path / "adapter_model.safetensors", [*tensors, frozen])
    assert dict(open_adapter(tmp_path).pairs) == dict(adapter.pairs)


def test_a_full_disk_leaves_the_adapter_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (tiny_adapter(tiny_pairs(opened("small"), rank=rank)) for rank in (2, 5))
    write_peft_folder(first, tmp_path)
    fsync, calls = os.fsync, list[int]()

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:  # the configuration does not fit any more
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(GgufError, match="cannot be written: No space left on device"):
        write_peft_folder(second, tmp_path)
    assert open_adapter(tmp_path).pairs == first.pairs
    assert len(list(tmp_path.iterdir())) == 2
