"""A DiffusionGemma to train, written from its formulas; parameters have their GGUF names."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from shape import Shape
from torch import Tensor, nn

from demo_model.model import attend, filled, frequencies, gelu, linear, matrix, rms, rope

Sees = dict[str, Tensor]  # for each kind of layer, a bias: 0, or -inf where it must not look


class Block(nn.Module):
    """The weights of one layer."""

    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        width, dim, keys = shape.width, shape.dim(index), shape.keys(index)
        for norm in ("attn_norm", "ffn_norm", "pre_ffw_norm_2"):
            self.register_parameter(norm, filled(width, 1.0))
        for norm in ("post_ffw_norm_1", "post_ffw_norm_2"):
            self.register_parameter(norm, filled(width, 1.0))
        for norm in ("post_attention_norm", "post_ffw_norm"):
            self.register_parameter(norm, filled(width, shape.layers**-0.5))
        self.attn_q = matrix(shape.heads * dim, width)
        self.attn_k = matrix(keys * dim, width)
        if not shape.is_full(index):  # else the raw keys serve as values
            self.attn_v = matrix(keys * dim, width)
        self.attn_output = matrix(width, shape.heads * dim)
        # The scores are q·k with nothing to scale them: begin with a spread of one.
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
    """Reader and writer in one pass: what stands before is read causally, the canvas sees all."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, ffn = shape.width, shape.condition_ffn
        self.token_embd = nn.Parameter(torch.randn(shape.vocab, width) * width**-0.5)
        self.output_norm, self.self_cond_pre_norm = filled(width, 1.0), filled(width, 1.0)
        self.self_cond_gate, self.self_cond_up = matrix(ffn, width), matrix(ffn, width)
        self.self_cond_down = matrix(width, ffn)
        self.blk = nn.ModuleList(Block(shape, index) for index in range(shape.layers))
        for kind, dim in (("s", shape.head_dim_sliding), ("f", shape.head_dim)):
            angles = torch.arange(shape.context)[:, None] * frequencies(shape, kind == "f", dim)
            self.register_buffer(f"cos_{kind}", angles.cos().float(), persistent=False)
            self.register_buffer(f"sin_{kind}", angles.sin().float(), persistent=False)

    def named_tensors(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every weight under the name it has in a GGUF."""
        for name, parameter in self.named_parameters():
            yield gguf_name(name), parameter

    def forward(
        self, ids: Tensor, expected: Tensor, sees: Sees, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Logits of the canvas, the last positions of ids [B, T]: [B, canvas, vocab], float32.

        `expected` [B, canvas, width] is what the step before makes one expect, or zero."""
        canvas, width = self.shape.canvas, self.shape.width
        x = (F.embedding(ids, self.token_embd) * math.sqrt(width)).to(dtype)
        told = x[:, -canvas:] + self.condition(expected.to(dtype))
        x = torch.cat((x[:, :-canvas], rms(told, None)), 1)
        writes = (torch.arange(ids.shape[1], device=ids.device) >= ids.shape[1] - canvas)[:, None]
        for index, block in enumerate(self.blk):
            a = self.attention(index, block, rms(x, block.attn_norm), sees)
            x = x + rms(a, block.post_attention_norm)
            f = feed_forward(block, rms(x, block.ffn_norm))
            e = self.experts(block, x)
            both = rms(f, block.post_ffw_norm_1) + rms(e, block.post_ffw_norm_2)
            x = x + rms(both, block.post_ffw_norm)
            scale = torch.where(writes, block.layer_output_scale, block.enc_layer_output_scale)
            x = x * scale.to(dtype)
        h, cap = rms(x[:, -canvas:], self.output_norm), self.shape.softcap
        return cap * torch.tanh(linear(h, self.token_embd).float() / cap)

    def expect(self, z: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """softmax(z) E √d."""
        p = torch.softmax(z, -1).to(dtype)
        return p @ self.token_embd.to(dtype) * math.sqrt(self.shape.width)

    def condition(self, expected: Tensor) -> Tensor:
        """What an expectation adds to the canvas; of zero it is zero."""
        n = rms(expected, self.self_cond_pre_norm)
        hidden = gelu(linear(n, self.self_cond_gate)) * linear(n, self.self_cond_up)
        return linear(hidden, self.self_cond_down)

    def attention(self, index: int, block: Block, h: Tensor, sees: Sees) -> Tensor:
        """softmax(q kᵀ) v and the output projection."""
        shape, kind = self.shape, self.shape.pattern[index]
        batch, length, _ = h.shape
        cos, sin = (getattr(self, f"{name}_{kind}")[:length].to(h.dtype) for name in ("cos", "sin"))

        def heads(weight: Tensor) -> Tensor:
            return linear(h, weight).view(batch, length, -1, shape.dim(index)).transpose(1, 2)

        q, k = heads(block.attn_q), heads(block.attn_k)
        v = rms(k if shape.is_full(index) else heads(block.attn_v), None)
        q, k = (
            rope(rms(q, block.attn_q_norm), cos, sin),
            rope(rms(k, block.attn_k_norm), cos, sin),
        )
        out = attend(q, k, v, sees[kind])
        return linear(out.transpose(1, 2).reshape(batch, length, -1), block.attn_output)

    def experts(self, block: Block, x: Tensor) -> Tensor:
        """The best experts of each token; all are computed, the shares of the others are zero."""
        shape, (batch, length, width) = self.shape, x.shape
        scores = linear(
            rms(x, block.ffn_gate_inp_scale) / math.sqrt(width), block.ffn_gate_inp
        ).float()
        p = torch.softmax(scores, -1)
        p = torch.where(p >= p.topk(shape.used, -1).values[..., -1:], p, 0.0)
        share = p / p.sum(-1, keepdim=True) * block.ffn_down_exps_scale
        m = rms(x, block.pre_ffw_norm_2)
        both = linear(m, block.ffn_gate_up_exps.flatten(0, 1))
        gate, up = both.view(batch, length, shape.experts, -1).chunk(2, -1)
        hidden = gelu(gate) * up * share[..., None].to(x.dtype)
        return linear(hidden.flatten(2), block.ffn_down_exps.transpose(0, 1).flatten(1))


def feed_forward(block: Block, n: Tensor) -> Tensor:
    """The dense branch."""
    hidden = gelu(linear(n, block.ffn_gate)) * linear(n, block.ffn_up)
    return linear(hidden, block.ffn_down)


def biases(shape: Shape, empty: Tensor, length: int, dtype: torch.dtype) -> Sees:
    """What each position sees [B, 1, T, T]; the first `empty` [B] of each row are no tokens.

    Rotary positions count from the row's begin: only distances matter. An empty position sees
    itself, so that it has something to divide by."""
    place = torch.arange(length, device=empty.device)
    first = length - shape.canvas  # of the canvas
    q, k = place[:, None], place[None]
    causal = (k <= q) | (q >= first)
    near = torch.where(q < first, q - k < shape.window, k > first - shape.window)
    token = k[None] >= empty[:, None, None]
    zero = torch.zeros((), dtype=dtype, device=empty.device)
    return {
        kind: torch.where((seen & token) | (q == k), zero, float("-inf"))[:, None]
        for kind, seen in (("f", causal), ("s", causal & near))
    }


def gguf_name(name: str) -> str:
    """blk.0.ffn_gate_inp_scale is called blk.0.ffn_gate_inp.scale there, most others X.weight."""
    if name.endswith(("inp_scale", "exps_scale")):
        return name.removesuffix("_scale") + ".scale"
    return name + ".weight"
