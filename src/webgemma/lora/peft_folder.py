"""Adapters as PEFT stores them: a folder with adapter_config.json and adapter_model.safetensors.

There a matrix is a module (`layers.3.self_attn.q_proj`) with a `lora_A` and a `lora_B`; all experts
of a layer are one parameter, whose pairs PEFT nests in wrappers."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from math import isfinite, sqrt
from pathlib import Path
from typing import Any, NamedTuple

from webgemma.errors import GgufError, InputError, ModelNotFoundError
from webgemma.gemma.config import GEMMA3
from webgemma.gguf.safetensors import NewSafetensor, Safetensors, safetensors_chunks
from webgemma.gguf.writer import written_beside
from webgemma.lora.adapter import (
    EMBEDDING,
    EXPERT_PARAMETERS,
    GLOBAL_MODULES,
    HEAD,
    LAYER_MODULES,
    Adapter,
    Pair,
    split_layer,
)
from webgemma.lora.float32 import ELEMENT_NBYTES, to_float32, transposed

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_MAX_CONFIG_NBYTES = 16 << 20

_TENSOR = re.compile(
    r"base_model\.model\.(?P<module>.+?)(?P<inner>(?:\.base_layer)*)"
    r"\.lora_(?P<embedding>embedding_)?(?P<half>[AB])(?:\.default)?(?:\.weight)?"
)
_FROZEN = ("embed_tokens.base_layer.weight", "lm_head.base_layer.weight")  # PEFT copies them
_PREFIX = re.compile(r"(?:(?:model|language_model)\.)*")
_LAYER = re.compile(r"layers\.(0|[1-9]\d{0,4})\.(.+)", re.ASCII)
_LAYER_NAMES = {module: name for name, module in LAYER_MODULES.items()}
_GLOBAL_NAMES = {module: name for name, module in GLOBAL_MODULES.items()}


class _Position(NamedTuple):
    """Where a tensor of the file belongs: a module, and its depth in PEFT's nested wrappers."""

    module: str
    depth: int


# Reading


def read_peft_folder(folder: str | os.PathLike[str]) -> Adapter:
    """Read the adapter of a folder."""
    folder = Path(folder)
    config = _Config(folder / CONFIG_FILE)
    if not (folder / WEIGHTS_FILE).is_file():
        raise ModelNotFoundError(f"{folder} has no {WEIGHTS_FILE}.")
    with Safetensors.open(folder / WEIGHTS_FILE) as file:
        positions = _positions(file)
        pairs = dict(_pairs(file, config, positions))
    return Adapter(folder.name, pairs, config.text("base_model_name_or_path"))


class _Config:
    """adapter_config.json; each value is checked when it is read."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.values = self._load(path)
        for key in ("use_dora", "fan_in_fan_out", "lora_bias"):
            if self.values.get(key):
                raise GgufError(f"{self.name}: {key} is set, which webgemma cannot apply.")
        kind = self.values.get("peft_type", "LORA")
        if kind != "LORA":
            raise GgufError(f"{self.name}: peft_type is {str(kind)[:40]!r}, not LORA.")
        if self.values.get("bias", "none") != "none":
            raise GgufError(f"{self.name}: it trains biases, which Gemma 4 does not have.")
        if self.values.get("modules_to_save"):
            raise GgufError(
                f"{self.name}: it replaces whole modules (modules_to_save), "
                "which webgemma cannot apply; merge it in PEFT and convert the model."
            )

    @staticmethod
    def _load(path: Path) -> dict[str, Any]:
        try:
            if path.stat().st_size > _MAX_CONFIG_NBYTES:
                raise GgufError(f"{path} is too long to be an adapter's configuration.")
            values = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise ModelNotFoundError(f"{path.parent} has no {path.name}.") from None
        except OSError as error:
            raise GgufError(f"{path} cannot be read: {error.strerror or error}.") from error
        except (ValueError, RecursionError) as error:
            raise GgufError(f"{path} is not valid JSON: {error}.") from None
        if not isinstance(values, dict):
            raise GgufError(f"{path} is not a JSON object.")
        return values

    def text(self, key: str) -> str:
        value = self.values.get(key)
        return value if isinstance(value, str) else ""

    def number(self, key: str, module: str, default: float) -> float:
        """Return r or lora_alpha, or what rank_pattern or alpha_pattern has for this module."""
        value = self.values.get(key, default)
        patterns = self.values.get({"r": "rank_pattern"}.get(key, "alpha_pattern")) or {}
        for pattern, special in patterns.items() if isinstance(patterns, dict) else ():
            if _matches(pattern, module):
                value = special
                break
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise GgufError(f"{self.name}: {key} of {module[:80]} is not a number.")
        return float(value)

    def scale(self, module: str, rank: int) -> float:
        alpha = self.number("lora_alpha", module, 8)
        return alpha / (sqrt(rank) if self.values.get("use_rslora") else rank)

    def only_expert_parameter(self) -> str | None:
        """Return the name of the experts' parameter, if only one of the two is adapted."""
        targets = self.values.get("target_parameters") or []
        targets = [targets] if isinstance(targets, str) else targets
        ends = {str(target).rpartition(".")[2] for target in targets}
        names = [
            name
            for name, parameter in EXPERT_PARAMETERS.items()
            if parameter.rpartition(".")[2] in ends
        ]
        return names[0] if len(names) == 1 else None


