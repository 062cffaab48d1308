"""What a client asks for and what it gets, whichever API it speaks.

Each API has a module that parses a body into a `Request` and turns the pieces of replies into its
own answers and events. Those modules do no input or output: `app.py` does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from webgemma.constraints.specifications import Json
from webgemma.errors import InputError
from webgemma.replies import Piece, Usage
from webgemma.text.parser import ToolCall

ToolChoice = Literal["auto", "none", "required"]
StructureKind = Literal["schema", "regex", "grammar", "choices"]


class RequestError(InputError):
    """A request that cannot be served as it is: a status and a sentence, for the client."""

    def __init__(self, message: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param  # the part of the body that is wrong


@dataclass(frozen=True, slots=True)
class Structure:
    """What replies have to be."""

    kind: StructureKind
    value: Any
    where: str  # its place in the body

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `Gemma.chat`. As at llama.cpp, Ollama and vLLM, objects have no
        properties that their schema does not declare, unless it allows them."""
        is_schema = self.kind == "schema"
        return {
            self.kind: Json(self.value, closed=True, where=self.where) if is_schema else self.value
        }


@dataclass(frozen=True, slots=True)
class Request:
    """A conversation to answer, or a text to continue, with the settings for it."""

    model: str
    settings: Mapping[str, Any]  # by the names of webgemma.settings; checked when it is served
    messages: Sequence[Mapping[str, Any]] = ()  # as `Gemma.chat` takes them
    prompts: Sequence[str | Sequence[int]] = ()  # texts to continue instead, each on its own
    choices: int = 1  # replies to each
    stream: bool = False
    tools: Sequence[Mapping[str, Any]] = ()  # as `Gemma.chat` takes them
    # Where the schemas of tools, by their names, stand in the body; others where `tools` has them.
    tool_places: Mapping[str, str] = field(default_factory=dict)
    tool_choice: ToolChoice | str = "auto"  # or the name of a tool
    parallel: bool = True  # a reply may call several tools
    structure: Structure | None = None
    think: bool | None = None
    continue_last: bool = False  # the last message, instead of replying to it
    special: bool = False  # tags in prompts are special tokens
    overflow: Literal["drop", "error"] = "drop"  # a conversation that does not fit
    logprobs: bool = False
    progress: bool = False  # of a stream: it also says what it waits for
    own: Mapping[str, Any] = field(default_factory=dict)  # what only this API's answers need


@dataclass(frozen=True, slots=True)
class Stage:
    """What a request waits for before the first piece of its answer."""

    name: Literal["loading", "queued", "encoding", "reading"]
    done: int = 0  # of encoding images and audio
    total: int = 0


@dataclass(slots=True)
class Reply:
    """One choice of an answer, put together from its pieces."""

    text: str = ""
    thinking: str = ""
    thinking_tokens: int = 0  # with the tags around them
    tool_calls: list[ToolCall] = field(default_factory=list)
    tokens: list[Piece] = field(default_factory=list)  # one for each token, if logprobs are wanted
    finish: str = ""  # "stop" or "length"; empty while it is being written
    stop: str = ""  # the stop text that ended it, if one did
    usage: Usage | None = None
    _unassigned: int = 0  # tokens that are part of whatever comes next

    def add(self, piece: Piece, *, keep_tokens: bool = False) -> None:
        """Add a piece."""
        self.text += piece.text
        self.thinking += piece.thinking
        self.tool_calls += piece.tool_calls
        self.finish = piece.finish or self.finish
        self.stop = piece.stop or self.stop
        self.usage = piece.usage or self.usage
        if piece.token >= 0:
            self._unassigned += 1
            if keep_tokens:
                self.tokens.append(piece)
        if piece.thinking:
            self.thinking_tokens += self._unassigned
        if piece.thinking or piece.text or piece.tool_calls:
            self._unassigned = 0
