"""What OpenAI's APIs share: the list of models, and errors."""

import pytest
from openai.pagination import SyncPage
from openai.types import Model

from webgemma.replies import Piece
from webgemma.server.openai_common import error_body, model_entry, model_list, sse
from webgemma.server.protocol import Reply, RequestError


def test_models() -> None:
    listed = SyncPage[Model].model_validate(
        model_list([model_entry(name, 5) for name in "ab"]), strict=True
    )
    assert [model.id for model in listed.data] == ["a", "b"]
    assert Model.model_validate(model_entry("a", 5), strict=True).created == 5


@pytest.mark.parametrize(
    ("status", "param", "kind", "code"),
    [
        (400, "n", "invalid_request_error", None),
        (401, None, "authentication_error", None),
        (403, None, "permission_error", None),
        (404, "model", "invalid_request_error", "model_not_found"),
        (404, None, "invalid_request_error", None),
        (429, None, "rate_limit_error", None),
        (500, None, "server_error", None),
        (503, None, "unavailable_error", None),
    ],
)
def test_errors(status: int, param: str | None, kind: str, code: str | None) -> None:
    body = error_body(RequestError("It is wrong.", status, param))
    assert body == {
        "error": {"message": "It is wrong.", "type": kind, "param": param, "code": code}
    }


def test_an_event_is_one_line_to_every_client() -> None:
    event = sse({"text": "é\n\u2028\x85\ud800"}, "response.created").decode()
    assert event.splitlines() == [
        "event: response.created",
        'data: {"text": "é\\n\\u2028\\u0085?"}',
        "",
    ]


def test_a_reply_counts_the_tokens_of_its_thoughts() -> None:
    reply = Reply()
    reply.add(Piece(1, "", 0.0))  # a tag
    reply.add(Piece(2, "", 0.0, thinking="Hm"))
    reply.add(Piece(-1, "", 0.0))  # a canvas, not a token
    reply.add(Piece(3, "", 0.0))
    reply.add(Piece(4, "Hello", 0.0))
    assert reply.thinking_tokens == 2