def _matches(pattern: str, module: str) -> bool:
    """Apply PEFT's rule: the pattern is the module's name, its end, or a regular expression."""
    if module == pattern or module.endswith("." + pattern):
        return True
    try:
        return len(pattern) < 1000 and re.fullmatch(rf"(.*\.)?({pattern})", module) is not None
    except (re.error, RecursionError, OverflowError):
        return False


def _positions(file: Safetensors) -> dict[_Position, dict[str, str]]:
    """Return the halves of each position: {"A": tensor name, "B": tensor name}."""
    positions: dict[_Position, dict[str, str]] = {}
    for name in file.names:
        if name.endswith(_FROZEN):
            continue
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise GgufError(f"{file.name}: {name[:120]!r} is neither a lora_A nor a lora_B.")
        position = _Position(match["module"], match["inner"].count(".base_layer"))
        if positions.setdefault(position, {}).setdefault(match["half"], name) != name:
            raise GgufError(f"{file.name}: {name[:120]!r} occurs under two names.")
        if file.dtype(name) not in ELEMENT_NBYTES or len(file.shape(name)) != 2:
            raise GgufError(
                f"{file.name}: {name[:120]!r} is {file.dtype(name)} {file.shape(name)}, "
                f"not a matrix of {', '.join(ELEMENT_NBYTES)}."
            )
    for position, halves in positions.items():
        if len(halves) < 2:
            raise GgufError(
                f"{file.name}: {position.module[:120]} has only one of lora_A and lora_B."
            )
    if not positions:
        raise GgufError(f"{file.name} holds no lora_A and lora_B.")
    return positions


def _pairs(
    file: Safetensors, config: _Config, positions: dict[_Position, dict[str, str]]
) -> Iterator[tuple[str, Pair]]:
    names: set[str] = set()
    for position, halves in positions.items():
        path = position.module[_PREFIX.match(position.module).end() :]  # type: ignore[union-attr]
        layer = _LAYER.fullmatch(path)
        if layer and layer[2] == "experts":
            part = _experts_part(file, config, positions, position)
            name = f"blk.{layer[1]}.{part}.weight"
            parameter = EXPERT_PARAMETERS[part].removeprefix("experts")
            pair = _expert_pair(file, config, position.module + parameter, halves)
        else:
            name = _GLOBAL_NAMES.get(path, "")
            if layer and layer[2] in _LAYER_NAMES:
                name = f"blk.{layer[1]}.{_LAYER_NAMES[layer[2]]}.weight"
            if not name or position.depth:
                raise GgufError(
                    f"{file.name}: it changes {position.module[:120]!r}, which webgemma cannot "
                    "adapt: only the text model's matrices; train without it."
                )
            pair = _pair(file, config, position, halves, name)
        if name in names:
            raise GgufError(f"{file.name}: {name} occurs under two names.")
        names.add(name)
        yield name, pair


def _pair(
    file: Safetensors, config: _Config, position: _Position, halves: dict[str, str], name: str
) -> Pair:
    (rank, inputs), (outputs, other) = (file.shape(halves[half]) for half in "AB")
    _check_rank(file, position.module, rank, other, inputs, outputs)
    a, b = (to_float32(file.read(halves[half]), file.dtype(halves[half])) for half in "AB")
    a = transposed(a, rank, inputs) if name == EMBEDDING else a
    return Pair(a, b, rank, inputs, outputs, config.scale(position.module, rank))


def _check_rank(file: Safetensors, module: str, rank: int, other: int, *sizes: int) -> None:
    if rank != other or rank < 1 or min(sizes) < 1:
        raise GgufError(
            f"{file.name}: lora_A and lora_B of {module[:120]} do not belong together "
            f"(rank {rank} and {other})."
        )


def _experts_part(
    file: Safetensors,
    config: _Config,
    positions: dict[_Position, dict[str, str]],
    position: _Position,
) -> str:
    """Return the parameter, by the shapes (d → 2·ffn, ffn → d) or, of one alone, the config."""
    stack = [key for key in positions if key.module == position.module and key != position]
    outputs, inputs = _outer_shape(file, positions[position])
    if len(stack) == 1:
        other_outputs, other_inputs = _outer_shape(file, positions[stack[0]])
        if (outputs, inputs) == (2 * other_inputs, other_outputs):
            return "ffn_gate_up_exps"
        if (other_outputs, other_inputs) == (2 * inputs, outputs):
            return "ffn_down_exps"
    only = config.only_expert_parameter()
    if stack or only is None:
        raise GgufError(
            f"{file.name} does not say which parameters of {position.module[:120]} it changes."
        )
    return only


def _outer_shape(file: Safetensors, halves: dict[str, str]) -> tuple[int, int]:
    return file.shape(halves["B"])[0], file.shape(halves["A"])[1]


