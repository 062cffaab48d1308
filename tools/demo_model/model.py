"""Step 3: Gemma 4 in PyTorch, for training; parameters have their GGUF names."""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from settings import Shape
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

Masks = dict[str, Any]  # of sliding ("s") and full ("f") layers: a bias, or a BlockMask


class Layer(nn.Module):
    """The weights of one layer."""

    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        width, dim, ffn = shape.width, shape.dim(index), shape.ffn_of(index)
        for norm in ("attn_norm", "ffn_norm"):
            self.register_parameter(norm, filled(width, 1.0))
        for norm in ("post_attention_norm", "post_ffw_norm", "post_norm"):
            self.register_parameter(norm, filled(width, shape.layers**-0.5))
        self.attn_q = matrix(shape.heads * dim, width)
        self.attn_output = matrix(width, shape.heads * dim)
        # The scores are q·k without a scale: they begin with a standard deviation of one.
        self.attn_q_norm = filled(dim, dim**-0.25)
        if not shape.shares(index):
            self.attn_k, self.attn_v = (matrix(shape.kv_heads * dim, width) for _ in "kv")
            self.attn_k_norm = filled(dim, dim**-0.25)
        self.ffn_gate, self.ffn_up = matrix(ffn, width), matrix(ffn, width)
        self.ffn_down = matrix(width, ffn)
        self.inp_gate, self.proj = matrix(shape.ple, width), matrix(width, shape.ple)
        self.layer_output_scale = filled(1, 1.0)


class Gemma4(nn.Module):
    """The text model: ids in, hidden states or logits out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, ple, layers = shape.width, shape.ple, shape.layers
        self.token_embd = nn.Parameter(torch.randn(shape.vocab, width) * width**-0.5)
        self.per_layer_token_embd = nn.Parameter(torch.randn(shape.vocab, ple * layers) * ple**-0.5)
        self.per_layer_model_proj = matrix(ple * layers, width)
        self.per_layer_proj_norm = filled(ple, 1.0)
        self.output_norm = filled(width, 1.0)
        self.blk = nn.ModuleList(Layer(shape, index) for index in range(layers))
        for kind, dim in (("s", shape.head_dim_sliding), ("f", shape.head_dim)):
            angles = torch.arange(shape.context)[:, None] * frequencies(shape, kind == "f", dim)
            self.register_buffer(f"cos_{kind}", angles.cos().float(), persistent=False)
            self.register_buffer(f"sin_{kind}", angles.sin().float(), persistent=False)

    def named_tensors(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every weight with its GGUF name."""
        for name, parameter in self.named_parameters():
            yield f"{name}.weight", parameter

    def forward(self, ids: Tensor, masks: Masks, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the hidden states after the last norm [B, T, width], computed in dtype."""
        shape = self.shape
        x = (F.embedding(ids, self.token_embd) * math.sqrt(shape.width)).to(dtype)
        ple = self.per_layer_inputs(ids, x)
        kv: dict[int, tuple[Tensor, Tensor]] = {}
        for index, layer in enumerate(self.blk):
            x = x + rms(
                self.attention(index, layer, rms(x, layer.attn_norm), masks, kv),
                layer.post_attention_norm,
            )
            n = rms(x, layer.ffn_norm)
            hidden = gelu(linear(n, layer.ffn_gate)) * linear(n, layer.ffn_up)
            x = x + rms(linear(hidden, layer.ffn_down), layer.post_ffw_norm)
            gate = gelu(linear(x, layer.inp_gate)) * ple[:, :, index]
            x = x + rms(linear(gate, layer.proj), layer.post_norm)
            x = x * layer.layer_output_scale.to(dtype)
        return rms(x, self.output_norm)

    def logits(self, h: Tensor) -> Tensor:
        """Return softcapped logits of hidden states, in float32."""
        cap = self.shape.softcap
        return cap * torch.tanh(linear(h, self.token_embd).float() / cap)

    def per_layer_inputs(self, ids: Tensor, x: Tensor) -> Tensor:
        """Return the per-layer inputs of each token [B, T, layers, ple]."""
        shape = self.shape
        size = (*ids.shape, shape.layers, shape.ple)
        token = F.embedding(ids, self.per_layer_token_embd) * math.sqrt(shape.ple)
        context = linear(x, self.per_layer_model_proj) / math.sqrt(shape.width)
        normed = rms(context.view(size), self.per_layer_proj_norm)
        return (normed + token.view(size).to(x.dtype)) * math.sqrt(0.5)

    def attention(
        self,
        index: int,
        layer: Layer,
        h: Tensor,
        masks: Masks,
        kv: dict[int, tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Return softmax(q kᵀ) v after the output projection.

        `kv` collects the keys and values of each layer, for the layers that share them."""
        shape, kind = self.shape, self.shape.pattern[index]
        batch, length, _ = h.shape
        cos, sin = (getattr(self, f"{name}_{kind}")[:length].to(h.dtype) for name in ("cos", "sin"))

        def heads(weight: Tensor) -> Tensor:
            return linear(h, weight).view(batch, length, -1, shape.dim(index)).transpose(1, 2)

        q = rope(rms(heads(layer.attn_q), layer.attn_q_norm), cos, sin)
        if not shape.shares(index):
            k = rope(rms(heads(layer.attn_k), layer.attn_k_norm), cos, sin)
            kv[index] = k, rms(heads(layer.attn_v), None)
        k, v = kv[shape.donor(index)]
        out = attend(q, k, v, masks[kind])
        return linear(out.transpose(1, 2).reshape(batch, length, -1), layer.attn_output)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """Compute attention without scaling; query heads share the key-value heads in order."""
    if isinstance(mask, BlockMask):
        return flex_attention(q, k, v, block_mask=mask, scale=1.0, enable_gqa=True)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)


