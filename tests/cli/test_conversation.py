"""Conversations as files: what is saved is what is loaded, and strangers' files are checked."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from webgemma.cli.conversation import Conversation, attachment, load
from webgemma.errors import InputError
from webgemma.text.chat import Chat


@pytest.fixture
def cat(tmp_path: Path) -> Path:
    path = tmp_path / "cat.png"
    Image.new("RGB", (30, 20), "orange").save(path)
    return path


def test_what_is_saved_is_loaded(tmp_path: Path, cat: Path) -> None:
    told = Conversation("Be brief.")
    told.attached.append(attachment("image", cat, budget=70))
    told.ask("What is this? ☃ \udc80")
    cat.unlink()  # the conversation has its own copy
    told.answer("A cat.", "It has whiskers.")
    told.ask("And now?")
    told.answer("")
    told.extend("Still", "Hm.")
    told.extend(" a cat.")
    path = tmp_path / "chat.json"
    told.save(path)
    assert load(path) == told
    assert told.messages[-1] == {
        "role": "assistant",
        "content": "Still a cat.",
        "thinking": "Hm.",
    }
    saved = json.loads(path.read_text())
    assert [message["role"] for message in saved] == [
        *("system", "user", "assistant", "user", "assistant")
    ]
    assert Chat().parts(saved)  # as the library reads it


def test_a_file_that_is_no_conversation_is_not_overwritten(tmp_path: Path) -> None:
    told = Conversation(messages=[{"role": "user", "content": "Hi"}])
    other = tmp_path / "notes.txt"
    other.write_text("precious")
    with pytest.raises(InputError, match="exists and is not a conversation"):
        told.save(other)
    assert other.read_text() == "precious"
    path = tmp_path / "chat.json"
    told.save(path)
    told.answer("Hello")
    told.save(path)
    assert load(path) == told
    with pytest.raises(InputError, match="cannot be written"):
        told.save(tmp_path / "no folder" / "chat.json")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["chat.json", "notes.txt"]


def test_other_forms_are_loaded(tmp_path: Path, cat: Path) -> None:
    """A row of training data, and Ollama's images."""
    data = base64.b64encode(cat.read_bytes()).decode()
    user = {"role": "user", "content": "Hi", "images": [data]}
    path = tmp_path / "row.json"
    path.write_text(json.dumps({"messages": [user]}))
    assert load(path).messages[0]["images"] == [f"data:;base64,{data}"]


def wrong(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


SECRET = "secret.png"


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("not json", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ([], "it has no messages"),
        ({}, "a list of messages is expected"),
        ([1], "a list of messages is expected"),
        ([{"role": "robot", "content": ""}], "role must be one of"),
        ([{"content": "Hi"}], "role"),
        (wrong(5), "messages[0].content"),
        (wrong([{"type": "image", "path": SECRET}]), "names another file"),
        (wrong([{"type": "image", "image": SECRET}]), "names another file"),
        (wrong([{"type": "image_url", "image_url": {"url": "https://x"}}]), "names another file"),
        (wrong([{"type": "audio", "path": SECRET}]), "names another file"),
        (wrong([{"type": "video", "video": [SECRET]}]), "names another file"),
        (wrong([{"type": "image", "url": "data:;base64,AAAA"}]), "is not an image"),
        ([{"role": "user", "content": "", "images": [SECRET]}], "neither a file nor base64"),
        ([{"role": "system", "content": [{"type": "image", "url": "data:,"}]}], "text only"),
        ([{"role": "tool", "content": [{"type": "image", "path": SECRET}]}], "names another file"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_strangers_file_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (30, 20)).save(SECRET)
    path = tmp_path / "chat.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    with pytest.raises(InputError) as error:
        load(path)
    assert sentence in str(error.value)
    assert str(path) in str(error.value)


def test_what_is_no_file_is_not_loaded(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder"):
        load(tmp_path)
    with pytest.raises(InputError, match="There is no file"):
        load(tmp_path / "none.json")
    (tmp_path / "latin.json").write_bytes(b'["\xff"]')
    with pytest.raises(InputError, match=r"latin\.json is not JSON"):
        load(tmp_path / "latin.json")


def test_what_cannot_be_read_is_not_attached(tmp_path: Path, cat: Path) -> None:
    with pytest.raises(InputError, match="There is no file"):
        attachment("image", tmp_path / "[")
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(InputError, match="not an image"):
        attachment("image", tmp_path / "text.png")
    with pytest.raises(InputError):
        attachment("audio", cat)
