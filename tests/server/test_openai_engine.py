"""OpenAI's APIs over a real, tiny model: what is parsed can be served, and streams say the same."""

import re
from typing import Any

import pytest
from helpers.openai_client import client
from helpers.tiny import SMALL, tiny_gguf

from webgemma import Gemma
from webgemma.server import openai_chat, openai_completions, openai_responses
from webgemma.server.openai_common import DONE, sse
from webgemma.server.protocol import Reply, Request

NAMES = {"id": "x_1", "created": 5, "model": "tiny"}
HELLO: Any = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Gemma:
    path = tmp_path_factory.mktemp("models") / "small.gguf"
    path.write_bytes(tiny_gguf(SMALL))
    return Gemma.load(path, device="cpu")


def written(model: Gemma, request: Request) -> Any:
    """Yield the index and the pieces of all replies."""
    settings: Any = request.settings
    asked = request.prompts or [request.messages]
    for at, each in enumerate(prompt for prompt in asked for _ in range(request.choices)):
        if request.prompts:
            pieces = model.generate(each, **settings)  # type: ignore[arg-type]
        else:
            pieces = model.chat(each, tools=request.tools, think=bool(request.think), **settings)  # type: ignore[arg-type]
        for piece in pieces:
            yield at, piece


def served(model: Gemma, api: Any, stream_class: Any, name: bool = False) -> Any:
    def respond(body: Any) -> Any:
        request = api.parse(body)
        token_bytes = model.tokenizer.token_bytes
        if request.stream:
            stream = stream_class(request, **NAMES, token_bytes=token_bytes)
            events = [*stream.begin()]
            for index, piece in written(model, request):
                events += stream.piece(index, piece)
            events += stream.end()
            return [*(sse(event, event["type"] if name else "") for event in events), DONE]
        replies = [Reply() for _ in range(max(1, len(request.prompts)) * request.choices)]
        for index, piece in written(model, request):
            replies[index].add(piece, keep_tokens=request.logprobs)
        return api.answer(request, replies, **NAMES, token_bytes=token_bytes)

    return client(respond)


@pytest.mark.parametrize("most", [0, 1, 12])
def test_chat(small: Gemma, most: int) -> None:
    settings: Any = {"max_tokens": most, "seed": -3, "logprobs": True, "top_logprobs": 2, "n": 2}
    completions = served(small, openai_chat, openai_chat.ChatStream).chat.completions
    whole = completions.create(model="m", messages=HELLO, **settings)
    with completions.stream(model="m", messages=HELLO, **settings) as stream:
        list(stream)
        snapshot = stream.current_completion_snapshot
    for choice, streamed in zip(whole.choices, snapshot.choices, strict=True):
        assert (choice.message.content or "") == (streamed.message.content or "")
        assert choice.finish_reason == streamed.finish_reason
        tokens = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
        # Special tokens, which a model with random weights writes, are no tokens of the text.
        text = re.sub(r"<\|?\w+\|?>", "", choice.message.content)
        assert tokens.decode("utf-8", "replace").strip() == text.strip()
    assert whole.usage.completion_tokens <= 2 * most
    if most:
        assert whole.choices[0].message.content == whole.choices[1].message.content  # one seed
        assert whole.usage.prompt_tokens > len(["hello", "there"])


@pytest.mark.parametrize("prompt", ["hello", ["hello", "there"], [2, 5, 6]])
def test_completions(small: Gemma, prompt: Any) -> None:
    api = served(small, openai_completions, openai_completions.CompletionStream)
    settings: Any = {"model": "m", "prompt": prompt, "temperature": 0, "logprobs": 1}
    whole = api.completions.create(**settings)
    api._strict_response_validation = False
    texts = [""] * len(whole.choices)
    for chunk in api.completions.create(**settings, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert whole.usage.completion_tokens <= 16 * len(whole.choices)


def test_responses(small: Gemma) -> None:
    api = served(small, openai_responses, openai_responses.ResponseStream, name=True)
    settings: Any = {"model": "m", "input": "hello", "max_output_tokens": 8, "temperature": 0}
    whole = api.responses.create(**settings)
    *_, last = api.responses.create(**settings, stream=True)
    assert last.response.output_text == whole.output_text
    assert last.response.usage == whole.usage
    assert whole.usage.output_tokens == 8 or whole.status == "completed"
