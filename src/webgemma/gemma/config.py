"""What a Gemma 4 is: the blueprint, derived from a file's metadata and tensors."""

from dataclasses import dataclass
from functools import cached_property

from webgemma.errors import GgufError
from webgemma.gemma.metadata import Metadata
from webgemma.gemma.tensors import canonical_tensors, check_tensors, text_tensors
from webgemma.gguf.reader import Gguf, TensorInfo

ARCHITECTURES = ("gemma4", "diffusion-gemma")


@dataclass(frozen=True, slots=True)
class Layer:
    """One block: its attention, its feed-forward width, and where its keys and values come from."""

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
        """Whether it has no keys and values of its own."""
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
        """The blueprint of a file; GgufError when it is no Gemma 4 or contradicts itself."""
        return _Reading(gguf).config()

    @property
    def images_attend_both_ways(self) -> bool:
        """Whether image blocks see themselves whole on sliding layers (the models without PLE)."""
        return self.ple == 0

    def kv_nbytes(self, context: int, *, chunk: int = 512, element_nbytes: int = 2) -> int:
        """Bytes of the KV cache: full layers keep all, sliding ones the window and a chunk."""
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


class _Reading:
    """One pass over a file: metadata first, then each tensor against it."""

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
                "this file holds no model (perhaps only a vocabulary)."
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
            softcap=keys.number("final_logit_softcapping", 30.0),
            rope_base=keys.number("rope.freq_base", 1e6),
            rope_base_sliding=keys.number("rope.freq_base_swa", 1e4),
            ple=keys.count("embedding_length_per_layer_input", 0, least=0),
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
        """Each layer's shape; sharing layers read the last earlier layer of their kind."""
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
        own = number - keys.count("attention.shared_kv_layers", 0, least=0)
        dims = {False: self.head_dim(""), True: self.head_dim("_swa") if any(sliding) else 0}
        layers = []
        for index in range(number):
            if heads[index] % kv_heads[index]:
                raise GgufError(
                    f"{self.gguf.name}: layer {index} has {heads[index]} query heads, "
                    f"which {kv_heads[index]} key-value heads cannot share evenly."
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
        """Head size of full ("") or sliding ("_swa") layers: even, the same for keys and values."""
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
        """The schedule, with the published constants where the file has none."""
        keys = Metadata(self.gguf, "diffusion.")
        gate = self.tensors.get("self_cond_gate.weight")
        return Diffusion(
            canvas=keys.count("canvas_length", 256),
            steps=keys.count("eb_max_steps", 48),
            t_min=keys.number("eb_t_min", 0.4),
            t_max=keys.number("eb_t_max", 0.8),
            entropy_bound=keys.number("eb_entropy_bound", 0.1),
            stability_threshold=keys.count("eb_stability_threshold", 1, least=0),
            confidence_threshold=keys.number("eb_confidence_threshold", 0.005),
            ffn=gate.rows if gate else 1,
        )

    def suppressed(self, vocab: int) -> tuple[int, ...]:
        """The ids that the file never wants to see."""
        key = "tokenizer.ggml.suppress_tokens"
        listed = self.gguf.metadata.get(key, ())
        if not isinstance(listed, str | int | float):
            ids = tuple(token for token in listed if isinstance(token, int) and 0 <= token < vocab)
            if len(ids) == len(listed):
                return ids
        raise GgufError(f"{self.gguf.name}: {key} holds something else than ids below {vocab}.")

    def check_vocabulary(self, config: Config) -> None:
        """As many tokens as embedding rows; only a file that says so may have none."""
        tokens = self.gguf.metadata.get("tokenizer.ggml.tokens")
        if tokens is None and self.gguf.metadata.get("tokenizer.ggml.model") in (
            "none",
            "no_vocab",
        ):
            return
        if tokens is None or isinstance(tokens, str | int | float):
            raise GgufError(
                f"{self.gguf.name}: the metadata has no list tokenizer.ggml.tokens; "
                "the file has lost its vocabulary."
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
        "clip": "it is a projector (mmproj); open the text model it belongs to",
        "gemma4-assistant": "it is a drafter; open the model it drafts for",
    }
    hint = hints.get(name, "webgemma runs Gemma 4 and DiffusionGemma only")
    raise GgufError(f"{gguf.name}: the architecture is {name[:40]!r}, not Gemma 4; {hint}.")


def _donor(gguf: Gguf, sliding: list[bool], own: int, index: int) -> int:
    for donor in range(own - 1, -1, -1):
        if sliding[donor] == sliding[index]:
            return donor
    raise GgufError(
        f"{gguf.name}: layer {index} shares keys and values, "
        "but no earlier layer of its kind has any; the file contradicts itself."
    )


def _is_text(name: str) -> bool:
    return not name.startswith(("v.", "a.", "mm."))
