"""The signatures and the help of Gemma's methods, each with a plain and an asynchronous face."""

import inspect
import pydoc

import pytest

from webgemma import Gemma
from webgemma.settings import SETTINGS, Settings

PAIRS = (
    *("load", "logits", "generate", "chat", "count_tokens", "encode_image", "encode_audio"),
    *("embed", "batch", "extract", "save", "restore", "prepare_structure"),
)


@pytest.mark.parametrize("name", PAIRS)
def test_both_faces_have_the_same_signature(name: str) -> None:
    plain, asynchronous = getattr(Gemma, name), getattr(Gemma, "a" + name)
    parameters = inspect.signature(plain).parameters
    assert len(parameters) > 1 or name == "prepare_structure"
    assert parameters == inspect.signature(asynchronous).parameters
    assert plain.__doc__
    assert plain.__doc__ == asynchronous.__doc__
    assert (plain.__name__, asynchronous.__name__) == (name, "a" + name)
    assert plain.__qualname__ == f"Gemma.{name}"
    assert asynchronous.__qualname__ == f"Gemma.a{name}"
    assert plain.__module__ == asynchronous.__module__ == "webgemma.api"


@pytest.mark.parametrize("name", ["chat", "achat", "generate", "agenerate", "batch", "abatch"])
def test_help_names_and_explains_every_setting(name: str) -> None:
    text = pydoc.render_doc(getattr(Gemma, name), renderer=pydoc.plaintext)
    parameters = inspect.signature(getattr(Gemma, name)).parameters
    for setting in SETTINGS.values():
        assert parameters[setting.name].kind is inspect.Parameter.KEYWORD_ONLY
        assert f"{setting.name}: " in text
        assert setting.help in text
        assert setting.help in pydoc.render_doc(Settings, renderer=pydoc.plaintext)


@pytest.mark.parametrize("prefix", ["", "a"])
def test_help_explains_every_parameter(prefix: str) -> None:
    for name in ("load", "chat", "batch", "embed"):
        face = getattr(Gemma, prefix + name)
        text = pydoc.render_doc(face, renderer=pydoc.plaintext)
        own = set(inspect.signature(face).parameters) - {"self", "messages", *SETTINGS}
        assert [parameter for parameter in own if f"`{parameter}" not in text] == []
    for parameter in ("device", "tools", "think", "continue_last"):
        assert parameter in (Gemma.__doc__ or "")


def test_every_coroutine_has_two_faces() -> None:
    public = [name for name in dir(Gemma) if not name.startswith("_")]
    awaited = {name for name in public if inspect.iscoroutinefunction(getattr(Gemma, name))}
    streams = {"agenerate", "achat", "abatch"}
    assert awaited | streams == {"a" + name for name in PAIRS}
    coroutines = {
        name
        for name, member in inspect.getmembers(Gemma)
        if inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member)
    }
    own = {"_soft_tokens", "_reply"}  # parts of others
    private = {name for name in coroutines if name.startswith("_")} - own
    written_twice = {"extract", "prepare_structure"}  # a chat is read; the model is not used
    assert private == {"_" + name for name in PAIRS if name not in written_twice}


@pytest.mark.parametrize(
    ("name", "kind"), [("generate", "Iterator"), ("agenerate", "AsyncGenerator")]
)
def test_streams_are_annotated(name: str, kind: str) -> None:
    annotation = inspect.signature(getattr(Gemma, name)).return_annotation
    assert kind in str(annotation)
    assert "Piece" in str(annotation)
