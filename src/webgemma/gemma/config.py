"""Configuration of a Gemma 4 text model, derived from a file's metadata and tensors."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from webgemma.errors import GgufError
from webgemma.gemma.metadata import Metadata
from webgemma.gemma.tensors import TensorSpec, canonical_tensors, check_tensors
from webgemma.gguf.reader import Gguf, TensorInfo

ARCHITECTURES = ("gemma4", "diffusion-gemma")
LARGEST_SOFTCAP = 1e9  # Gemma 4's is 30; logits stay far above what stands for -inf on a GPU


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer: its attention, its feed-forward width, and whose keys and values it reads."""

    index: int
    sliding: bool  # attends to the last `Config.window` positions; else to all of them
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    kv_donor: int  # the layer whose cache it reads: itself, or an earlier one of the same kind
    k_is_v: bool  # no value projection: the raw keys serve as values
    experts: bool  # a mixture of experts beside the dense branch

    @property
    def shares_kv(self) -> bool:
        """Whether it reads another layer's keys and values."""
        return self.kv_donor != self.index


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts: `used` of `count` experts of width `ffn` for each token."""

    count: int
    used: int
    ffn: int
    fused: bool  # gate and up in one tensor


@dataclass(frozen=True, slots=True)
class Diffusion:
    """DiffusionGemma's canvas and denoising schedule."""

    canvas: int
    steps: int
    t_min: float
    t_max: float
    entropy_bound: float
    stability_threshold: int
    confidence_threshold: float
    ffn: int  # width of the self-conditioning MLP


@dataclass(frozen=True, slots=True)
class Config:
    """The text model, every size of it."""

    architecture: str
    name: str
    vocab: int
    width: int  # d_model
    context: int
    window: int
    layers: tuple[Layer, ...]
    eps: float
    softcap: float
    rope_base: float  # full layers
    rope_base_sliding: float
    ple: int  # width of a per-layer embedding, 0 when there are none
    experts: Experts | None
    diffusion: Diffusion | None
    tied: bool  # the head is the embedding table
    suppressed: tuple[int, ...]  # ids whose logits are -inf
    parameters: int  # of the text model

    @classmethod
    def from_gguf(cls, gguf: Gguf) -> "Config":
        """Return the configuration of a file; GgufError if it is not a Gemma 4, or inconsistent."""
        return _ConfigReader(gguf).config()

    @property
    def bidirectional_images(self) -> bool:
        """Whether images attend to all of themselves on sliding layers: models without PLE do."""
        return self.ple == 0

    def kv_nbytes(self, context: int, *, chunk: int = 512, element_nbytes: int = 2) -> int:
        """Return the bytes of the KV cache: full layers keep all, sliding ones window and chunk."""
        ring = min(context, self.window + chunk)
        return sum(
            2
            * element_nbytes
            * layer.kv_heads
            * layer.head_dim
            * (ring if layer.sliding else context)
            for layer in self.layers
            if not layer.shares_kv
        )


