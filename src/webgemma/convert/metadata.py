"""GGUF metadata of a Hugging Face model, from its config.json and the shapes of its tensors."""

import math
import struct
from collections.abc import Mapping
from typing import Any

from webgemma.errors import GgufError
from webgemma.gemma.config import (
    CENTROIDS,
    DRAFTER,
    EMBEDDING,
    EMBEDDING2,
    GEMMA3,
    GEMMA3_27B,
    GEMMA3_PERIOD,
    MEAN_POOLING,
    POST_PROJECTION,
    PROJECTION,
)
from webgemma.gemma.drafter_config import NEAREST
from webgemma.gemma.metadata import LARGEST, SMALLEST
from webgemma.gemma.metadata import MAX_COUNT as LARGEST_COUNT
from webgemma.gguf.writer import NewTensor
from webgemma.values import real_number, shown

Shapes = Mapping[str, tuple[int, ...]]  # by GGUF name, slowest dimension first

DIFFUSION = "diffusion_gemma"
MODEL_TYPES = {
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), "gemma4"),
    **dict.fromkeys((DIFFUSION, DIFFUSION + "_text"), "diffusion-gemma"),
    **dict.fromkeys((GEMMA3, GEMMA3 + "_text"), GEMMA3),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), DRAFTER),
    **dict.fromkeys(("embedding_gemma2", "embedding_gemma2_text"), EMBEDDING2),
}
NO_ROTATION = 1e30  # divisor that makes a frequency zero
MAX_COUNT = 2**31 - 1
_SCHEDULE = {  # key of generation_config.json -> GGUF key and type
    "entropy_bound": ("eb_entropy_bound", float),
    "max_denoising_steps": ("eb_max_steps", int),
    "t_min": ("eb_t_min", float),
    "t_max": ("eb_t_max", float),
    "stability_threshold": ("eb_stability_threshold", int),
    "confidence_threshold": ("eb_confidence_threshold", float),
}


