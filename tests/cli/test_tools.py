"""`webgemma run --tools`: which functions become tools, and who is asked before they are called."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.command import answer, refused, webgemma
from helpers.scripted import follow_script

from webgemma import Gemma
from webgemma.cli.chat import TerminalChat
from webgemma.cli.conversation import load
from webgemma.cli.reading import Typed
from webgemma.cli.reply import call_text, result_text
from webgemma.cli.tools import load_tools
from webgemma.replies import ToolResult
from webgemma.text.calls import ToolCall

TOOLS = '''
"""Some tools."""
from dataclasses import dataclass
from os.path import join

import neighbour

print("to be seen by people")


@dataclass
class Place:
    name: str


def add(a: int, b: int) -> int:
    """Add numbers."""
    print("adding")
    return a + b


async def weather(place: Place) -> str:
    """Tell the weather."""
    import asyncio

    await asyncio.sleep(0)
    return f"rain in {place.name}"


def leave() -> None:
    """Leave."""
    raise SystemExit(3)


def _hidden() -> None: ...


nameless = lambda: 1
again = add
'''
SCRIPT = {
    r"response:weather\{value:<\|\"\|>rain in Oslo": "It rains.",
    r"response:leave\{error:<\|\"\|>RuntimeError: SystemExit: 3": "I stay.",
    r"response:add\{error:<\|\"\|>The user declined": "As you like.",
    r"response:add\{value:5\}": "It is five.",
    r"Sum\?": "I add.<|tool_call>call:add{a:2,b:3}<tool_call|>",
    r"Both\?": "<|tool_call>call:add{a:2,b:3}<tool_call|><|tool_call>call:add{a:1,b:1}<tool_call|>",
    r"Rain\?": '<|tool_call>call:weather{place:{name:<|"|>Oslo<|"|>}}<tool_call|>',
    r"Leave\?": "<|tool_call>call:leave{}<tool_call|>",
    r"Stop\?": "<|tool_call>call:add{a:2,b:3}<tool_call|>",
}
RUN = ("run", "-", "--device", "cpu")


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour.py").write_text("def imported() -> int:\n    return 1\n")
    path = tmp_path / "tools.py"
    path.write_text(TOOLS)
    yield path
    for name in ("neighbour", "webgemma_tools"):
        sys.modules.pop(name, None)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> None:
    follow_script(monkeypatch, SCRIPT)


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a model is loaded."""

    def load(*_: object, **__: object) -> None:
        pytest.fail("a model is loaded")

    monkeypatch.setattr("webgemma.cli.run.Gemma.load", load)


def test_the_functions_that_a_file_defines(tools: Path, capsys: pytest.CaptureFixture[str]) -> None:
    functions = load_tools(tools)
    assert [function.__name__ for function in functions] == ["add", "weather", "leave"]
    assert functions[0](a=2, b=3) == 5
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "to be seen by people\nadding\n")
    assert not (tools.parent / "__pycache__" / "tools.cpython-311.pyc").exists()


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (None, "There is no file FILE."),
        ("x = 1\ndef f(:\n", "FILE, line 2: invalid syntax."),
        ("a\0b", "FILE"),
        ("import sys\nsys.exit()\n", "FILE, line 2: SystemExit."),
        ("\n\n1 / 0\n", "FILE, line 3: ZeroDivisionError: division by zero."),
        ("import no_such_module\n", "FILE, line 1: ModuleNotFoundError: No module named"),
        ("from os.path import join\n_x = 1\n", "FILE defines no function"),
        ("def f(*a): ...\n", "FILE: The function f cannot be a tool: its parameter *a has no name"),
        ("def f(a: 'Nope'): ...\n", "FILE: The function f cannot be a tool: name 'Nope'"),
    ],
)
def test_an_error_in_the_file_is_one_sentence(
    tmp_path: Path, source: str | None, sentence: str
) -> None:
    file = tmp_path / "tools.py"
    if source is not None:
        file.write_text(source)
    assert f"error: {sentence.replace('FILE', str(file))}" in refused(
        *RUN, "Hi", "--tools", file, "--yes"
    )


@pytest.mark.usefixtures("no_loading")
def test_what_is_refused_before_a_model_is_loaded(tools: Path) -> None:
    sentence = refused(*RUN, "Hi", "--tools", tools)
    assert "Nobody can be asked here" in sentence
    assert "--yes makes every call" in sentence
    assert "leave --raw out" in refused(*RUN, "Hi", "--tools", tools, "--yes", "--raw")
    assert "--tools names their file" in refused(*RUN, "Hi", "--yes")


@pytest.mark.usefixtures("script")
def test_calls_and_results_are_shown_beside_standard_output(tools: Path) -> None:
    result = webgemma(*RUN, "Sum?", "--tools", tools, "--yes", "--stats")
    assert result.exit_code == 0, result.output
    assert result.stdout == "I add.\nIt is five.\n"
    *lines, statistics = result.stderr.splitlines()
    assert lines == ["to be seen by people", "add(a=2, b=3)", "adding", "add → 5"]
    facts = answer_of(webgemma(*RUN, "Sum?", "--tools", tools, "--yes", "--json"))
    assert f"prompt {facts['usage']['prompt']} tokens (0 cached), " in statistics
    assert f"reply {len(facts['tokens'])} tokens, " in statistics  # of both rounds
    assert facts["text"] == "I add.\nIt is five."
    assert facts["tool_calls"] == [{"name": "add", "arguments": {"a": 2, "b": 3}}]
    assert facts["tool_results"] == [{"name": "add", "value": 5, "failed": False}]
    quiet = webgemma(*RUN, "Both?", "--tools", tools, "--yes", "--quiet")
    assert quiet.stdout == "It is five.\n"
    assert quiet.stderr == "to be seen by people\nadding\nadding\n"  # what the file itself prints


