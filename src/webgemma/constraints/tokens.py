"""Tokens in constraints: special ones by name, and masks with a bit for each token.

A mask has 32-bit little-endian words, for all tokens of a model's table."""

from collections.abc import Iterable

from webgemma.errors import InputError
from webgemma.text.markup import Markup
from webgemma.text.tokenizer import Tokenizer


def special_token(tokenizer: Tokenizer, markup: Markup) -> int:
    """Return the id of a special token; InputError if the vocabulary has none."""
    token = tokenizer.special_ids.get(markup)
    if token is None:
        raise InputError(
            f"The model's vocabulary has no special token {markup}, which this needs; is it a "
            "Gemma 4 chat model?"
        )
    return token


def mask_of(tokens: Iterable[int], vocab: int) -> bytes:
    """Return the mask of some tokens of a table of so many."""
    mask = bytearray(mask_nbytes(vocab))
    for token in tokens:
        mask[token // 8] |= 1 << token % 8
    return bytes(mask)


def mask_without(tokens: Iterable[int], size: int, vocab: int) -> bytes:
    """Return the mask of all tokens of a vocabulary but some; a table may have more of them."""
    mask = bytearray(resized(b"\xff" * mask_nbytes(size), size, vocab))
    for token in tokens:
        mask[token // 8] &= ~(1 << token % 8)
    return bytes(mask)


def resized(mask: bytes, size: int, vocab: int) -> bytes:
    """Return the mask of a vocabulary as one of a table, whose other tokens are not allowed."""
    mask = mask[: (size + 7) // 8]
    if size % 8:
        mask = mask[:-1] + bytes([mask[-1] & (1 << size % 8) - 1])
    return mask.ljust(mask_nbytes(vocab), b"\0")


def mask_nbytes(vocab: int) -> int:
    """Return the size of a mask for a table of so many tokens."""
    return (vocab + 31) // 32 * 4


def allows(mask: bytes, token: int) -> bool:
    """Return whether a mask allows a token."""
    return 0 <= token < 8 * len(mask) and bool(mask[token // 8] >> token % 8 & 1)


def with_token(mask: bytes, token: int) -> bytes:
    """Return a mask that allows one token more."""
    changed = bytearray(mask)
    changed[token // 8] |= 1 << token % 8
    return bytes(changed)
