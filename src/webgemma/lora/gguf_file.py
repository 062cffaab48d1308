"""Adapters in GGUF files, as llama.cpp stores them: `<tensor>.lora_a` and `<tensor>.lora_b`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from math import isfinite

from webgemma.errors import GgufError, InputError
from webgemma.gguf.reader import Gguf, TensorInfo
from webgemma.gguf.sources import FileSource, Source
from webgemma.gguf.writer import NewTensor, Typed, gguf_bytes, write_gguf
from webgemma.lora.adapter import EMBEDDING, MAX_RANK, Adapter, Pair, check_adaptable
from webgemma.lora.float32 import ELEMENT_NBYTES, scaled, to_float32
from webgemma.sync import run_sync

ARCHITECTURES = ("gemma4", "gemma3")


def read_gguf_adapter(path: str | os.PathLike[str]) -> Adapter:
    """Read the adapter of a local file."""
    return run_sync(open_gguf_adapter(FileSource(path)))


async def open_gguf_adapter(source: Source) -> Adapter:
    """Read the adapter of any source, and close the source."""
    with await Gguf.aopen(source) as gguf:
        _check_kind(gguf)
        alpha = _alpha(gguf)
        halves = _halves(gguf)
        check_adaptable(gguf.name, halves)
        base = gguf.metadata.get("general.base_model.0.name", "")
        pairs = {name: await _pair(gguf, name, a, b, alpha) for name, (a, b) in halves.items()}
        architecture = str(gguf.metadata["general.architecture"])
        return Adapter(gguf.name, pairs, base if isinstance(base, str) else "", architecture)


def _check_kind(gguf: Gguf) -> None:
    kind, architecture, type_ = (
        gguf.metadata.get(key) for key in ("general.type", "general.architecture", "adapter.type")
    )
    if kind != "adapter":
        raise GgufError(f"{gguf.name} is a {str(kind or 'model')[:40]}, not an adapter.")
    if type_ != "lora":
        raise GgufError(f"{gguf.name} is an adapter of type {str(type_)[:40]!r}, not 'lora'.")
    if architecture not in ARCHITECTURES:
        raise GgufError(
            f"{gguf.name} is an adapter for {str(architecture)[:40]!r}, not for Gemma 4 or 3."
        )
    if "adapter.alora.invocation_tokens" in gguf.metadata:
        raise GgufError(
            f"{gguf.name} is an activated LoRA (aLoRA), which webgemma cannot apply; "
            "use a plain LoRA."
        )


def _alpha(gguf: Gguf) -> float:
    """Return alpha; zero if the products are added unscaled."""
    alpha = gguf.metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, int | float) or not isfinite(alpha):
        raise GgufError(f"{gguf.name}: adapter.lora.alpha is not a number.")
    return float(alpha)


def _halves(gguf: Gguf) -> dict[str, tuple[TensorInfo, TensorInfo]]:
    found: dict[str, dict[str, TensorInfo]] = {}
    for name, tensor in gguf.tensors.items():
        base, dot, half = name.rpartition(".")
        if half in ("lora_a", "lora_b") and dot:
            found.setdefault(base, {})[half] = tensor
        elif not name.endswith("_norm.weight"):
            raise GgufError(f"{gguf.name}: {name} is neither a lora_a nor a lora_b.")
    for base, halves in found.items():
        if len(halves) < 2:
            raise GgufError(f"{gguf.name}: {base} has only one of lora_a and lora_b.")
    if not found:
        raise GgufError(f"{gguf.name} is an adapter that changes nothing.")
    return {base: (halves["lora_a"], halves["lora_b"]) for base, halves in found.items()}


async def _pair(gguf: Gguf, name: str, a: TensorInfo, b: TensorInfo, alpha: float) -> Pair:
    dims = {len(a.shape), len(b.shape)}
    if name == EMBEDDING:
        rank, inputs = a.shape[:2] if dims == {2} else (0, 0)
    else:
        inputs, rank = a.shape[:2] if dims <= {2, 3} and len(dims) == 1 else (0, 0)
    experts = a.shape[2] if len(a.shape) == 3 else 1
    fits = 0 < rank <= MAX_RANK and b.shape[0] == rank and b.shape[2:] == a.shape[2:]
    if not fits:
        raise GgufError(
            f"{gguf.name}: {name} has lora_a of {a.shape} and lora_b of {b.shape}, "
            "which do not belong together."
        )
    for half in (a, b):
        if half.format.name not in ELEMENT_NBYTES:
            raise GgufError(
                f"{gguf.name}: {half.name} is stored as {half.format}; webgemma reads adapters "
                f"in {', '.join(ELEMENT_NBYTES)}",
                "convert it with --outtype f16",
            )
    first, second = [to_float32(await gguf.read(half), half.format.name) for half in (a, b)]
    scale = alpha / rank if alpha else 1.0
    return Pair(first, second, rank, inputs, b.shape[1], scale, experts)


def write_gguf_adapter(adapter: Adapter, path: str | os.PathLike[str]) -> None:
    """Write a file that llama.cpp and Ollama can apply.

    It has one alpha: where a pair's differs, its B is scaled instead."""
    write_gguf(path, *_content(adapter))


def gguf_adapter_bytes(adapter: Adapter) -> bytes:
    """Return the same file as bytes."""
    return gguf_bytes(*_content(adapter))


def _content(adapter: Adapter) -> tuple[dict[str, object], Iterator[NewTensor]]:
    if not adapter.pairs:
        raise InputError(f"The adapter {adapter.name} changes nothing: there is nothing to write.")
    alpha = Counter(pair.alpha for pair in adapter.pairs.values()).most_common(1)[0][0]
    metadata: dict[str, object] = {
        "general.architecture": adapter.architecture or ARCHITECTURES[0],
        "general.type": "adapter",
        "general.name": adapter.name,
        "adapter.type": "lora",
        "adapter.lora.alpha": Typed(alpha or 1.0, "FLOAT32"),
    }
    if adapter.base:
        metadata |= {"general.base_model.count": 1, "general.base_model.0.name": adapter.base}
    return metadata, _tensors(adapter, alpha or 1.0)


def _tensors(adapter: Adapter, alpha: float) -> Iterator[NewTensor]:
    for name, pair in adapter.pairs.items():
        experts = (pair.experts,) if name.endswith("_exps.weight") else ()
        a = (pair.rank, pair.inputs) if name == EMBEDDING else (pair.inputs, pair.rank, *experts)
        yield NewTensor(name + ".lora_a", a, "F32", pair.a)
        b = scaled(pair.b, pair.alpha / alpha)
        yield NewTensor(name + ".lora_b", (pair.rank, pair.outputs, *experts), "F32", b)