def biases(documents: Tensor, window: int, dtype: torch.dtype) -> Masks:
    """Return attention biases within each document [B, 1, T, T]: 0, or -inf where masked."""
    position = torch.arange(documents.shape[1], device=documents.device)
    distance = position[:, None] - position[None]
    own = (documents[:, :, None] == documents[:, None]) & (distance >= 0)
    near = own & (distance < window)
    zero = torch.zeros((), dtype=dtype, device=documents.device)
    return {
        kind: torch.where(attended, zero, float("-inf"))[:, None]
        for kind, attended in (("f", own), ("s", near))
    }


def block_masks(documents: Tensor, window: int) -> Masks:
    """Return the same masks for FlexAttention, which skips blocks that are masked."""

    def own(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:  # noqa: ARG001
        return (q >= k) & (documents[b, q] == documents[b, k])

    def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return own(b, h, q, k) & (q - k < window)

    batch, length = documents.shape
    return {
        kind: create_block_mask(attended, batch, None, length, length, device=documents.device)
        for kind, attended in (("f", own), ("s", near))
    }


def frequencies(shape: Shape, full: bool, dim: int) -> Tensor:
    """Return radians per position of each pair of dimensions; on full layers most are 0."""
    base = shape.rope_base if full else shape.rope_base_sliding
    radians = base ** (-torch.arange(dim // 2, dtype=torch.float64) * 2 / dim)
    if full:
        radians[dim // 8 :] = 0
    return radians


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate dimensions j and j + d/2 of x [B, heads, T, d] together."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def rms(x: Tensor, weight: Tensor | None) -> Tensor:
    """Return x / √(mean(x²) + eps), computed in float32, times the weight."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    return (normed if weight is None else normed * weight).to(x.dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x Wᵀ in the type of x."""
    return F.linear(x, weight.to(x.dtype))


def gelu(x: Tensor) -> Tensor:
    """Return the tanh approximation of GELU."""
    return F.gelu(x, approximate="tanh")


def matrix(rows: int, columns: int) -> nn.Parameter:
    """Return a random matrix whose products have about the size of their inputs."""
    return nn.Parameter(torch.randn(rows, columns) * columns**-0.5)


def filled(size: int, value: float) -> nn.Parameter:
    """Return a vector of one value."""
    return nn.Parameter(torch.full((size,), value))
