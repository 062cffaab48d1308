"""Gemma: load a model, ask it for logits, text or a chat, from plain or asynchronous code."""

import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypedDict, Unpack

from webgemma.blocking import each, finish
from webgemma.errors import InputError, WebgemmaError
from webgemma.gemma.config import Config
from webgemma.gguf.reader import Gguf
from webgemma.models import FoundModel, find_model
from webgemma.pieces import Piece, PlainReader, ReplyReader, StopText
from webgemma.sampler import Sampling
from webgemma.text.chat import Chat, encode_parts, opens_thought
from webgemma.text.parser import ReplyParser
from webgemma.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Message = Mapping[str, Any]
Tool = Mapping[str, Any]


class Settings(TypedDict, total=False):
    """How to generate; what is left out is the model's own default, then Gemma's."""

    max_tokens: int | None  # None: until the model ends or the context is full
    stop: str | Sequence[str]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    recent: int
    logit_bias: Mapping[int, float]
    seed: int | None


SAMPLING_NAMES = Settings.__annotations__.keys() - {"max_tokens", "stop"}


class Engine(Protocol):
    """What computes: the reference on the CPU, or the GPU."""

    async def logits(self, ids: Sequence[int]) -> Any: ...

    def generate(
        self, ids: Sequence[int], sampling: Sampling, seed: int
    ) -> AsyncIterator[tuple[int, float]]: ...

    def close(self) -> None: ...


