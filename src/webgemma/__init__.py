"""Gemma 4 where the user is: in-process Python on any GPU, in the browser and natively.

The public names are imported when they are first used, so that `webgemma`, the command, starts at
once and can answer Ctrl-C from its first instant."""

TYPE_CHECKING = False  # as in typing, which takes longer to import than all of this file
if TYPE_CHECKING:
    from webgemma.api import Gemma
    from webgemma.batches import BatchReply
    from webgemma.denoising import Canvas
    from webgemma.engine.interface import Slot
    from webgemma.errors import (
        DeviceError,
        DeviceLostError,
        DeviceMemoryError,
        GgufError,
        InputError,
        KernelError,
        MissingEncoderError,
        MissingPackageError,
        ModelNotFoundError,
        StorageError,
        WebgemmaError,
    )
    from webgemma.gguf.reader import Gguf
    from webgemma.lora.adapter import Adapter
    from webgemma.lora.loading import open_adapter
    from webgemma.replies import Piece, ToolResult, TopToken, Usage
    from webgemma.settings import Settings
    from webgemma.text.chat import Chat
    from webgemma.text.parser import Reply, ReplyParser, ToolCall, parse_reply
    from webgemma.text.tokenizer import Tokenizer

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "BatchReply",
    "Canvas",
    "Chat",
    "DeviceError",
    "DeviceLostError",
    "DeviceMemoryError",
    "Gemma",
    "Gguf",
    "GgufError",
    "InputError",
    "KernelError",
    "MissingEncoderError",
    "MissingPackageError",
    "ModelNotFoundError",
    "Piece",
    "Reply",
    "ReplyParser",
    "Settings",
    "Slot",
    "StorageError",
    "Tokenizer",
    "ToolCall",
    "ToolResult",
    "TopToken",
    "Usage",
    "WebgemmaError",
    "open_adapter",
    "parse_reply",
]

_MODULES = (  # of the public names; the first one imports most of the others
    *("api", "batches", "denoising", "engine.interface", "errors", "gguf.reader"),
    *("lora.adapter", "lora.loading", "replies", "settings"),
    *("text.chat", "text.parser", "text.tokenizer"),
)


def __getattr__(name: str) -> object:
    from importlib import import_module

    for module in [import_module(f"webgemma.{module}") for module in _MODULES]:
        if name in __all__ and hasattr(module, name):
            return globals().setdefault(name, getattr(module, name))
    if name in globals():  # a module, such as webgemma.errors
        return globals()[name]
    raise AttributeError(f"module 'webgemma' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
