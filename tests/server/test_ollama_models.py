"""Ollama's API for models: its client lists, shows and finds them; nothing changes the store."""

import json
import os
from pathlib import Path
from typing import Any

import httpx
import ollama as client
import pytest
from helpers.store import add_model
from helpers.tiny import SMALL, tiny_gguf
from helpers.tiny_vision import SMALL_VISION, vision_gguf

from webgemma.gguf.ollama import OllamaModel, OllamaStore
from webgemma.gguf.reader import Gguf
from webgemma.server import ollama, ollama_models
from webgemma.server.ollama_models import ModelEntry, Running
from webgemma.server.protocol import RequestError


@pytest.fixture
def model(tmp_path: Path) -> OllamaModel:
    params = json.dumps({"temperature": 1, "stop": ["<turn|>", "x"]})
    layers = [("template", "{{ .Prompt }}"), ("license", "Free."), ("params", params)]
    manifest = add_model(tmp_path, gguf=tiny_gguf(SMALL), layers=layers)
    os.utime(manifest, (1_700_000_000, 1_700_000_000))
    return OllamaStore(tmp_path).find("gemma4:e2b")


def ask(answer: Any) -> client.Client:
    """Return Ollama's client at a server with one answer."""

    def handle(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=ollama.line(answer))

    return client.Client("http://test", transport=httpx.MockTransport(handle))


def test_the_models_of_the_store_are_listed(model):
    listed = ask(ollama_models.tags([ModelEntry.of_store(model)])).list().models[0]
    assert listed.model == "gemma4:e2b"
    assert listed.modified_at.timestamp() == 1_700_000_000
    assert (listed.size, listed.digest) == (model.nbytes, model.digest)
    details = listed.details
    assert (details.format, details.family, details.families) == ("gguf", "gemma4", ["gemma4"])
    assert (details.parameter_size, details.quantization_level) == ("5.1B", "Q4_K_M")


def test_a_listed_model_has_every_field_that_editors_require(model):
    [entry] = ollama_models.tags([ModelEntry.of_store(model)])["models"]
    assert {"name", "model", "modified_at", "size", "digest", "details"} == set(entry)
    required = {"format", "family", "parameter_size", "quantization_level"}
    assert required <= set(entry["details"])


def test_a_model_is_shown(model):
    entry = ModelEntry.of_store(model, texts=True)
    with Gguf.open(model.path) as gguf:
        can = ollama_models.capabilities_of(gguf)
        shown = ask(ollama_models.show(entry, gguf, can)).show("gemma4:e2b")
        verbose = ollama_models.show(entry, gguf, can, verbose=True)
        count = sum(int(product_of(tensor.shape)) for tensor in gguf.tensors.values())
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.template == "{{ .Prompt }}"
    assert shown.license == "Free."
    lines = [line.split() for line in shown.parameters.splitlines()]
    assert lines == [["temperature", "1"], ["stop", '"<turn|>"'], ["stop", '"x"']]
    info = shown.modelinfo
    assert info["general.architecture"] == "gemma4"
    assert info["general.parameter_count"] == count
    assert info["gemma4.context_length"] == SMALL.context
    assert info["tokenizer.ggml.tokens"] is None
    assert len(verbose["model_info"]["tokenizer.ggml.tokens"]) == SMALL.vocab
    assert {"name", "type", "shape"} == set(verbose["tensors"][0])


def product_of(shape: tuple[int, ...]) -> int:
    product = 1
    for side in shape:
        product *= side
    return product


def test_a_damaged_text_does_not_hide_a_model(model):
    licence = next(layer for layer in model.layers if layer.kind == "license")
    licence.path.write_bytes(b"\xff" * licence.nbytes)
    entry = ModelEntry.of_store(model, texts=True)
    assert "license" not in entry.texts
    assert entry.texts["template"] == "{{ .Prompt }}"


def test_encoders_are_capabilities(tmp_path):
    (tmp_path / "text.gguf").write_bytes(tiny_gguf(SMALL))
    (tmp_path / "mmproj.gguf").write_bytes(vision_gguf(SMALL_VISION))
    with Gguf.open(tmp_path / "text.gguf") as text, Gguf.open(tmp_path / "mmproj.gguf") as eyes:
        assert "vision" not in ollama_models.capabilities_of(text)
        assert "vision" in ollama_models.capabilities_of(text, [eyes])


def test_a_model_file_describes_itself(tmp_path):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf(SMALL))
    with Gguf.open(path) as gguf:
        entry = ModelEntry.of_file("tiny.gguf", gguf, path.stat().st_size, 1_700_000_000)
    listed = ask(ollama_models.tags([entry])).list().models[0]
    assert (listed.model, listed.digest, listed.details.family) == ("tiny.gguf", "", "gemma4")
    assert listed.details.quantization_level == "F32"
    assert listed.details.parameter_size.endswith("K")


@pytest.mark.parametrize("expires", [1_700_000_300, ollama.FOREVER])
def test_loaded_models_are_listed(model, expires):
    running = Running(ModelEntry.of_store(model), gpu_nbytes=123, context=4096, expires=expires)
    listed = ask(ollama_models.processes([running])).ps().models[0]
    assert (listed.name, listed.size_vram, listed.context_length) == ("gemma4:e2b", 123, 4096)
    year = listed.expires_at.year
    assert year == (9999 if expires == ollama.FOREVER else 2023)


def test_the_version_is_new_enough_for_codex():
    version = ollama_models.version()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 13, 4)


@pytest.mark.parametrize("route", ["pull", "create", "copy", "delete", "push", "blobs"])
def test_nothing_changes_the_store(route):
    error = ollama_models.refusal(route)
    assert error.status == 501
    assert str(error).count(". ") == 0
    assert "ollama " in str(error)
    assert set(ollama_models.REFUSED) == {"pull", "create", "copy", "delete", "push", "blobs"}


def test_the_body_of_show():
    assert ollama_models.parse_show({"name": "gemma4"}) == ("gemma4", False)
    assert ollama_models.parse_show({"model": "gemma4", "verbose": True}) == ("gemma4", True)
    for body in (None, [], {}, {"model": 5}, {"model": "m", "verbose": "yes"}):
        with pytest.raises(RequestError):
            ollama_models.parse_show(body)
