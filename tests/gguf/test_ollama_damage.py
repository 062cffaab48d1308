"""Damaged and hostile Ollama stores: every fault is an error, and no path leaves the store."""

import contextlib
import hashlib
import json
import os
from pathlib import Path

import pytest
from helpers.store import IMAGE, add_manifest, add_model, layer, manifest_path
from hypothesis import given, settings
from hypothesis import strategies as st

from webgemma.errors import GgufError
from webgemma.gguf import ollama
from webgemma.gguf.ollama import OllamaStore

HEX = "0123456789abcdef" * 4
DIGESTS = st.sampled_from([f"sha256:{HEX}", f"sha256-{HEX}", "sha256:../../etc/passwd", ""])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | DIGESTS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["config", "layers", "mediaType", "digest", "size", "name", "x"]),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)
KINDS = ["model", "projector", "adapter", "draft", "template", "params", "messages", "tensor"]
MEDIA_TYPES = st.sampled_from([IMAGE + kind for kind in KINDS] + ["", "../x"])
VALID_LAYERS = st.fixed_dictionaries(
    {"mediaType": MEDIA_TYPES, "digest": st.just(f"sha256:{HEX}"), "size": st.integers(0, 4)}
)
LAYERS = VALID_LAYERS | st.fixed_dictionaries(
    {},
    optional={
        "mediaType": MEDIA_TYPES | JSON,
        "digest": DIGESTS | JSON,
        "size": st.integers() | JSON,
        "name": st.text() | JSON,
    },
)
MANIFESTS = JSON | st.fixed_dictionaries(
    {"layers": st.lists(VALID_LAYERS, max_size=4) | st.lists(LAYERS, max_size=4) | JSON},
    optional={"config": LAYERS | JSON},
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


def model_entry(**changes):
    entry = {
        "mediaType": "application/vnd.ollama.image.model",
        "digest": f"sha256:{HEX}",
        "size": 4,
    }
    return {"layers": [entry | changes]}


BAD_MANIFESTS = {
    "empty": b"",
    "not JSON": b"GGUF\0\0",
    "cut short": b'{"layers": [',
    "not UTF-8": b'{"x": "\xff"}',
    "UTF-16": '{"layers": []}'.encode("utf-16"),
    "nesting": b"[" * 200_000,
    "nested objects": b'{"a":' * 200_000,
    "a long number": b'{"schemaVersion": ' + b"9" * 5000 + b"}",
    "not a number": b'{"layers": [], "x": NaN}',
    "half a surrogate pair": b'{"layers": [], "x": "\\ud800"}',
    "too large": b'{"layers": []}' + b" " * ollama.MAX_TEXT_NBYTES,
    "a list": [],
    "a text": "layers",
    "layers an object": {"layers": {}},
    "layers a text": {"layers": "model"},
    "a layer a text": {"layers": ["model"]},
    "a layer null": {"layers": [None]},
    "config a list": {"layers": [], "config": [1]},
    "config without size": {"config": {"digest": f"sha256:{HEX}"}},
    "digest a path": model_entry(digest="../../../etc/passwd"),
    "digest an absolute path": model_entry(digest="/etc/passwd"),
    "digest with a path": model_entry(digest="sha256:../../../../../../../../etc/passwd"),
    "digest a number": model_entry(digest=1),
    "digest null": model_entry(digest=None),
    "size negative": model_entry(size=-1),
    "size a text": model_entry(size="4"),
    "size a float": model_entry(size=4.0),
    "size true": model_entry(size=True),
    "size beyond 64 bits": model_entry(size=1 << 63),
    "media type a list": model_entry(mediaType=[]),
    "name a number": model_entry(name=1),
    "config digest a path": {"config": {"digest": "../../etc/passwd", "size": 1}},
}


@pytest.mark.parametrize("manifest", BAD_MANIFESTS.values(), ids=BAD_MANIFESTS)
def test_a_damaged_manifest_affects_no_other_model(manifest, root):
    add_model(root, "good:one")
    add_manifest(root, "bad:one", manifest)
    store = OllamaStore(root)
    assert [str(model.name) for model in store.list()] == ["good:one"]
    assert len(store.problems) == 1
    assert len(store.problems[0]) < 400
    assert "bad:one" in store.problems[0]
    with pytest.raises(GgufError, match="bad:one"):
        store.find("bad:one")


@pytest.mark.parametrize(
    "config",
    [
        [],
        None,
        {"model_format": 1},
        {"remote_host": ["x"]},
        {"model_families": "gemma4"},
        {"model_families": [1]},
        {"capabilities": {}},
        {"context_length": True},
        {"draft": "x"},
    ],
)
def test_a_damaged_config_is_rejected(config, root):
    text = json.dumps(config)
    add_manifest(root, "bad:one", {"config": layer(root, "config", text), "layers": []})
    with pytest.raises(GgufError, match=r"The config of bad:one.* is damaged"):
        OllamaStore(root).find("bad:one")


def test_null_in_a_config_counts_as_missing(root):
    add_model(root, "m:t", config={"model_families": None, "model_format": "gguf", "new": 1})
    assert OllamaStore(root).find("m:t").config == {"model_format": "gguf", "new": 1}


@pytest.mark.parametrize("data", [b"GGU", b"GGUF+", b""])
def test_a_blob_of_another_size_is_rejected(root, data):
    add_model(root, gguf=b"GGUF")
    model = OllamaStore(root).find("gemma4:e2b")
    model.layers[0].path.write_bytes(data)
    with pytest.raises(GgufError, match=f"gemma4:e2b has {len(data)} of 4 bytes: pull it again"):
        _ = model.path


def test_a_missing_blob_or_a_folder_is_rejected(root):
    add_model(root)
    model = OllamaStore(root).find("gemma4:e2b")
    model.layers[0].path.unlink()
    with pytest.raises(GgufError, match=r"model file of gemma4:e2b is missing .*pull"):
        _ = model.path
    model.layers[0].path.mkdir()
    with pytest.raises(GgufError, match="is not a plain file"):
        _ = model.path


def test_an_upper_case_digest_keeps_its_spelling(root):
    data = b"GGUF"
    digest = hashlib.sha256(data).hexdigest()
    (root / "blobs").mkdir(parents=True)
    (root / "blobs" / f"sha256-{digest.upper()}").write_bytes(data)
    add_manifest(root, "m:t", model_entry(digest=f"sha256:{digest.upper()}"))
    model = OllamaStore(root).find("m:t")
    assert model.path.read_bytes() == data
    assert model.layers[0].digest == f"sha256:{digest}"


def test_a_pipe_is_never_opened(root):
    add_model(root, layers=[("system", "text")])
    model = OllamaStore(root).find("gemma4:e2b")
    model.layers[1].path.unlink()
    os.mkfifo(model.layers[1].path)
    os.mkfifo(manifest_path(root, "gemma4:pipe"))
    with pytest.raises(GgufError, match="is not a plain file"):
        _ = model.system
    assert [str(model.name) for model in OllamaStore(root).list()] == ["gemma4:e2b"]


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        ("system", b"\xff", "not UTF-8"),
        ("template", b"x" * (ollama.MAX_TEXT_NBYTES + 1), "larger than 4 MiB"),
        ("params", "[]", "dict is expected"),
        ("params", "{", "damaged"),
        ("params", b"[" * 100_000, "damaged"),
        ("params", '{"temperature": Infinity}', "Infinity is not JSON"),
        ("messages", "{}", "list is expected"),
        ("messages", "[1]", "dict is expected"),
        ("messages", '[{"role": "user"}]', "'content' is damaged: str is expected"),
        ("messages", '[{"role": 1, "content": ""}]', "'role' is damaged: str is expected"),
    ],
)
def test_a_damaged_text_is_rejected(kind, data, message, root):
    add_model(root, layers=[(kind, data)])
    model = OllamaStore(root).find("gemma4:e2b")
    with pytest.raises(GgufError, match=f"The {kind} file of gemma4:e2b.*{message}"):
        getattr(model, kind)


