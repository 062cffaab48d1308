"""OpenAI's older Completions API, against the `openai` package's types and client."""

from typing import Any

import openai
import pytest
from helpers.openai_client import JSON, PROMPT, Script, client, parsed_or_refused, refusal
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from pydantic import ValidationError

from webgemma.server.openai_common import DONE, sse
from webgemma.server.openai_completions import MAX_REPLIES, CompletionStream, answer, parse
from webgemma.server.openai_structures import FIELDS as STRUCTURE_FIELDS
from webgemma.server.protocol import RequestError
from webgemma.settings import resolve

NAMES = {"id": "cmpl-7", "created": 1700000000, "model": "gemma4:e2b"}


def serve(*scripts: Script, cached: int = 0) -> openai.OpenAI:
    """Return a client of a server whose model writes these replies."""
    scripts[0].cache(cached)

    def respond(given: Any) -> Any:
        request = parse(given)
        token_bytes = {k: v for script in scripts for k, v in script.texts.items()}.__getitem__
        if not request.stream:
            replies = [script.reply() for script in scripts]
            return answer(request, replies, **NAMES, token_bytes=token_bytes)
        stream = CompletionStream(request, **NAMES, token_bytes=token_bytes)
        events = [*stream.begin()]
        for index, script in enumerate(scripts):
            for piece in script.pieces:
                events += stream.piece(index, piece)
        events += stream.end()
        for event in events:
            check_chunk(event)
        return [*map(sse, events), DONE]

    return client(respond)


def check_chunk(event: Any) -> None:
    """Validate a chunk. The package's type has no null for finish_reason, which OpenAI streams."""
    known = {("choices", 0, "finish_reason")}
    if event["choices"] and event["choices"][0]["finish_reason"] is None:
        with pytest.raises(ValidationError) as caught:
            Completion.model_validate(event, strict=True)
        assert {wrong["loc"] for wrong in caught.value.errors()} == known
    else:
        Completion.model_validate(event, strict=True)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Once", ["Once"]),
        ("", [""]),
        (None, [""]),
        (["Once", "Twice"], ["Once", "Twice"]),
        ([2, 3], [[2, 3]]),
        ([[2, 3], [4]], [[2, 3], [4]]),
    ],
)
def test_prompts_are_texts_or_ids(prompt: Any, prompts: Any) -> None:
    request = parse({"prompt": prompt})
    assert request.prompts == prompts
    assert not request.messages


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": 5}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [2, "a"]}, "prompt[1]"),
        ({"prompt": [[2, -1]]}, "prompt[0][1]"),
        ({"prompt": [2, True]}, "prompt[1]"),
        ({"prompt": ["a"] * (MAX_REPLIES // 2 + 1), "n": 2}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"echo": True}, "echo"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"max_tokens": "x"}, "max_tokens"),
    ],
)
def test_wrong_fields_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refusal(parse, {"prompt": "Once"} | fields).param == param


def test_settings() -> None:
    assert parse({}).settings == {"max_tokens": 16}  # OpenAI's default
    fields = {"suffix": None, "echo": False, "best_of": 0, "logit_bias": {"foo": 0}, "user": "u"}
    request = parse({"prompt": "a", "max_tokens": 0, "logprobs": 0, "stop": "\n"} | fields)
    assert request.settings == {"max_tokens": 0, "stop": ("\n",), "logit_bias": {}}
    assert request.logprobs
    assert parse({"logprobs": 3}).settings["top_logprobs"] == 3


def test_a_whole_answer_is_the_clients() -> None:
    scripts = [Script().text("a", "b").stop(), Script().text("c").length()]
    scripts += [Script().text("d").stop(), Script().stop()]
    done = serve(*scripts, cached=4).completions.create(model="m", prompt=["One", "Two"], n=2)
    assert [(choice.index, choice.text, choice.finish_reason) for choice in done.choices] == [
        (0, "ab", "stop"),
        (1, "c", "length"),
        (2, "d", "stop"),
        (3, "", "stop"),
    ]
    assert done.usage is not None
    assert done.usage.prompt_tokens == 2 * PROMPT  # each prompt once
    assert done.usage.completion_tokens == 3 + 1 + 2 + 1
    assert done.usage.prompt_tokens_details.cached_tokens == 4  # type: ignore[union-attr]


@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_stream_gives_the_client_the_same_answer(logprobs: int | None) -> None:
    def scripts() -> list[Script]:
        return [Script().text("a").halves("é").text("b").stop(), Script().text("c").length()]

    whole = serve(*scripts()).completions.create(model="m", prompt="One", n=2, logprobs=logprobs)
    texts, reasons, offsets = ["", ""], ["", ""], [[], []]  # type: ignore[var-annotated]
    usage = None
    served = serve(*scripts())  # strictly, it refuses the null of finish_reason
    served._strict_response_validation = False
    for chunk in served.completions.create(
        model="m",
        prompt="One",
        n=2,
        logprobs=logprobs,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or ""
            if choice.logprobs:
                offsets[choice.index] += choice.logprobs.text_offset or []
    assert texts == [choice.text for choice in whole.choices] == ["aéb", "c"]
    assert reasons == [choice.finish_reason for choice in whole.choices] == ["stop", "length"]
    assert usage == whole.usage
    if logprobs:
        assert offsets == [choice.logprobs.text_offset for choice in whole.choices]  # type: ignore[union-attr]


def test_logprobs_are_columns() -> None:
    script = Script().text("a").halves("é").text("b").stop()
    done = serve(script).completions.create(model="m", prompt="One", logprobs=2)
    columns = done.choices[0].logprobs
    assert columns is not None
    assert columns.tokens == ["a", "\ufffd", "\ufffd", "b"]
    assert columns.token_logprobs == [-0.5, -1.5, -2.5, -3.5]
    assert columns.text_offset == [0, 1, 1, 2]  # "b" is the third character
    assert columns.top_logprobs is not None
    assert columns.top_logprobs[3] == {"b": -3.5, "<turn|>": -9999.0}


def test_no_tokens_at_all_end_by_length() -> None:
    request = parse({"prompt": "a", "max_tokens": 0})
    (event,) = CompletionStream(request, **NAMES).end()
    assert event["choices"][0]["finish_reason"] == "length"
    done = Completion.model_validate(answer(request, [Script().reply()], **NAMES))
    assert (done.choices[0].finish_reason, done.choices[0].text) == ("length", "")


def test_the_client_raises_what_is_wrong() -> None:
    served = serve(Script().stop())
    with pytest.raises(openai.BadRequestError, match="cannot fill a gap") as caught:
        served.completions.create(model="m", prompt="a", suffix="b")
    assert caught.value.param == "suffix"
    stream = CompletionStream(parse({"stream": True}), **NAMES)
    events = [*stream.error(RequestError("The GPU was lost.", 500))]
    failing = client(lambda _: map(sse, events))
    with pytest.raises(openai.APIError, match=r"The GPU was lost\."):
        list(failing.completions.create(model="m", prompt="a", stream=True))


FIELDS = [
    *("model", "prompt", "suffix", "echo", "best_of", "n", "logprobs", "logit_bias", "stop"),
    *("max_tokens", "seed", "temperature", "stream", "stream_options"),
    *("response_format", "structured_outputs", *STRUCTURE_FIELDS),
]


@given(JSON | st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
def test_any_json_is_a_request_or_refused(given: Any) -> None:
    request = parsed_or_refused(parse, given)
    if request:
        resolve(request.settings)  # type: ignore[arg-type]
        assert request.prompts
