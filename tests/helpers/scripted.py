"""A small model that says what a script has, where the script has something for a prompt.

For what only a large model can do, such as calling a tool. Template, tokenizer, limits, stop texts
and the parser of replies are the real ones: only which tokens come is not computed."""

import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import cache
from typing import Any

import pytest

from webgemma.engine.cpu import CpuEngine
from webgemma.gguf.reader import Gguf
from webgemma.sampler import SampledToken
from webgemma.text.tokenizer import Tokenizer

LOGPROB = -0.25


@cache
def _tokenizer(gguf: Gguf) -> Tokenizer:
    return Tokenizer.from_gguf(gguf)


def follow_script(patch: pytest.MonkeyPatch, script: Mapping[str, str]) -> None:
    """Let models on the CPU say a reply, in Gemma's markup, after the prompts that match a pattern.

    The first pattern that a prompt holds, as text with its tags, decides; without one, the model
    itself replies."""
    computed = CpuEngine.generate

    async def generate(
        self: CpuEngine, ids: Sequence[int], *rest: Any, **named: Any
    ) -> AsyncGenerator[SampledToken, None]:
        tokenizer = _tokenizer(self.gguf)
        prompt = tokenizer.decode(list(ids))
        for pattern, reply in script.items():
            if re.search(pattern, prompt, re.DOTALL):
                for token in tokenizer.encode(f"{reply}<turn|>", special=True):
                    yield SampledToken(token, LOGPROB, ())
                return
        async with aclosing(computed(self, ids, *rest, **named)) as tokens:
            async for sampled in tokens:
                yield sampled

    patch.setattr(CpuEngine, "generate", generate)
