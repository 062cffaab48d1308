"""Adapters that a user names: read from GGUF files and PEFT folders, fitted to a model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from webgemma.errors import InputError
from webgemma.gemma.config import Config
from webgemma.gguf.sources import user_path
from webgemma.lora.adapter import Adapter, Pair
from webgemma.lora.gguf_file import read_gguf_adapter
from webgemma.lora.peft_folder import CONFIG_FILE, WEIGHTS_FILE, read_peft_folder
from webgemma.values import real_number, shown

LoraSource: TypeAlias = "str | os.PathLike[str] | Adapter"
Lora: TypeAlias = (
    "LoraSource | tuple[LoraSource, float] | Sequence[LoraSource | tuple[LoraSource, float]] | None"
)


def open_adapter(path: str | os.PathLike[str]) -> Adapter:
    """Read a GGUF adapter, or a folder that PEFT wrote."""
    file = user_path(path)
    if file.name in (CONFIG_FILE, WEIGHTS_FILE):
        file = file.parent
    return read_peft_folder(file) if file.is_dir() else read_gguf_adapter(file)


def fitted_adapters(lora: Lora, config: Config) -> list[tuple[Mapping[str, Pair], float]]:
    """Return the pairs and the scale of each adapter, fitted to a model.

    `lora` is one of, or a list of: a path, "path:0.5", an Adapter, a tuple of one and a scale."""
    if lora is None:
        return []
    several = isinstance(lora, Sequence) and not isinstance(lora, str | tuple)
    items: Any = lora if several else [lora]
    fitted = []
    for item in items:
        source, scale = item if isinstance(item, tuple) and len(item) == 2 else (item, 1.0)
        if isinstance(source, str) and not isinstance(item, tuple):
            source, scale = _split_scale(source)
        if not isinstance(source, str | os.PathLike | Adapter):
            raise InputError(f"An adapter must be a path, not {type(source).__name__}.")
        factor = real_number(scale)
        if factor is None:
            raise InputError(f"The scale of an adapter must be a number, not {shown(scale)}.")
        adapter = source if isinstance(source, Adapter) else open_adapter(source)
        fitted.append((adapter.fitted(config).pairs, factor))
    return fitted


def _split_scale(text: str) -> tuple[str, float]:
    """Split "adapter:0.5" into ("adapter", 0.5), unless the whole is the path of a file."""
    path, colon, number = text.rpartition(":")
    if not colon or user_path(text).exists():
        return text, 1.0
    try:
        return path, float(number)
    except ValueError:
        return text, 1.0
