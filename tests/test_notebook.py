"""What a notebook shows, in IPython without a notebook around it: each output with its updates."""

import asyncio
import base64
import io
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import pytest
from helpers.standin import standin_gguf
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from PIL import Image

from webgemma import Gemma, Piece, ToolCall
from webgemma.gguf.sources import BytesSource
from webgemma.notebook import Reply, loading_bar

GREEDY = "temperature=0, max_tokens=6"


class Notebook:
    """Runs cells, and collects what they show."""

    def __init__(self) -> None:
        self.shell = InteractiveShell.instance()
        self.shown = self.shell.display_pub = CapturingDisplayPublisher()

    def run(self, cell: str, **names: Any) -> list[dict[str, Any]]:
        """Return what a cell shows, one after the other: data, and whether it is an update."""
        self.shell.push(names)
        self.shown.outputs.clear()
        self.shell.run_cell(cell).raise_error()
        return [*self.shown.outputs]


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    yield Notebook()
    InteractiveShell.clear_instance()


@pytest.fixture(scope="module")
def gemma() -> Iterator[Gemma]:
    with Gemma.load(BytesSource(standin_gguf(), "<standin>"), "cpu") as loaded:
        yield loaded


def text_of(gemma: Gemma) -> str:
    return "".join(piece.text for piece in gemma.chat("Hello", temperature=0, max_tokens=6))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show every piece, however soon it comes."""
    monkeypatch.setattr("webgemma.notebook.UPDATE_SECONDS", 0)


@pytest.mark.usefixtures("at_once")
def test_a_reply_is_shown_while_it_is_written(gemma: Gemma, notebook: Notebook) -> None:
    text = text_of(gemma)
    first, *updates = notebook.run(f"reply = model.chat('Hello', {GREEDY}); reply", model=gemma)
    assert not first["update"]
    assert len(updates) > 3
    assert all(output["update"] for output in updates)
    assert {str(output["transient"]) for output in updates} == {str(first["transient"])}
    texts = [output["data"]["text/plain"] for output in updates]
    assert all(text.startswith(part) for part in texts)
    assert texts[-1] == text
    assert f"{escape(text)}</div>" in updates[-1]["data"]["text/html"]
    assert "cut by max_tokens" in updates[-1]["data"]["text/html"]
    (again,) = notebook.run("reply")
    assert again["data"]["text/plain"] == text


@pytest.mark.usefixtures("at_once")
def test_an_asynchronous_reply_is_shown_after_its_cell(gemma: Gemma, notebook: Notebook) -> None:
    text = text_of(gemma)
    shown = notebook.run(
        f"import asyncio\ndisplay(model.achat('Hello', {GREEDY}))\nawait asyncio.sleep(0)\n"
        "while len(asyncio.all_tasks()) > 1: await asyncio.sleep(0.01)",
        model=gemma,
    )
    assert len(shown) > 4
    assert shown[-1]["data"]["text/plain"] == text


def test_programs_iterate_as_ever(gemma: Gemma, notebook: Notebook) -> None:
    expected = text_of(gemma)
    stream = gemma.chat("Hello", temperature=0, max_tokens=6)
    text = next(stream).text + "".join(piece.text for piece in stream)
    assert text == expected
    assert next(stream, None) is None
    stream = gemma.chat("Hello", temperature=0, max_tokens=6)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert [*stream] == []

    async def read() -> str:
        stream = gemma.achat("Hello", temperature=0, max_tokens=6)
        text = (await anext(stream)).text
        text += "".join([piece.text async for piece in stream])
        other = gemma.achat("Hello", temperature=0)
        await anext(other)
        await other.aclose()
        return text

    assert asyncio.run(read()) == expected
    assert notebook.run("for piece in model.chat('Hello', max_tokens=2): pass", model=gemma) == []


def test_an_error_is_a_sentence(gemma: Gemma, notebook: Notebook) -> None:
    *_, last = notebook.run("model.chat('Hello', temperature=-1)", model=gemma)
    assert last["data"]["text/plain"].startswith("temperature is -1")
    assert "<strong>temperature is -1" in last["data"]["text/html"]


def test_what_is_shown_is_escaped() -> None:
    attack = "<img src=x onerror=alert(1)></div>"
    reply = Reply([{"role": "user", "content": [{"type": "image", "image": attack}]}])
    call = ToolCall(attack, {attack: attack})
    reply.read(Piece(1, attack, 0.0, thinking=attack, tool_calls=(call,)))
    data = reply._repr_mimebundle_()
    assert "<img" not in data["text/html"]
    assert data["text/html"].count("&lt;img src=x onerror=alert(1)&gt;") == 5
    assert attack in data["text/plain"]


def test_images_of_the_last_message_are_shown(tmp_path: Path) -> None:
    picture = Image.new("RGB", (48, 48), "red")
    made = io.BytesIO()
    picture.save(made, "PNG")
    data = made.getvalue()
    path = tmp_path / "cat.png"
    path.write_bytes(data)
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    images = [data, path, str(path), url, picture, "missing.png", b"<svg onload=x>", None]
    content = [{"type": "image", "image": image} for image in images]
    html = Reply([{"role": "user", "content": content}])._repr_mimebundle_()["text/html"]
    assert html.count('<img src="data:image/png;base64,') == 5
    assert "svg" not in html


def test_a_model_and_its_loading_are_shown(notebook: Notebook) -> None:
    data = standin_gguf()
    *bars, model = notebook.run(
        "model = Gemma.load(BytesSource(data, '<b>x</b>'), 'gpu'); display(model)",
        Gemma=Gemma,
        BytesSource=BytesSource,
        data=data,
    )
    assert "&lt;b&gt;x&lt;/b&gt;" in model["data"]["text/html"]
    assert model["data"]["text/plain"].startswith("<Gemma '<b>x</b>' on ")
    assert "<progress" in bars[0]["data"]["text/html"]
    assert all("<b>" not in bar["data"]["text/html"] for bar in bars)
    assert all(bar["update"] for bar in bars[1:])
    done, total = re.findall(r'value="(\d+)" max="(\d+)"', bars[-1]["data"]["text/html"])[0]
    assert done == total


def test_programs_and_terminals_show_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class TerminalInteractiveShell:
        pass

    for running in (None, TerminalInteractiveShell()):
        monkeypatch.setattr("webgemma.notebook.shell", lambda running=running: running)
        assert loading_bar("x") is None
