"""Configuration of a text model, Gemma 4 or 3, derived from a file's metadata and tensors.

EmbeddingGemma is a Gemma 3, EmbeddingGemma 2 a Gemma 4, whose tokens attend both ways."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from webgemma.errors import GgufError, InputError
from webgemma.gemma.metadata import Metadata
from webgemma.gemma.tensors import TensorSpec, canonical_tensors, check_tensors
from webgemma.gguf.reader import Gguf, TensorInfo

GEMMA3 = "gemma3"
EMBEDDING, EMBEDDING2 = "gemma-embedding", "embedding-gemma2"
ARCHITECTURES = ("gemma4", "diffusion-gemma", GEMMA3, EMBEDDING, EMBEDDING2)
DRAFTER = "gemma4-assistant"
# A drafter's own tensors: its input and its next state; clusters of tokens, and the ids of each.
PRE_PROJECTION, POST_PROJECTION = "nextn.pre_projection.weight", "nextn.post_projection.weight"
CENTROIDS, ORDERING = "masked_embd_centroids.weight", "masked_embd_ordering"
# What makes vectors of states: two linear layers after each other, or one (EmbeddingGemma 2).
DENSE, PROJECTION = ("dense_2.weight", "dense_3.weight"), "embedding_projection.weight"
MEAN_POOLING = 1
LARGEST_SOFTCAP = 1e9  # Gemma 4's is 30; logits stay far above what stands for -inf on a GPU
PARTIAL_ROPE = 0.25  # of the pairs of a head, on Gemma 4's full layers

# What files of Gemma 3 leave out: every sixth layer is full, and heads have 256 dimensions.
GEMMA3_PERIOD, GEMMA3_HEAD = 6, 256
# Layers of the 4B, 12B and 27B, whose full layers divide positions by 8: Ollama's files do not say
# so. The 27B alone scales queries by its width: no file says so.
GEMMA3_SCALED, GEMMA3_27B, GEMMA3_ROPE_SCALE = (34, 48, 62), 62, 8.0


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer: its attention, its feed-forward width, and whose keys and values it reads."""

    index: int
    sliding: bool  # attends to the last `Config.window` positions; else to all of them
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    kv_donor: int  # the layer whose cache it reads: itself, an earlier one, or a drafter's target's
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
class Drafter:
    """What a drafter has that other models have not, and what it reads of its target.

    Its layers have no keys and values of their own: they read those of the target's `donors`, which
    count as layers after its last one."""

    target_width: int
    donors: tuple[int, ...]  # layers of the target
    centroids: int  # clusters of tokens, 0 if its head computes all logits
    nearest: int  # clusters whose tokens are candidates


