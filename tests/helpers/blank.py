"""Models of the real shapes whose weights are zeros that are never stored: with a NullDevice, the
memory and the dispatches of a real model are counted on any machine."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import prod

from webgemma.device import Plan
from webgemma.gemma.config import (
    DENSE,
    Config,
    Diffusion,
    Embedding,
    Experts,
    Layer,
    text_tensors,
)
from webgemma.gguf.formats import FORMATS
from webgemma.gguf.reader import TensorInfo


def q4_k_m(name: str) -> str:
    """Return the format in which llama.cpp's Q4_K_M stores a matrix, roughly."""
    if name.endswith("_gate_inp.weight"):
        return "F32"
    if name in ("token_embd.weight", "per_layer_token_embd.weight"):
        return "Q6_K"
    if name == "per_layer_model_proj.weight":
        return "F16"
    return "Q5_0" if "_down_exps" in name or name == "self_cond_down.weight" else "Q4_K"


def with_better_values(name: str) -> str:
    """Return the same, with the values of some layers' attention in Q6_K as Q4_K_M has them."""
    if name.endswith("attn_v.weight") and int(name.split(".")[1]) % 3 == 0:
        return "Q6_K"
    return q4_k_m(name)


class BlankGguf:
    """The part of a Gguf that `Model.load` reads."""

    name = "blank.gguf"

    def __init__(self, config: Config, format_of: Callable[[str], str] = q4_k_m) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        for name, shape, needed in text_tensors(config):
            if needed or name.endswith("scale.weight"):
                fmt = FORMATS["F32" if len(shape) == 1 else format_of(name)]
                nbytes = fmt.row_nbytes(shape[0]) * prod(shape[1:])
                self.tensors[name] = TensorInfo(name, shape, fmt, 0, nbytes)
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.largest_read_nbytes = 0

    async def read(self, tensor: TensorInfo, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Return zeros."""
        nbytes = tensor.nbytes - offset if nbytes is None else nbytes
        assert 0 <= offset <= offset + nbytes <= tensor.nbytes
        self.largest_read_nbytes = max(self.largest_read_nbytes, nbytes)
        return bytes(nbytes)

    read_raw = read


def op_counts(plan: Plan) -> Counter[str]:
    """Return how many dispatches of a plan each op has."""
    return Counter(re.split("[ /]", dispatch.name)[0] for dispatch in plan.dispatches)


def e2b() -> Config:
    """Return Gemma 4 E2B: 35 layers, of which the last 20 read the caches of layers 13 and 14."""
    layers = tuple(
        Layer(
            index=i,
            sliding=(sliding := (i + 1) % 5 != 0),
            heads=8,
            kv_heads=1,
            head_dim=256 if sliding else 512,
            ffn=6144 if i < 15 else 12288,
            kv_donor=i if i < 15 else (13 if sliding else 14),
            k_is_v=False,
            experts=False,
        )
        for i in range(35)
    )
    return _config("E2B", layers, width=1536, window=512, context=131072, ple=256)


def a4b() -> Config:
    """Return Gemma 4 26B-A4B: 30 layers of 128 experts."""
    layers = tuple(
        Layer(
            index=i,
            sliding=(sliding := (i + 1) % 6 != 0),
            heads=16,
            kv_heads=8 if sliding else 2,
            head_dim=256 if sliding else 512,
            ffn=2112,
            kv_donor=i,
            k_is_v=not sliding,
            experts=True,
        )
        for i in range(30)
    )
    experts = Experts(count=128, used=8, ffn=704, fused=True)
    return _config("26B", layers, width=2816, window=1024, context=262144, experts=experts)


def b31() -> Config:
    """Return Gemma 4 31B: 60 layers."""
    layers = tuple(
        Layer(
            index=i,
            sliding=(sliding := (i + 1) % 6 != 0),
            heads=32,
            kv_heads=16 if sliding else 4,
            head_dim=256 if sliding else 512,
            ffn=21504,
            kv_donor=i,
            k_is_v=not sliding,
            experts=False,
        )
        for i in range(60)
    )
    return _config("31B", layers, width=5376, window=1024, context=262144)


def g3_1b() -> Config:
    """Return Gemma 3 1B: 26 layers."""
    layers = tuple(
        Layer(
            index=i,
            sliding=(i + 1) % 6 != 0,
            heads=4,
            kv_heads=1,
            head_dim=256,
            ffn=6912,
            kv_donor=i,
            k_is_v=False,
            experts=False,
        )
        for i in range(26)
    )
    gemma4 = _config("1B", layers, width=1152, window=512, context=32768)
    rope = {"rope_share": 1.0, "query_scale": 1 / 16}
    return replace(gemma4, architecture="gemma3", softcap=0.0, value_norm=False, **rope)


def embedding_300m() -> Config:
    """Return EmbeddingGemma: 24 layers and two dense ones."""
    layers = tuple(
        Layer(
            index=i,
            sliding=(i + 1) % 6 != 0,
            heads=3,
            kv_heads=1,
            head_dim=256,
            ffn=1152,
            kv_donor=i,
            k_is_v=False,
            experts=False,
        )
        for i in range(24)
    )
    gemma3 = replace(g3_1b(), layers=layers, width=768, window=257, context=2048)
    dense = Embedding(size=768, dense=DENSE, hidden=3072, ends_with_eos=True)
    return replace(gemma3, architecture="gemma-embedding", name="300M", embedding=dense)


def diffusion() -> Config:
    """Return DiffusionGemma: the same layers, and a canvas."""
    canvas = Diffusion(
        canvas=256,
        steps=48,
        t_min=0.4,
        t_max=0.8,
        entropy_bound=0.1,
        stability_threshold=1,
        confidence_threshold=0.005,
        ffn=2112,
    )
    return replace(a4b(), architecture="diffusion-gemma", name="Diffusion", diffusion=canvas)


def _config(
    name: str,
    layers: tuple[Layer, ...],
    *,
    width: int,
    window: int,
    context: int,
    ple: int = 0,
    experts: Experts | None = None,
) -> Config:
    return Config(
        architecture="gemma4",
        name=name,
        vocab=262144,
        width=width,
        context=context,
        window=window,
        layers=layers,
        eps=1e-6,
        softcap=30.0,
        query_scale=1.0,
        value_norm=True,
        rope_base=1e6,
        rope_base_sliding=1e4,
        rope_scale=1.0,
        rope_share=0.25,
        ple=ple,
        experts=experts,
        diffusion=None,
        drafter=None,
        embedding=None,
        tied=True,
        suppressed=(),
        parameters=0,
    )