class Gemma:
    """A loaded model."""

    def __init__(
        self,
        name: str,
        config: Config,
        tokenizer: Tokenizer | None,
        engine: Engine,
        *,
        chat: Chat,
        context: int,
        defaults: Settings | None = None,
        opening: Sequence[Message] = (),
    ) -> None:
        self.name = name
        self.config = config
        self.context = context  # positions at most, prompt and reply together
        self.defaults: Settings = defaults or {}
        self.opening = tuple(
            opening
        )  # messages that stand before a chat (Ollama's system and messages)
        self._tokenizer = tokenizer
        self._engine = engine
        self._chat = chat

    @classmethod
    async def aload(
        cls,
        model: str | os.PathLike[str] | None = None,
        device: Literal["auto", "gpu", "cpu"] = "auto",
        *,
        context: int | None = None,
    ) -> Self:
        """Load an Ollama name, a path to a .gguf, or (None) the bundled model."""
        found = find_model(model)
        gguf = found.open()
        try:
            config = Config.from_gguf(gguf)
            has_words = "tokenizer.ggml.tokens" in gguf.metadata
            tokenizer = Tokenizer.from_gguf(gguf) if has_words else None
            engine = _engine(gguf, config, device)
        except BaseException:
            gguf.close()
            raise
        defaults, opening, asked = _ollama_defaults(found)
        return cls(
            found.label,
            config,
            tokenizer,
            engine,
            chat=Chat(_chat_size(found, config)),
            context=_context(config, context, asked),
            defaults=defaults,
            opening=opening,
        )

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str] | None = None,
        device: Literal["auto", "gpu", "cpu"] = "auto",
        *,
        context: int | None = None,
    ) -> Self:
        """As `aload`, from plain code."""
        return finish(cls.aload(model, device, context=context))

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's words."""
        if self._tokenizer is None:
            raise InputError(f"{self.name} has no vocabulary; give token ids instead of text.")
        return self._tokenizer

    async def alogits(self, ids: Sequence[int]) -> "NDArray[np.float32]":
        """Logits after each of the ids: [T, vocab] (nothing is put in front of them)."""
        result: NDArray[np.float32] = await self._engine.logits(self._checked(ids))
        return result

    def logits(self, ids: Sequence[int]) -> "NDArray[np.float32]":
        """As `alogits`, from plain code."""
        return finish(self.alogits(ids))

    async def agenerate(
        self, prompt: str | Sequence[int], *, special: bool = False, **settings: Unpack[Settings]
    ) -> AsyncGenerator[Piece, None]:
        """Continue a text (after <bos>) or ids (as they are); `special` reads tags as tokens."""
        ids = self._prompt_ids(prompt, special)
        chosen = self._settings(settings)
        reader = PlainReader(self._tokenizer, StopText(chosen.get("stop", ())))
        async for piece in self._pieces(ids, reader, chosen):
            yield piece

    def generate(
        self, prompt: str | Sequence[int], *, special: bool = False, **settings: Unpack[Settings]
    ) -> Iterator[Piece]:
        """As `agenerate`, from plain code."""
        return each(self.agenerate(prompt, special=special, **settings))

    async def achat(
        self,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        think: bool = False,
        continue_last: bool = False,
        **settings: Unpack[Settings],
    ) -> AsyncGenerator[Piece, None]:
        """The model's reply to a conversation (or to one text), as pieces."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        messages = self._opened(messages)
        parts = self._chat.parts(messages, tools, think, continue_last=continue_last)
        ids = encode_parts(self.tokenizer, parts)
        chosen = self._settings(settings)
        parser = ReplyParser(think, tools, in_thought=opens_thought(parts))
        reader = ReplyReader(self.tokenizer, parser, StopText(chosen.get("stop", ())))
        async for piece in self._pieces(self._checked(ids), reader, chosen):
            yield piece

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        think: bool = False,
        continue_last: bool = False,
        **settings: Unpack[Settings],
    ) -> Iterator[Piece]:
        """As `achat`, from plain code."""
        return each(
            self.achat(messages, tools=tools, think=think, continue_last=continue_last, **settings)
        )

    def close(self) -> None:
        """Free what the model holds."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _pieces(
        self, ids: list[int], reader: PlainReader | ReplyReader, settings: Settings
    ) -> AsyncGenerator[Piece, None]:
        room = self.context - len(ids)
        most = settings.get("max_tokens")
        if most is not None and most < 0:
            raise InputError(f"max_tokens is {most}; it must be 0 or more.")
        limit = room if most is None else min(room, most)
        if limit == 0:
            return
        chosen: dict[str, Any] = {k: v for k, v in settings.items() if k in SAMPLING_NAMES}
        sampling = Sampling(**chosen)
        _check_ids(list(sampling.logit_bias), self.config.vocab, "logit_bias")
        seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        ends = self._tokenizer.ends if self._tokenizer else frozenset[int]()
        count = 0
        async for token, logprob in self._engine.generate(ids, sampling, seed):
            count += 1
            if token in ends:
                yield reader.last(token, logprob, "stop")
                return
            if count == limit:
                yield reader.last(token, logprob, "length")
                return
            piece = reader.read(token, logprob)
            yield piece
            if piece.finish:
                return

    def _prompt_ids(self, prompt: str | Sequence[int], special: bool) -> list[int]:
        if not isinstance(prompt, str):
            return self._checked(prompt)
        ids = self.tokenizer.encode(prompt, special=special)
        if ids[:1] != [self.tokenizer.bos]:
            ids = [self.tokenizer.bos, *ids]
        return self._checked(ids)

    def _checked(self, ids: Sequence[int]) -> list[int]:
        """The ids, when the model can read them."""
        checked = _check_ids(ids, self.config.vocab, "The prompt")
        if not checked:
            raise InputError("The prompt is empty: there is nothing to continue.")
        if len(checked) > self.context:
            raise InputError(
                f"The prompt has {len(checked)} tokens, but the context holds {self.context}; "
                "shorten it or load the model with a larger context."
            )
        return checked

    def _opened(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The conversation after the model's own opening; a system message replaces that one."""
        own_system = any(isinstance(m, Mapping) and m.get("role") == "system" for m in messages)
        kept = [m for m in self.opening if not (own_system and m.get("role") == "system")]
        return [*kept, *messages] if kept else messages

    def _settings(self, settings: Settings) -> Settings:
        unknown = set(settings) - set(Settings.__annotations__)
        if unknown:
            known = ", ".join(Settings.__annotations__)
            raise InputError(f"There is no setting {sorted(unknown)[0]!r}; there are: {known}.")
        return {**self.defaults, **settings}


def _engine(gguf: Gguf, config: Config, device: str) -> Engine:
    if device not in ("auto", "gpu", "cpu"):
        raise InputError(f"There is no device {device!r}; choose auto, gpu or cpu.")
    if device == "gpu":
        raise WebgemmaError("This version computes on the CPU only; use device='cpu' (or 'auto').")
    if config.diffusion:
        raise WebgemmaError(
            f"{gguf.name}: this version reads DiffusionGemma files but cannot run them."
        )
    from webgemma.reference.engine import ReferenceEngine  # numpy: natively only

    return ReferenceEngine(gguf, config)


def _check_ids(ids: Sequence[int], vocab: int, what: str) -> list[int]:
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


def _context(config: Config, asked: int | None, default: object) -> int:
    """Positions at most: what is asked for, else the model's default, else all it was made for."""
    if asked is None:
        fitting = isinstance(default, int) and 1 <= default <= config.context
        return default if fitting else config.context  # type: ignore[return-value]
    if not 1 <= asked <= config.context:
        raise InputError(
            f"A context of {asked} is not possible; this model's is 1 to {config.context}."
        )
    return asked


def _chat_size(found: FoundModel, config: Config) -> Literal["small", "large"]:
    """E2B and E4B, the models with per-layer embeddings, have the small template."""
    renderer = found.ollama.config.get("renderer") if found.ollama else None
    if renderer in ("gemma4-small", "gemma4-large"):
        return "small" if renderer == "gemma4-small" else "large"
    return "small" if config.ple else "large"


# Ollama's name of a parameter -> ours.
_OLLAMA_PARAMS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "repeat_last_n": "recent",
    "stop": "stop",
    "seed": "seed",
    "num_predict": "max_tokens",
}


def _ollama_defaults(found: FoundModel) -> tuple[Settings, list[Message], int | None]:
    """Settings, opening messages and context length that an Ollama model brings along."""
    if found.ollama is None:
        return {}, [], None
    params = found.ollama.params
    settings: Any = {ours: params[name] for name, ours in _OLLAMA_PARAMS.items() if name in params}
    for name in ("seed", "max_tokens"):  # negative means unset to Ollama
        if isinstance(settings.get(name), int) and settings[name] < 0:
            settings[name] = None
    system = found.ollama.system
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    context = params.get("num_ctx")
    return settings, opening + list(found.ollama.messages), context
