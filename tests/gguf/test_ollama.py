"""Ollama's store: names, digests, models and the folder they are in."""

import hashlib
import json
import os
import string
from pathlib import Path, PurePosixPath

import pytest
from conftest import FIXTURES
from helpers.store import CONFIG, add_manifest, add_model, manifest_path
from hypothesis import given
from hypothesis import strategies as st

from webgemma.errors import GgufError, InputError, ModelNotFoundError
from webgemma.gguf import ollama
from webgemma.gguf.ollama import (
    DEFAULT_HOST,
    DEFAULT_NAMESPACE,
    DEFAULT_TAG,
    ModelName,
    OllamaStore,
    parse_digest,
    sha256_file,
)

NAMES = [json.loads(line) for line in (FIXTURES / "names.jsonl").read_text().splitlines()]
HEX = "0123456789abcdef" * 4
LETTERS = string.ascii_letters + string.digits + "_"


def part(more: str, longest: int) -> st.SearchStrategy[str]:
    rest = st.text(LETTERS + more, max_size=longest - 1)
    return st.builds(str.__add__, st.sampled_from(LETTERS), rest)


MODEL_NAMES = st.builds(
    ModelName,
    host=st.just(DEFAULT_HOST) | part("-.:", 350),
    namespace=st.just(DEFAULT_NAMESPACE) | part("-", 80),
    model=part("-.", 80),
    tag=st.just(DEFAULT_TAG) | part("-.", 80),
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


# Names


@pytest.mark.parametrize("case", NAMES, ids=lambda case: repr(case["name"][:40]))
def test_names_are_parsed_as_ollama_does(case, root):
    if case["valid"]:
        name = ModelName.parse(case["name"])
        assert name == ModelName(case["host"], case["namespace"], case["model"], case["tag"])
    else:
        with pytest.raises(InputError, match=r"Not a model name.*as in 'gemma4:e2b'") as caught:
            OllamaStore(root).find(case["name"])
        assert len(str(caught.value)) < 400
        assert not root.exists()


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("gemma4", "gemma4:latest"),
        ("gemma4:e2b", "gemma4:e2b"),
        ("registry.ollama.ai/library/gemma4:e2b", "gemma4:e2b"),
        ("alice/story:v1.2", "alice/story:v1.2"),
        ("http://hf.co/library/m", "hf.co/library/m:latest"),
        ("localhost:5000/a/b:c", "localhost:5000/a/b:c"),
    ],
)
def test_names_are_printed_in_short_form(typed, shown):
    assert str(ModelName.parse(typed)) == shown


@pytest.mark.parametrize(
    "text",
    [
        "a\n",
        "a:b\n",
        "9http://h/n/m",
        "https:///n/m",
        "://h/n/m",
        "https://model",
        "ª",
        "a:١",
        "\ud800",
    ],
)
def test_other_names_are_rejected(text):
    with pytest.raises(InputError):
        ModelName.parse(text)


def test_an_invalid_name_cannot_be_constructed():
    with pytest.raises(InputError, match=r"its tag '\.\.' must be"):
        ModelName("a", "b", "c", "..")


@given(MODEL_NAMES)
def test_a_printed_name_is_parsed_back(name):
    assert ModelName.parse(str(name)) == name


@given(st.text() | st.text("./:\\~%\0 aB-_", max_size=30))
def test_no_text_becomes_a_path_outside_the_store(text):
    try:
        name = ModelName.parse(text)
    except InputError:
        return
    path = PurePosixPath("/", name.host, name.namespace, name.model, name.tag)
    assert len(path.parts) == 5
    assert not {".", "..", ""} & set(path.parts)
    assert "\\" not in str(path)


# Digests


@pytest.mark.parametrize("text", [f"sha256:{HEX}", f"sha256-{HEX}", f"sha256:{HEX.upper()}"])
def test_digests_are_parsed(text):
    assert parse_digest(text) == HEX


@pytest.mark.parametrize(
    "text",
    [
        *("", HEX, f"sha256{HEX}", f"sha256:{HEX[1:]}", f"sha256:{HEX}0", f"sha256:{HEX}\n"),
        *(f"sha256:{HEX[1:]}g", f"SHA256:{HEX}", f"md5:{HEX}", f" sha256:{HEX}"),
        *("../../etc/passwd", f"sha256:../{HEX[3:]}", f"sha256:{HEX[1:]}٣"),
    ],
)
def test_invalid_digests_are_rejected(text):
    with pytest.raises(GgufError, match="is not a digest"):
        parse_digest(text)


def test_sha256_of_a_file_reports_progress(tmp_path):
    data = os.urandom(1 << 20) + b"end"
    (tmp_path / "file").write_bytes(data)
    reported: list[int] = []
    assert sha256_file(tmp_path / "file", reported.append) == hashlib.sha256(data).hexdigest()
    assert reported == sorted(reported)
    assert reported[-1] == len(data)
    with pytest.raises(GgufError, match="cannot be read"):
        sha256_file(tmp_path)


# Models


