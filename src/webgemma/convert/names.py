"""Names of Gemma's tensors: from Hugging Face's layout to GGUF."""

import re

from webgemma.errors import GgufError
from webgemma.gemma.config import (
    CENTROIDS,
    ORDERING,
    POST_PROJECTION,
    PRE_PROJECTION,
    PROJECTION,
)

_MEDIA_PREFIXES = (
    *("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio."),
    "multi_modal_projector.",
)
# DiffusionGemma's encoder shares all tensors with the decoder but the scalars of its layers.
_ENCODER = "encoder.language_model."
_PREFIXES = ("model.", "language_model.", "model.", "decoder.", "ple.")  # removed in this order
_LAYER_PREFIX = "ple_block."  # EmbeddingGemma 2 keeps what belongs to PLE in modules of its own

_GLOBAL = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
    "embedding_projection.weight": PROJECTION,
    "pre_projection.weight": PRE_PROJECTION,
    "post_projection.weight": POST_PROJECTION,
    "masked_embedding.centroids.weight": CENTROIDS,
    "masked_embedding.token_ordering": ORDERING,
    "self_conditioning.pre_norm.weight": "self_cond_pre_norm.weight",
    "self_conditioning.gate_proj.weight": "self_cond_gate.weight",
    "self_conditioning.up_proj.weight": "self_cond_up.weight",
    "self_conditioning.down_proj.weight": "self_cond_down.weight",
}
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
}
_IN_LAYER = re.compile(r"layers\.(\d{1,4})\.(.+)", re.ASCII)


def gguf_name(name: str) -> str | None:
    """Return a tensor's GGUF name; None if it is a duplicate or not part of the text model."""
    rest = name.removeprefix("model.")
    encoder = rest.startswith("encoder.")
    if rest.removeprefix("encoder.").startswith(_MEDIA_PREFIXES):
        return None
    if encoder:
        rest = rest.removeprefix(_ENCODER)
    else:
        for prefix in _PREFIXES:
            rest = rest.removeprefix(prefix)
    layer = _IN_LAYER.fullmatch(rest)
    gguf = _LAYER.get(layer[2].removeprefix(_LAYER_PREFIX)) if layer else _GLOBAL.get(rest)
    if gguf is None:
        raise GgufError(
            f"The tensor {name[:80]} is not part of any supported Gemma; "
            "this model cannot be converted."
        )
    if encoder:
        return f"blk.{int(layer[1])}.enc_{gguf}" if layer and layer[2] == "layer_scalar" else None
    return f"blk.{int(layer[1])}.{gguf}" if layer else gguf
