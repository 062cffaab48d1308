"""The stored vocabulary: special tokens, bytes, then tokens learnt from text."""

import json
from pathlib import Path

from settings import DATA, VOCABULARY

from webgemma.text.tokenizer import Tokenizer

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
CONTROLS = [
    *("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|tool>", "<tool|>", "<|think|>"),
    *("<|turn>", "<turn|>", "<|image>", "<image|>", "<|audio>", "<audio|>"),
    *("<|image|>", "<|audio|>", "<|video|>"),
]
TAGS = [
    *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
    *('<|"|>', "<|channel>", "<channel|>"),
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
FIRST = [*CONTROLS, *TAGS, *BYTES]


def kind(token: str) -> int:
    """Return the GGUF type of a token."""
    for group, number in ((CONTROLS, CONTROL), (TAGS, USER_DEFINED), (BYTES, BYTE)):
        if token in group:
            return number
    return NORMAL


def load_tokenizer(path: Path = DATA / VOCABULARY) -> Tokenizer:
    """Return webgemma's tokenizer with this vocabulary."""
    file = json.loads(path.read_text())
    ids = {token: at for at, token in enumerate(file["tokens"][: len(FIRST)])}
    return Tokenizer(
        file["tokens"],
        file["merges"],
        file["token_type"],
        bos=ids["<bos>"],
        eos=ids["<eos>"],
        pad=ids["<pad>"],
        unknown=ids["<unk>"],
    )
