"""An adapter: for some matrices W of a text model what is added to them, scale · B A."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias

from webgemma.errors import GgufError, InputError
from webgemma.gemma.config import Config
from webgemma.gemma.tensors import text_tensors

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
MAX_RANK = 4096

# Ours (GGUF's) names of what can be adapted, and Hugging Face's: of the whole model, of a layer,
# and of the parameters that hold all experts of a layer.
GLOBAL_MODULES = {
    EMBEDDING: "embed_tokens",
    HEAD: "lm_head",
    "per_layer_model_proj.weight": "per_layer_model_projection",
}
LAYER_MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "ffn_gate_inp": "router.proj",
}
EXPERT_PARAMETERS = {
    "ffn_gate_up_exps": "experts.gate_up_proj",
    "ffn_down_exps": "experts.down_proj",
}
_UNFUSED = ("ffn_gate_exps", "ffn_up_exps")  # of old files; PEFT has no name for them
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9]\d{0,4})\.(\w+)\.weight", re.ASCII)


@dataclass(frozen=True, slots=True)
class Pair:
    """What is added to one matrix [outputs, inputs]: scale · B A, in little-endian float32.

    The embedding's A has a row for each token: [inputs, rank]."""

    a: bytes  # [experts, rank, inputs]
    b: bytes  # [experts, outputs, rank]
    rank: int
    inputs: int
    outputs: int
    scale: float
    experts: int = 1

    def __post_init__(self) -> None:
        sizes = (self.rank, self.inputs, self.outputs, self.experts)
        if min(sizes) < 1 or self.rank > MAX_RANK:
            raise InputError(f"An adapter of rank {self.rank} is none; take 1 to {MAX_RANK}.")
        wanted = tuple(4 * self.experts * self.rank * n for n in (self.inputs, self.outputs))
        if (len(self.a), len(self.b)) != wanted:
            raise InputError(
                f"A and B of rank {self.rank} for {self.inputs} x {self.outputs} take {wanted} "
                f"bytes, not {(len(self.a), len(self.b))}."
            )
        if not isfinite(self.scale):
            raise InputError(f"An adapter's scale cannot be {self.scale}.")

    @property
    def alpha(self) -> float:
        """What files keep: scale · rank."""
        return self.scale * self.rank

    @property
    def nbytes(self) -> int:
        """Of A and B together."""
        return len(self.a) + len(self.b)


@dataclass(frozen=True, slots=True)
class Adapter:
    """Pairs by the GGUF names of the matrices they belong to."""

    name: str  # for messages
    pairs: Mapping[str, Pair]
    base: str = ""  # the model it was made for, as far as its file says

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Adapter:
        """A GGUF adapter, or a folder as PEFT writes it."""
        from webgemma.lora.gguf_file import read_gguf_adapter
        from webgemma.lora.peft_folder import CONFIG_FILE, WEIGHTS_FILE, read_peft_folder

        file = Path(path).expanduser()
        if file.name in (CONFIG_FILE, WEIGHTS_FILE):
            file = file.parent
        return read_peft_folder(file) if file.is_dir() else read_gguf_adapter(file)

    @property
    def nbytes(self) -> int:
        """Of all pairs."""
        return sum(pair.nbytes for pair in self.pairs.values())

    def fitted(self, config: Config) -> Adapter:
        """The pairs that this model computes with; InputError when one does not fit."""
        if config.diffusion:
            raise InputError("DiffusionGemma cannot have adapters on yet.")
        shapes = {name: shape for name, shape, _ in text_tensors(config)}
        shapes[HEAD] = shapes[EMBEDDING]
        unused = {
            f"blk.{layer.index}.attn_{part}.weight"
            for layer in config.layers
            for part in "kv"
            if layer.shares_kv or (layer.k_is_v and part == "v")
        }
        pairs = {}
        for name, pair in self.pairs.items():
            if name in unused:  # converters keep what sharing layers carry along
                continue
            if name not in shapes:
                raise InputError(
                    f"The adapter {self.name} changes {name}, which this model does not have: "
                    "it belongs to another model."
                )
            inputs, outputs, *experts = shapes[name]
            if name == EMBEDDING:
                inputs, outputs = outputs, inputs
            if (pair.inputs, pair.outputs, pair.experts) != (inputs, outputs, *(experts or [1])):
                raise InputError(
                    f"The adapter {self.name} has {pair.inputs} x {pair.outputs} weights for "
                    f"{name}, this model {inputs} x {outputs}: it belongs to another model."
                )
            pairs[name] = pair
        return replace(self, pairs=pairs)


Choice: TypeAlias = "str | os.PathLike[str] | Adapter"
Choices: TypeAlias = (
    "Choice | tuple[Choice, float] | Sequence[Choice | tuple[Choice, float]] | None"
)


def fitted_adapters(lora: Choices, config: Config) -> list[tuple[Mapping[str, Pair], float]]:
    """The adapters that are asked for, fitted to a model, each with how much of it.

    One or several of: a path, "path:0.5", an Adapter, or a tuple of such a thing and a number."""
    if lora is None:
        return []
    several = isinstance(lora, Sequence) and not isinstance(lora, str | tuple)
    listed: Any = lora if several else [lora]
    found = []
    for each in listed:
        thing, scale = each if isinstance(each, tuple) and len(each) == 2 else (each, 1.0)
        if isinstance(thing, str) and not isinstance(each, tuple):
            thing, scale = _path_and_scale(thing)
        if not isinstance(thing, str | os.PathLike | Adapter):
            raise InputError(f"An adapter must be a path, not {type(thing).__name__}.")
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not isfinite(scale):
            raise InputError(f"The scale of an adapter must be a number, not {scale!r}.")
        adapter = thing if isinstance(thing, Adapter) else Adapter.open(thing)
        found.append((adapter.fitted(config).pairs, float(scale)))
    return found


def _path_and_scale(text: str) -> tuple[str, float]:
    """("adapter", 0.5) of "adapter:0.5"; a path that exists is one."""
    path, colon, number = text.rpartition(":")
    if not colon or Path(text).expanduser().exists():
        return text, 1.0
    try:
        return path, float(number)
    except ValueError:
        return text, 1.0


def adaptable(name: str) -> bool:
    """Whether a tensor can have an adapter, by its GGUF name."""
    if name in GLOBAL_MODULES:
        return True
    match = _LAYER_TENSOR.fullmatch(name)
    parts = {*LAYER_MODULES, *EXPERT_PARAMETERS, *_UNFUSED}
    return match is not None and match[2] in parts


def split_layer(name: str) -> tuple[int, str] | None:
    """(3, "attn_q") of "blk.3.attn_q.weight"."""
    match = _LAYER_TENSOR.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def check_adaptable(file: str, names: Iterable[str]) -> None:
    """GgufError for a tensor that no adapter can change here."""
    for name in names:
        if not adaptable(name):
            raise GgufError(
                f"{file}: it changes {name[:80]!r}, which webgemma cannot adapt; "
                "make the adapter without it."
            )
