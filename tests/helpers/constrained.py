"""Replies under a constraint: texts cut into tokens, and models that choose at random."""

import json
import lzma
import os
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from conftest import FIXTURES, SHARED

from webgemma.constraints.compiling import Compiler, constrain
from webgemma.constraints.specifications import specification
from webgemma.constraints.tokens import allows
from webgemma.engine.constraints import Constraint
from webgemma.errors import InputError
from webgemma.gguf.reader import Gguf
from webgemma.sync import run_sync
from webgemma.text.tokenizer import Tokenizer

SCHEMAS = FIXTURES / "schemas"
SEEDS = int(os.environ.get("WEBGEMMA_SEEDS", "0"))  # of a thorough run; 0: a share of it
MAX_TOKENS = 400  # of a random walk


@cache
def small_tokenizer() -> Tokenizer:
    """A vocabulary of about a thousand tokens, structured as Gemma 4's."""
    metadata = json.loads((FIXTURES / "text" / "tokenizer-small.json").read_text())
    return Tokenizer.from_gguf(SimpleNamespace(name="small.gguf", metadata=metadata))


@cache
def real_tokenizer() -> Tokenizer:
    """Gemma 4's own vocabulary, which is in shared/fixtures only."""
    data = lzma.decompress((SHARED / "vocab" / "gemma4-vocab.gguf.xz").read_bytes())
    with TemporaryDirectory() as folder:
        path = Path(folder) / "vocab.gguf"
        path.write_bytes(data)
        with Gguf.open(path) as gguf:
            return Tokenizer.from_gguf(gguf)


def constraint_of(compiler: Compiler, **asked: Any) -> Constraint:
    """Return the constraint of a specification."""
    constraint = run_sync(constrain(compiler, specification(**asked)))
    assert constraint is not None
    return constraint


def lines(name: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of tests/fixtures/schemas."""
    for line in (SCHEMAS / name).read_text().splitlines():
        yield json.loads(line)


def accepts(constraint: Constraint, tokens: Sequence[int], end: int) -> bool:
    """Return whether every mask allows the next token, and the last one the end.

    The mask and `accept` have to agree about each of them."""
    constraint = constraint.copy()
    for token in (*tokens, end):
        mask = constraint.mask()
        is_allowed = mask is None or allows(mask, token)
        try:
            constraint.accept(token)
        except InputError:
            assert not is_allowed, f"the mask allows {token}, but it is not accepted"
            return False
        assert is_allowed, f"{token} is accepted, but the mask does not allow it"
    return True


class Cutter:
    """Cuts texts into tokens of a vocabulary in any way, not only in that of its tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = set(tokenizer.special_ids.values())
        self._by_bytes: dict[bytes, list[int]] = {}
        for token in range(tokenizer.size):
            if token not in special:
                self._by_bytes.setdefault(tokenizer.token_bytes(token), []).append(token)
        self._longest = max(map(len, self._by_bytes))

    def cut(self, text: str, rng: random.Random) -> list[int]:
        """Return random tokens whose text this is."""
        data, tokens, at = text.encode(), [], 0
        while at < len(data):
            ends = [
                end
                for end in range(at + 1, min(at + self._longest, len(data)) + 1)
                if data[at:end] in self._by_bytes
            ]
            end = rng.choice(ends)
            tokens.append(rng.choice(self._by_bytes[data[at:end]]))
            at = end
        return tokens


class Walker:
    """A model that chooses among the allowed tokens at random.

    It prefers to end: the longer its reply is, the rather it takes tokens that close something."""

    def __init__(self, tokenizer: Tokenizer, seed: int, *, to_end: float = 0.2) -> None:
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)
        self._to_end = to_end
        closing = {'"', "}", "]", '"}', '"]', "0", "1", ",", '",', '":', ":", "a"}
        self._closing = {
            token
            for token in range(tokenizer.size)
            if tokenizer.piece(token) in closing
            or tokenizer.piece(token) in ("<tool_call|>", '<|"|>')
        }

    def walk(self, constraint: Constraint) -> list[int] | None:
        """Return the tokens of a reply without its end; None if it became too long."""
        tokens: list[int] = []
        while len(tokens) < MAX_TOKENS:
            mask = constraint.mask()
            assert mask is not None
            found = allowed(mask)
            assert found, "nothing is allowed"
            assert found[-1] < self._tokenizer.size
            ends = [token for token in found if token in self._tokenizer.ends]
            others = [token for token in found if token not in self._tokenizer.ends]
            assert not ends or set(ends) == set(self._tokenizer.ends)
            assert constraint.is_over == (not others)
            wish = self._to_end + len(tokens) / MAX_TOKENS
            if ends and (not others or self._rng.random() < wish):
                constraint.accept(ends[0])
                assert constraint.is_over
                return tokens
            closing = [token for token in others if token in self._closing]
            token = self._rng.choice(closing if closing and self._rng.random() < wish else others)
            constraint.accept(token)
            tokens.append(token)
        return None


def allowed(mask: bytes) -> list[int]:
    """Return the tokens that a mask allows."""
    return [
        8 * at + bit for at, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1
    ]
