"""From a prompt's ids to the pieces of a reply: limits, ends, and what draws the tokens."""

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from webgemma.defaults import DENOISING_NAMES, Settings, denoising_of
from webgemma.denoising import Canvas, tokens_of, whole_canvases
from webgemma.engine.opening import Engine
from webgemma.errors import InputError
from webgemma.gemma.config import Config
from webgemma.media.encoders import MediaSpan
from webgemma.pieces import Piece, PlainReader, ReplyReader, top_tokens
from webgemma.sampler import Chosen, Sampling
from webgemma.text.tokenizer import Tokenizer

SAMPLING_NAMES = Settings.__annotations__.keys() - DENOISING_NAMES - {"max_tokens", "stop", "watch"}


@dataclass(frozen=True, slots=True)
class Speaker:
    """A model that replies, of whatever kind."""

    config: Config
    tokenizer: Tokenizer | None
    engine: Engine
    context: int  # positions at most

    def checked(self, ids: Sequence[int]) -> list[int]:
        """The ids, when the model can read them."""
        checked = check_ids(ids, self.config.vocab, "The prompt")
        if not checked:
            raise InputError("The prompt is empty: there is nothing to continue.")
        if len(checked) > self.context:
            raise InputError(
                f"The prompt has {len(checked)} tokens, but the context holds {self.context}; "
                "shorten it or load the model with a larger context."
            )
        return checked

    async def pieces(
        self,
        ids: Sequence[int],
        reader: PlainReader | ReplyReader,
        settings: Settings,
        placed: Sequence[MediaSpan] = (),
    ) -> AsyncGenerator[Piece, None]:
        """The reply to a prompt, as the reader reads it."""
        prompt = self.checked(ids)
        limit = self._limit(len(prompt), settings)
        if limit == 0:
            return
        ends = self.tokenizer.ends if self.tokenizer else frozenset[int]()
        count = 0
        async for drawn in self._stream(prompt, settings, placed):
            if isinstance(drawn, Canvas):
                yield Piece(-1, "", 0.0, canvas=drawn)
                continue
            token, logprob, likeliest = drawn
            count += 1
            top = top_tokens(self.tokenizer, likeliest)
            if token in ends:
                yield reader.last(token, logprob, "stop", top)
                return
            if count == limit:
                yield reader.last(token, logprob, "length", top)
                return
            piece = reader.read(token, logprob, top)
            yield piece
            if piece.finish:
                return

    def _limit(self, length: int, settings: Settings) -> int:
        """How many tokens a reply to a prompt of so many may have."""
        room, diffusion = self.context - length, self.config.diffusion
        if diffusion:
            room = whole_canvases(length, diffusion.canvas, self.context)
        most = settings.get("max_tokens")
        if most is not None and most < 0:
            raise InputError(f"max_tokens is {most}; it must be 0 or more.")
        return room if most is None else min(room, most)

    def _stream(
        self, ids: list[int], settings: Settings, placed: Sequence[MediaSpan]
    ) -> AsyncIterator[Chosen | Canvas]:
        """Token after token or, of a canvas, block after block."""
        asked: dict[str, Any] = {k: v for k, v in settings.items() if k in SAMPLING_NAMES}
        sampling = Sampling(**asked)
        check_ids(list(sampling.logit_bias), self.config.vocab, "logit_bias")
        seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        if self.config.diffusion:
            denoising = denoising_of(self.config.diffusion, settings)
            canvases = self.engine.denoise(ids, denoising, seed, placed)
            return tokens_of(canvases, settings.get("watch", False))
        return self.engine.generate(ids, sampling, seed, placed)


def check_ids(ids: Sequence[int], vocab: int, what: str) -> list[int]:
    """The same as plain numbers; InputError for what is no token of the model."""
    checked = []
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise InputError(
                f"{what} holds {token!r} at position {position}; token ids are whole numbers."
            )
        if not 0 <= (token := token.__index__()) < vocab:
            raise InputError(
                f"{what} holds the id {token} at position {position}; "
                f"this model has the tokens 0 to {vocab - 1}."
            )
        checked.append(token)
    return checked
