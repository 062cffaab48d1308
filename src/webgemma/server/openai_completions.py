"""OpenAI's older Completions API, which continues texts: `/v1/completions`."""

from collections.abc import Iterator, Sequence
from typing import Any

from webgemma.replies import Piece
from webgemma.server.openai_chunks import ChunkStream
from webgemma.server.openai_common import (
    ContentTokens,
    Event,
    TextOffsets,
    TokenBytes,
    content_tokens,
    flag,
    read_body,
    read_choices,
    read_include_usage,
    read_model,
    read_settings,
    read_top_logprobs,
    usage,
    whole,
)
from webgemma.server.openai_structures import read_structure
from webgemma.server.protocol import Reply, Request, RequestError
from webgemma.values import shown

MAX_REPLIES = 256  # to all prompts of a request together
DEFAULT_LENGTH = 16  # tokens, as OpenAI documents it
LIMITS = ("max_tokens", "n_predict")
REFUSED = {
    "echo": "the answer is only what follows the prompt; put the prompt before it yourself",
    "prompt_embeds": "prompts are text or token ids",
    "suffix": "the model continues a text and cannot fill a gap before one",
}

Prompt = str | list[int]


def parse(body: Any) -> Request:
    """Return what a body asks for; RequestError if it cannot be served."""
    body = read_body(body, REFUSED)
    prompts = _prompts(body.get("prompt"))
    choices = read_choices(body)
    if len(prompts) * choices > MAX_REPLIES:
        raise RequestError(
            f"prompt holds {len(prompts)} prompts with {choices} replies to each; there may be up "
            f"to {MAX_REPLIES} replies to a request.",
            param="prompt",
        )
    settings = {"max_tokens": DEFAULT_LENGTH} | read_settings(body, LIMITS)
    top = read_top_logprobs(body, "logprobs")
    if top:
        settings["top_logprobs"] = top
    return Request(
        read_model(body),
        settings,
        prompts=prompts,
        choices=choices,
        stream=flag(body.get("stream"), "stream"),
        structure=read_structure(body, body.get("response_format")),
        logprobs=body.get("logprobs") is not None,
        own={"include_usage": read_include_usage(body)},
    )


def _prompts(given: Any) -> list[Prompt]:
    """Return the prompts of a text, ids, or a list of either; no prompt is the empty text."""
    if given is None:
        return [""]
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list | tuple):
        raise RequestError(
            f"prompt is {shown(given)}; it must be a text, token ids, or a list of either.",
            param="prompt",
        )
    if not given:
        raise RequestError("prompt is an empty list: there is nothing to continue.", param="prompt")
    if all(isinstance(each, str) for each in given):
        return list(given)
    if all(isinstance(each, list | tuple) for each in given):
        return [_ids(each, f"prompt[{at}]") for at, each in enumerate(given)]
    return [_ids(given, "prompt")]


def _ids(given: Sequence[Any], where: str) -> list[int]:
    if not given:
        raise RequestError(f"{where} is an empty list: there is nothing to continue.", param=where)
    return [whole(token, f"{where}[{at}]", 0, 2**31 - 1) for at, token in enumerate(given)]


def answer(
    request: Request,
    replies: Sequence[Reply],
    *,
    id: str,
    created: int,
    model: str = "",
    token_bytes: TokenBytes | None = None,
) -> Event:
    """Return the whole answer; the replies are all those to the first prompt, then the next's."""
    choices = []
    for index, reply in enumerate(replies):
        tokens = content_tokens(reply, token_bytes) if request.logprobs else None
        columns = None if tokens is None else TextOffsets().columns(tokens)
        choices.append(_choice(index, reply.text, columns, _finish(reply)))
    return {
        "id": id,
        "object": "text_completion",
        "created": created,
        "model": model or request.model,
        "choices": choices,
        "usage": usage(request, replies),
    }


def _finish(reply: Reply) -> str:
    return reply.finish or "length"  # one without tokens was not allowed any


def _choice(index: int, text: str, columns: Event | None, finish: str | None) -> Event:
    return {"index": index, "text": text, "logprobs": columns, "finish_reason": finish}


class CompletionStream(ChunkStream):
    """Turns the pieces of an answer's replies into its chunks."""

    def __init__(
        self,
        request: Request,
        *,
        id: str,
        created: int,
        model: str = "",
        token_bytes: TokenBytes | None = None,
    ) -> None:
        count = len(request.prompts) * request.choices
        super().__init__(request, "text_completion", count, id=id, created=created, model=model)
        self._tokens = [(ContentTokens(token_bytes), TextOffsets()) for _ in range(count)]

    def begin(self) -> Iterator[Event]:
        """Yield nothing: the first chunk holds text."""
        yield from ()

    def piece(self, index: int, piece: Piece) -> Iterator[Event]:
        """Yield the chunks for a piece of a choice."""
        self.replies[index].add(piece)
        columns = None
        if self.request.logprobs:
            tokens, offsets = self._tokens[index]
            columns = offsets.columns(tokens.feed(piece))
        if piece.text:
            yield self._with_head(_choice(index, piece.text, columns, None))
        if piece.finish:
            yield self._last(index)

    def _end_of(self, index: int) -> Event:
        return self._with_head(_choice(index, "", None, _finish(self.replies[index])))
