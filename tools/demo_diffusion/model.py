"""DiffusionGemma in PyTorch, for training; parameters have their GGUF names."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from shape import Shape
from torch import Tensor, nn

from demo_model.model import attend, filled, frequencies, gelu, linear, matrix, rms, rope

Masks = dict[str, Tensor]  # of sliding ("s") and full ("f") layers: 0, or -inf where masked


class Layer(nn.Module):
    """The weights of one layer."""

    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        width, dim, kv_heads = shape.width, shape.dim(index), shape.kv_heads_of(index)
        for norm in ("attn_norm", "ffn_norm", "pre_ffw_norm_2"):
            self.register_parameter(norm, filled(width, 1.0))
        for norm in ("post_ffw_norm_1", "post_ffw_norm_2"):
            self.register_parameter(norm, filled(width, 1.0))
        for norm in ("post_attention_norm", "post_ffw_norm"):
            self.register_parameter(norm, filled(width, shape.layers**-0.5))
        self.attn_q = matrix(shape.heads * dim, width)
        self.attn_k = matrix(kv_heads * dim, width)
        if not shape.is_full(index):  # else the raw keys serve as values
            self.attn_v = matrix(kv_heads * dim, width)
        self.attn_output = matrix(width, shape.heads * dim)
        # The scores are q·k without a scale: they begin with a standard deviation of one.
        self.attn_q_norm, self.attn_k_norm = filled(dim, dim**-0.25), filled(dim, dim**-0.25)
        self.ffn_gate, self.ffn_up = matrix(shape.ffn, width), matrix(shape.ffn, width)
        self.ffn_down = matrix(width, shape.ffn)
        count, ffn = shape.experts, shape.expert_ffn
        self.ffn_gate_inp = nn.Parameter(torch.randn(count, width))
        self.ffn_gate_inp_scale, self.ffn_down_exps_scale = filled(width, 1.0), filled(count, 1.0)
        self.ffn_gate_up_exps = nn.Parameter(torch.randn(count, 2 * ffn, width) * width**-0.5)
        self.ffn_down_exps = nn.Parameter(torch.randn(count, width, ffn) * ffn**-0.5)
        self.layer_output_scale, self.enc_layer_output_scale = filled(1, 1.0), filled(1, 1.0)


class DiffusionGemma(nn.Module):
    """Encoder and decoder in one pass.

    The tokens before the canvas attend causally, the canvas to all positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, ffn = shape.width, shape.condition_ffn
        self.token_embd = nn.Parameter(torch.randn(shape.vocab, width) * width**-0.5)
        self.output_norm, self.self_cond_pre_norm = filled(width, 1.0), filled(width, 1.0)
        self.self_cond_gate, self.self_cond_up = matrix(ffn, width), matrix(ffn, width)
        self.self_cond_down = matrix(width, ffn)
        self.blk = nn.ModuleList(Layer(shape, index) for index in range(shape.layers))
        for kind, dim in (("s", shape.head_dim_sliding), ("f", shape.head_dim)):
            angles = torch.arange(shape.context)[:, None] * frequencies(shape, kind == "f", dim)
            self.register_buffer(f"cos_{kind}", angles.cos().float(), persistent=False)
            self.register_buffer(f"sin_{kind}", angles.sin().float(), persistent=False)

    def named_tensors(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every weight with its GGUF name."""
        for name, parameter in self.named_parameters():
            yield gguf_name(name), parameter

    def forward(
        self, ids: Tensor, expected: Tensor, masks: Masks, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return float32 logits [B, canvas, vocab] of the canvas, the last positions of ids [B, T].

        `expected` [B, canvas, width] is the expected embedding of the step before, or zero."""
        canvas, width = self.shape.canvas, self.shape.width
        x = (F.embedding(ids, self.token_embd) * math.sqrt(width)).to(dtype)
        conditioned = x[:, -canvas:] + self.condition(expected.to(dtype))
        x = torch.cat((x[:, :-canvas], rms(conditioned, None)), 1)
        position = torch.arange(ids.shape[1], device=ids.device)
        in_canvas = (position >= ids.shape[1] - canvas)[:, None]
        for index, layer in enumerate(self.blk):
            a = self.attention(index, layer, rms(x, layer.attn_norm), masks)
            x = x + rms(a, layer.post_attention_norm)
            f = feed_forward(layer, rms(x, layer.ffn_norm))
            e = self.experts(layer, x)
            both = rms(f, layer.post_ffw_norm_1) + rms(e, layer.post_ffw_norm_2)
            x = x + rms(both, layer.post_ffw_norm)
            scale = torch.where(in_canvas, layer.layer_output_scale, layer.enc_layer_output_scale)
            x = x * scale.to(dtype)
        h, cap = rms(x[:, -canvas:], self.output_norm), self.shape.softcap
        return cap * torch.tanh(linear(h, self.token_embd).float() / cap)

    def expected_embedding(self, z: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return softmax(z) E √d."""
        p = torch.softmax(z, -1).to(dtype)
        return p @ self.token_embd.to(dtype) * math.sqrt(self.shape.width)

    def condition(self, expected: Tensor) -> Tensor:
        """Return the self-conditioning of an expected embedding; zero gives zero."""
        n = rms(expected, self.self_cond_pre_norm)
        hidden = gelu(linear(n, self.self_cond_gate)) * linear(n, self.self_cond_up)
        return linear(hidden, self.self_cond_down)

    def attention(self, index: int, layer: Layer, h: Tensor, masks: Masks) -> Tensor:
        """Return softmax(q kᵀ) v after the output projection."""
        shape, kind = self.shape, self.shape.pattern[index]
        batch, length, _ = h.shape
        cos, sin = (getattr(self, f"{name}_{kind}")[:length].to(h.dtype) for name in ("cos", "sin"))

        def heads(weight: Tensor) -> Tensor:
            return linear(h, weight).view(batch, length, -1, shape.dim(index)).transpose(1, 2)

        q, k = heads(layer.attn_q), heads(layer.attn_k)
        v = rms(k if shape.is_full(index) else heads(layer.attn_v), None)
        q, k = (
            rope(rms(q, layer.attn_q_norm), cos, sin),
            rope(rms(k, layer.attn_k_norm), cos, sin),
        )
        out = attend(q, k, v, masks[kind])
        return linear(out.transpose(1, 2).reshape(batch, length, -1), layer.attn_output)

    def experts(self, layer: Layer, x: Tensor) -> Tensor:
        """Return the sum of each token's best experts.

        All experts are computed; the shares of the others are zero."""
        shape, (batch, length, width) = self.shape, x.shape
        scores = linear(
            rms(x, layer.ffn_gate_inp_scale) / math.sqrt(width), layer.ffn_gate_inp
        ).float()
        p = torch.softmax(scores, -1)
        p = torch.where(p >= p.topk(shape.used, -1).values[..., -1:], p, 0.0)
        share = p / p.sum(-1, keepdim=True) * layer.ffn_down_exps_scale
        m = rms(x, layer.pre_ffw_norm_2)
        both = linear(m, layer.ffn_gate_up_exps.flatten(0, 1))
        gate, up = both.view(batch, length, shape.experts, -1).chunk(2, -1)
        hidden = gelu(gate) * up * share[..., None].to(x.dtype)
        return linear(hidden.flatten(2), layer.ffn_down_exps.transpose(0, 1).flatten(1))


def feed_forward(layer: Layer, n: Tensor) -> Tensor:
    """Return the output of the dense branch."""
    hidden = gelu(linear(n, layer.ffn_gate)) * linear(n, layer.ffn_up)
    return linear(hidden, layer.ffn_down)


def biases(shape: Shape, empty: Tensor, length: int, dtype: torch.dtype) -> Masks:
    """Return attention biases [B, 1, T, T]; the first `empty` [B] positions are padding.

    Rotary positions count from the begin of the row: only distances matter. An empty position
    attends to itself, so that its softmax has a sum."""
    position = torch.arange(length, device=empty.device)
    first = length - shape.canvas  # of the canvas
    q, k = position[:, None], position[None]
    causal = (k <= q) | (q >= first)
    near = torch.where(q < first, q - k < shape.window, k > first - shape.window)
    token = k[None] >= empty[:, None, None]
    zero = torch.zeros((), dtype=dtype, device=empty.device)
    return {
        kind: torch.where((attended & token) | (q == k), zero, float("-inf"))[:, None]
        for kind, attended in (("f", causal), ("s", causal & near))
    }


def gguf_name(name: str) -> str:
    """Return a parameter's GGUF name: ffn_gate_inp.scale for ffn_gate_inp_scale, else X.weight."""
    if name.endswith(("inp_scale", "exps_scale")):
        return name.removesuffix("_scale") + ".scale"
    return name + ".weight"