def answer_of(result: Any) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.usefixtures("script")
def test_coroutines_are_awaited_and_no_function_ends_the_program(tools: Path) -> None:
    for message, text, failed in (("Rain?", "It rains.", False), ("Leave?", "I stay.", True)):
        facts = answer_of(webgemma(*RUN, message, "--tools", tools, "--yes", "--json"))
        assert facts["text"] == text
        assert facts["tool_results"][0]["failed"] is failed


def test_without_a_call_nothing_is_different(tools: Path) -> None:
    tools.write_text("def add(a: int) -> int:\n    return a\n")
    facts = answer(*RUN, "Hello!", "--tools", tools, "--yes", "--max-tokens", 4)
    assert facts["tool_calls"] == []
    assert "tool_results" not in facts


def test_a_call_is_shown_whole_and_cannot_pretend_to_be_another() -> None:
    call = ToolCall("run", {"command": "rm \u202e*\n\x1b[2K", "times": 2, "text": "x" * 5000})
    shown = call_text(call)
    assert shown.startswith(r'run(command="rm \u202e*\n\u001b[2K", times=2, text="xxx')
    assert "x" * 5000 in shown
    long = result_text(ToolResult(call, ["ö"] * 300))
    assert long.startswith('run → ["ö", "ö", ')
    assert long.endswith("… (1500 characters)")
    assert result_text(ToolResult(call, {"error": "no\x1b"}, failed=True)) == r"run: no\x1b"


class Lines:
    """A reader of lines that are known."""

    def __init__(self, *lines: str) -> None:
        self.lines = iter(lines)

    def read(self) -> Typed | None:
        line = next(self.lines, None)
        return None if line is None else Typed(line)


@pytest.mark.usefixtures("script")
def test_a_chat_keeps_calls_and_their_results(tools: Path, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"

    def confirm(_: ToolCall) -> bool:
        if len(chat.conversation.messages) > 5:
            raise KeyboardInterrupt
        return True

    with Gemma.load(device="cpu") as gemma:
        functions = load_tools(tools)
        chat = TerminalChat(
            gemma, {"temperature": 0}, tools=functions, confirm=confirm, history=False
        )
        chat.loop(Lines("Sum?", "/regenerate", f"/save {saved}"))
        assert [message["role"] for message in chat.conversation.messages] == [
            *("user", "assistant", "tool", "assistant")
        ]
        said, result, last = chat.conversation.messages[1:]
        assert said["content"] == "I add."
        assert said["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}
        assert result["tool_call_id"] == said["tool_calls"][0]["id"]
        assert result["content"] == 5
        assert last == {"role": "assistant", "content": "It is five."}
        assert load(saved).messages == chat.conversation.messages
        # The model is told of the calls again, and a reply that is stopped at the question is kept.
        assert "response:add{value:5}" in gemma.render(chat.conversation.messages, tools=functions)
        later = {r"Later\?<turn\|>": "<|tool_call>call:add{a:2,b:3}<tool_call|>"}
        with pytest.MonkeyPatch.context() as patch:
            follow_script(patch, later)
            chat.loop(Lines("Hello!", "Later?"))
    assert chat.last is not None
    assert chat.last.stopped
    assert chat.last.results == []
    assert chat.conversation.messages[-1] == {"role": "assistant", "content": ""}


DRIVER = f"""
import sys

sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
import pytest
from helpers.scripted import follow_script
from cli.test_tools import SCRIPT
from webgemma.cli import main

follow_script(pytest.MonkeyPatch(), SCRIPT)
sys.argv[0] = "webgemma"
main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs pseudo-terminals")
def test_a_person_is_asked_before_every_call(tools: Path, tmp_path: Path) -> None:
    from helpers.terminal import Terminal

    question = "Make this call? [y/N]"
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    command = f"exec {sys.executable} {driver} run - --device cpu --tools {tools}"
    with Terminal(shell=f"{command} 'Both?'") as terminal:
        assert "add(a=2, b=3)" in terminal.expect(question)
        terminal.type("yes\r")
        assert "add(a=1, b=1)" in terminal.expect(question)
        terminal.type("\r")  # no
        terminal.expect("add → 5\nadd: The user declined this call.\nAs you like.")
        assert terminal.wait() == 0
    assert terminal.shown.count("adding") == 1
    with Terminal(shell=f"{command} 'Both?'") as terminal:
        terminal.expect(question)
        terminal.type("\x04")  # Ctrl-D: no
        terminal.expect(question)
        terminal.type("\x03")
        assert terminal.wait() == 130
    assert "adding" not in terminal.shown
    assert "Traceback" not in terminal.shown
    with Terminal(shell=command, env={"WEBGEMMA_NOHISTORY": "1"}) as terminal:
        terminal.expect("Send a message")
        terminal.type("Stop?\r")
        terminal.expect(question)
        terminal.type("\x03")
        terminal.expect("Send a message")  # only the reply is stopped
        terminal.type("Sum?\r")
        terminal.expect(question)
        terminal.type("y\r")
        terminal.expect("It is five.")
        terminal.expect("Send a message")
        terminal.type("\x04")
        assert terminal.wait() == 0