class HuggingFaceConfig:
    """The configuration in config.json and generation_config.json."""

    def __init__(self, config: dict[str, Any], generation: dict[str, Any]) -> None:
        self.config = config
        self.generation = generation
        kind = config.get("model_type")
        if not isinstance(kind, str) or kind not in MODEL_TYPES:
            raise GgufError(
                f"config.json has the model_type {shown(kind)}; only Gemma 4, its drafters, "
                "DiffusionGemma, Gemma 3 and EmbeddingGemma can be converted."
            )
        text = config.get("text_config", config)
        self.text: dict[str, Any] = text if isinstance(text, dict) else {}
        self.architecture = MODEL_TYPES[kind]
        if self.architecture == GEMMA3 and self.text.get("use_bidirectional_attention"):
            self.architecture = EMBEDDING
        self.embeds = self.architecture in (EMBEDDING, EMBEDDING2)
        self.tied = config.get("tie_word_embeddings", self.text.get("tie_word_embeddings", True))
        self.rotary = 0  # dimensions of a head in full layers; set by `metadata`

    def metadata(self, shapes: Shapes, name: str) -> dict[str, object]:
        """Return all metadata but the tokenizer's; sizes come from the tensors."""
        if self.architecture in (GEMMA3, EMBEDDING):
            return self._gemma3(shapes, name)
        sliding = self._sliding()
        heads = [self._heads(shapes, index, kind) for index, kind in enumerate(sliding)]
        full = next((size for (_, _, size), s in zip(heads, sliding, strict=True) if not s), 0)
        window = next((size for (_, _, size), s in zip(heads, sliding, strict=True) if s), full)
        self.rotary = full
        _, width = _matrix(shapes, "token_embd.weight")
        hyperparameters: dict[str, object] = {
            "block_count": len(sliding),
            "context_length": self._count("max_position_embeddings"),
            "embedding_length": width,
            "feed_forward_length": [
                _matrix(shapes, f"blk.{index}.ffn_gate.weight")[0] for index in range(len(sliding))
            ],
            "attention.head_count": [queries for queries, _, _ in heads],
            "attention.head_count_kv": [keys for _, keys, _ in heads],
            "attention.key_length": full,
            "attention.value_length": full,
            "attention.key_length_swa": window,
            "attention.value_length_swa": window,
            "rope.dimension_count": full,
            "rope.dimension_count_swa": window,
            "attention.layer_norm_rms_epsilon": self._number("rms_norm_eps", 1e-6),
            "attention.sliding_window": self._count("sliding_window"),
            "attention.sliding_window_pattern": sliding,
            "attention.shared_kv_layers": self._shared(len(sliding)),
            "rope.freq_base": self._rope("full_attention", "rope_theta", 1e6),
            "rope.freq_base_swa": self._rope("sliding_attention", "rope_theta", 1e4),
            "embedding_length_per_layer_input": shapes.get("per_layer_proj_norm.weight", (0,))[0],
            **self._experts(shapes),
            **self._drafter(shapes, len(sliding)),
        }
        if self.architecture == EMBEDDING2:
            hyperparameters |= self._projected(shapes)
        else:
            softcap = self._number("final_logit_softcapping", 30.0)
            hyperparameters["final_logit_softcapping"] = softcap
        if self.architecture in ("diffusion-gemma", EMBEDDING2):
            hyperparameters["attention.causal"] = False
        values = {f"{self.architecture}.{key}": value for key, value in hyperparameters.items()}
        return {
            "general.architecture": self.architecture,
            "general.name": name,
            **values,
            **self._diffusion(),
        }

    def _gemma3(self, shapes: Shapes, name: str) -> dict[str, object]:
        """Return the metadata of a Gemma 3; GgufError for what a file cannot say of one."""
        number = sum(tensor.endswith(".attn_q.weight") for tensor in shapes)
        heads = {self._heads(shapes, index, sliding=True) for index in range(number)}
        if len(heads) != 1:
            raise GgufError("The layers have different heads, as no Gemma 3 has.")
        queries, keys, size = heads.pop()
        width = _matrix(shapes, "token_embd.weight")[1]
        scale = width // queries if number == GEMMA3_27B else size
        if self._number("query_pre_attn_scalar", scale) != scale:
            raise GgufError(
                f"config.json has query_pre_attn_scalar {shown(self.text['query_pre_attn_scalar'])}"
                f"; a Gemma 3 of {number} layers has {scale}, and no GGUF file says another."
            )
        if self.text.get("final_logit_softcapping") is not None:
            raise GgufError("config.json has final_logit_softcapping, which no Gemma 3 has.")
        values: dict[str, object] = {
            "block_count": number,
            "context_length": self._positive("max_position_embeddings", 131072),
            "embedding_length": width,
            "feed_forward_length": _matrix(shapes, "blk.0.ffn_gate.weight")[0],
            "attention.head_count": queries,
            "attention.head_count_kv": keys,
            "attention.key_length": size,
            "attention.value_length": size,
            "attention.layer_norm_rms_epsilon": self._within("rms_norm_eps", 1e-6, SMALLEST),
            "attention.sliding_window": self._positive("sliding_window"),
            "attention.sliding_window_pattern": self._gemma3_pattern(number),
            **self._gemma3_rope(),
        }
        if self.architecture == EMBEDDING:
            values["pooling_type"] = MEAN_POOLING
        values = {f"{self.architecture}.{key}": value for key, value in values.items()}
        return {"general.architecture": self.architecture, "general.name": name, **values}

    def _projected(self, shapes: Shapes) -> dict[str, object]:
        """Return what EmbeddingGemma 2 has beside Gemma 4; GgufError for RoPE of another kind."""
        parameters = self.text.get("rope_parameters")
        full = parameters.get("full_attention") if isinstance(parameters, dict) else None
        kind = full.get("rope_type", "default") if isinstance(full, dict) else "default"
        if kind != "default":
            raise GgufError(
                f"config.json has the rope_type {shown(kind)}; EmbeddingGemma 2 rotates whole "
                "heads, without scaling."
            )
        size = _matrix(shapes, PROJECTION)[0]
        return {"embedding_length_out": size, "pooling_type": MEAN_POOLING}

    def _gemma3_pattern(self, number: int) -> list[bool]:
        """Return which layers are sliding; older configurations have a period instead of a list."""
        if self.text.get("layer_types") is not None:
            sliding = self._sliding()
            if len(sliding) != number:
                raise GgufError(f"config.json has {len(sliding)} layer_types for {number} layers.")
            return sliding
        period = self._positive("sliding_window_pattern", GEMMA3_PERIOD)
        return [(index + 1) % period != 0 for index in range(number)]

    def _gemma3_rope(self) -> dict[str, object]:
        """Return bases and scaling, which older configurations have under other names."""
        base = self._within("rope_theta", 1e6, 1.0)
        local = self._within("rope_local_base_freq", 1e4, 1.0)
        parameters = self.text.get("rope_parameters")
        full = parameters.get("full_attention") if isinstance(parameters, dict) else None
        given = full if isinstance(full, dict) else self.text.get("rope_scaling")
        scaling: dict[str, Any] = given if isinstance(given, dict) else {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        factor = real_number(scaling.get("factor", 1.0))
        if kind not in ("default", "linear") or factor is None or not 1 <= factor <= LARGEST:
            raise GgufError(
                f"config.json scales RoPE by {shown(kind)} with the factor {shown(factor)}; "
                "webgemma supports the linear scaling of Google's models only."
            )
        bases = {
            "rope.freq_base": self._rope("full_attention", "rope_theta", base),
            "rope.freq_base_swa": self._rope("sliding_attention", "rope_theta", local),
        }
        if not all(1 <= value <= LARGEST for value in bases.values()):
            raise GgufError("config.json has a rope_theta that is below 1 or beyond float32.")
        scaled = {"rope.scaling.type": "linear", "rope.scaling.factor": factor}
        return {**bases, **(scaled if kind == "linear" else {"rope.scaling.type": "none"})}

    def _positive(self, key: str, default: int | None = None) -> int:
        """Return a number that a model can have: see `Metadata.count`."""
        value = self._count(key, default)
        if not 1 <= value <= LARGEST_COUNT:
            raise GgufError(f"config.json has {key} {value}; a model has 1 to {LARGEST_COUNT}.")
        return value

    def _within(self, key: str, default: float, low: float) -> float:
        """Return a number from `low` on that float32 can hold."""
        value = self._number(key, default)
        if not low <= value <= LARGEST:
            raise GgufError(f"config.json has {key} {value}; it must be {low:g} to {LARGEST:g}.")
        return value

    def rope_factors(self) -> NewTensor:
        """Return the divisors of RoPE's frequencies: full layers rotate only the first pairs."""
        half = self.rotary // 2
        rotating = round(half * self._rope("full_attention", "partial_rotary_factor", 0.25))
        factors = [1.0] * rotating + [NO_ROTATION] * (half - rotating)
        data = struct.pack(f"<{half}f", *factors)
        return NewTensor("rope_freqs.weight", (half,), "F32", data)

    def _sliding(self) -> list[bool]:
        """Return for each layer whether its attention is sliding."""
        kinds = self.text.get("layer_types")
        known = ("sliding_attention", "full_attention")
        if not isinstance(kinds, list) or not kinds or any(kind not in known for kind in kinds):
            raise GgufError("config.json has no valid list layer_types.")
        if "full_attention" not in kinds:
            raise GgufError(
                "config.json's layer_types have no full_attention, which every Gemma has."
            )
        return [kind == "sliding_attention" for kind in kinds]

    def _shared(self, layers: int) -> int:
        """Return how many layers share keys and values: all of a drafter's."""
        return layers if self.architecture == DRAFTER else self._count("num_kv_shared_layers", 0)

    def _heads(self, shapes: Shapes, index: int, sliding: bool) -> tuple[int, int, int]:
        """Return the numbers of query and key heads, and their size, from a layer's tensors."""
        name = f"blk.{index}."
        size = shapes.get(name + "attn_q_norm.weight", (0,))[0] or 1
        queries = _matrix(shapes, name + "attn_q.weight")[0]
        has_keys = name + "attn_k.weight" in shapes  # layers with shared keys may have none
        keys = _matrix(shapes, name + "attn_k.weight")[0] if has_keys else size
        if self.architecture == DRAFTER:  # which reads those of another model
            keys = size * self._key_heads(index, sliding)
        if queries % size or keys % size:
            raise GgufError(
                f"Layer {index} has projections that are not a multiple of its head size {size}."
            )
        return queries // size, keys // size, size

    def _key_heads(self, index: int, sliding: bool) -> int:
        """Return the key heads of a layer that has no tensor to tell."""
        each = self.text.get("per_layer_config")
        own = each.get(str(index)) if isinstance(each, dict) else None
        if isinstance(own, dict) and "num_key_value_heads" in own:
            return self._count("num_key_value_heads", own["num_key_value_heads"], own)
        full = self.text.get("num_global_key_value_heads")
        if not sliding and full is not None and self.text.get("attention_k_eq_v", True):
            return self._count("num_global_key_value_heads")
        return self._count("num_key_value_heads")

    def _drafter(self, shapes: Shapes, layers: int) -> dict[str, object]:
        if self.architecture != DRAFTER:
            return {}
        values: dict[str, object] = {
            "embedding_length_out": _matrix(shapes, POST_PROJECTION)[0],
            "nextn_predict_layers": layers,
        }
        if CENTROIDS in shapes:
            top = self._count("centroid_intermediate_top_k", NEAREST, self.config)
            values["masked_embd_top_k"] = top
        return values

    def _experts(self, shapes: Shapes) -> dict[str, object]:
        name = next((name for name in shapes if name.endswith(".ffn_down_exps.weight")), None)
        if name is None:
            return {}
        if len(shapes[name]) != 3:
            raise GgufError(f"{name} is not a stack of experts: its shape is {shapes[name]}.")
        count, _, ffn = shapes[name]
        used = self._count("top_k_experts")
        return {
            "expert_count": count,
            "expert_used_count": used,
            "expert_feed_forward_length": ffn,
        }

    def _diffusion(self) -> dict[str, object]:
        if self.architecture != "diffusion-gemma":
            return {}
        canvas = self.config.get("canvas_length", 256)
        if type(canvas) is not int or not 1 <= canvas <= MAX_COUNT:
            raise GgufError(
                f"config.json has canvas_length {shown(canvas)}; it must be an integer above zero."
            )
        values: dict[str, object] = {"diffusion.canvas_length": canvas}
        sampler = self.generation.get("sampler_config")
        bound = sampler.get("entropy_bound") if isinstance(sampler, dict) else None
        schedule = {"entropy_bound": bound} | {key: self.generation.get(key) for key in _SCHEDULE}
        for source, value in schedule.items():
            if value is None:
                continue
            key, kind = _SCHEDULE[source]
            number = real_number(value)
            least = 0 if kind is int else math.ulp(0)
            if number is None or not least <= number <= MAX_COUNT or number != kind(number):
                expected = "an integer, 0 or above" if kind is int else "a number above zero"
                raise GgufError(
                    f"generation_config.json has {source} {shown(value)}; it must be {expected}."
                )
            values["diffusion." + key] = kind(number)
        return values

    def _count(
        self, key: str, default: int | None = None, values: Mapping[str, Any] | None = None
    ) -> int:
        value = (self.text if values is None else values).get(key, default)
        if type(value) is not int or not 0 <= value <= MAX_COUNT:
            raise GgufError(
                f"config.json has {key} {shown(value)}; it must be an integer, 0 or above."
            )
        return value

    def _number(self, key: str, default: float) -> float:
        value = self.text.get(key)
        value = default if value is None else value
        number = real_number(value)
        if number is None:
            raise GgufError(f"config.json has {key} {shown(value)}; it must be a number.")
        return number

    def _rope(self, kind: str, key: str, default: float) -> float:
        parameters = self.text.get("rope_parameters")
        values = parameters.get(kind) if isinstance(parameters, dict) else None
        value = values.get(key, default) if isinstance(values, dict) else default
        number = real_number(value)
        if number is None or number <= 0:
            raise GgufError(
                f"config.json has {kind} {key} {shown(value)}; it must be a number above zero."
            )
        return number


def _matrix(shapes: Shapes, name: str) -> tuple[int, int]:
    """Return the rows and columns of a matrix; GgufError if it is missing or not a matrix."""
    shape = shapes.get(name)
    if shape is None:
        raise GgufError(f"The folder's files do not have the tensor that becomes {name}.")
    if len(shape) != 2:
        raise GgufError(
            f"The tensor that becomes {name} has the shape {shape}: it is not a matrix."
        )
    return shape[0], shape[1]
