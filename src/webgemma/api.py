"""Gemma: a loaded model that chats, generates, embeds, computes logits, encodes images and audio.

Each method is written once, as a coroutine or an asynchronous generator, and has two faces: a plain
one (`chat`), which blocks, and an asynchronous one (`achat`), which never blocks the event loop."""

import math
import os
import warnings
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from itertools import pairwise
from typing import (
    TYPE_CHECKING,
    Any,
    BinaryIO,
    Literal,
    NoReturn,
    Self,
    TypeAlias,
    Unpack,
    cast,
    get_args,
)

from webgemma.batches import BatchReply, replies_beside
from webgemma.calling.functions import declared_tools
from webgemma.calling.rounds import Confirm, Functions, check_rounds, replies_with_functions
from webgemma.constraints.compiling import prepare
from webgemma.constraints.structure import Structure
from webgemma.embeddings import (
    Task,
    Texts,
    check_batch,
    joined_rows,
    lacks_dense_layers,
    listed,
    unit_rows,
)
from webgemma.engine.batching import not_finite
from webgemma.engine.embedding import EmbeddingEngine
from webgemma.engine.gpu import GpuEngine
from webgemma.engine.interface import (
    DeviceName,
    Embedder,
    Engine,
    EngineOptions,
    KvName,
    PrecisionName,
    Slot,
    check_slots,
)
from webgemma.engine.opening import open_engine
from webgemma.errors import InputError, WebgemmaError
from webgemma.faces import (
    asynchronous,
    asynchronous_constructor,
    asynchronous_stream,
    plain,
    plain_constructor,
    plain_stream,
)
from webgemma.gemma.config import Config
from webgemma.gemma.lora_weights import Choice
from webgemma.gguf.sources import Source
from webgemma.images import BUDGET
from webgemma.lora.data import ExampleReader
from webgemma.lora.loading import Lora, LoraSource, fitted_adapters
from webgemma.media.encoders import EncodedMedia, MediaSpan
from webgemma.media.fitting import count_left_out, fit_turns
from webgemma.media.prompt import encode_media, read_audio, read_image, read_turns
from webgemma.models import (
    FoundModel,
    Message,
    ModelDefaults,
    find_model,
    is_address,
    needs_await,
    with_draft,
    with_mmproj,
)
from webgemma.notebook import AsyncStream, Stream, loading_bar, table
from webgemma.progress import Progress, ignore_progress
from webgemma.replies import Piece, PlainReader, Replies, ReplyReader, StopText, too_long
from webgemma.settings import Settings, resolve
from webgemma.structured import Structures, extracted, extraction, with_value
from webgemma.sync import Worker, drive_aside, for_caller, has_event_loop, run_sync
from webgemma.text.chat import Chat, opens_thought
from webgemma.text.inputs import wrong_type
from webgemma.text.sizes import least_length, without_oldest
from webgemma.text.tokenizer import Tokenizer
from webgemma.values import real_number, shown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Tool = Mapping[str, Any] | Callable[..., Any]  # a declaration, or a Python function
Overflow = Literal["drop", "error"]  # what becomes of a conversation that the context cannot hold
MAX_ROUNDS = 10  # of functions that are called
SavedPath: TypeAlias = "str | os.PathLike[str] | BinaryIO"
LoraChoice: TypeAlias = "str | Mapping[str, float] | None"  # of attached adapters


