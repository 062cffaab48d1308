"""The chat template: messages and tools become the prompt, as Google's templates write it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, get_args

from webgemma.errors import InputError
from webgemma.text.gemma3 import write_gemma3
from webgemma.text.inputs import Message, Response, Tool, read_messages, read_tools
from webgemma.text.markup import (
    BOS,
    CHANNEL_CLOSE,
    CHANNEL_OPEN,
    END_OF_TURN,
    RESPONSE_OPEN,
    THINK,
    THOUGHT,
    TURN_CLOSE,
    TURN_OPEN,
    Markup,
    Part,
    merge,
)
from webgemma.text.parser import Parser, ReplyParser, TextParser, parse_reply
from webgemma.text.sizes import SYSTEM_ROLES
from webgemma.text.tools import call_parts, declaration_parts, response_parts

__all__ = [
    "Chat",
    "Markup",
    "Part",
    "Size",
    "SpecialTokenizer",
    "encode_parts",
    "opens_thought",
]

Size: TypeAlias = Literal["small", "large", "gemma3"]


class SpecialTokenizer(Protocol):
    """The part of a tokenizer that `Chat.encode` needs."""

    @property
    def special_ids(self) -> Mapping[str, int]: ...
    def encode(self, text: str, *, special: bool = False) -> Sequence[int]: ...


def encode_parts(tokenizer: SpecialTokenizer, parts: Iterable[Part]) -> list[int]:
    """Return the ids of a prompt: markup becomes special tokens, plain strings ordinary ones."""
    ids: list[int] = []
    for part in parts:
        if not isinstance(part, Markup):
            ids += tokenizer.encode(part, special=False)
        elif part in tokenizer.special_ids:
            ids.append(tokenizer.special_ids[part])
        else:
            raise InputError(
                f"The model's vocabulary has no special token {part}, which this "
                "conversation needs; is it a chat model of Gemma?"
            )
    return ids


def opens_thought(parts: Sequence[Part]) -> bool:
    """Return whether a prompt ends inside a thought; its reply is then parsed with `in_thought`."""
    markup = [part for part in parts if isinstance(part, Markup)]
    return bool(markup) and markup[-1] == CHANNEL_OPEN


class Chat:
    """The chat template of one model size, or of Gemma 3, which has another one.

    The sizes differ in one way: with thinking off, the prompt of a large model ends with an empty
    thought.
    """

    def __init__(self, size: Size = "small") -> None:
        if size not in get_args(Size):
            raise InputError(f"The chat size must be 'small', 'large' or 'gemma3', not {size!r}.")
        self.size: Size = size

    @property
    def without_empty_thought(self) -> "Chat":
        """The template of finished turns, which have no empty thought."""
        return Chat("small") if self.size == "large" else self

    @property
    def ends(self) -> tuple[Markup, ...]:
        """The special tokens that end a turn of the model."""
        return (END_OF_TURN,) if self.size == "gemma3" else (TURN_CLOSE, RESPONSE_OPEN)

    def parser(
        self, think: bool, tools: Sequence[Mapping[str, Any]] | None, *, in_thought: bool
    ) -> Parser:
        """Return a parser of a reply; Gemma 3's replies are text, whatever they spell."""
        if self.size == "gemma3":
            return TextParser()
        return ReplyParser(think, tools, in_thought=in_thought)

    parse_reply = staticmethod(parse_reply)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        think: bool = False,
        *,
        add_generation_prompt: bool = True,
        continue_last: bool = False,
    ) -> str:
        """Return the prompt as one string; use `encode` for ids, where text cannot forge markup."""
        return "".join(
            self.parts(
                messages,
                tools,
                think,
                add_generation_prompt=add_generation_prompt,
                continue_last=continue_last,
            )
        )

    def encode(
        self,
        tokenizer: SpecialTokenizer,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        think: bool = False,
        *,
        add_generation_prompt: bool = True,
        continue_last: bool = False,
    ) -> list[int]:
        """Return the prompt's token ids; text that spells a special token stays text."""
        parts = self.parts(
            messages,
            tools,
            think,
            add_generation_prompt=add_generation_prompt,
            continue_last=continue_last,
        )
        return encode_parts(tokenizer, parts)

    def parts(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        think: bool = False,
        *,
        add_generation_prompt: bool = True,
        continue_last: bool = False,
    ) -> list[Part]:
        """Return the prompt in parts: `Markup` for special tokens, plain strings between them.

        `continue_last` leaves the turn of the last message, an assistant's, open for the model to
        continue: the text keeps its trailing white space, a thought stays open unless content
        follows it, and no generation prompt is added.
        """
        checked, declared = read_messages(messages), read_tools(tools)
        if continue_last:
            _check_continues(checked)
            add_generation_prompt = False
        if self.size == "gemma3":
            options = {"continue_last": continue_last}
            options["add_generation_prompt"] = add_generation_prompt
            return merge(write_gemma3(checked, declared, think, **options))
        return merge(self._write(checked, declared, think, add_generation_prompt, continue_last))

    def _write(
        self,
        messages: list[Message],
        tools: list[Tool],
        think: bool,
        add_generation_prompt: bool,
        continue_last: bool,
    ) -> Iterator[Part]:
        yield BOS
        system = messages[0] if messages and messages[0].role in SYSTEM_ROLES else None
        if think or tools or system:
            yield from _system_turn(system, tools, think)
        turns = _turns(messages[1:] if system else messages)
        last_user = max((at for at, turn in enumerate(turns) if turn.role == "user"), default=-1)
        around = zip([None, *turns], turns, [*turns[1:], None], strict=False)
        for at, (before, turn, after) in enumerate(around):
            joins = before is not None and before.role == turn.role == "model"
            if not joins:
                yield from (TURN_OPEN, f"{turn.role}\n")
            if continue_last and after is None:
                yield from self._open_turn(turn.message, think or joins)
            else:
                yield from _closed_turn(turn, after, keep_thought=at > last_user)
        if add_generation_prompt:
            yield from self._generation_prompt(turns[-1] if turns else None, think)

    def _generation_prompt(self, last: "_Turn | None", think: bool) -> Iterator[Part]:
        if last and last.responses:  # the model's turn is still open
            yield from (CHANNEL_OPEN, THOUGHT) if think else ()
        elif not (last and last.message.calls):
            yield from (TURN_OPEN, "model\n")
            yield from self._empty_thought(think)

    def _open_turn(self, message: Message, may_think: bool) -> Iterator[Part]:
        """Yield a model turn to be continued, as if the model had just generated it.

        Therefore a large model with thinking off has its empty thought here, which the template
        omits from finished turns.
        """
        content = merge(_content(message, keep_end=True))
        if message.thinking:
            yield from (CHANNEL_OPEN, THOUGHT, message.thinking)
            yield from ("\n", CHANNEL_CLOSE) if content else ()
        else:
            yield from self._empty_thought(may_think)
        yield from content

    def _empty_thought(self, may_think: bool) -> Iterator[Part]:
        if self.size == "large" and not may_think:
            yield from (CHANNEL_OPEN, THOUGHT, CHANNEL_CLOSE)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A message that is not a tool's, with the responses to its calls."""

    role: str
    message: Message
    responses: list[Response]
    called: dict[str, str]  # the name of the function, by the id of the call


