"""Batch sampler of the teacher, stories15M (a Llama of 15M weights): many stories at a time."""

import struct
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from teacher_vocabulary import BOS, EOS, HEADER_NBYTES, WEIGHTS

EPS = 1e-5
TEMPERATURE = 0.8
MIN_P = 0.04  # of the best token's probability: less likely tokens are never chosen
ENOUGH = 0.98  # share of ended stories at which the others are dropped
LENGTH = 256

LAYER = ("attn_norm", "q", "k", "v", "o", "ffn_norm", "gate", "down", "up")


class Sampler:
    """The teacher's weights; all stories of a batch grow by one token a step."""

    def __init__(self, path: Path, device: str, dtype: torch.dtype | None = None) -> None:
        self.device = device
        self.dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
        data = path.read_bytes()
        dim, hidden, self.layers, self.heads, _, vocab, _ = struct.unpack(
            "<7i", data[:HEADER_NBYTES]
        )
        values = np.frombuffer(data, np.float16, WEIGHTS, HEADER_NBYTES).astype(np.float32)
        weights = torch.from_numpy(values).to(device, self.dtype)
        at = 0

        def take(*shape: int) -> torch.Tensor:
            nonlocal at
            size = int(np.prod(shape))
            at += size
            return weights[at - size : at].view(shape)

        shapes = [(dim,), *[(dim, dim)] * 4, (dim,), (hidden, dim), (dim, hidden), (hidden, dim)]
        self.embedding = take(abs(vocab), dim)
        stacks = [take(self.layers, *shape) for shape in shapes]
        self.layer_weights = [
            dict(zip(LAYER, (s[i] for s in stacks), strict=True)) for i in range(self.layers)
        ]
        self.norm = take(dim)
        self.head_dim = dim // self.heads
        pairs = torch.arange(0, self.head_dim, 2, device=device) / self.head_dim
        angles = torch.arange(LENGTH, device=device)[:, None] * 10000.0**-pairs
        self.cos, self.sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    @torch.inference_mode()
    def sample(self, prompts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Return ids [stories, LENGTH] and the length of each; LENGTH if it did not end."""
        count = len(prompts)
        tokens = torch.zeros(count, LENGTH, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        lengths = torch.tensor([len(prompt) for prompt in prompts]).to(self.device)
        tokens = tokens.to(self.device)
        shape = (self.layers, 2, count, self.heads, LENGTH, self.head_dim)
        cache = torch.zeros(shape, device=self.device, dtype=self.dtype)
        end = torch.full((count,), LENGTH, device=self.device)
        for at in range(LENGTH - 1):
            chosen = self._choose(self._step(tokens[:, at], at, cache))
            free = at + 1 >= lengths
            tokens[:, at + 1] = torch.where(free, chosen, tokens[:, at + 1])
            ended = free & ((chosen == EOS) | (chosen == BOS)) & (end == LENGTH)
            end = torch.where(ended, at + 1, end)
            if at % 32 == 31 and float((end < LENGTH).float().mean()) > ENOUGH:
                break
        return tokens.cpu().numpy().astype(np.int32), end.cpu().numpy()

    def _step(self, ids: torch.Tensor, at: int, cache: torch.Tensor) -> torch.Tensor:
        x = self.embedding[ids]
        for layer, (keys, values) in zip(self.layer_weights, cache, strict=True):
            h = self._rms(x, layer["attn_norm"])
            q, k, v = ((h @ layer[name].T).view(len(ids), self.heads, -1) for name in "qkv")
            keys[:, :, at], values[:, :, at] = self._rope(k, at), v
            past = (keys[:, :, : at + 1], values[:, :, : at + 1])
            out = F.scaled_dot_product_attention(self._rope(q, at)[:, :, None], *past)
            x = x + out.reshape(len(ids), -1) @ layer["o"].T
            h = self._rms(x, layer["ffn_norm"])
            x = x + (F.silu(h @ layer["gate"].T) * (h @ layer["up"].T)) @ layer["down"].T
        return self._rms(x, self.norm) @ self.embedding.T

    def _choose(self, logits: torch.Tensor) -> torch.Tensor:
        p = torch.softmax(logits.float() / TEMPERATURE, -1)
        p = torch.where(p < MIN_P * p.amax(-1, keepdim=True), 0.0, p)
        return (p / torch.empty_like(p).exponential_()).argmax(-1)

    def _rope(self, x: torch.Tensor, at: int) -> torch.Tensor:
        a, b = x[..., 0::2], x[..., 1::2]
        cos, sin = self.cos[at], self.sin[at]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)

    @staticmethod
    def _rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), None, EPS).to(x.dtype) * weight
