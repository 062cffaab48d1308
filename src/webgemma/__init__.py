"""Gemma 4 where the user is: in-process Python on any GPU, in the browser and natively."""

from webgemma.api import Gemma
from webgemma.denoising import Canvas
from webgemma.errors import (
    DeviceError,
    DeviceLostError,
    DeviceMemoryError,
    GgufError,
    InputError,
    KernelError,
    MissingEncoderError,
    ModelNotFoundError,
    StorageError,
    WebgemmaError,
)
from webgemma.gguf.reader import Gguf
from webgemma.lora.adapter import Adapter
from webgemma.lora.loading import open_adapter
from webgemma.replies import Piece, TopToken, Usage
from webgemma.settings import Settings
from webgemma.text.chat import Chat
from webgemma.text.parser import Reply, ReplyParser, ToolCall, parse_reply
from webgemma.text.tokenizer import Tokenizer

__version__ = "0.1.0"

__all__ = [
    "Adapter",
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
    "ModelNotFoundError",
    "Piece",
    "Reply",
    "ReplyParser",
    "Settings",
    "StorageError",
    "Tokenizer",
    "ToolCall",
    "TopToken",
    "Usage",
    "WebgemmaError",
    "open_adapter",
    "parse_reply",
]
