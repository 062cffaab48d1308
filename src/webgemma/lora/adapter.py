"""A LoRA adapter: for some matrices W of a text model, the scale · B A that is added to each."""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import isfinite, sqrt

from webgemma.errors import GgufError, InputError
from webgemma.gemma.config import Config, text_tensors
from webgemma.lora.float32 import pack_floats

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
MAX_RANK = 4096

# The GGUF names of what can be adapted, and Hugging Face's: of the whole model, of a layer, and of
# the parameters that hold all experts of a layer.
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

# What a new adapter may train, by the names of tensors without blk.N. and .weight.
ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
FEED_FORWARD = ("ffn_gate", "ffn_up", "ffn_down")
PER_LAYER = ("inp_gate", "proj")
ALL_LINEAR = (*ATTENTION, *FEED_FORWARD, *PER_LAYER)
TARGETS = (*LAYER_MODULES, *(name.removesuffix(".weight") for name in GLOBAL_MODULES))
TARGET_GROUPS = {"all": ALL_LINEAR, "attention": ATTENTION, "feed-forward": FEED_FORWARD}


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
            raise _rank_error(self.rank)
        expected = tuple(4 * self.experts * self.rank * n for n in (self.inputs, self.outputs))
        if (len(self.a), len(self.b)) != expected:
            raise InputError(
                f"A and B of rank {self.rank} for {self.inputs} x {self.outputs} take {expected} "
                f"bytes, not {(len(self.a), len(self.b))}."
            )
        if not isfinite(self.scale):
            raise InputError(f"An adapter's scale cannot be {self.scale}.")

    @property
    def alpha(self) -> float:
        """scale · rank, which files store."""
        return self.scale * self.rank

    @property
    def nbytes(self) -> int:
        """Bytes of A and B."""
        return len(self.a) + len(self.b)


@dataclass(frozen=True, slots=True)
class Adapter:
    """Pairs by the GGUF names of the matrices they belong to."""

    name: str  # for messages
    pairs: Mapping[str, Pair]
    base: str = ""  # the model it was trained for, as its file names it
    architecture: str = ""  # that model's, if the file says so

    @property
    def nbytes(self) -> int:
        """Bytes of all pairs."""
        return sum(pair.nbytes for pair in self.pairs.values())

    def fitted(self, config: Config) -> Adapter:
        """Return the pairs that this model uses; InputError if one does not fit."""
        if config.diffusion:
            raise InputError("DiffusionGemma does not support adapters yet.")
        if self.architecture not in ("", config.architecture):
            raise InputError(
                f"The adapter {self.name} is for a model of the architecture {self.architecture}, "
                f"and this one is {config.architecture}: it belongs to another model."
            )
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
            if name in unused:  # converters keep the unused tensors of layers that share
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
        return replace(self, pairs=pairs, architecture=config.architecture)


def new_adapter(
    config: Config,
    targets: Iterable[str] = ALL_LINEAR,
    *,
    rank: int = 16,
    alpha: float | None = None,
    layers: Collection[int] | None = None,
    seed: int = 0,
    name: str = "adapter",
) -> Adapter:
    """Return an adapter to train, which changes nothing yet: A is random, B is zero.

    `targets` are names of TARGETS, those that the model has, in all or some layers; `alpha` is
    twice the rank by default. Of the embedding, A is zero and B random: the rows of A belong to
    tokens, few of which occur in the data."""
    if not 1 <= rank <= MAX_RANK:  # before so much memory is filled
        raise _rank_error(rank)
    if alpha is not None and not (isfinite(alpha) and alpha):
        raise InputError(f"alpha is {alpha}; it must be a number other than 0, or nothing learns.")
    chosen = set(targets)
    if unknown := sorted(chosen - set(TARGETS)):
        raise InputError(
            f"There is no target {unknown[0]!r} for an adapter; there are: {', '.join(TARGETS)}."
        )
    if layers is not None and not set(layers) <= set(range(len(config.layers))):
        raise InputError(f"This model has layers 0 to {len(config.layers) - 1}.")
    scale = 2.0 if alpha is None else alpha / rank
    pairs = {}
    for tensor, (inputs, outputs) in _target_shapes(config, chosen):
        layer = split_layer(tensor)
        if layer is not None and layers is not None and layer[0] not in layers:
            continue
        draw = random.Random(f"{seed}:{tensor}")
        if tensor == EMBEDDING:
            a, b = bytes(4 * config.vocab * rank), _uniform(rank * config.width, 1.0, draw)
            pairs[tensor] = Pair(a, b, rank, config.vocab, config.width, scale)
        else:  # as PEFT does
            a, b = _uniform(rank * inputs, 1 / sqrt(inputs), draw), bytes(4 * outputs * rank)
            pairs[tensor] = Pair(a, b, rank, inputs, outputs, scale)
    fitted = Adapter(name, pairs, config.name).fitted(config)
    if not fitted.pairs:
        raise InputError("None of these targets is in these layers of the model.")
    return fitted


def _target_shapes(config: Config, chosen: set[str]) -> Iterable[tuple[str, tuple[int, int]]]:
    """Yield the matrices to adapt, with (inputs, outputs); a tied head is no tensor of its own."""
    for tensor, shape, _ in text_tensors(config):
        layer = split_layer(tensor)
        target = layer[1] if layer else tensor.removesuffix(".weight")
        if target in chosen and len(shape) == 2 and tensor != HEAD:
            yield tensor, (shape[0], shape[1])
    if HEAD.removesuffix(".weight") in chosen:
        yield HEAD, (config.width, config.vocab)


def _uniform(count: int, bound: float, draw: random.Random) -> bytes:
    return pack_floats([bound * (2 * draw.random() - 1) for _ in range(count)])


def _rank_error(rank: int) -> InputError:
    return InputError(f"An adapter cannot have rank {rank}; use 1 to {MAX_RANK}.")


def adaptable(name: str) -> bool:
    """Return whether a tensor can have an adapter, by its GGUF name."""
    if name in GLOBAL_MODULES:
        return True
    layer = split_layer(name)
    return layer is not None and layer[1] in {*LAYER_MODULES, *EXPERT_PARAMETERS, *_UNFUSED}


def split_layer(name: str) -> tuple[int, str] | None:
    """Split "blk.3.attn_q.weight" into (3, "attn_q"); None for a name of another form."""
    match = _LAYER_TENSOR.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def check_adaptable(file: str, names: Iterable[str]) -> None:
    """Raise GgufError for a tensor that no adapter can change here."""
    for name in names:
        if not adaptable(name):
            raise GgufError(
                f"{file}: it changes {name[:80]!r}, which webgemma cannot adapt; "
                "train the adapter without it."
            )
