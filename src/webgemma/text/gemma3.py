"""Gemma 3's chat template: turns of user and model; the user's first begins with the system's."""

from collections.abc import Iterator, Sequence

from webgemma.errors import InputError, MissingEncoderError
from webgemma.text.inputs import Message, Tool
from webgemma.text.markup import BOS, END_OF_TURN, START_OF_TURN, Lead, Markup, Part
from webgemma.text.sizes import SYSTEM_ROLES

USER, MODEL = "user\n", "model\n"


def write_gemma3(
    messages: Sequence[Message],
    tools: Sequence[Tool],
    think: bool,
    *,
    add_generation_prompt: bool,
    continue_last: bool,
) -> Iterator[Part]:
    """Yield the prompt of a conversation; InputError for what Gemma 3 does not have.

    Instructions that come later, which Google's template does not know, begin the user's next
    turn; thoughts are left out."""
    if tools:
        raise InputError(
            "Gemma 3 calls no tools: leave them out, or ask for JSON with a schema instead."
        )
    if think:
        raise InputError("Gemma 3 does not think before it replies: leave that out.")
    yield BOS
    said = ""  # by the system, since the user's last turn
    lead: type[str] = Lead  # what it says first holds for all turns
    for at, message in enumerate(messages):
        if message.role in SYSTEM_ROLES:
            text = _text(message, trim=at > 0)
            said += f"{text}\n\n" if text else ""
            continue
        if message.role == "user":
            yield from (START_OF_TURN, lead(USER + said) if said else USER)
            yield from (_text(message), END_OF_TURN, "\n")
        else:
            yield from _alone(said, lead)
            yield from (START_OF_TURN, MODEL)
            if continue_last and at == len(messages) - 1:
                yield _text(message, keep_end=True)
            else:
                yield from (_text(message), END_OF_TURN, "\n")
        said, lead = "", str
    yield from _alone(said, lead)
    if add_generation_prompt:
        yield from (START_OF_TURN, MODEL)


def _alone(said: str, lead: type[str]) -> Iterator[Part]:
    """Yield a turn of what the system says, if that is something, where no user's turn follows."""
    if said:
        yield from (START_OF_TURN, lead(USER + said.rstrip()), END_OF_TURN, "\n")


def _text(message: Message, *, trim: bool = True, keep_end: bool = False) -> str:
    """Return the text of a message; of a list, its texts, each trimmed."""
    if message.role == "tool" or message.calls or message.responses:
        raise InputError(f"{message.where} is about a tool, and Gemma 3 calls none: leave it out.")
    for part in message.content:
        if isinstance(part, Markup):
            raise MissingEncoderError(
                "webgemma runs only the text model of Gemma 3, which reads text only",
                f"leave images and audio out of {message.where}",
            )
    texts = list(message.content)
    if keep_end:
        return "".join(text.strip() for text in texts[:-1]) + "".join(texts[-1:]).lstrip()
    return "".join(text.strip() if trim else text for text in texts)