def text_tensors(config: Config) -> Iterator[TensorSpec]:
    """Yield all tensors of the text model."""
    width, ple, number = config.width, config.ple, len(config.layers)
    yield "token_embd.weight", (width, config.vocab), True
    yield "output.weight", (width, config.vocab), False
    yield "output_norm.weight", (width,), True
    full = [layer for layer in config.layers if not layer.sliding]
    if full:
        yield "rope_freqs.weight", (full[0].head_dim // 2,), False
    if ple:
        yield "per_layer_token_embd.weight", (ple * number, config.vocab), True
        yield "per_layer_model_proj.weight", (width, ple * number), True
        yield "per_layer_proj_norm.weight", (ple,), True
    if config.diffusion:
        ffn = config.diffusion.ffn
        yield "self_cond_pre_norm.weight", (width,), True
        yield "self_cond_gate.weight", (width, ffn), True
        yield "self_cond_up.weight", (width, ffn), True
        yield "self_cond_down.weight", (ffn, width), True
    for layer in config.layers:
        for name, shape, needed in _layer_tensors(config, layer):
            yield f"blk.{layer.index}.{name}", shape, needed


def _layer_tensors(config: Config, layer: Layer) -> Iterator[TensorSpec]:
    width, ple = config.width, config.ple
    queries = layer.heads * layer.head_dim
    keys = layer.kv_heads * layer.head_dim
    own_kv = not layer.shares_kv
    yield "attn_norm.weight", (width,), True
    yield "attn_q.weight", (width, queries), True
    yield "attn_q_norm.weight", (layer.head_dim,), True
    if own_kv:  # sharing layers may carry these, unused
        yield "attn_k.weight", (width, keys), True
        yield "attn_k_norm.weight", (layer.head_dim,), True
        yield "attn_v.weight", (width, keys), not layer.k_is_v
    yield "attn_output.weight", (queries, width), True
    yield "post_attention_norm.weight", (width,), True
    yield "ffn_norm.weight", (width,), True
    yield "ffn_gate.weight", (width, layer.ffn), True
    yield "ffn_up.weight", (width, layer.ffn), True
    yield "ffn_down.weight", (layer.ffn, width), True
    yield "post_ffw_norm.weight", (width,), True
    yield "layer_output_scale.weight", (1,), False
    if config.diffusion:
        yield "enc_layer_output_scale.weight", (1,), False
    if ple:
        yield "inp_gate.weight", (width, ple), True
        yield "proj.weight", (ple, width), True
        yield "post_norm.weight", (width,), True
    if layer.experts and config.experts:
        experts = config.experts
        yield "ffn_gate_inp.weight", (width, experts.count), True
        yield "ffn_gate_inp.scale", (width,), True
        for name, ffn in gate_and_up(experts.fused, experts.ffn):
            yield name, (width, ffn, experts.count), True
        yield "ffn_down_exps.weight", (experts.ffn, width, experts.count), True
        yield "ffn_down_exps.scale", (experts.count,), False
        for norm in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
            yield f"{norm}.weight", (width,), True


def gate_and_up(fused: bool, ffn: int) -> tuple[tuple[str, int], ...]:
    """Return the experts' input tensors and their rows: one fused (gate first), or two."""
    if fused:
        return (("ffn_gate_up_exps.weight", 2 * ffn),)
    return (("ffn_gate_exps.weight", ffn), ("ffn_up_exps.weight", ffn))


class _ConfigReader:
    """Reads one file: metadata first, then checks each tensor against it."""

    def __init__(self, gguf: Gguf) -> None:
        self.gguf = gguf
        self.architecture = _architecture(gguf)
        self.keys = Metadata(gguf, self.architecture + ".")
        self.tensors: dict[str, TensorInfo] = canonical_tensors(gguf)

    def config(self) -> Config:
        keys = self.keys
        table = self.tensors.get("token_embd.weight")
        if table is None:
            raise GgufError(
                f"{self.gguf.name}: there is no tensor token_embd.weight; "
                "the file has no model (perhaps only a vocabulary)."
            )
        layers = self.layers()
        config = Config(
            architecture=self.architecture,
            name=Metadata(self.gguf, "general.").text("name", ""),
            vocab=table.rows,
            width=keys.count("embedding_length"),
            context=keys.count("context_length"),
            window=keys.count("attention.sliding_window") if any(x.sliding for x in layers) else 0,
            layers=layers,
            eps=keys.number("attention.layer_norm_rms_epsilon", 1e-6),
            softcap=keys.number("final_logit_softcapping", 30.0, high=LARGEST_SOFTCAP),
            rope_base=keys.number("rope.freq_base", 1e6, low=1.0),
            rope_base_sliding=keys.number("rope.freq_base_swa", 1e4, low=1.0),
            ple=keys.count("embedding_length_per_layer_input", 0, minimum=0),
            experts=self.experts if any(layer.experts for layer in layers) else None,
            diffusion=self.diffusion() if self.architecture == "diffusion-gemma" else None,
            tied="output.weight" not in self.tensors,
            suppressed=self.suppressed(table.rows),
            parameters=sum(
                tensor.weights for name, tensor in self.tensors.items() if _is_text(name)
            ),
        )
        check_tensors(self.gguf, text_tensors(config), self.tensors)
        self.check_vocabulary(config)
        return config

    def layers(self) -> tuple[Layer, ...]:
        """Return the layers; sharing layers read the last earlier layer of their kind."""
        keys = self.keys
        number = keys.count("block_count")
        if number > 4 * len(self.tensors):
            raise GgufError(
                f"{self.gguf.name}: {keys.prefix}block_count is {number}, "
                f"but the file holds only {len(self.tensors)} tensors."
            )
        sliding = keys.flags("attention.sliding_window_pattern", number)
        heads = keys.counts("attention.head_count", number)
        kv_heads = keys.counts("attention.head_count_kv", number)
        ffn = keys.counts("feed_forward_length", number)
        own = number - keys.count("attention.shared_kv_layers", 0, minimum=0)
        dims = {False: self.head_dim(""), True: self.head_dim("_swa") if any(sliding) else 0}
        layers = []
        for index in range(number):
            if heads[index] % kv_heads[index]:
                raise GgufError(
                    f"{self.gguf.name}: layer {index} has {heads[index]} query heads, "
                    f"which is not a multiple of its {kv_heads[index]} key-value heads."
                )
            donor = index if index < own else _donor(self.gguf, sliding, own, index)
            layers.append(
                Layer(
                    index=index,
                    sliding=sliding[index],
                    heads=heads[index],
                    kv_heads=kv_heads[donor],
                    head_dim=dims[sliding[index]],
                    ffn=ffn[index],
                    kv_donor=donor,
                    k_is_v=donor == index and f"blk.{index}.attn_v.weight" not in self.tensors,
                    experts=f"blk.{index}.ffn_gate_inp.weight" in self.tensors,
                )
            )
        return tuple(layers)

    def head_dim(self, suffix: str) -> int:
        """Return the head size of full ("") or sliding ("_swa") layers: even, equal for k and v."""
        size = self.keys.count(f"attention.key_length{suffix}")
        value = self.keys.count(f"attention.value_length{suffix}", size)
        rotary = self.keys.count(f"rope.dimension_count{suffix}", size)
        if not size == value == rotary or size % 2:
            raise GgufError(
                f"{self.gguf.name}: heads with {size} key, {value} value and {rotary} rotary "
                "dimensions are not Gemma 4's (one even number for all three)."
            )
        return size

    @cached_property
    def experts(self) -> Experts:
        count = self.keys.count("expert_count")
        used = self.keys.count("expert_used_count")
        if used > count:
            raise GgufError(f"{self.gguf.name}: {used} experts are used of only {count}.")
        return Experts(
            count=count,
            used=used,
            ffn=self.keys.count("expert_feed_forward_length"),
            fused=any(name.endswith(".ffn_gate_up_exps.weight") for name in self.tensors),
        )

    def diffusion(self) -> Diffusion:
        """Return the schedule, with the published constants where the file has none."""
        keys = Metadata(self.gguf, "diffusion.")
        gate = self.tensors.get("self_cond_gate.weight")
        return Diffusion(
            canvas=keys.count("canvas_length", 256),
            steps=keys.count("eb_max_steps", 48),
            t_min=keys.number("eb_t_min", 0.4),
            t_max=keys.number("eb_t_max", 0.8),
            entropy_bound=keys.number("eb_entropy_bound", 0.1),
            stability_threshold=keys.count("eb_stability_threshold", 1, minimum=0),
            confidence_threshold=keys.number("eb_confidence_threshold", 0.005),
            ffn=gate.rows if gate else 1,
        )

    def suppressed(self, vocab: int) -> tuple[int, ...]:
        """Return the ids that must never be generated, each once."""
        key = "tokenizer.ggml.suppress_tokens"
        listed = self.gguf.metadata.get(key, ())
        ids = [None] if isinstance(listed, str | int | float) else listed
        checked = {x for x in ids if type(x) is int and 0 <= x < vocab}
        if not all(type(x) is int and x in checked for x in ids):
            raise GgufError(f"{self.gguf.name}: {key} must be a list of ids below {vocab}.")
        suppressed = tuple(sorted(checked))
        if len(suppressed) == vocab:
            raise GgufError(
                f"{self.gguf.name}: {key} holds all {vocab} tokens, which leaves none to write; "
                "the file contradicts itself."
            )
        return suppressed

    def check_vocabulary(self, config: Config) -> None:
        """Raise GgufError unless there are as many tokens as embedding rows, or declared none."""
        tokens = self.gguf.metadata.get("tokenizer.ggml.tokens")
        if tokens is None and self.gguf.metadata.get("tokenizer.ggml.model") in (
            "none",
            "no_vocab",
        ):
            return
        if tokens is None or isinstance(tokens, str | int | float):
            raise GgufError(
                f"{self.gguf.name}: the metadata has no list tokenizer.ggml.tokens; "
                "the vocabulary is missing."
            )
        if len(tokens) != config.vocab:
            raise GgufError(
                f"{self.gguf.name}: the vocabulary has {len(tokens)} tokens, "
                f"but token_embd.weight has {config.vocab} rows."
            )


def _architecture(gguf: Gguf) -> str:
    name = Metadata(gguf, "general.").text("architecture")
    if name in ARCHITECTURES:
        return name
    hints = {
        "clip": "it is a projector (mmproj); load the text model it belongs to",
        "gemma4-assistant": "it is a drafter; load the model it drafts for",
    }
    hint = hints.get(name, "webgemma runs Gemma 4 and DiffusionGemma only")
    raise GgufError(f"{gguf.name}: the architecture is {name[:40]!r}, not Gemma 4; {hint}.")


def _donor(gguf: Gguf, sliding: list[bool], own: int, index: int) -> int:
    for donor in range(own - 1, -1, -1):
        if sliding[donor] == sliding[index]:
            return donor
    raise GgufError(
        f"{gguf.name}: layer {index} shares keys and values, "
        "but no earlier layer of its kind has any; the file is inconsistent."
    )


def _is_text(name: str) -> bool:
    return not name.startswith(("v.", "a.", "mm."))