def test_a_model_with_all_layers(root):
    path = add_model(
        root,
        "gemma4:e2b",
        gguf=b"GGUF model",
        layers=[
            ("projector", b"GGUF vision"),
            ("projector", b"GGUF audio"),
            ("adapter", b"GGUF lora"),
            ("draft", b"GGUF small"),
            ("prompt", "old {{ .Prompt }}"),
            ("template", "{{ .Prompt }} é"),
            ("system", "Be brief."),
            ("params", '{"temperature": 1, "stop": ["<turn|>"]}'),
            ("messages", '[{"role": "user", "content": "Hi"}]'),
            ("license", "first"),
            ("license", "second"),
        ],
    )
    model = OllamaStore(root).find("gemma4:e2b")
    assert model.path.read_bytes() == b"GGUF model"
    assert model.path.parent == root / "blobs"
    assert [file.read_bytes() for file in model.projectors] == [b"GGUF vision", b"GGUF audio"]
    assert [file.read_bytes() for file in model.adapters] == [b"GGUF lora"]
    assert model.draft is not None
    assert model.draft.read_bytes() == b"GGUF small"
    assert model.template == "{{ .Prompt }} é"
    assert model.system == "Be brief."
    assert model.params == {"temperature": 1, "stop": ["<turn|>"]}
    assert model.messages == ({"role": "user", "content": "Hi"},)
    assert model.licenses == ("first", "second")
    assert model.config == CONFIG
    assert model.manifest_path == path
    assert model.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert model.modified_seconds == path.stat().st_mtime
    assert model.nbytes == sum(file.stat().st_size for file in (root / "blobs").iterdir())
    assert [layer.kind for layer in model.layers][:3] == ["model", "projector", "projector"]


def test_a_model_without_layers(root):
    add_manifest(root, "m:t", {"layers": None, "config": None})
    model = OllamaStore(root).find("m:t")
    assert (model.template, model.system, model.params, model.draft) == ("", "", {}, None)
    assert model.projectors == model.adapters == model.licenses == model.messages == ()
    assert (model.config, model.nbytes) == ({}, 0)
    with pytest.raises(GgufError, match="m:t has no model file"):
        _ = model.path


def test_the_list_is_sorted_by_name(root):
    for name in ["gemma4:latest", "gemma4:e2b", "alice/story:v1.2", "hf.co/org/m-GGUF:Q8_0"]:
        add_model(root, name)
    store = OllamaStore(root)
    names = [str(model.name) for model in store.list()]
    assert names == ["alice/story:v1.2", "gemma4:e2b", "gemma4:latest", "hf.co/org/m-GGUF:Q8_0"]
    assert store.problems == ()
    assert all(store.find(name).name == ModelName.parse(name) for name in names)


def test_an_empty_or_missing_store_has_no_models(root):
    assert OllamaStore(root).list() == []
    (root / "manifests").mkdir(parents=True)
    assert OllamaStore(root).list() == []
    with pytest.raises(ModelNotFoundError, match=r"The store is empty.*OLLAMA_MODELS"):
        OllamaStore(root).find("gemma4")


def test_names_are_found_in_any_case(root):
    add_model(root, "hf.co/Some-Org/Gemma-GGUF:Q8_0", gguf=b"GGUF 1")
    model = OllamaStore(root).find("HF.co/some-org/gemma-gguf:q8_0")
    assert str(model.name) == "hf.co/Some-Org/Gemma-GGUF:Q8_0"


def test_the_exact_spelling_is_preferred(root):
    add_model(root, "M:t", gguf=b"GGUF upper")
    add_model(root, "m:t", gguf=b"GGUF lower")
    if not (manifest_path(root, "M:t")).samefile(manifest_path(root, "m:t")):
        assert OllamaStore(root).find("m:t").path.read_bytes() == b"GGUF lower"
        assert OllamaStore(root).find("M:t").path.read_bytes() == b"GGUF upper"


def test_a_missing_model_lists_the_closest_names_first(root):
    for name in ["zephyr:7b", "gemma4:e2b", "gemma3:4b", *(f"x{i}:y" for i in range(9))]:
        add_model(root, name)
    with pytest.raises(ModelNotFoundError) as caught:
        OllamaStore(root).find("gemma4:e4b")
    assert "Ollama has no gemma4:e4b" in str(caught.value)
    assert "Available: gemma4:e2b, gemma3:4b, " in str(caught.value)
    assert str(caught.value).endswith(" and 2 more.")


# The folder of the store


@pytest.mark.parametrize("value", ["{}", "  {} ", '"{}"', "'{}'", ' "{}" '])
def test_ollama_models_sets_the_store(monkeypatch, root, value):
    monkeypatch.setenv("OLLAMA_MODELS", value.format(root))
    assert OllamaStore().root == root


@pytest.mark.parametrize("value", ["", " ", '""'])
def test_the_home_store_comes_before_the_service_store(monkeypatch, tmp_path, value):
    monkeypatch.setenv("OLLAMA_MODELS", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setattr(ollama, "SERVICE_ROOT", tmp_path / "service")
    home = tmp_path / ".ollama" / "models"
    assert OllamaStore().root == home
    (tmp_path / "service").mkdir()
    assert OllamaStore().root == tmp_path / "service"
    home.mkdir(parents=True)
    assert OllamaStore().root == home


def test_an_unreadable_store_is_reported(monkeypatch, root):
    def forbidden(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(ollama.os, "scandir", forbidden)
    store = OllamaStore(root)
    assert store.list() == []
    assert "cannot be read: Permission denied" in store.problems[0]
    with pytest.raises(ModelNotFoundError, match="Permission denied"):
        store.find("gemma4")