class Gemma:
    """A loaded model, which `Gemma.load(model=None, device="auto", …)` makes; `with` closes it.

    - `chat(messages, tools=…, think=…, continue_last=…, …)` replies to a conversation, and
      `generate(prompt, …)` continues a text; both yield pieces as they are generated.
    - `batch(prompts, …)` replies to many conversations, side by side on the model's `slots`, and
      `extract(text, schema)` returns what a text says as JSON or an instance of a class.
    - `count_tokens(messages, …)` and `render(messages, …)` say what the prompt of a chat is.
    - `embed(texts, task=…, size=…)` returns vectors, of an embedding model.
    - `logits(ids)`, `encode_image(image)` and `encode_audio(audio)` return arrays.
    - `set_lora(lora)` applies adapters, `attach_lora(adapters)` lets calls choose among some;
      `fork()`, `save(path)` and `restore(path)` are for conversations; `close()` frees what the
      model holds.

    What computes can also be awaited, by a name that begins with an a: `aload`, `achat` and so on.
    `help(Gemma.load)` and `help(Gemma.chat)` explain all parameters and settings."""

    def __init__(
        self,
        name: str,
        config: Config,
        tokenizer: Tokenizer | None,
        engine: Engine,
        *,
        chat: Chat,
        context: int,
        defaults: ModelDefaults,
        worker: Worker | None = None,
    ) -> None:
        self.name = name
        self.config = config
        self.context = context  # positions of prompt and reply together, at most
        self.defaults = defaults.settings
        self.opening = defaults.opening  # messages before every chat: Ollama's system and messages
        self.device = engine.name  # what computes
        self._worker = worker or Worker()
        self._model_defaults = defaults
        self._tokenizer = tokenizer
        self._engine = engine
        self._replies = Replies(config, tokenizer, engine, context)
        self._template = chat
        self._structures = Structures(name, config, lambda: self.tokenizer)
        self.worker = self._worker

    @property
    def worker(self) -> Worker:
        """What drives the coroutines of this model."""
        return self._worker

    @worker.setter
    def worker(self, worker: Worker) -> None:
        self._worker = worker
        if isinstance(self._engine, GpuEngine):
            self._engine.attach(worker)

    def __repr__(self) -> str:
        return f"<Gemma {self.name!r} on {self.device}, context {self.context}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows of the model."""
        kind = "embedding model" if self.config.embedding else "diffusion model"
        rows: list[tuple[str, object]] = [
            ("Gemma", self.name),
            ("computes on", self.device),
            ("context", f"{self.context:,} tokens"),
            ("GPU memory", f"{self.memory_nbytes / 1e9:.2f} GB"),
        ]
        writes = not (self.config.embedding or self.config.diffusion)
        return table(rows[: 4 if self.memory_nbytes else 3] + [("kind", kind)] * (not writes))

    def __reduce__(self) -> NoReturn:
        raise InputError(
            f"{self.name} is loaded and cannot be pickled or copied",
            "load it in each process, with Gemma.load(…); in the same one, fork() gives a second "
            "conversation",
        )

    # Loading

    @classmethod
    async def _load(
        cls,
        model: str | os.PathLike[str] | Source | FoundModel | None = None,
        device: DeviceName = "auto",
        *,
        context: int | None = None,
        kv: KvName = "f16",
        precision: PrecisionName = "auto",
        gpu: str | None = None,
        memory_gb: float | None = None,
        slots: int | None = None,
        progress: Progress | None = None,
        mmproj: str | os.PathLike[str] | Source | None = None,
        draft: str | os.PathLike[str] | Source | Literal[False] | None = None,
        lora: Lora = None,
    ) -> "Gemma":
        """Load an Ollama name, a path to a .gguf, an http(s) address, or (None) the bundled model.

        `model` may also be any Source and, in a browser, a File or Blob. Addresses need `aload`.

        - `device`: "gpu", "cpu" (the reference in numpy), or "auto".
        - `context`: positions of prompt and reply together; by default 32768, or fewer if the model
          was trained for fewer.
        - `kv`: how the GPU stores keys and values.
        - `precision`: of the activations on the GPU: exact (float32), int16 (the relative error of
          a product is 3e-5), int8 (6e-3), or f16, with which matrix units multiply prompts and
          other batches (3e-4; single tokens as int16). auto is f16 on a GPU with matrix units, else
          int16; without them f16 is int16. On a software GPU auto is exact. With f16, images and
          audio are encoded in float16, too, else in float32.
        - `gpu`: a part of the name of the GPU to use, where there are several. "dawn" or "wgpu"
          chooses a WebGPU library, "dawn:NAME" or "wgpu:NAME" also one of its GPUs; by default it
          is Dawn where that is installed and reaches the matrix units of the GPU.
        - `memory_gb`: what weights and cache may take of the GPU's memory (in 10**9 bytes; a step
          works in some hundred megabytes more). If the model needs more than that, or than the GPU
          has, its table of per-layer embeddings stays in the file, which makes each token a little
          slower; a model that still does not fit is refused before it is loaded.
        - `slots`: how many conversations the GPU computes at once, at most (1 to 64). Each has a
          cache of its own. A number: their memory is taken now, and the model is refused if there
          is too little. None: up to 4, or as many as `memory_gb` and the GPU have memory for, which
          is taken when they are first needed.
        - `progress`: called with the bytes that are loaded and their total; it may raise to end
          loading. By default a notebook shows a bar.
        - `mmproj`: the file of the vision and audio encoders, if it is neither the model's own file
          nor in Ollama's store. They are loaded with the first image or audio.
        - `draft`: the file of the model's drafter (gemma4-assistant), with which the GPU writes the
          same text in fewer steps; by default the one that Ollama's store has for the model, if it
          has one, and False: none.
        - `lora`: as for `set_lora`."""
        for file in (model, mmproj, draft):
            if is_address(file) and not has_event_loop():
                raise needs_await(file)
        conversations = check_slots(slots)
        found = with_draft(with_mmproj(find_model(model), mmproj), draft)
        defaults, drafter = found.defaults(), found.draft()
        bar = loading_bar(found.label) if progress is None else None
        shown = bar or progress
        gguf = await found.aopen()
        try:
            config = Config.from_gguf(gguf)
            has_vocabulary = "tokenizer.ggml.tokens" in gguf.metadata
            tokenizer = Tokenizer.from_gguf(gguf) if has_vocabulary else None
            positions = defaults.choose_context(config, context)
            adapters = fitted_adapters(lora, config)
            options = EngineOptions(
                device=device,
                kv=kv,
                precision=precision,
                gpu=gpu,
                memory_gb=memory_gb,
                slots=conversations,
                progress=None if shown is None else _reporter(shown),
                label=found.label,
                projectors=found.projectors,
                draft=drafter.aopen if drafter else None,
            )
            engine = await open_engine(gguf, config, positions, options)
        except BaseException:
            gguf.close()
            raise
        if bar:
            for_caller(bar.end)()
        try:
            if adapters:
                engine.set_adapters(adapters)
        except BaseException:
            engine.close()
            raise
        if config.embedding and config.embedding.is_cut:
            warnings.warn(lacks_dense_layers(found.label), stacklevel=2)
        template = Chat(found.chat_size(config))
        return cls(
            found.label,
            config,
            tokenizer,
            engine,
            chat=template,
            context=positions,
            defaults=defaults,
        )

    load = plain_constructor(_load)
    aload = asynchronous_constructor(_load)

    def set_lora(self, lora: Lora) -> None:
        """Apply these LoRA adapters from now on and no others; None removes all.

        One or a list of: a path (a PEFT folder or a GGUF file), "path:0.5", or a tuple of a path
        and a scale. Forks share the adapters; conversations are read again."""
        adapters = fitted_adapters(lora, self.config)
        with self.worker.exclusive():
            self._engine.set_adapters(adapters)

    def attach_lora(self, adapters: "Mapping[str, LoraSource | tuple[LoraSource, float]]") -> None:
        """Hold these LoRA adapters ready under their names, and no others: each as for `set_lora`.

        A call applies those that it names, beside those of `set_lora`: `chat(…, lora="name")`, or
        `lora={"name": 0.5}` for half of its scale. On a GPU, conversations with different adapters
        and without any are computed together. Conversations are read again."""
        if not isinstance(adapters, Mapping):
            raise wrong_type(adapters, "adapters", "a dict of names and adapters")
        named = {}
        for name, adapter in adapters.items():
            if not isinstance(name, str) or not name:
                raise InputError(f"The name of an adapter is {shown(name)}; it must be a text.")
            fitted = fitted_adapters(adapter, self.config)
            if len(fitted) != 1:
                raise InputError(
                    f"The name {name} is given to {len(fitted)} adapters; give it one."
                )
            named[name] = fitted[0]
        with self.worker.exclusive():
            self._engine.set_adapters(named=named)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; InputError if its file has no vocabulary."""
        if self._tokenizer is None:
            raise InputError(f"{self.name} has no vocabulary; give token ids instead of text.")
        return self._tokenizer

    def example_reader(self, max_tokens: int) -> ExampleReader:
        """Return a reader of training data for this model."""
        return ExampleReader(self.tokenizer, self._template, max_tokens)

    # Text

    async def _logits(self, ids: Sequence[int]) -> "NDArray[np.float32]":
        """Return the logits after each of the ids, to which nothing is added: [T, vocab].

        Without numpy, as in most browser tabs, they are a list of T memoryviews of floats, so that
        `logits[t][i]` is the same number everywhere."""
        self.config.check_writes(self.name)
        checked = self._replies.check_prompt(ids)
        if self.config.diffusion:
            raise InputError(
                f"{self.name} denoises whole canvases: it has no logits of a next token",
                "generate with watch=True to see each step",
            )
        values = await self._engine.logits(checked)
        return self._finite_rows(values, self.config.vocab, self.config.suppressed)

    logits = plain(_logits)
    alogits = asynchronous(_logits)

    async def _embed(
        self,
        texts: Iterable[str | Iterable[int] | Sequence[Mapping[str, Any]]],
        task: Task | None = None,
        size: int | None = None,
        *,
        titles: Iterable[str | None] | None = None,
        batch: int | None = None,
        progress: Progress | None = None,
        lora: LoraChoice = None,
    ) -> "NDArray[np.float32]":
        """Return a vector of length 1 for each of the `texts`: [texts, size].

        A text is a string, or a list of ids, which is taken as it is. With EmbeddingGemma 2 it may
        be a list of content parts, as in `chat`, with images and audio, which are read before the
        text: [{"type": "image", "path": …}, {"type": "text", "text": …}]. Only EmbeddingGemma and
        EmbeddingGemma 2 embed. What a text is for goes before it: `task` is "query" or "document"
        (what is searched for, and where), "question", "fact", "classification", "clustering",
        "similarity", "code" or "summary"; None: nothing does. Documents may have `titles`. With
        `size`, vectors are cut, to 512, 256 or 128 numbers, say. The product of two vectors says
        how alike two texts are.

        Many texts are computed at once, `batch` tokens at most (2048, with matrix units 16384), but
        always a whole text. One that the context cannot hold is cut, with a warning. `progress` is
        called with how many texts are finished and their total, and may raise to end it. `lora` is
        that of `chat`. Without numpy, the vectors are lists."""
        reader, report, choice = self.texts, _reporter(progress), self._choice(lora)
        width = reader.size(size)
        at_once = check_batch(batch)
        full = reader.embedding.size
        given = listed(texts)
        engine, encoders = cast(Embedder, self._engine), self._engine.encoders
        parts: list[Any] = [unit_rows(_rows(b"", full), width)]
        cut: list[int] = []
        done = 0
        async with aclosing(reader.groups(given, task, titles, encoders)) as groups:
            async for turns in groups:

                def show(count: int, _: int, done: int = done) -> None:
                    report(done + count, len(given))

                media: list[list[MediaSpan]] = []
                try:
                    for turn in turns:
                        media.append((await encode_media([turn], encoders))[1])
                    ids = [turn.ids for turn in turns]
                    values = await engine.embed(ids, at_once, show, choice, media)
                finally:
                    encoders.release(*(span.media for spans in media for span in spans))
                parts.append(unit_rows(self._finite_rows(values, full), width))
                cut += [done + number for number, turn in enumerate(turns) if turn.cut]
                done += len(turns)
        if cut:
            warnings.warn(reader.cut_warning(cut, len(given)), stacklevel=2)
        vectors: NDArray[np.float32] = joined_rows(parts)
        return vectors

    embed = plain(_embed)
    aembed = asynchronous(_embed)

    @property
    def texts(self) -> Texts:
        """What reads texts to embed."""
        return Texts(self.name, self.config, self._tokenizer, self.context)

    async def _generate(
        self,
        prompt: str | Sequence[int],
        *,
        special: bool = False,
        schema: Any = None,
        regex: str | None = None,
        grammar: str | None = None,
        choices: Sequence[str] | None = None,
        lora: LoraChoice = None,
        **settings: Unpack[Settings],
    ) -> AsyncGenerator[Piece, None]:
        """Continue a text (after <bos>) or ids (as they are), piece by piece.

        With `special`, tags in the text are read as special tokens. `schema`, `regex`, `grammar`,
        `choices` and `lora` are those of `chat`, the settings those of `Settings`. DiffusionGemma's
        tokens come a canvas at a time; with `watch=True`, pieces that hold the canvas after each
        step come between."""
        self.config.check_writes(self.name)
        resolved, choice = self._resolve(settings), self._choice(lora)
        structure = Structure.of(schema=schema, regex=regex, grammar=grammar, choices=choices)
        special = _flag(special, "special")
        ids = self._prompt_ids(prompt, special) if isinstance(prompt, str) else prompt
        reader = PlainReader(self._tokenizer, StopText(resolved["stop"]))
        constraint = None
        if compiling := self._structures.compiling(structure):
            yield cast(Any, compiling)
            constraint = compiling.result()
        pieces = self._replies.pieces(ids, reader, resolved, constraint=constraint, choice=choice)
        async with aclosing(with_value(pieces, structure)) as stream:
            async for piece in stream:
                yield piece

    generate = plain_stream(_generate, Stream)
    agenerate = asynchronous_stream(_generate, AsyncStream)

    async def _chat(
        self,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: str | None = None,
        parallel_tool_calls: bool = True,
        confirm: Confirm | None = None,
        max_rounds: int = MAX_ROUNDS,
        schema: Any = None,
        regex: str | None = None,
        grammar: str | None = None,
        choices: Sequence[str] | None = None,
        think: bool = False,
        continue_last: bool = False,
        overflow: Overflow = "drop",
        progress: Progress | None = None,
        lora: LoraChoice = None,
        **settings: Unpack[Settings],
    ) -> AsyncGenerator[Piece, None]:
        """Reply to a conversation, or to one text, piece by piece.

        The content of a message is text or a list of parts. An image is the part
        `{"type": "image", "image": …}` with what `encode_image` accepts (and perhaps a `budget`),
        audio is `{"type": "audio", "audio": …}` with what `encode_audio` accepts; OpenAI's
        `image_url` and `input_audio` and Ollama's `images` work, too. A video is
        `{"type": "video", "video": …}`: a list of images with their `fps`, or an animated GIF, WebP
        or PNG. `progress` is called with how far encoding them is, and may raise to end it.

        `tools` are JSON schemas of functions, or Python functions with type hints and docstrings.
        `tool_choice` is "auto", "required", "none" or the name of a tool; with
        `parallel_tool_calls=False` a reply makes one call at most. Calls name a known tool, and
        their arguments fit its schema. Python functions are called, `max_rounds` times at most, and
        the model is told what they return or raise; pieces have that as `tool_results`. If there is
        `confirm`, it is called with each call before, and says whether that may be made.

        A reply can be made to keep to a structure, after its thought if there is one: `schema` is a
        JSON Schema, a pydantic model, a dataclass or another type (`value` of the last piece is
        what the reply stands for), `regex` matches all of it, `grammar` is one in Lark, as
        llguidance reads it, or in llama.cpp's GBNF, and `choices` are the texts that it may be.

        `think` lets the model think first, and `continue_last` continues the last message instead
        of replying to it. `lora` names an adapter of `attach_lora` that is applied, or several with
        factors of their scales: {"name": 0.5}. The settings are those of `Settings`.

        A conversation that does not fit the context loses its oldest turns, never a system message
        nor the last turn; the `usage` of each piece says how many messages were left out. With
        `overflow="error"` it is refused instead."""
        declared, functions = declared_tools(tools)
        if confirm is not None and not callable(confirm):
            raise wrong_type(confirm, "confirm", "a function")
        most = check_rounds(max_rounds)

        def begin(
            conversation: str | Sequence[Message], chosen: str | None, goes_on: bool = False
        ) -> AsyncGenerator[Any, None]:
            return self._reply(
                conversation,
                tools=() if chosen == "none" else declared,
                structure=Structure.of(
                    schema=schema,
                    regex=regex,
                    grammar=grammar,
                    choices=choices,
                    tools=declared,
                    tool_choice=chosen,
                    parallel=_flag(parallel_tool_calls, "parallel_tool_calls"),
                ),
                think=_flag(think, "think"),
                continue_last=_flag(continue_last, "continue_last") and not goes_on,
                overflow=overflow,
                progress=progress,
                choice=self._choice(lora),
                settings=settings,
            )

        stream = begin(messages, tool_choice)
        if functions:
            given = [{"role": "user", "content": messages}]
            said = given if isinstance(messages, str) else messages
            called = Functions(functions, confirm)
            stream = replies_with_functions(self.worker, begin, said, tool_choice, called, most)
        async with aclosing(stream) as pieces:
            async for piece in pieces:
                yield piece

    chat = plain_stream(_chat, Stream)
    achat = asynchronous_stream(_chat, AsyncStream)

    async def _reply(
        self,
        messages: str | Sequence[Message],
        *,
        tools: Any,
        structure: Structure,
        think: bool,
        continue_last: bool,
        overflow: Overflow,
        progress: Progress | None,
        choice: Choice,
        settings: Settings,
    ) -> AsyncGenerator[Any, None]:
        """Yield the pieces of one reply."""
        self.config.check_writes(self.name)
        if not isinstance(overflow, str) or overflow not in get_args(Overflow):
            raise InputError(f"overflow is {shown(overflow)}; it must be 'drop' or 'error'.")
        resolved = self._resolve(settings)
        conversation = self._conversation(messages)
        written = self._shortened(conversation, tools, overflow)
        parts = self._template.parts(written, tools, think, continue_last=continue_last)
        in_thought = opens_thought(parts)
        parser = self._template.parser(think, tools, in_thought=in_thought)
        reader = ReplyReader(self.tokenizer, parser, StopText(resolved["stop"]))
        constraint = None
        thought = {"think": think, "in_thought": in_thought}
        if compiling := self._structures.compiling(structure, **thought):
            yield compiling
            constraint = compiling.result()
        encoders, report = self._engine.encoders, _reporter(progress)
        turns = await read_turns(parts, self.tokenizer, encoders, self.context)
        left_out = 0
        if overflow == "drop":
            kept = fit_turns(turns, self.context, self._replies.room(resolved))
            if len(kept) < len(turns) or len(written) < len(conversation):
                given = 1 if isinstance(messages, str) else len(messages)
                left_out = count_left_out(kept, conversation, len(conversation) - given)
            turns = kept
        length = sum(len(turn.ids) for turn in turns)
        if length >= self.context:
            cut = any(turn.cut for turn in turns)
            raise too_long(length, self.context, at_least=cut)
        ids, media = await encode_media(turns, encoders, report)
        try:
            replies = self._replies.pieces(
                ids, reader, resolved, media, left_out, constraint, choice
            )
            async with aclosing(with_value(replies, structure)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            if media:
                await self.worker.call(lambda: encoders.release(*(span.media for span in media)))

    def prepare_structure(self) -> None:
        """Build what the first reply with a schema, pattern, grammar or tools would wait for.

        That takes up to a few seconds for a large vocabulary."""
        run_sync(prepare(self._structures.compiler))

    async def aprepare_structure(self) -> None:
        """Build what the first reply with a schema, pattern, grammar or tools would wait for.

        That takes up to a few seconds for a large vocabulary."""
        await drive_aside(prepare(self._structures.compiler))

    def extract(self, text: str, schema: Any, **options: Any) -> Any:
        """Return what a text says, as `schema` has it: see `chat`, whose options are these.

        At temperature 0, unless the options say otherwise. InputError for a reply that was cut off
        or, as of a type that checks its values, does not become an instance."""
        prompt, given = extraction(text, schema, options)
        return extracted([*self.chat(prompt, **given)], schema)

    async def aextract(self, text: str, schema: Any, **options: Any) -> Any:
        """Return what a text says, as `schema` has it: see `chat`, whose options are these.

        At temperature 0, unless the options say otherwise. InputError for a reply that was cut off
        or, as of a type that checks its values, does not become an instance."""
        prompt, given = extraction(text, schema, options)
        return extracted([piece async for piece in self.achat(prompt, **given)], schema)

    async def _batch(
        self,
        prompts: Sequence[str | Sequence[Message]],
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: str | None = None,
        parallel_tool_calls: bool = True,
        schema: Any = None,
        regex: str | None = None,
        grammar: str | None = None,
        choices: Sequence[str] | None = None,
        think: bool = False,
        continue_last: bool = False,
        overflow: Overflow = "drop",
        progress: Progress | None = None,
        lora: LoraChoice = None,
        **settings: Unpack[Settings],
    ) -> AsyncGenerator[tuple[int, BatchReply | WebgemmaError], None]:
        """Reply to many `prompts`, texts or conversations; yield (index, reply) as replies finish.

        As many are computed side by side as the model has slots that nobody else uses. `tools`,
        `tool_choice`, `parallel_tool_calls`, `schema`, `regex`, `grammar`, `choices`, `think`,
        `continue_last`, `overflow`, `lora` and the settings are those of `chat`, for each of them;
        Python functions are not called, and a seed is the same for all. A prompt that cannot be
        answered has its error instead of a reply, and the others go on. `progress` is called with
        how many are finished and their total, and may raise to end all. Closing the iterator ends
        what is being written."""
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise wrong_type(prompts, "prompts", "a list of texts or conversations")
        self.config.check_writes(self.name)
        self._resolve(settings)
        self._choice(lora)
        report, total, finished = _reporter(progress), len(prompts), 0
        declared: Any = declared_tools(tools)[0]
        streams = (
            self._chat(
                prompt,
                tools=declared,
                tool_choice=tool_choice,
                parallel_tool_calls=parallel_tool_calls,
                schema=schema,
                regex=regex,
                grammar=grammar,
                choices=choices,
                think=think,
                continue_last=continue_last,
                overflow=overflow,
                lora=lora,
                **settings,
            )
            for prompt in list(prompts)
        )
        async with aclosing(replies_beside(self.worker, streams)) as outcomes:
            async for outcome in outcomes:
                if isinstance(outcome, tuple):
                    finished += 1
                    report(finished, total)
                yield outcome

    batch = plain_stream(_batch)
    abatch = asynchronous_stream(_batch)

    async def _count_tokens(
        self,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        think: bool = False,
        continue_last: bool = False,
    ) -> int:
        """Return the tokens of a conversation's prompt, with its images and audio, as for `chat`.

        Nothing is left out, whatever the context holds."""
        declared: Any = declared_tools(tools)[0]
        parts = self._template.parts(
            self._conversation(messages), declared, think, continue_last=continue_last
        )
        turns = await read_turns(parts, self.tokenizer, self._engine.encoders)
        return sum(len(turn.ids) for turn in turns)

    count_tokens = plain(_count_tokens, brief=True)
    acount_tokens = asynchronous(_count_tokens, brief=True)

    def render(
        self,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        think: bool = False,
        continue_last: bool = False,
    ) -> str:
        """Return the prompt of a conversation as text, as for `chat`."""
        conversation, declared = self._conversation(messages), declared_tools(tools)[0]
        return self._template.render(
            conversation, cast(Any, declared), think, continue_last=continue_last
        )

    def _resolve(self, settings: Settings) -> Settings:
        return resolve(settings, self.defaults, diffusion=self.config.diffusion is not None)

    def _choice(self, lora: LoraChoice) -> Choice:
        """Return the attached adapters that a call applies, with factors of their scales."""
        given = {lora: 1.0} if isinstance(lora, str) else {} if lora is None else lora
        if not isinstance(given, Mapping):
            raise wrong_type(lora, "lora", "the name of an adapter, or a dict of names and factors")
        choice = {}
        for name, value in given.items():
            factor = real_number(value)
            if factor is None:
                raise InputError(f"The factor of an adapter must be a number, not {shown(value)}.")
            if factor:
                choice[name] = factor
        self._engine.adapters.scaled(choice)  # or its error
        return choice

    def _prompt_ids(self, text: str, special: bool) -> list[int]:
        tokenizer = self.tokenizer
        ids = tokenizer.encode(text, special=special, most=self.context)
        if len(ids) > self.context:
            cut = tokenizer.exceeds(text, self.context)
            raise too_long(len(ids), self.context, at_least=cut)
        return ids if ids[:1] == [tokenizer.bos] else [tokenizer.bos, *ids]

    def _conversation(self, messages: str | Sequence[Message]) -> Sequence[Message]:
        """Return the messages after the model's opening, whose system message they may replace."""
        given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        if not isinstance(given, list | tuple):
            raise wrong_type(given, "messages", "a text or a list of messages")
        roles = (m.get("role") for m in given if isinstance(m, Mapping))
        has_system = any(isinstance(role, str) and role == "system" for role in roles)
        opening = [m for m in self.opening if not (has_system and m.get("role") == "system")]
        return [*opening, *given] if opening else given

    def _shortened(
        self, conversation: Sequence[Message], tools: object, overflow: Overflow
    ) -> Sequence[Message]:
        """Return what may fit the context, so that a conversation of any length is written soon."""
        context, token_length = self.context, self.tokenizer.token_length
        drop = overflow == "drop"
        written = without_oldest(conversation, context, token_length) if drop else conversation
        least = least_length(written, tools, token_length)
        if least > (3 if drop else 1) * context:  # by the system and the last turn alone
            raise too_long(least, context, at_least=True)
        return written

    # Images and audio

    async def _encode_image(
        self,
        image: Any,
        resize: bool = True,
        budget: int = BUDGET,
        progress: Progress | None = None,
    ) -> "NDArray[np.float32]":
        """Return the soft tokens that the model reads in place of an image: [n, width].

        An image is a path, the bytes of a file, a data: URL, a PIL image or uint8 [H, W, 3]. It is
        resized to at most `budget` soft tokens (70, 140, 280, 560 or 1120); without `resize` its
        sides must be multiples of 48."""
        limit = budget if _flag(resize, "resize") else None
        decoded = await read_image(image, "The image")
        report = _reporter(progress)
        media = await self._engine.encoders.encode_image(decoded, limit, report)
        return await self._soft_tokens(media)

    encode_image = plain(_encode_image, brief=True)
    aencode_image = asynchronous(_encode_image, brief=True)

    async def _encode_audio(
        self, audio: Any, progress: Progress | None = None
    ) -> "NDArray[np.float32]":
        """Return the soft tokens that the model reads in place of audio, 25 a second: [n, width].

        Audio is a path, the bytes of a file (WAV, FLAC, OGG, MP3), a data: URL, or float samples at
        16 kHz. Segments of 30 s are encoded separately."""
        samples = await read_audio(audio, "The audio")
        report = _reporter(progress)
        media = await self._engine.encoders.encode_audio(samples, report)
        return await self._soft_tokens(media)

    encode_audio = plain(_encode_audio, brief=True)
    aencode_audio = asynchronous(_encode_audio, brief=True)

    def free_encoders(self) -> None:
        """Free the memory of the encoders; the next image or audio loads them again."""
        with self.worker.lock:
            self._engine.encoders.free()

    async def _soft_tokens(self, media: EncodedMedia) -> "NDArray[np.float32]":
        encoders = self._engine.encoders
        try:
            values = await encoders.read(media)
        finally:
            encoders.release(media)
        return self._finite_rows(values, self.config.width)

    # Conversations

    async def _save(self, path: SavedPath) -> None:
        """Write what the GPU holds of the last conversation to a file, for `restore`.

        In a browser, `webgemma.gguf.opfs.open_stored` opens files that persist."""
        await self.gpu_engine("Saving a conversation").save(path)

    save = plain(_save)
    asave = asynchronous(_save)

    async def _restore(self, path: SavedPath) -> list[int]:
        """Restore the conversation that `save` wrote; return its tokens, prompt and reply.

        A chat or a prompt that begins with them continues without reading them again. The file must
        be of the same model; the context may differ if it holds them."""
        return await self.gpu_engine("Restoring a conversation").restore(path)

    restore = plain(_restore)
    arestore = asynchronous(_restore)

    def fork(self) -> Self:
        """Return a second conversation on the same weights, which continues from this one.

        Each has to be closed; the weights are freed with the last one."""
        with self.worker.exclusive():
            engine = self.gpu_engine("A second conversation").fork()
        return type(self)(
            self.name,
            self.config,
            self._tokenizer,
            engine,
            chat=self._template,
            context=self.context,
            defaults=self._model_defaults,
            worker=Worker(self.worker.lock),  # one device does one thing at a time
        )

    # The engine

    @property
    def slots(self) -> list[Slot]:
        """What computes conversations side by side: which are busy, and the tokens they hold.

        On the CPU it is one."""
        states = self._engine.slot_states(len(self.worker.turns.streams))
        return [Slot(n, busy, tokens, self.context) for n, (busy, tokens) in enumerate(states)]

    @property
    def memory_nbytes(self) -> int:
        """GPU memory in use: weights, cache, and what a step works in."""
        engine = self._engine
        return engine.nbytes if isinstance(engine, GpuEngine | EmbeddingEngine) else 0

    def gpu_engine(self, purpose: str) -> GpuEngine:
        """Return the engine on the GPU; InputError, which names the purpose, on the CPU."""
        self.config.check_writes(self.name)
        if not isinstance(self._engine, GpuEngine):
            raise InputError(f"{purpose} needs the GPU; this model is loaded on the {self.device}.")
        return self._engine

    def close(self) -> None:
        """Free what the model holds."""
        with self.worker.lock:
            self._engine.close()
        self.worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _finite_rows(
        self, values: Any, width: int, suppressed: Sequence[int] = ()
    ) -> "NDArray[np.float32]":
        """Return values as rows, from the device's bytes; GgufError if one is not finite."""
        if isinstance(values, bytes):
            values = _rows(values, width)
            if not _are_finite(values, suppressed):
                raise not_finite(self.name, self.device)
        result: NDArray[np.float32] = values
        return result