def _expert_pair(file: Safetensors, config: _Config, module: str, halves: dict[str, str]) -> Pair:
    """Read A, [experts · rank, in], and B, [out, rank · experts] with the expert fastest."""
    (rows, inputs), (outputs, columns) = (file.shape(halves[half]) for half in "AB")
    rank = int(config.number("r", module, 8))
    if rank < 1 or rows % rank:
        raise GgufError(f"{file.name}: rank {rank} does not divide {module[:120]}'s {rows} rows.")
    _check_rank(file, module, rows, columns, inputs, outputs)
    a, b = (to_float32(file.read(halves[half]), file.dtype(halves[half])) for half in "AB")
    experts = rows // rank
    b = transposed(b, outputs * rank, experts)  # [experts, out, rank]
    return Pair(a, b, rank, inputs, outputs, config.scale(module, rank), experts)


# Writing


def write_peft_folder(
    adapter: Adapter, folder: str | os.PathLike[str], *, text_only: bool = False
) -> None:
    """Write a folder that PEFT loads onto the model of transformers.

    With `text_only`, onto Gemma4ForCausalLM, which has no encoders and shorter names; an adapter
    of Gemma 3 always onto Gemma3ForCausalLM."""
    if not adapter.pairs:
        raise InputError(f"The adapter {adapter.name} changes nothing: there is nothing to write.")
    text_only = text_only or adapter.architecture == GEMMA3
    modules = {name: _module(name, text_only) for name in adapter.pairs}
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be created: {error.strerror or error}.") from error
    config = (json.dumps(_config(adapter, modules), indent=2) + "\n").encode()
    weights = safetensors_chunks(_stored(adapter, modules), {"format": "pt"})
    with (
        written_beside(folder / WEIGHTS_FILE, weights) as rename_weights,
        written_beside(folder / CONFIG_FILE, [config]) as rename_config,
    ):
        _remove_other_config(folder / CONFIG_FILE, config)
        rename_weights()
        rename_config()


def _remove_other_config(path: Path, config: bytes) -> None:
    """Remove another adapter's configuration: half replaced, a folder must not pass for whole."""
    try:
        if path.exists() and path.read_bytes() != config:
            path.unlink()
    except OSError as error:
        raise InputError(f"{path} cannot be replaced: {error.strerror or error}.") from error


def _module(name: str, text_only: bool) -> str:
    inner = "model." if text_only else "model.language_model."
    if name in GLOBAL_MODULES:
        return ("" if name == HEAD else inner) + GLOBAL_MODULES[name]
    layer = split_layer(name)
    modules = LAYER_MODULES | EXPERT_PARAMETERS
    if layer is None or layer[1] not in modules:
        raise InputError(f"PEFT has no name for {name}: write a GGUF adapter instead.")
    return f"{inner}layers.{layer[0]}.{modules[layer[1]]}"


def _is_experts(name: str) -> bool:
    layer = split_layer(name)
    return layer is not None and layer[1] in EXPERT_PARAMETERS


def _config(adapter: Adapter, modules: dict[str, str]) -> dict[str, object]:
    rank = Counter(pair.rank for pair in adapter.pairs.values()).most_common(1)[0][0]
    alpha = Counter(pair.alpha for pair in adapter.pairs.values()).most_common(1)[0][0]
    pairs = adapter.pairs.items()
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base or None,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {modules[name]: pair.rank for name, pair in pairs if pair.rank != rank},
        "alpha_pattern": {modules[name]: pair.alpha for name, pair in pairs if pair.alpha != alpha},
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
        "target_modules": [module for name, module in modules.items() if not _is_experts(name)],
        "target_parameters": [module for name, module in modules.items() if _is_experts(name)]
        or None,
    }


def _stored(adapter: Adapter, modules: dict[str, str]) -> Iterator[NewSafetensor]:
    for name, pair in adapter.pairs.items():
        experts, rank = pair.experts, pair.rank
        a = (experts * rank, pair.inputs)
        b = (pair.outputs, rank * experts)
        if name == EMBEDDING:
            stem = f"base_model.model.{modules[name]}.lora_embedding_"
            yield NewSafetensor(stem + "A", "F32", a, transposed(pair.a, pair.inputs, rank))
            yield NewSafetensor(stem + "B", "F32", b, pair.b)
            continue
        module = modules[name]
        if _is_experts(name):
            module = module.rpartition(".")[0] + _wrappers(adapter, name)
        stem = f"base_model.model.{module}.lora_"
        yield NewSafetensor(stem + "A.weight", "F32", a, pair.a)
        yield NewSafetensor(
            stem + "B.weight", "F32", b, transposed(pair.b, experts, pair.outputs * rank)
        )


def _wrappers(adapter: Adapter, name: str) -> str:
    """Return the wrapper's suffix: PEFT nests the experts' second parameter in the first."""
    outer = name.replace("ffn_gate_up_exps", "ffn_down_exps")
    return ".base_layer" if name != outer and outer in adapter.pairs else ""
