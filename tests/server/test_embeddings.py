"""Embeddings over HTTP: the official clients of OpenAI and Ollama, bodies, limits, refusals."""

import asyncio
import base64
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import openai
import pytest
from helpers.live_server import PATIENCE, Live, live_server, tiny_model, wait_until
from helpers.tiny import EMBEDDING, tiny_gguf
from helpers.tiny_adapter import LAYER, tiny_adapter, tiny_pairs

from webgemma import Gemma
from webgemma.gguf.reader import Gguf
from webgemma.lora.peft_folder import write_peft_folder
from webgemma.server import embeddings
from webgemma.server.embeddings import parse_old_ollama, parse_ollama, parse_openai
from webgemma.server.protocol import RequestError

TEXTS = ["the inner", "in the end", ""]
LONG = "the " * 300
WITHIN = 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    tiny_model(made)
    (made / "embedding.gguf").write_bytes(tiny_gguf(EMBEDDING))
    return made


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    with live_server(folder / "embedding.gguf", folder / "small.gguf") as server:
        yield server


@pytest.fixture(scope="module")
def to_openai(live: Live) -> Iterator[Any]:
    with openai.OpenAI(
        base_url=f"{live.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE
    ) as client:
        yield client


@pytest.fixture(scope="module")
def to_ollama(live: Live) -> Iterator[Any]:
    client = ollama.Client(host=live.url, timeout=PATIENCE)
    yield client
    client._client.close()


@pytest.fixture(scope="module")
def gemma(folder: Path) -> Iterator[Gemma]:
    with Gemma.load(folder / "embedding.gguf", "cpu") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def expected(gemma: Gemma) -> np.ndarray:
    return gemma.embed(TEXTS)


def assert_close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=WITHIN)


# OpenAI


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_openai(to_openai: Any, expected: np.ndarray, gemma: Gemma, encoding: str | None) -> None:
    """The client asks for base64 by itself, and decodes that."""
    more: Any = {} if encoding is None else {"encoding_format": encoding}
    answer = to_openai.embeddings.create(model="embedding", input=TEXTS, **more)
    vectors = [row.embedding for row in answer.data]
    if encoding == "base64":
        vectors = [np.frombuffer(base64.b64decode(vector), "<f4") for vector in vectors]
    assert_close(vectors, expected)
    assert [row.index for row in answer.data] == [0, 1, 2]
    assert (answer.object, answer.model, answer.data[0].object) == (
        "list",
        "embedding",
        "embedding",
    )
    tokens = sum(map(len, gemma.texts.read(TEXTS).ids))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)


def test_openai_inputs(to_openai: Any, expected: np.ndarray, gemma: Gemma) -> None:
    ids = gemma.texts.read(TEXTS).ids
    for given, wanted in (
        (TEXTS[1], expected[1:2]),
        (ids[1], expected[1:2]),
        (ids, expected),
        ([TEXTS[0], ids[1]], expected[:2]),
    ):
        answer = to_openai.embeddings.create(model="embedding", input=given)
        assert_close([row.embedding for row in answer.data], wanted)


def test_openai_dimensions_and_tasks(to_openai: Any, gemma: Gemma) -> None:
    answer = to_openai.embeddings.create(
        model="embedding", input=TEXTS, dimensions=16, extra_body={"task": "query"}
    )
    wanted = gemma.embed(TEXTS, task="query", size=16)
    assert_close([row.embedding for row in answer.data], wanted)


