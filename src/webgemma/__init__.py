"""Gemma 4 where the user is: in-process Python on any GPU, in the browser and natively."""

from webgemma.api import Gemma
from webgemma.denoising import Canvas
from webgemma.errors import (
    DeviceError,
    GgufError,
    InputError,
    ModelNotFoundError,
    StorageError,
    WebgemmaError,
)
from webgemma.gguf.reader import Gguf
from webgemma.pieces import Piece, TopToken
from webgemma.text.chat import Chat
from webgemma.text.parser import Reply, ReplyParser, ToolCall, parse_reply
from webgemma.text.tokenizer import Tokenizer

__version__ = "0.1.0"

__all__ = [
    "Canvas",
    "Chat",
    "DeviceError",
    "Gemma",
    "Gguf",
    "GgufError",
    "InputError",
    "ModelNotFoundError",
    "Piece",
    "Reply",
    "ReplyParser",
    "StorageError",
    "Tokenizer",
    "ToolCall",
    "TopToken",
    "WebgemmaError",
    "parse_reply",
]
