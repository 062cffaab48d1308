"""The chat's commands and quiet lines, with a tiny model and a reader that has all it will read."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.tiny import SMALL, tiny_gguf
from PIL import Image

from webgemma import Gemma
from webgemma.cli.chat import TerminalChat
from webgemma.cli.reading import Typed, unquoted
from webgemma.replies import Piece

CONTEXT = 64


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gemma]:
    path = tmp_path_factory.mktemp("models") / "small.gguf"
    path.write_bytes(tiny_gguf(SMALL))
    with Gemma.load(path, "cpu", context=CONTEXT) as model:
        yield model


class Script:
    """A reader of lines that are known; an exception among them is raised."""

    def __init__(self, *lines: str | BaseException) -> None:
        self.lines = iter(lines)

    def read(self) -> Typed | None:
        line = next(self.lines, None)
        if isinstance(line, BaseException):
            raise line
        return None if line is None else unquoted(line)


def new_chat(gemma: Gemma, **options: object) -> TerminalChat:
    settings = {"temperature": 0, "max_tokens": 4}
    return TerminalChat(gemma, settings, history=False, **options)  # type: ignore[arg-type]


@pytest.fixture
def chat(gemma: Gemma) -> TerminalChat:
    return new_chat(gemma)


def roles(chat: TerminalChat) -> list[str]:
    return [message["role"] for message in chat.conversation.messages]


def test_every_message_is_answered_when_the_context_is_full(
    chat: TerminalChat, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said once, with what to do; after /clear it may be said again."""
    turns = ["in the inner inner"] * 12
    chat.loop(Script(*turns))
    quiet = capsys.readouterr().err
    assert "error" not in quiet
    assert roles(chat) == ["user", "assistant"] * 12
    assert all(message["content"] for message in chat.conversation.messages)
    assert quiet.count("from here on the oldest messages are left out; /clear starts") == 1
    chat.loop(Script("/clear", *turns))
    assert "the oldest messages are left out" in capsys.readouterr().err
    chat.loop(Script("/stats"))
    assert "messages left out" in capsys.readouterr().err