@pytest.mark.parametrize(
    ("asked", "message", "param"),
    [
        ({"input": LONG}, r"input\[0\] has more than 128 tokens", "input"),
        ({"input": ["in", [30] * 200]}, r"input\[1\] has more than 128 tokens", "input"),
        ({"input": [[2, 9999]]}, "holds the id 9999", "input"),
        ({"input": []}, "input is", "input"),
        ({"input": "in", "dimensions": 65}, "A size of 65 is not possible", "dimensions"),
        ({"input": "in", "dimensions": 0}, "dimensions is 0", "dimensions"),
        ({"input": "in", "encoding_format": "int8"}, "one of float, base64", "encoding_format"),
        ({"input": "in", "extra_body": {"task": "search"}}, "one of query, document", "task"),
        ({"input": "in", "model": "small"}, "small writes text and does not embed", "model"),
    ],
    ids=str,
)
def test_openai_refuses(to_openai: Any, asked: dict[str, Any], message: str, param: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        to_openai.embeddings.create(**{"model": "embedding"} | asked)
    assert refused.value.param == param


def test_a_model_that_does_not_embed_is_not_loaded_for_that(live: Live, to_openai: Any) -> None:
    to_openai.embeddings.create(model="embedding", input="in")
    with pytest.raises(openai.BadRequestError, match="does not embed"):
        to_openai.embeddings.create(model="small", input="in")
    assert [model.offered.name for model in live.registry.loaded()] == ["embedding"]
    with pytest.raises(openai.NotFoundError):
        to_openai.embeddings.create(model="other", input="in")


def test_a_loaded_model_that_does_not_embed(live: Live) -> None:
    asked = {"model": "small", "messages": [{"role": "user", "content": "in"}], "max_tokens": 1}
    assert live.post("/v1/chat/completions", asked).status_code == 200
    answer = live.post("/v1/embeddings", {"model": "small", "input": "in"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "model"


# Ollama


def test_ollama(to_ollama: Any, expected: np.ndarray, gemma: Gemma) -> None:
    answer = to_ollama.embed("embedding", TEXTS)
    assert_close(answer.embeddings, expected)
    assert answer.model == "embedding"
    assert answer.prompt_eval_count == sum(map(len, gemma.texts.read(TEXTS).ids))
    assert answer.total_duration > answer.load_duration >= 0
    assert_close(to_ollama.embed("embedding:latest", TEXTS[0]).embeddings, expected[:1])
    assert_close(to_ollama.embeddings("embedding", TEXTS[0]).embedding, expected[0])


def test_ollama_dimensions(to_ollama: Any, gemma: Gemma) -> None:
    answer = to_ollama.embed("embedding", TEXTS, dimensions=8)
    assert_close(answer.embeddings, gemma.embed(TEXTS, size=8))


def test_ollama_cuts_unless_told_otherwise(live: Live, to_ollama: Any) -> None:
    answer = to_ollama.embed("embedding", LONG)
    assert answer.prompt_eval_count == 128
    assert len(live.post("/api/embeddings", {"model": "embedding", "prompt": LONG}).json()) == 1
    with pytest.raises(ollama.ResponseError, match="has more than 128 tokens") as refused:
        to_ollama.embed("embedding", LONG, truncate=False)
    assert refused.value.status_code == 400


def test_ollama_loads_for_an_empty_input(live: Live) -> None:
    for body in ({}, {"input": None}):
        answer = live.post("/api/embed", {"model": "embedding", **body})
        assert (answer.status_code, answer.json()["embeddings"]) == (200, [])
    assert live.post("/api/embeddings", {"model": "embedding"}).json() == {"embedding": []}
    assert [model.offered.name for model in live.registry.loaded()] == ["embedding"]


def test_ollama_keep_alive(live: Live) -> None:
    body = {"model": "embedding", "input": "in", "keep_alive": 0}
    assert live.post("/api/embed", body).status_code == 200
    wait_until(lambda: not live.registry.loaded())


def test_ollama_refuses(live: Live, to_ollama: Any) -> None:
    for embed in (to_ollama.embed, to_ollama.embeddings):
        with pytest.raises(ollama.ResponseError, match="small writes text") as said:
            embed("small", "in")
        assert said.value.status_code == 400
    assert live.post("/api/embed", {"name": "other", "input": "in"}).status_code == 404
    assert live.post("/api/embeddings").status_code == 400


def test_capabilities(to_ollama: Any) -> None:
    assert to_ollama.show("embedding").capabilities == ["embedding"]
    assert "completion" in to_ollama.show("small").capabilities


# An embedding model writes no text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "in"}]}),
        ("/v1/completions", {"prompt": "in"}),
        ("/v1/responses", {"input": "in"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "in"}], "max_tokens": 3}),
        ("/api/generate", {"prompt": "in", "stream": False}),
        ("/api/chat", {"messages": [{"role": "user", "content": "in"}], "stream": False}),
    ],
)
def test_it_writes_no_text(live: Live, path: str, body: dict[str, Any]) -> None:
    answer = live.post(path, {"model": "embedding", **body})
    assert answer.status_code == 400
    assert "is an embedding model, which writes no text" in json.dumps(answer.json())


def test_an_adapter_has_vectors_of_its_own(folder: Path, gemma: Gemma, tmp_path: Path) -> None:
    model, adapter = folder / "embedding.gguf", tmp_path / "adapter"
    with Gguf.open(model) as gguf:
        write_peft_folder(tiny_adapter(tiny_pairs(gguf, LAYER)), adapter)
    with Gemma.load(model, "cpu", lora=adapter) as adapted:
        expected = adapted.embed(TEXTS)
    with live_server(model, adapters=[f"own={adapter}"]) as live:
        for name, wanted in (("own", expected), ("embedding", gemma.embed(TEXTS))):
            answer = live.post("/api/embed", {"model": name, "input": TEXTS}).json()
            assert_close(answer["embeddings"], wanted)
    assert np.abs(expected - gemma.embed(TEXTS)).max() > 0.01


