"""The public names of the package: listed here, importable, and all that the README uses."""

import re
from pathlib import Path

import webgemma

PUBLIC = {
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
}
PROJECT = Path(__file__).parents[1]
TEXTS = ("README.md", "examples/README.md", "docs/python.md", "docs/command-line.md")


def test_the_public_names_are_these() -> None:
    assert set(webgemma.__all__) == PUBLIC
    assert list(webgemma.__all__) == sorted(webgemma.__all__)
    for name in PUBLIC:
        assert getattr(webgemma, name).__doc__


def test_every_error_is_a_webgemma_error() -> None:
    errors = [getattr(webgemma, name) for name in PUBLIC if name.endswith("Error")]
    assert all(issubclass(error, webgemma.WebgemmaError) for error in errors)


def test_what_the_documents_recommend_is_public() -> None:
    found = 0
    for text in TEXTS:
        for line in re.findall(r"^from webgemma import (.+)$", (PROJECT / text).read_text(), re.M):
            names = {name.strip() for name in line.split(",")}
            assert names <= PUBLIC, text
            found += len(names)
    assert found >= 5
