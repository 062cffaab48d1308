"""A small model that says what a script has, where the script has something for a prompt.

For what only a large model can do, such as calling a tool. Template, tokenizer, limits, stop texts
and the parser of replies are the real ones: only which tokens come is not computed."""

import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import cache

import pytest

from webgemma.constraints.tokens import allows
from webgemma.engine.constraints import Constraint
from webgemma.engine.cpu import CpuEngine
from webgemma.gemma.lora_weights import NO_CHOICE, Choice
from webgemma.gguf.reader import Gguf
from webgemma.media.encoders import MediaSpan
from webgemma.sampler import SampledToken
from webgemma.settings import Settings
from webgemma.text.tokenizer import Tokenizer

LOGPROB = -0.25


@cache
def _tokenizer(gguf: Gguf) -> Tokenizer:
    return Tokenizer.from_gguf(gguf)


def follow_script(patch: pytest.MonkeyPatch, script: Mapping[str, str]) -> None:
    """Let models on the CPU say a reply, in Gemma's markup, after the prompts that match a pattern.

    The first pattern that a prompt holds, as text with its tags, decides; without one, or where a
    constraint has a say in the first token, the model itself replies."""
    computed = CpuEngine.generate

    async def generate(
        self: CpuEngine,
        ids: Sequence[int],
        settings: Settings,
        seed: int,
        media: Sequence[MediaSpan] = (),
        constraint: Constraint | None = None,
        choice: Choice = NO_CHOICE,
    ) -> AsyncGenerator[SampledToken, None]:
        tokenizer = _tokenizer(self.gguf)
        prompt = tokenizer.decode(list(ids))
        is_free = constraint is None or constraint.mask() is None
        for pattern, reply in script.items() if is_free else ():
            if re.search(pattern, prompt, re.DOTALL):
                for token in _said(tokenizer, reply, constraint):
                    yield SampledToken(token, LOGPROB, ())
                return
        replies = computed(self, ids, settings, seed, media, constraint, choice)
        async with aclosing(replies) as tokens:
            async for sampled in tokens:
                yield sampled

    patch.setattr(CpuEngine, "generate", generate)


def _said(tokenizer: Tokenizer, reply: str, constraint: Constraint | None) -> Iterator[int]:
    """Yield the tokens of a reply, which ends where a constraint lets nothing else follow.

    Otherwise it says what it says, also what no model could say under the constraint."""
    for token in tokenizer.encode(f"{reply}<turn|>", special=True):
        mask = None if constraint is None else constraint.mask()
        if mask is not None and not allows(mask, token):
            if constraint is not None and constraint.is_over:
                yield min(tokenizer.ends)
                return
            constraint = None
        if constraint is not None:
            constraint.accept(token)
        yield token