# Limits, and clients that leave


def test_limits(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = live.post("/v1/embeddings", {"model": "embedding", "input": ["in"] * 2049})
    assert answer.status_code == 400
    assert "input has 2049 texts; there may be up to 2048" in answer.text
    monkeypatch.setattr(embeddings, "MAX_TOKENS", 20)
    answer = live.post("/api/embed", {"model": "embedding", "input": ["in the end"] * 9})
    assert answer.status_code == 400
    assert "there may be up to 20 in a request" in answer.text


def test_a_client_that_leaves_ends_what_is_computed(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.post("/api/embed", {"model": "embedding", "input": "in"})
    engine = live.registry.loaded()[0].engine
    assert engine is not None
    computing: Any = engine.model._engine
    embed, computed = computing.embed, list[int]()

    async def counted(ids: Any, batch: Any, progress: Any, *more: Any) -> Any:
        def show(done: int, total: int) -> None:
            computed.append(done)
            progress(done, total)

        return await embed(ids, batch, show, *more)

    monkeypatch.setattr(computing, "embed", counted)
    texts = ["the inner end of the thing in there"] * 2048
    body = json.dumps({"model": "embedding", "input": texts}).encode()
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with live.connect() as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        wait_until(lambda: len(computed) > 0)
    wait_until(lambda: live.registry.requests == 0)
    assert len(computed) < 1000  # all of them take seconds
    assert live.post("/api/embed", {"model": "embedding", "input": "in"}).status_code == 200


def test_many_texts_let_others_have_their_turn(
    live: Live, monkeypatch: pytest.MonkeyPatch, expected: np.ndarray
) -> None:
    monkeypatch.setattr(embeddings, "TURN_TOKENS", 40)
    aembed, turns, go = Gemma.aembed, list[int](), threading.Event()

    async def held(self: Gemma, texts: Any, **more: Any) -> Any:
        if len(texts) > 1:
            turns.append(len(texts))
            if len(turns) == 2:
                await asyncio.to_thread(go.wait, PATIENCE)
        return await aembed(self, texts, **more)

    monkeypatch.setattr(Gemma, "aembed", held)
    try:
        with ThreadPoolExecutor(1) as pool:
            many = {"model": "embedding", "input": [*TEXTS, "the inner end"] * 9}
            first = pool.submit(live.post, "/api/embed", many)
            wait_until(lambda: len(turns) == 2)
            answer = live.post("/api/embed", {"model": "embedding", "input": TEXTS[0]}).json()
            assert_close(answer["embeddings"], expected[:1])
            go.set()
            vectors = np.array(first.result().json()["embeddings"])
    finally:
        go.set()
    assert sum(turns) == len(vectors) == 36
    for number in range(3):
        assert_close(vectors[number::4], [expected[number]] * 9)


def test_tokens_are_counted(live: Live) -> None:
    def count() -> int:
        line = next(
            line
            for line in live.http.get("/metrics").text.splitlines()
            if line.startswith("llamacpp:prompt_tokens_total")
        )
        return int(line.split()[1])

    before = count()
    answer = live.post("/v1/embeddings", {"model": "embedding", "input": TEXTS})
    assert count() - before == answer.json()["usage"]["prompt_tokens"] > 0


# Bodies


def test_bodies() -> None:
    asked = parse_openai({"input": "in", "user": "somebody", "model": "x"})
    assert (asked.model, asked.texts, asked.size, asked.truncate) == ("x", ["in"], None, False)
    assert parse_openai({"input": [2, 30]}).texts == [[2, 30]]
    assert parse_openai({"input": [[2], [3]]}).texts == [[2], [3]]
    asked = parse_ollama({"model": "x", "input": ["a", "b"], "keep_alive": "5m", "dimensions": 8})
    assert (asked.texts, asked.keep_alive, asked.size, asked.truncate) == (["a", "b"], 300, 8, True)
    assert parse_old_ollama({"model": "x", "prompt": "a"}).texts == ["a"]


@pytest.mark.parametrize("given", [3, None, {}, [""] * 3 + [None], [[]], [["a"]], [True], [2.5]])
def test_wrong_inputs(given: Any) -> None:
    with pytest.raises(RequestError, match="a text or a list of texts, or token ids"):
        parse_openai({"input": given})
    if given is not None:
        with pytest.raises(RequestError, match="a text or a list of texts"):
            parse_ollama({"model": "x", "input": given})


@pytest.mark.parametrize("body", [[], "in", None])
def test_wrong_bodies(body: Any) -> None:
    for parse in (parse_openai, parse_ollama, parse_old_ollama):
        with pytest.raises(RequestError, match="must be a JSON object"):
            parse(body)
