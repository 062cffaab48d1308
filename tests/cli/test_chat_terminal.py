"""The chat in a terminal: what a person types and sees, with the bundled model."""

import json
import re
import sys
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("needs pseudo-terminals", allow_module_level=True)

from helpers.terminal import Terminal
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from webgemma.cli.commands import COMMANDS
from webgemma.cli.prompt import CommandCompleter

ASK = "Send a message"  # the prompt waits
OPTIONS = ("run", "--temperature", 0, "--device", "cpu")


@pytest.fixture
def state(tmp_path: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(tmp_path), "WEBGEMMA_NOHISTORY": ""}


def test_thirty_turns_in_a_context_of_256_are_all_answered(
    state: dict[str, str], tmp_path: Path
) -> None:
    saved = tmp_path / "chat.json"
    options = (*OPTIONS, "--context", 256, "--max-tokens", 5, "--verbose")
    with Terminal(*options, env=state, columns=200) as terminal:
        for _ in range(30):
            terminal.expect(ASK)
            terminal.type("What are you? Tell me about it.\r")
            terminal.expect("of 256 used")  # the last line of a reply
        terminal.expect(ASK)
        terminal.type("/stats\r")
        terminal.expect("messages left out")
        terminal.expect(ASK)
        terminal.type(f"/save {saved}\r")
        terminal.expect("60 messages are saved")
        terminal.expect(ASK)
        terminal.type("\x04")
        assert terminal.wait() == 0
    assert "error" not in terminal.shown
    assert terminal.shown.count("/clear starts a new conversation") == 1
    messages = json.loads(saved.read_text())
    assert [message["role"] for message in messages] == ["user", "assistant"] * 30
    assert all(message["content"] for message in messages)


def test_pasted_lines_are_one_message_and_history_is_kept(
    state: dict[str, str], tmp_path: Path
) -> None:
    saved = tmp_path / "chat.json"
    with Terminal(*OPTIONS, "--max-tokens", 3, env=state) as terminal:
        terminal.expect(ASK)
        terminal.paste("Hello,\nwho are\r\nyou?")
        terminal.expect("you?")
        terminal.type("\r")
        terminal.expect(ASK)
        terminal.type("one\x1b\rtwo\r")  # Alt+Enter
        terminal.expect(ASK)
        terminal.type('"""three\rfour"""\r')
        terminal.expect(ASK)
        terminal.type(f"/save {saved}\r")
        terminal.expect("6 messages are saved")
        terminal.expect(ASK)
        terminal.type("\x04")
        assert terminal.wait() == 0
    asked = [message["content"] for message in json.loads(saved.read_text())[::2]]
    assert asked == ["Hello,\nwho are\nyou?", "one\ntwo", "three\nfour"]
    history = tmp_path / "webgemma" / "history.jsonl"
    assert history.stat().st_mode & 0o777 == 0o600
    with Terminal(*OPTIONS, "--no-history", env=state) as terminal:
        terminal.expect(ASK)
        terminal.type("/bye\r")
        assert terminal.wait() == 0
    with Terminal(*OPTIONS, "--max-tokens", 3, env=state, columns=200) as terminal:
        terminal.expect(ASK)
        terminal.type("\x10")  # Ctrl-P: the last one
        terminal.expect(f"/save {saved}")
        terminal.type("\x03")
        terminal.expect("Ctrl-D or /bye leaves.")
        terminal.expect(ASK)
        terminal.type("/he\t")
        terminal.expect("/help")
        terminal.type("\r")
        terminal.expect("stop the reply")
        terminal.expect(ASK)
        terminal.type("\x04")
        assert terminal.wait() == 0


def test_ctrl_c_stops_a_reply_and_continue_goes_on(state: dict[str, str], tmp_path: Path) -> None:
    """The reply is wrapped between words, and what is kept has no added line breaks."""
    saved = tmp_path / "chat.json"
    with Terminal(*OPTIONS, env=state, columns=40) as terminal:
        terminal.expect(ASK)
        terminal.type("Tell me a long story.\r")
        terminal.expect("\n")
        terminal.expect("Once")
        terminal.type("\x03")
        terminal.expect(ASK)
        terminal.type("/set max_tokens 40\r")
        terminal.expect("max_tokens is 40.")
        terminal.expect(ASK)
        terminal.type("/continue\r")
        terminal.expect("/continue\n")
        text = terminal.expect("The reply was cut")
        terminal.expect(ASK)
        terminal.type(f"/save {saved}\r")
        terminal.expect("2 messages are saved")
        terminal.expect(ASK)
        terminal.type("/bye\r")
        assert terminal.wait() == 0
    reply = json.loads(saved.read_text())[1]["content"]
    lines = text.rstrip("\n").split("\n")
    assert all(len(line) <= 40 for line in lines)
    assert len(lines) > 2
    assert reply.split()[-30:] == " ".join(lines).split()[-30:]
    assert reply.count("\n") < len(lines) - 1


def test_a_dumb_terminal_gets_plain_lines(state: dict[str, str]) -> None:
    env = {**state, "TERM": "dumb"}
    with Terminal(*OPTIONS, "--max-tokens", 3, env=env) as terminal:
        terminal.expect(">>> ")
        terminal.type('"""one\n')
        terminal.expect("... ")
        terminal.type('two"""\n')
        terminal.expect("cut at 3 tokens")
        terminal.expect(">>> ")
        terminal.type("\x04")
        assert terminal.wait() == 0
    assert "\x1b" not in terminal.raw


def test_no_color_has_no_colours(state: dict[str, str]) -> None:
    with Terminal(*OPTIONS, "--max-tokens", 3, env={**state, "NO_COLOR": "1"}) as terminal:
        terminal.expect(ASK)
        terminal.type("Hello\r")
        terminal.expect("cut at 3 tokens")
        terminal.expect(ASK)
        terminal.type("\x04")
        assert terminal.wait() == 0
    assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|9[0-7]|38;)[0-9;]*m", terminal.raw)


def test_only_replies_are_written_to_a_file(state: dict[str, str], tmp_path: Path) -> None:
    """Standard output is a file, and the prompt is on the terminal all the same."""
    out = tmp_path / "out.txt"
    shell = f"{sys.executable} -m webgemma run --temperature 0 --max-tokens 3 > {out}"
    with Terminal(shell=shell, env=state) as terminal:
        terminal.expect(ASK)
        terminal.type("What are you?\r")
        terminal.expect("cut at 3 tokens")
        terminal.expect(ASK)
        terminal.type("\x04")
        assert terminal.wait() == 0
    assert out.read_text() == "I am a\n"


def test_commands_settings_and_files_are_completed(tmp_path: Path) -> None:
    (tmp_path / "my cats").mkdir()
    (tmp_path / "my cats" / "cat.png").touch()
    completer = CommandCompleter(list(COMMANDS), ["temperature", "top_k", "think"])

    def completed(text: str) -> list[str]:
        found = completer.get_completions(Document(text), CompleteEvent())
        return [text[: len(text) + each.start_position] + each.text for each in found]

    assert completed("/re") == ["/regenerate"]
    assert completed("/set parameter te") == ["/set parameter temperature"]
    assert completed(f"/image {tmp_path}/my") == [f"/image {tmp_path}/my cats/"]
    assert completed(f"/load {tmp_path}/my cats/c") == [f"/load {tmp_path}/my cats/cat.png"]
    assert completed("Hello /re") == completed("/clear x") == completed("a\n/re") == []
