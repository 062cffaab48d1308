"""Replies of models under schemas: each is valid, or says that it was cut.

CI has a seed for every third schema; for all:
WEBGEMMA_SEEDS=20 .venv/bin/pytest tests/constraints"""

import json
from collections.abc import Iterator

import pytest
from helpers.constrained import SEEDS
from helpers.everyday_schemas import SCHEMAS
from helpers.live_server import tiny_model
from jsonschema import Draft202012Validator

from webgemma import Gemma

MAX_TOKENS = 300


@pytest.fixture(scope="module", params=["bundled", "random"])
def gemma(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gemma]:
    path = (
        tiny_model(tmp_path_factory.mktemp("models"), ends=True)
        if request.param == "random"
        else None
    )
    with Gemma.load(path, device="cpu") as model:
        yield model


@pytest.mark.parametrize("name", SCHEMAS if SEEDS else list(SCHEMAS)[::3])
def test_whatever_a_model_writes_is_valid(gemma: Gemma, name: str) -> None:
    schema = SCHEMAS[name]
    checker = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    for seed in range(SEEDS or 1):
        pieces = list(
            gemma.chat(
                f"Tell me about {name}, in JSON.",
                schema=schema,
                temperature=1.5,
                top_k=0,
                top_p=1.0,
                seed=seed,
                max_tokens=MAX_TOKENS,
            )
        )
        text, end = "".join(piece.text for piece in pieces), pieces[-1]
        if end.finish == "length":
            assert end.value is None, text
            assert end.usage.reply == MAX_TOKENS
            continue
        assert end.finish == "stop", text
        assert end.value == json.loads(text)
        assert not [error.message for error in checker.iter_errors(end.value)], text