def _turns(messages: Sequence[Message]) -> list[_Turn]:
    """Return the messages, tool messages attached to the calls they answer; others are dropped."""
    turns: list[_Turn] = []
    for message in messages:
        if message.role != "tool":
            role = "model" if message.role == "assistant" else message.role
            called = {call.id: call.name for call in message.calls if call.id}
            turns.append(_Turn(role, message, list(message.responses), called))
        elif turns and turns[-1].message.calls and not turns[-1].message.responses:
            name = _function_name(turns[-1], message)
            where = f"{message.where}.content"
            turns[-1].responses.append(Response(name, message.result, where, message.content))
    return turns


def _function_name(turn: _Turn, message: Message) -> str:
    """Return the function that a tool message answers: by call id, tool name or position."""
    calls, index = turn.message.calls, len(turn.responses)
    if message.call_id in turn.called:
        return turn.called[message.call_id]
    if message.call_id or message.tool_name:
        return message.tool_name or "unknown"
    return calls[index].name if index < len(calls) and not calls[index].id else "unknown"


def _check_continues(messages: Sequence[Message]) -> None:
    if not messages:
        raise InputError("There is no message to continue.")
    last = messages[-1]
    if last.role != "assistant":
        raise InputError(f"{last.where} must have the role assistant to be continued.")
    if last.calls or last.responses:
        raise InputError(f"{last.where} has tool calls, so its text cannot be continued.")


def _system_turn(system: Message | None, tools: list[Tool], think: bool) -> Iterator[Part]:
    yield from (TURN_OPEN, "system\n")
    if think:
        yield from (THINK, "\n")
    for part in system.content if system else ():
        if isinstance(part, Markup):
            raise InputError("messages[0] is a system message, which may contain text only.")
        yield part.strip()
        yield " " if system and system.in_parts else ""
    for tool in tools:
        yield from declaration_parts(tool)
    yield from (TURN_CLOSE, "\n")


def _closed_turn(turn: _Turn, after: _Turn | None, keep_thought: bool) -> Iterator[Part]:
    """Yield a finished turn in the template's order: thought, calls, responses, content."""
    message = turn.message
    if message.thinking and keep_thought:
        yield from (CHANNEL_OPEN, THOUGHT, message.thinking, "\n", CHANNEL_CLOSE)
    for at, call in enumerate(message.calls):
        yield from call_parts(call, f"{message.where}.tool_calls[{at}].function.arguments")
    for response in turn.responses:
        yield from response_parts(response)
    content = merge(_content(message))
    yield from content
    if message.calls and not turn.responses:
        yield RESPONSE_OPEN  # the model stopped here to wait for the result
    elif turn.role == "model" and after and after.role == "model":
        pass  # the next message continues the same turn
    elif content or after or not turn.responses:
        yield from (TURN_CLOSE, "\n")


def _content(message: Message, keep_end: bool = False) -> Iterator[Part]:
    """Yield the trimmed parts of the content; an assistant's without thoughts in its text."""
    last = len(message.content) - 1
    for at, part in enumerate(message.content):
        if isinstance(part, Markup):
            yield part
            continue
        text = _without_thoughts(part) if message.role == "assistant" else part
        yield text.lstrip() if keep_end and at == last else text.strip()


def _without_thoughts(text: str) -> str:
    return "".join(span.partition(CHANNEL_OPEN)[0] for span in text.split(CHANNEL_CLOSE))
