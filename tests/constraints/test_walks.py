"""Models that choose at random under a constraint: whatever they write, it is valid."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from conftest import needs_shared
from helpers.constrained import SEEDS, Walker, constraint_of, real_tokenizer, small_tokenizer
from helpers.everyday_schemas import SCHEMAS
from jsonschema import Draft202012Validator

from webgemma.constraints.compiling import Compiler
from webgemma.constraints.native import LlguidanceCompiler
from webgemma.text.tokenizer import Tokenizer

RARELY_END = (
    "open person",
    "base and more",
    "patterns",
)  # a name is needed among all others that may be
WALKS = {"LlguidanceCompiler": SEEDS or 6, "XgrammarCompiler": SEEDS or 3}


def walk(compiler: Compiler, tokenizer: Tokenizer, name: str, seeds: Sequence[int]) -> int:
    """Check replies for a schema, and return how many there were."""
    schema, count = SCHEMAS[name], 0
    checker = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    start = constraint_of(compiler, schema=schema)
    for seed in seeds:
        # Every other one chooses without any wish to end, but for its length.
        tokens = Walker(tokenizer, seed, to_end=0.3 * (seed % 2)).walk(start.copy())
        if tokens is not None:
            text = tokenizer.decode(tokens, special=True)
            problems = [error.message for error in checker.iter_errors(json.loads(text))]
            assert not problems, (name, text)
            count += 1
    return count


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_is_written_is_valid(compiler: Compiler, name: str) -> None:
    seeds = range(WALKS[type(compiler).__name__])
    ended = walk(compiler, small_tokenizer(), name, seeds)
    assert ended or name in RARELY_END


@needs_shared
def test_with_gemmas_own_vocabulary() -> None:
    tokenizer = real_tokenizer()
    compiler = LlguidanceCompiler(tokenizer, tokenizer.size)
    names = random.Random(1).sample(sorted(SCHEMAS), 15)
    assert sum(walk(compiler, tokenizer, name, [1]) for name in names) > 10


def test_forced_tokens_are_those_that_the_masks_allow(compiler: Compiler) -> None:
    tokenizer, forced = small_tokenizer(), 0
    schema: dict[str, Any] = SCHEMAS["nested"]
    constraint = constraint_of(compiler, schema=schema)
    text = '{"user":{"address":{"street":"a","city":"b"},"phones":[]}}'
    at = 0
    tokens = tokenizer.encode(text)
    while at < len(tokens):
        must = constraint.forced()
        ahead = constraint.copy()
        for token in must:
            ahead.accept(token)
        written = tokenizer.decode(must)
        assert tokenizer.decode(tokens[at:]).startswith(written)
        forced += bool(must)
        constraint.accept(tokens[at])
        at += 1
    assert forced > 5
