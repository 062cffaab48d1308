"""Gemma: load a model, ask it for logits, text or a chat, from plain or asynchronous code."""

import os
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Self, Unpack

from webgemma.defaults import (
    Message,
    Settings,
    chat_size,
    context_of,
    ollama_defaults,
    settings_for,
)
from webgemma.engine.opening import Engine, EngineOptions, GpuEngine, open_engine
from webgemma.engine.session import no_numbers
from webgemma.errors import InputError
from webgemma.gemma.config import Config
from webgemma.gguf.sources import Source
from webgemma.images import BUDGET
from webgemma.lora.adapter import Choices, fitted_adapters
from webgemma.lora.data import Texts
from webgemma.media.encoders import EncodedMedia
from webgemma.media.prompt import place_media, read_audio, read_image
from webgemma.models import find_model, is_address, not_at_once, with_mmproj
from webgemma.pieces import Piece, PlainReader, ReplyReader, StopText
from webgemma.progress import Progress, unwatched
from webgemma.prompts import conversation, text_ids
from webgemma.replies import Speaker
from webgemma.rows import are_numbers, rows_of
from webgemma.sync import iterate_sync, run_sync
from webgemma.text.chat import Chat, opens_thought
from webgemma.text.parser import ReplyParser
from webgemma.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Tool = Mapping[str, Any]


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
        self.opening = tuple(opening)  # messages before every chat: Ollama's system and messages
        self.device = engine.name  # what computes
        self._tokenizer = tokenizer
        self._engine = engine
        self._speaker = Speaker(config, tokenizer, engine, context)
        self._chat = chat

    @classmethod
    async def aload(
        cls,
        model: str | os.PathLike[str] | Source | None = None,
        device: Literal["auto", "gpu", "cpu"] = "auto",
        *,
        context: int | None = None,
        kv: Literal["f16", "f32"] = "f16",
        precision: Literal["auto", "exact", "int16", "int8"] = "auto",
        adapter: str | None = None,
        memory_gb: float | None = None,
        progress: Callable[[int, int], None] | None = None,
        mmproj: str | os.PathLike[str] | Source | None = None,
        lora: Choices = None,
    ) -> Self:
        """Load an Ollama name, a path to a .gguf, an http(s) address, or (None) the bundled model.

        Anything that is read like a file (a Source) will do, and in a browser a File or Blob.
        `context` is how many positions prompt and reply may take together: 32768, or what the
        model was made for if that is less, unless more is asked for. `adapter` names the GPU, `kv`
        is how the GPU keeps keys and values, and `progress` is told how many bytes of how many are
        loaded. `precision` is that of the activations on the GPU: exact (float32), int16 (each
        product off by 3e-5), int8 (by 6e-3); auto is int16 on a real GPU. `memory_gb` is
        what weights and cache may take of the GPU's memory (10**9 bytes each; a step works in some
        hundred megabytes more). Above it, or above what the GPU has, the table of per-layer
        embeddings stays in the file, which makes each token a little slower; a model that still
        does not fit is refused before it is loaded. `mmproj` is the file that holds the model's
        eyes and ears, where that is not the model's own or one that Ollama's store names; they are
        loaded when the first picture or sound comes. `lora` is what `set_lora` takes."""
        found = with_mmproj(find_model(model), mmproj)
        defaults, opening, asked = ollama_defaults(found)
        gguf = await found.aopen()
        try:
            config = Config.from_gguf(gguf)
            has_words = "tokenizer.ggml.tokens" in gguf.metadata
            tokenizer = Tokenizer.from_gguf(gguf) if has_words else None
            positions = context_of(config, context, asked)
            adapters = fitted_adapters(lora, config)
            options = EngineOptions(
                *(device, kv, precision, adapter, memory_gb, progress, found.label),
                projectors=found.projectors,
            )
            engine = await open_engine(gguf, config, positions, options)
            if adapters:
                _put_on(engine, adapters)
        except BaseException:
            gguf.close()
            raise
        return cls(
            found.label,
            config,
            tokenizer,
            engine,
            chat=Chat(chat_size(found, config)),
            context=positions,
            defaults=defaults,
            opening=opening,
        )

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str] | Source | None = None,
        device: Literal["auto", "gpu", "cpu"] = "auto",
        *,
        context: int | None = None,
        kv: Literal["f16", "f32"] = "f16",
        precision: Literal["auto", "exact", "int16", "int8"] = "auto",
        adapter: str | None = None,
        memory_gb: float | None = None,
        progress: Callable[[int, int], None] | None = None,
        mmproj: str | os.PathLike[str] | Source | None = None,
        lora: Choices = None,
    ) -> Self:
        """As `aload`, from plain code; nothing there can wait for a server."""
        for file in (model, mmproj):
            if is_address(file):
                raise not_at_once(file)
        loading = cls.aload(
            model,
            device,
            context=context,
            kv=kv,
            precision=precision,
            adapter=adapter,
            memory_gb=memory_gb,
            progress=progress,
            mmproj=mmproj,
            lora=lora,
        )
        return run_sync(loading)

    def set_lora(self, lora: Choices) -> None:
        """Have these low-rank adapters on from now on and no others; None takes all off.

        Each is a path (a folder of PEFT's, or a GGUF file), "path:0.5" or a tuple with how much of
        it is added. The weights stay where they are; forks have the same adapters on, and what was
        read of a conversation is read again."""
        self._engine.set_adapters(fitted_adapters(lora, self.config))

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's words."""
        if self._tokenizer is None:
            raise InputError(f"{self.name} has no vocabulary; give token ids instead of text.")
        return self._tokenizer

    def texts(self, max_tokens: int) -> Texts:
        """How rows of data become examples for this model to learn from."""
        return Texts(self.tokenizer, self._chat, max_tokens)

    async def alogits(self, ids: Sequence[int]) -> "NDArray[np.float32]":
        """Logits after each of the ids: [T, vocab] (nothing is put in front of them).

        Without numpy, as in most browser tabs, they are a list of T memoryviews of floats, one
        for each row, so that `logits[t][i]` is the same number everywhere."""
        checked = self._speaker.checked(ids)
        if self.config.diffusion:
            raise InputError(
                f"{self.name} denoises whole blocks: it has no logits of a next token; "
                "generate with watch=True to see each step."
            )
        values = await self._engine.logits(checked)
        if isinstance(values, bytes):
            values = rows_of(values, self.config.vocab)
            if not are_numbers(values, self.config.suppressed):
                raise no_numbers(self.name, self.device)
        result: NDArray[np.float32] = values
        return result

    def logits(self, ids: Sequence[int]) -> "NDArray[np.float32]":
        """As `alogits`, from plain code."""
        return run_sync(self.alogits(ids))

    async def agenerate(
        self, prompt: str | Sequence[int], *, special: bool = False, **settings: Unpack[Settings]
    ) -> AsyncGenerator[Piece, None]:
        """Continue a text (after <bos>) or ids (as they are); `special` reads tags as tokens.

        DiffusionGemma's tokens come a block at a time; with `watch=True`, pieces that hold the
        canvas after each step come between."""
        ids = text_ids(prompt, self.tokenizer, special) if isinstance(prompt, str) else prompt
        asked = settings_for(self.config, settings, self.defaults)
        reader = PlainReader(self._tokenizer, StopText(asked.get("stop", ())))
        async for piece in self._speaker.pieces(ids, reader, asked):
            yield piece

    def generate(
        self, prompt: str | Sequence[int], *, special: bool = False, **settings: Unpack[Settings]
    ) -> Iterator[Piece]:
        """As `agenerate`, from plain code."""
        return iterate_sync(self.agenerate(prompt, special=special, **settings))

    async def achat(
        self,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        think: bool = False,
        continue_last: bool = False,
        progress: Progress | None = None,
        **settings: Unpack[Settings],
    ) -> AsyncGenerator[Piece, None]:
        """The model's reply to a conversation (or to one text), as pieces.

        A picture is a part of a message's content, `{"type": "image", "image": …}`, with what
        `encode_image` takes (and perhaps a `budget`), a sound is `{"type": "audio", "audio": …}`,
        with what `encode_audio` takes; OpenAI's `image_url` and `input_audio` and Ollama's
        `images` will do, too. A film is `{"type": "video", "video": …}`: a list of pictures with
        their `fps`, or an animated GIF, WebP or PNG. `progress` is told how far encoding them is,
        and may raise to end it."""
        opened = conversation(messages, self.opening)
        parts = self._chat.parts(opened, tools, think, continue_last=continue_last)
        asked = settings_for(self.config, settings, self.defaults)
        parser = ReplyParser(think, tools, in_thought=opens_thought(parts))
        reader = ReplyReader(self.tokenizer, parser, StopText(asked.get("stop", ())))
        senses = self._engine.senses
        ids, placed = await place_media(parts, self.tokenizer, senses, progress or unwatched)
        try:
            async for piece in self._speaker.pieces(ids, reader, asked, placed):
                yield piece
        finally:
            senses.release(*(each.sensed for each in placed))

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        think: bool = False,
        continue_last: bool = False,
        progress: Progress | None = None,
        **settings: Unpack[Settings],
    ) -> Iterator[Piece]:
        """As `achat`, from plain code."""
        reply = self.achat(
            messages,
            tools=tools,
            think=think,
            continue_last=continue_last,
            progress=progress,
            **settings,
        )
        return iterate_sync(reply)

    async def aencode_image(
        self,
        image: Any,
        resize: bool = True,
        budget: int = BUDGET,
        progress: Progress | None = None,
    ) -> "NDArray[np.float32]":
        """The soft tokens that the model reads in place of a picture: [n, width].

        A picture is a path, the bytes of a file, a data: URL, a PIL image or uint8 [H, W, 3]. It
        is resized to become at most `budget` soft tokens (70, 140, 280, 560 or 1120), or not at
        all: then its sides are to be multiples of 48."""
        picture = await read_image(image, "The picture")
        senses = self._engine.senses
        wanted = budget if resize else None
        return await self._soft(await senses.see(picture, wanted, progress or unwatched))

    def encode_image(
        self,
        image: Any,
        resize: bool = True,
        budget: int = BUDGET,
        progress: Progress | None = None,
    ) -> "NDArray[np.float32]":
        """As `aencode_image`, from plain code."""
        return run_sync(self.aencode_image(image, resize, budget, progress))

    async def aencode_audio(
        self, audio: Any, progress: Progress | None = None
    ) -> "NDArray[np.float32]":
        """The soft tokens that the model reads in place of a sound, 25 a second: [n, width].

        A sound is a path, the bytes of a file (WAV, FLAC, OGG, MP3), a data: URL, or float samples
        at 16 kHz. Each 30 s are heard on their own."""
        samples = await read_audio(audio, "The sound")
        return await self._soft(await self._engine.senses.hear(samples, progress or unwatched))

    def encode_audio(self, audio: Any, progress: Progress | None = None) -> "NDArray[np.float32]":
        """As `aencode_audio`, from plain code."""
        return run_sync(self.aencode_audio(audio, progress))

    def free_encoders(self) -> None:
        """Give back the memory of the model's eyes and ears; the next picture loads them again."""
        self._engine.senses.free()

    async def asave(self, path: str | os.PathLike[str] | BinaryIO) -> None:
        """Write what the GPU keeps of the last conversation to a file, for `restore`.

        In a browser `webgemma.gguf.opfs.open_stored` gives files that stay."""
        await self.gpu("Saving a conversation").save(path)

    def save(self, path: str | os.PathLike[str] | BinaryIO) -> None:
        """As `asave`, from plain code."""
        run_sync(self.asave(path))

    async def arestore(self, path: str | os.PathLike[str] | BinaryIO) -> list[int]:
        """Take up the conversation that `save` wrote; gives its tokens, prompt and reply.

        A chat or a prompt that begins with them goes on without reading them again. The file must
        come from the same model; the context may be another one that holds them."""
        return await self.gpu("Restoring a conversation").restore(path)

    def restore(self, path: str | os.PathLike[str] | BinaryIO) -> list[int]:
        """As `arestore`, from plain code."""
        return run_sync(self.arestore(path))

    def fork(self) -> Self:
        """A second conversation on the same weights, which goes on from where this one is.

        Each has to be closed; the weights stay until the last one is."""
        return type(self)(
            self.name,
            self.config,
            self._tokenizer,
            self.gpu("A second conversation").fork(),
            chat=self._chat,
            context=self.context,
            defaults=self.defaults,
            opening=self.opening,
        )

    @property
    def memory_nbytes(self) -> int:
        """Memory of the GPU in use: weights, cache, and what a step works in."""
        return self._engine.nbytes if isinstance(self._engine, GpuEngine) else 0

    def close(self) -> None:
        """Free what the model holds."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _soft(self, sensed: EncodedMedia) -> "NDArray[np.float32]":
        """What was sensed, as numbers."""
        senses = self._engine.senses
        try:
            values = await senses.read(sensed)
        finally:
            senses.release(sensed)
        if isinstance(values, bytes):
            values = rows_of(values, self.config.width)
            if not are_numbers(values):
                raise no_numbers(self.name, self.device)
        result: NDArray[np.float32] = values
        return result

    def gpu(self, what: str) -> GpuEngine:
        """The engine on the GPU; InputError if the model is elsewhere, with `what` needs it."""
        if not isinstance(self._engine, GpuEngine):
            raise InputError(f"{what} needs the GPU; this model is loaded on the {self.device}.")
        return self._engine


def _put_on(engine: Engine, adapters: Sequence[tuple[Mapping[str, Any], float]]) -> None:
    """Put adapters on an engine; one that cannot have them is closed."""
    try:
        engine.set_adapters(adapters)
    except BaseException:
        engine.close()
        raise
