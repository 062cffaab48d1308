"""OpenAI's `/v1/audio/transcriptions`, for models with an audio encoder: a chat about the audio."""

from collections.abc import Iterator, Sequence
from typing import Any

from webgemma.gemma.encoder_config import SAMPLE_RATE
from webgemma.media.audio_files import read_audio
from webgemma.replies import Piece
from webgemma.server.forms import Form
from webgemma.server.openai_common import (
    ContentTokens,
    Event,
    TokenBytes,
    cached_tokens,
    checked,
    content_tokens,
    error_body,
    prompt_tokens,
    reply_tokens,
    whole,
)
from webgemma.server.protocol import Reply, Request, RequestError
from webgemma.settings import SETTINGS
from webgemma.values import shown

FORMATS = ("json", "text", "verbose_json")
TIMED = ("srt", "vtt", "diarized_json")
MAX_HINT = 4000  # characters of the text before
MAX_LANGUAGE = 60

# Accepted, and why nothing comes of it.
IGNORED = {"chunking_strategy": "audio is always encoded in segments of 30 seconds"}

REFUSED = {
    "known_speaker_names": "Gemma does not tell speakers apart",
    "known_speaker_references": "Gemma does not tell speakers apart",
    "timestamp_granularities": "Gemma writes no times",
}


def parse(form: Form) -> Request:
    """Return what a form asks for; RequestError if it cannot be served."""
    for name, why in REFUSED.items():
        if form.texts(name):
            raise RequestError(f"{name} cannot be used here: {why}; leave it out.", param=name)
    wanted = form.text("response_format") or FORMATS[0]
    if wanted in TIMED:
        raise RequestError(
            f"response_format is {shown(wanted)}, but Gemma writes no times and does not tell "
            "speakers apart: ask for json, text or verbose_json.",
            param="response_format",
        )
    form.choice("response_format", FORMATS)
    logprobs = _includes_logprobs(form)
    audio = {"type": "audio", "audio": form.data("file")}
    text = {"type": "text", "text": _instruction(form)}
    return Request(
        model=form.text("model"),
        settings=_settings(form),
        messages=[{"role": "user", "content": [audio, text]}],
        stream=form.flag("stream"),
        overflow="error",  # a part of the audio would be missing
        logprobs=logprobs,
        own={"format": wanted, "language": form.text("language")},
    )


def audio_seconds(request: Request) -> float:
    """Return how long the audio of a request is; InputError if it cannot be decoded."""
    return len(read_audio(request.messages[0]["content"][0]["audio"])) / SAMPLE_RATE


def _includes_logprobs(form: Form) -> bool:
    for item in (included := form.texts("include")):
        if item != "logprobs":
            raise RequestError(f"include is {shown(item)}; it must be logprobs.", param="include")
    return bool(included)


def _settings(form: Form) -> dict[str, Any]:
    given = form.number("temperature")
    temperature = checked(
        lambda value, _: SETTINGS["temperature"].check(value), given or 0, "temperature"
    )
    settings = {"temperature": temperature}
    for name in ("max_tokens", "max_completion_tokens"):  # vLLM's
        if (most := form.number(name)) is not None:
            settings["max_tokens"] = whole(most, name, 0, 2**63 - 1)
    if (seed := form.number("seed")) is not None:
        settings["seed"] = whole(seed, "seed", -(2**63), 2**64 - 1) % 2**64
    return settings


def _instruction(form: Form) -> str:
    """Return what the model is asked to do with the audio."""
    language = form.text("language").strip()
    if len(language) > MAX_LANGUAGE:
        raise RequestError(
            f"language is {shown(language)}; it must be a code such as en.", param="language"
        )
    hint = form.text("prompt").strip()
    if len(hint) > MAX_HINT:
        raise RequestError(
            f"prompt has {len(hint)} characters; there may be up to {MAX_HINT}.", param="prompt"
        )
    spoken = f"in the language {language}" if language else "in its own language"
    text = (
        f"Transcribe this speech word for word, {spoken}. Write only the transcription, on one "
        "line, with numbers as digits."
    )
    return f"{text} Spell names and terms as in this text:\n{hint}" if hint else text


def answer(
    request: Request,
    replies: Sequence[Reply],
    *,
    token_bytes: TokenBytes | None = None,
    **_: Any,
) -> Event | str:
    """Return the whole answer, JSON or text."""
    (reply,) = replies
    text = reply.text.strip()
    if request.own["format"] == "text":
        return f"{text}\n"
    body: Event = {"text": text}
    if request.own["format"] == "verbose_json":
        seconds = request.own["seconds"]
        body |= {
            "task": "transcribe",
            "language": request.own["language"] or "unknown",
            "duration": seconds,
            "usage": {"type": "duration", "seconds": seconds},
        }
    else:
        body["usage"] = _usage(reply)
    if request.logprobs:
        body["logprobs"] = _logprobs(content_tokens(reply, token_bytes))
    return body


def _usage(reply: Reply) -> Event:
    read, written = prompt_tokens([reply], 1), reply_tokens([reply])
    return {
        "type": "tokens",
        "input_tokens": read,
        "input_token_details": {"cached_tokens": cached_tokens([reply], 1)},
        "output_tokens": written,
        "total_tokens": read + written,
    }


def _logprobs(tokens: Sequence[Event]) -> list[Event]:
    return [{name: token[name] for name in ("token", "logprob", "bytes")} for token in tokens]


class TranscriptionStream:
    """Turns the pieces of a reply into events; blanks around the text are left out."""

    def __init__(
        self, request: Request, *, token_bytes: TokenBytes | None = None, **_: Any
    ) -> None:
        self.request = request
        self.reply = Reply()
        self._tokens = ContentTokens(token_bytes)
        self._logprobs: list[Event] = []
        self._held = ""  # blanks, which more text may follow
        self._held_tokens: list[Event] = []
        self._has_begun = False

    def begin(self) -> Iterator[Event]:
        """Yield nothing: the first event holds text."""
        yield from ()

    def piece(self, _index: int, piece: Piece) -> Iterator[Event]:
        """Yield the event for a piece; there is one reply."""
        self.reply.add(piece)
        tokens = _logprobs(self._tokens.feed(piece)) if self.request.logprobs else []
        self._logprobs += tokens
        self._held_tokens += tokens
        text = self._held + piece.text
        text = text if self._has_begun else text.lstrip()
        delta = text.rstrip()
        self._held = text[len(delta) :]
        if delta:
            self._has_begun = True
            tokens, self._held_tokens = self._held_tokens, []
            event: Event = {"type": "transcript.text.delta", "delta": delta}
            yield event | ({"logprobs": tokens} if self.request.logprobs else {})

    def end(self) -> Iterator[Event]:
        """Yield the whole text."""
        text = self.reply.text.strip()
        event: Event = {"type": "transcript.text.done", "text": text, "usage": _usage(self.reply)}
        yield event | ({"logprobs": self._logprobs} if self.request.logprobs else {})

    def error(self, error: RequestError) -> Iterator[Event]:
        """Yield what says that the answer cannot be continued."""
        yield error_body(error)