def test_a_message_that_cannot_fit_is_refused_and_the_chat_goes_on(
    chat: TerminalChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.loop(Script("in", "the " * 80, "the"))
    assert "tokens, but the context holds 64" in capsys.readouterr().err
    assert [m["content"] for m in chat.conversation.messages[::2]] == ["in", "the"]


def test_a_cut_reply_says_so_and_goes_on(
    chat: TerminalChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.loop(Script("in"))
    first = chat.conversation.messages[-1]["content"]
    shown = capsys.readouterr()
    assert "The reply was cut at 4 tokens: /continue goes on" in shown.err
    assert "cut" not in shown.out
    chat.loop(Script("/continue"))
    both = chat.conversation.messages[-1]["content"]
    assert both == first + capsys.readouterr().out.removesuffix("\n")
    assert len(both) > len(first)
    assert roles(chat) == ["user", "assistant"]
    chat.loop(Script("/regenerate"))
    assert chat.conversation.messages[-1]["content"] == first
    chat.loop(Script("/set max_tokens none", "/regenerate"))
    assert "the context of 64 tokens is full: /continue" in capsys.readouterr().err


def test_what_there_is_nothing_to_do_with(
    chat: TerminalChat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.loop(Script("/continue", "/regenerate", f"/save {tmp_path / 'x'}", "/stats"))
    quiet = capsys.readouterr().err
    for sentence in (
        "There is no reply to continue",
        "There is no message yet to reply to",
        "There is nothing to save yet",
        "no reply yet · context of 64 tokens",
    ):
        assert sentence in quiet


def test_a_complete_reply_is_not_continued(
    gemma: Gemma,
    chat: TerminalChat,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pieces = [Piece(5, "done", 0.0, finish="stop")]
    monkeypatch.setattr(gemma, "chat", lambda *_, **__: (piece for piece in pieces))
    chat.loop(Script("in", "/continue"))
    assert "The last reply is complete; /regenerate" in capsys.readouterr().err


def test_ctrl_c_keeps_what_came_and_the_chat(
    gemma: Gemma,
    chat: TerminalChat,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stopped(*_: object, **__: object) -> Iterator[Piece]:
        yield Piece(5, "half a ", 0.0)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gemma, "chat", stopped)
        chat.loop(Script("in", KeyboardInterrupt()))
    assert chat.conversation.messages[-1] == {"role": "assistant", "content": "half a "}
    shown = capsys.readouterr()
    assert shown.out == "half a \n"
    assert "cut" not in shown.err
    assert "Ctrl-D or /bye leaves." in shown.err
    chat.loop(Script("/continue"))
    assert chat.conversation.messages[-1]["content"].startswith("half a ")
    assert len(chat.conversation.messages[-1]["content"]) > len("half a ")


def test_ctrl_c_before_the_first_token_keeps_the_old_reply(
    gemma: Gemma, chat: TerminalChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> Iterator[Piece]:
        raise KeyboardInterrupt
        yield

    chat.loop(Script("in"))
    before = list(chat.conversation.messages)
    monkeypatch.setattr(gemma, "chat", stopped)
    chat.loop(Script("/regenerate"))
    assert chat.conversation.messages == before


def test_unknown_commands_and_paths(chat: TerminalChat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.loop(
        Script("/claer", "/image [/x]", "/image ~nobody-here/x", "/load [bold]", "/bye", "in")
    )
    quiet = capsys.readouterr().err
    assert "There is no command /claer; did you mean /clear?" in quiet
    assert "There is no file [/x]." in quiet
    assert "There is no file [bold]." in quiet
    assert roles(chat) == []
    chat.loop(Script("/etc/hosts in the", '"""/clear"""'))
    asked = [m["content"] for m in chat.conversation.messages if m["role"] == "user"]
    assert asked == ["/etc/hosts in the", "/clear"]


def test_settings_are_changed_listed_and_checked(
    chat: TerminalChat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.loop(
        Script(
            *("/set temperature 0.5", "/set parameter top_k 3", "/set stop 'the end'"),
            *("/set seed 7", "/set seed default", "/set temperature -1", "/set top_logprobs 3"),
            *("/set think", "/set verbose", "/set nowordwrap", "/set system Be [bold] brief."),
            *("/set", "/set steps 3", "/set temperature"),
        )
    )
    quiet = capsys.readouterr().err
    assert chat.settings == {
        "temperature": 0.5,
        "max_tokens": 4,
        "top_k": 3,
        "stop": ("the end",),
    }
    assert (chat.think, chat.verbose, chat.wrap) == (True, True, False)
    assert chat.conversation.all() == [{"role": "system", "content": "Be [bold] brief."}]
    assert "temperature is -1.0; it must be a number between 0 and 100" in quiet
    assert "top_logprobs does not apply" in quiet
    assert "steps does not apply to this model" in quiet
    assert "/set temperature needs a value" in quiet
    assert "typical_p" in quiet
    chat.loop(Script("/set nothink", "/think", "/think", "/set system", "/set quiet"))
    assert (chat.think, chat.verbose) == (False, False)
    assert chat.conversation.all() == []


def test_a_conversation_is_saved_and_loaded(
    gemma: Gemma, chat: TerminalChat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my chat.json"
    chat.loop(Script("/set system Be brief.", "in", f"/save {path}"))
    other = new_chat(gemma)
    other.loop(Script("the", f"/load '{path}'", "the"))
    assert other.conversation.system == "Be brief."
    assert other.conversation.messages[:2] == chat.conversation.messages
    assert roles(other) == ["user", "assistant"] * 2
    assert f"2 messages of {path} are loaded." in capsys.readouterr().err
    path.write_text(json.dumps([{"role": "user", "content": "in"}]))
    other.loop(Script(f"/load {path}", "/regenerate"))
    assert "/regenerate replies to the last one" in capsys.readouterr().err
    assert other.conversation.messages == chat.conversation.messages
    other.loop(Script(f"/load {tmp_path}"))
    assert "is a folder" in capsys.readouterr().err
    assert roles(other) == ["user", "assistant"]


def test_a_dropped_file_may_be_escaped(chat: TerminalChat, tmp_path: Path) -> None:
    Image.new("RGB", (30, 20)).save(tmp_path / "my cat.png")
    chat.loop(Script("/image " + str(tmp_path / "my cat.png").replace(" ", "\\ ")))
    assert [part["type"] for part in chat.conversation.attached] == ["image"]


def test_an_image_that_the_model_cannot_read_is_not_kept(
    chat: TerminalChat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (30, 20)).save(tmp_path / "cat.png")
    chat.loop(Script(f"/image {tmp_path / 'cat.png'}", "in", "the"))
    assert "cannot read images" in capsys.readouterr().err
    assert [m["content"] for m in chat.conversation.messages[::2]] == ["the"]


def test_verbose_says_tokens_rate_and_context(
    gemma: Gemma, capsys: pytest.CaptureFixture[str]
) -> None:
    new_chat(gemma, verbose=True).loop(Script("in"))
    shown = capsys.readouterr()
    assert "tokens/s" not in shown.out
    line = next(line for line in shown.err.splitlines() if "tokens/s" in line)
    words = line.split()
    prompt = int(words[words.index("prompt") + 1])
    assert "reply 4 tokens, " in line
    assert f"context {prompt + 4} of 64 used, {64 - prompt - 4} left" in line


def test_quiet_prints_only_replies(gemma: Gemma, capsys: pytest.CaptureFixture[str]) -> None:
    chat = new_chat(gemma, quiet=True)
    chat.loop(Script(*["in the inner inner"] * 8, "/clear", "/foo"))
    shown = capsys.readouterr()
    assert shown.err.startswith("error: There is no command /foo")
    assert len(shown.out.splitlines()) >= 8


def test_what_a_terminal_would_obey_is_not_written_to_one(
    gemma: Gemma,
    chat: TerminalChat,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "a\x1b]0;title\x07b\tc :key: [red]\r\n"
    pieces = [Piece(5, text, 0.0, finish="stop")]
    monkeypatch.setattr(gemma, "chat", lambda *_, **__: (piece for piece in pieces))
    chat.loop(Script("in"))
    assert capsys.readouterr().out == text + "\n"  # in a pipe it stays as it is
    monkeypatch.setattr("webgemma.cli.reply.out._force_terminal", True)
    chat.loop(Script("in"))
    shown = capsys.readouterr().out
    assert "\x1b]" not in shown
    assert "a␛]0;title␇b" in shown
    assert ":key: [red]" in shown