def _reporter(progress: Progress | None) -> Progress:
    """Return a function that reports to the caller, if they gave one."""
    if progress is None:
        return ignore_progress
    if not callable(progress):
        raise wrong_type(progress, "progress", "a function")
    return for_caller(progress)


def _flag(value: Any, name: str) -> bool:
    try:
        return bool(value)
    except Exception:  # such as an array of several values
        raise wrong_type(value, name, "True or False") from None


def _rows(values: bytes, width: int) -> Any:
    """Return float32 numbers as an array of rows or, without numpy, as a list of memoryviews."""
    try:
        import numpy as np
    except ImportError:
        flat = memoryview(values).cast("f")
        return [flat[at : at + width] for at in range(0, len(flat), width)]
    return np.frombuffer(values, np.float32).reshape(-1, width)


def _are_finite(rows: Any, suppressed: Sequence[int]) -> bool:
    """Return whether all values are finite, except in the suppressed columns, which are -inf."""
    if isinstance(rows, list):
        # A sum of float32 in float64 is finite if and only if all of them are.
        edges = sorted({-1, *suppressed, len(rows[0])})
        return all(math.isfinite(sum(row[a + 1 : b])) for row in rows for a, b in pairwise(edges))
    import numpy as np

    wrong = ~np.isfinite(rows)
    wrong[:, list(suppressed)] = False
    return not wrong.any()