@dataclass(frozen=True, slots=True)
class Embedding:
    """What an embedding model has that other models have not.

    All tokens of a text attend to each other, on sliding layers to those less than `Config.window`
    positions away. The mean of their states goes through the `dense` layers."""

    size: int  # of a vector
    dense: tuple[str, ...]  # names of matrices
    hidden: int  # width between two of them
    ends_with_eos: bool  # a text is read with <eos> after it

    @property
    def is_cut(self) -> bool:
        """Whether the file lacks the model's dense layers: vectors are other ones than Google's."""
        return not self.dense


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
    softcap: float  # of the logits, 0 if they have none
    query_scale: float  # of a score: q kᵀ is multiplied by it
    value_norm: bool  # values are normed
    rope_base: float  # full layers
    rope_base_sliding: float
    rope_scale: float  # of full layers: they divide positions by it
    rope_share: float  # of the pairs of a head that full layers rotate, without rope_freqs
    ple: int  # width of a per-layer embedding, 0 when there are none
    experts: Experts | None
    diffusion: Diffusion | None
    drafter: Drafter | None
    embedding: Embedding | None
    tied: bool  # the head is the embedding table
    suppressed: tuple[int, ...]  # ids whose logits are -inf
    parameters: int  # of the text model

    @classmethod
    def from_gguf(cls, gguf: Gguf) -> "Config":
        """Return the configuration of a file; GgufError if webgemma cannot run what it holds."""
        architecture = _architecture(gguf)
        return _reader(gguf, architecture)(gguf, architecture).config()

    def check_writes(self, name: str) -> None:
        """Raise InputError, which names the model, unless it writes text."""
        if self.embedding:
            raise InputError(
                f"{name} is an embedding model, which writes no text: let it embed texts, and chat "
                "with another Gemma."
            )

    @property
    def generation(self) -> int:
        """The generation of Gemma: 3, or 4, of which DiffusionGemma is."""
        return 3 if self.architecture in (GEMMA3, EMBEDDING) else 4

    @property
    def bidirectional_images(self) -> bool:
        """Whether images attend to all of themselves on sliding layers: Gemma 4 without PLE."""
        return self.ple == 0 and self.generation == 4 and self.embedding is None

    @property
    def has_token_ple(self) -> bool:
        """Whether per-layer embeddings are also those of tokens: not in EmbeddingGemma 2."""
        return self.ple > 0 and self.embedding is None

    def kv_nbytes(self, context: int, *, chunk: int = 512, element_nbytes: int = 2) -> int:
        """Return the bytes of the KV cache: full layers keep all, sliding ones window and chunk.

        Embedding models keep those of one layer of one text."""
        if self.embedding:
            each = max(layer.kv_heads * layer.head_dim for layer in self.layers)
            return 2 * element_nbytes * each * context
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
    if full and config.generation == 4 and not config.embedding:
        yield "rope_freqs.weight", (full[0].head_dim // 2,), False
    if config.has_token_ple:
        yield "per_layer_token_embd.weight", (ple * number, config.vocab), True
    if ple:
        yield "per_layer_model_proj.weight", (width, ple * number), True
        yield "per_layer_proj_norm.weight", (ple,), True
    if config.drafter:
        target = config.drafter.target_width
        yield PRE_PROJECTION, (2 * target, width), True
        yield POST_PROJECTION, (width, target), True
        if config.drafter.centroids:
            yield CENTROIDS, (width, config.drafter.centroids), True
    if config.embedding:
        yield from _dense_tensors(config, config.embedding)
    if config.diffusion:
        ffn = config.diffusion.ffn
        yield "self_cond_pre_norm.weight", (width,), True
        yield "self_cond_gate.weight", (width, ffn), True
        yield "self_cond_up.weight", (width, ffn), True
        yield "self_cond_down.weight", (ffn, width), True
    for layer in config.layers:
        for name, shape, needed in _layer_tensors(config, layer):
            yield f"blk.{layer.index}.{name}", shape, needed


def _dense_tensors(config: Config, embedding: Embedding) -> Iterator[TensorSpec]:
    if embedding.dense == DENSE:
        yield DENSE[0], (config.width, embedding.hidden), True
        yield DENSE[1], (embedding.hidden, embedding.size), True
    elif embedding.dense:
        yield PROJECTION, (config.width, embedding.size), True


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


class ConfigReader:
    """Reads one file: metadata first, then checks each tensor against it."""

    value_norm = True
    keys_as_values = True  # layers may have no value projection
    more_tokens = False  # there may be tokens without a row of the embedding table
    rope_share = PARTIAL_ROPE

    def __init__(self, gguf: Gguf, architecture: str) -> None:
        self.gguf = gguf
        self.architecture = architecture
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
        base, sliding_base, rope_scale = self.rope()
        config = Config(
            architecture=self.architecture,
            name=Metadata(self.gguf, "general.").text("name", ""),
            vocab=table.rows,
            width=keys.count("embedding_length"),
            context=keys.count("context_length"),
            window=self.window() if any(x.sliding for x in layers) else 0,
            layers=layers,
            eps=keys.number("attention.layer_norm_rms_epsilon", 1e-6),
            softcap=self.softcap(),
            query_scale=self.query_scale(layers),
            value_norm=self.value_norm,
            rope_base=base,
            rope_base_sliding=sliding_base,
            rope_scale=rope_scale,
            rope_share=self.rope_share,
            ple=keys.count("embedding_length_per_layer_input", 0, minimum=0),
            experts=self.experts if any(layer.experts for layer in layers) else None,
            diffusion=self.diffusion() if self.architecture == "diffusion-gemma" else None,
            drafter=self.drafter(),
            embedding=self.embedding(),
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
        sliding = self.pattern(number)
        heads = keys.counts("attention.head_count", number)
        kv_heads = keys.counts("attention.head_count_kv", number)
        ffn = keys.counts("feed_forward_length", number)
        dims = self.head_dims(any(sliding))
        layers = []
        for index in range(number):
            if heads[index] % kv_heads[index]:
                raise GgufError(
                    f"{self.gguf.name}: layer {index} has {heads[index]} query heads, "
                    f"which is not a multiple of its {kv_heads[index]} key-value heads."
                )
            donor = self.donor(sliding, index)
            layers.append(
                Layer(
                    index=index,
                    sliding=sliding[index],
                    heads=heads[index],
                    kv_heads=kv_heads[donor if donor < number else index],
                    head_dim=dims[sliding[index]],
                    ffn=ffn[index],
                    kv_donor=donor,
                    k_is_v=self.keys_as_values
                    and donor == index
                    and f"blk.{index}.attn_v.weight" not in self.tensors,
                    experts=f"blk.{index}.ffn_gate_inp.weight" in self.tensors,
                )
            )
        return tuple(layers)

    def pattern(self, number: int) -> list[bool]:
        """Return which of so many layers are sliding."""
        return self.keys.flags("attention.sliding_window_pattern", number)

    def head_dims(self, has_sliding: bool) -> dict[bool, int]:
        """Return the head sizes of full and (True) of sliding layers."""
        return {False: self.head_dim(""), True: self.head_dim("_swa") if has_sliding else 0}

    def window(self) -> int:
        """Return how many positions a token of a sliding layer attends to, with its own."""
        return self.keys.count("attention.sliding_window")

    def rope(self) -> tuple[float, float, float]:
        """Return the bases of full and of sliding layers, and the scale of full ones."""
        keys = self.keys
        base = keys.number("rope.freq_base", 1e6, low=1.0)
        return base, keys.number("rope.freq_base_swa", 1e4, low=1.0), 1.0

    def softcap(self) -> float:
        """Return the softcap of the logits."""
        return self.keys.number("final_logit_softcapping", 30.0, high=LARGEST_SOFTCAP)

    def query_scale(self, layers: tuple[Layer, ...]) -> float:
        """Return the scale of the scores; norms of queries and keys hold Gemma 4's."""
        del layers
        return 1.0

    @property
    def shared(self) -> int:
        """How many layers, the last ones, share keys and values."""
        return self.keys.count("attention.shared_kv_layers", 0, minimum=0)

    def donor(self, sliding: list[bool], index: int) -> int:
        """Return the layer whose keys and values a layer reads, perhaps itself."""
        own = len(sliding) - self.shared
        if index < own:
            return index
        for donor in range(own - 1, -1, -1):
            if sliding[donor] == sliding[index]:
                return donor
        raise GgufError(
            f"{self.gguf.name}: layer {index} shares keys and values, "
            "but no earlier layer of its kind has any; the file is inconsistent."
        )

    def drafter(self) -> Drafter | None:
        """Return what a drafter has more than other models; None for those."""
        return None

    def embedding(self) -> Embedding | None:
        """Return what an embedding model has more than other models; None for those."""
        return None

    def head_dim(self, suffix: str, default: int | None = None) -> int:
        """Return the head size of full ("") or sliding ("_swa") layers: even, equal for k and v."""
        size = self.keys.count(f"attention.key_length{suffix}", default)
        value = self.keys.count(f"attention.value_length{suffix}", size)
        rotary = self.keys.count(f"rope.dimension_count{suffix}", size)
        if not size == value == rotary or size % 2:
            raise GgufError(
                f"{self.gguf.name}: heads with {size} key, {value} value and {rotary} rotary "
                "dimensions are not Gemma's (one even number for all three)."
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
        if len(tokens) < config.vocab or (len(tokens) > config.vocab and not self.more_tokens):
            raise GgufError(
                f"{self.gguf.name}: the vocabulary has {len(tokens)} tokens, "
                f"but token_embd.weight has {config.vocab} rows."
            )


class Gemma3Reader(ConfigReader):
    """Reads a file of Gemma 3, as llama.cpp or Ollama writes it, which leave out what is usual."""

    value_norm = False
    keys_as_values = False
    more_tokens = True  # of images, in Ollama's files
    rope_share = 1.0

    def config(self) -> Config:
        for name in self.tensors:
            if name.endswith(".ffn_gate_inp.weight"):
                raise GgufError(f"{self.gguf.name}: it has experts, which no Gemma 3 has.")
        return super().config()

    def pattern(self, number: int) -> list[bool]:
        """Return which layers are sliding: all but every sixth, or what a number or a list says."""
        key, keys = "attention.sliding_window_pattern", self.keys
        if not isinstance(keys.gguf.metadata.get(keys.prefix + key, 0), int):
            return keys.flags(key, number)
        period = keys.count(key, GEMMA3_PERIOD)
        return [(index + 1) % period != 0 for index in range(number)]

    def head_dims(self, has_sliding: bool) -> dict[bool, int]:
        """Return the head size, which is the same on all layers."""
        del has_sliding
        return dict.fromkeys((False, True), self.head_dim("", GEMMA3_HEAD))

    def rope(self) -> tuple[float, float, float]:
        """Return the bases of full and of sliding layers, and the scale of full ones."""
        keys, layers = self.keys, self.keys.count("block_count")
        full = "rope.freq_base" if keys.has("rope.freq_base") else "rope.global.freq_base"
        local = "rope.local.freq_base" if keys.has("rope.local.freq_base") else "rope.freq_base_swa"
        kind = keys.text("rope.scaling.type", "linear")
        if kind not in ("linear", "none"):
            raise GgufError(
                f"{self.gguf.name}: {keys.prefix}rope.scaling.type is {kind[:40]!r}; webgemma "
                "supports the linear scaling of Google's models only."
            )
        usual = GEMMA3_ROPE_SCALE if layers in GEMMA3_SCALED else 1.0
        scale = 1.0 if kind == "none" else keys.number("rope.scaling.factor", usual, low=1.0)
        return keys.number(full, 1e6, low=1.0), keys.number(local, 1e4, low=1.0), scale

    def softcap(self) -> float:
        """Return 0; Ollama's older files of the 1B name one that it does not have."""
        return 0.0

    def query_scale(self, layers: tuple[Layer, ...]) -> float:
        """Return 1 / √(head size), or of the 27B 1 / √(width / heads)."""
        if len(layers) == GEMMA3_27B:
            return 1 / math.sqrt(self.keys.count("embedding_length") / layers[0].heads)
        return 1 / math.sqrt(layers[0].head_dim)


class EmbeddingReader(Gemma3Reader):
    """Reads a file of EmbeddingGemma, whose dense layers llama.cpp's files may lack."""

    def window(self) -> int:
        """Return the positions to one side, with the token's own: half of the stored window."""
        return super().window() // 2 + 1

    def embedding(self) -> Embedding:
        """Return the size of the vectors, and the dense layers that the file has."""
        check_pooling(self.keys)
        first, second = map(self.tensors.get, DENSE)
        if (first is None) != (second is None):
            missing = DENSE[first is not None]
            raise GgufError(
                f"{self.gguf.name}: of EmbeddingGemma's two dense layers {missing} is missing; "
                "the file is incomplete: convert the model again."
            )
        return Embedding(
            size=second.rows if second else self.keys.count("embedding_length"),
            dense=DENSE if second else (),
            hidden=first.rows if first else 0,
            ends_with_eos=Metadata(self.gguf, "tokenizer.ggml.").flag("add_eos_token", True),
        )


class Embedding2Reader(ConfigReader):
    """Reads a file of EmbeddingGemma 2, a Gemma 4 with one projection at its end."""

    keys_as_values = False
    rope_share = 1.0

    def config(self) -> Config:
        for name in self.tensors:
            if name.endswith(".ffn_gate_inp.weight"):
                raise GgufError(f"{self.gguf.name}: it has experts, which no EmbeddingGemma has.")
        if self.shared:
            raise GgufError(
                f"{self.gguf.name}: {self.keys.prefix}attention.shared_kv_layers is {self.shared}; "
                "the layers of EmbeddingGemma 2 share no keys and values."
            )
        return super().config()

    def window(self) -> int:
        """Return the positions to one side, with the token's own: the stored window and one."""
        return super().window() + 1

    def softcap(self) -> float:
        """Return 0: there are no logits."""
        return 0.0

    def embedding(self) -> Embedding:
        """Return the size of the vectors, which the projection has."""
        check_pooling(self.keys)
        projection = self.tensors.get(PROJECTION)
        stored = projection.rows if projection else 1  # `check_tensors` says that it is missing
        return Embedding(
            size=self.keys.count("embedding_length_out", stored),
            dense=(PROJECTION,),
            hidden=0,
            ends_with_eos=Metadata(self.gguf, "tokenizer.ggml.").flag("add_eos_token"),
        )


def check_pooling(keys: Metadata) -> None:
    """Raise GgufError unless the vector of a text is the mean of tokens that attend both ways."""
    pooling = keys.count("pooling_type", MEAN_POOLING, minimum=0)
    if pooling != MEAN_POOLING or keys.flag("attention.causal"):
        raise GgufError(
            f"{keys.gguf.name}: {keys.prefix}pooling_type is {pooling}, attention is "
            f"{'causal' if keys.flag('attention.causal') else 'not causal'}; EmbeddingGemma takes "
            f"the mean ({MEAN_POOLING}) of tokens that attend both ways."
        )


HINTS = {
    "clip": "it is a projector (mmproj); load the text model it belongs to",
    DRAFTER: "it is a drafter; load the model it drafts for, with draft=",
    "gemma3n": "it is Gemma 3n, which is built in another way",
}


def _architecture(gguf: Gguf) -> str:
    name = Metadata(gguf, "general.").text("architecture")
    if name in ARCHITECTURES:
        return name
    hint = HINTS.get(name, "webgemma runs Gemma 4, DiffusionGemma, Gemma 3 and EmbeddingGemma only")
    raise GgufError(f"{gguf.name}: the architecture is {name[:40]!r}, not Gemma 4 or 3; {hint}.")


def embeds(gguf: Gguf) -> bool:
    """Return whether a file holds an embedding model, as far as its header says."""
    architecture = gguf.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        return False
    return issubclass(_reader(gguf, str(architecture)), EmbeddingReader | Embedding2Reader)


def _reader(gguf: Gguf, architecture: str) -> type[ConfigReader]:
    """Return what reads a file; Ollama's EmbeddingGemma calls itself a Gemma 3."""
    pooled = Metadata(gguf, GEMMA3 + ".").has("pooling_type")
    if architecture == EMBEDDING2:
        return Embedding2Reader
    if architecture == EMBEDDING or (
        architecture == GEMMA3 and (pooled or set(DENSE) & canonical_tensors(gguf).keys())
    ):
        return EmbeddingReader
    return Gemma3Reader if architecture == GEMMA3 else ConfigReader


def _is_text(name: str) -> bool:
    return not name.startswith(("v.", "a.", "mm."))