@pytest.mark.parametrize(
    ("config", "kind", "message"),
    [
        ({"model_format": "safetensors"}, "tensor", "is stored as safetensors"),
        ({}, "tensor", "is stored as safetensors"),
        ({"remote_host": "https://example.org", "remote_model": "m"}, "json", "runs on 'https://"),
        ({"model_format": "gguf"}, "json", "has no model file"),
    ],
)
def test_models_without_a_gguf_file_are_listed_but_have_no_path(config, kind, message, root):
    add_model(root, "m:t", gguf=None, layers=[(kind, b"{}")], config=config)
    (model,) = OllamaStore(root).list()
    with pytest.raises(GgufError, match=f"m:t {message}"):
        _ = model.path


def test_other_files_among_the_manifests_are_skipped(root):
    path = add_model(root, "m:t")
    for level in [path, *path.parents][:4]:
        (level.parent / ".DS_Store").write_bytes(b"x")
    for level in list(path.parents)[1:4]:
        (level / "stray").write_bytes(b"x")
    (path.parent / "folder").mkdir()
    (path.parent / "no name").write_bytes(b"{}")
    store = OllamaStore(root)
    assert [str(model.name) for model in store.list()] == ["m:t"]
    assert len(store.problems) == 1
    assert "no name" in store.problems[0]


@pytest.mark.parametrize("level", range(4))
def test_links_are_not_followed(level, root, tmp_path):
    outside = add_model(tmp_path / "outside", "out:side")
    add_model(root, "m:t")
    link = manifest_path(root, "m:t")
    target = outside
    for _ in range(level):
        link, target = link.parent, target.parent
    link = link.with_name("link")
    link.symlink_to(target)
    store = OllamaStore(root)
    assert [str(model.name) for model in store.list()] == ["m:t"]
    assert store.problems == (f"{str(link)!r} is skipped: it is a symbolic link.",)


def test_the_store_itself_may_be_a_link(root, tmp_path):
    add_model(tmp_path / "elsewhere", "m:t")
    root.symlink_to(tmp_path / "elsewhere")
    assert OllamaStore(root).find("m:t").path.read_bytes() == b"GGUF"


@settings(max_examples=300)
@given(MANIFESTS)
def test_any_manifest_is_a_model_or_raises_a_gguf_error(tmp_path_factory, manifest):
    root = tmp_path_factory.getbasetemp() / "any-manifest"
    add_manifest(root, "m:t", manifest)
    (root / "blobs").mkdir(exist_ok=True)
    (root / "blobs" / f"sha256-{HEX}").write_bytes(b"[{}]")
    try:
        model = OllamaStore(root).find("m:t")
    except GgufError:
        return
    for blob in model.layers:
        assert blob.path.parent == root / "blobs"
        assert blob.nbytes >= 0
    for attribute in ("path", "projectors", "adapters", "draft", "template", "params", "messages"):
        with contextlib.suppress(GgufError):
            getattr(model, attribute)


@settings(max_examples=150)
@given(JSON, st.sampled_from(["params", "messages", "system", "config"]))
def test_any_layer_is_read_or_raises_a_gguf_error(tmp_path_factory, value, kind):
    root = tmp_path_factory.getbasetemp() / "any-layer"
    entry = layer(root, kind, json.dumps(value))
    add_manifest(root, "m:t", {"config": entry} if kind == "config" else {"layers": [entry]})
    with contextlib.suppress(GgufError):
        getattr(OllamaStore(root).find("m:t"), kind)
