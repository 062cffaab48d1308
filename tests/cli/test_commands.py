"""The commands of the chat: what is one, what is a message, and what /set understands."""

from typing import Any

import pytest

from webgemma.cli.commands import Command, parse_value, read_command, setting_named
from webgemma.cli.reading import Typed, is_open, unquoted
from webgemma.errors import InputError
from webgemma.settings import SETTINGS


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("/clear", Command("clear")),
        ("/CLEAR", Command("clear")),
        ("/quit", Command("bye")),
        ("/?", Command("help")),
        ("/image my cat.jpg", Command("image", "my cat.jpg")),
        ("/image [/x]", Command("image", "[/x]")),
        ("/set", Command("set")),
        ("/set system Be brief.\nBe kind.", Command("set", "system Be brief.\nBe kind.")),
        ("Hello", None),
        ("/etc/hosts what is this?", None),
        ("/tmp what is in there?", None),
        ("// a comment", None),
        ("/** a comment */", None),
        ("/", None),
        ("/include\n/exclude", None),
    ],
)
def test_what_is_a_command(text: str, command: Command | None) -> None:
    assert read_command(Typed(text)) == command


def test_what_stands_in_quotes_is_a_message() -> None:
    assert read_command(unquoted('"""/clear"""')) is None
    assert unquoted('"""/clear"""').text == "/clear"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("/foo", "There is no command /foo; /help lists them."),
        ("/regen", "did you mean /regenerate?"),
        ("/laod x.json", "did you mean /load?"),
        ("/clear all", "/clear stands alone."),
        ("/image", "/image needs a file: /image FILE."),
        ("/save ", "/save needs a file"),
    ],
)
def test_a_wrong_command_gets_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(InputError) as error:
        read_command(Typed(text))
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("text", "is_it"),
    [
        ('"""', True),
        ('"""a', True),
        ('"""a\nb"""', False),
        ('""""""', False),
        ('a """', False),
        ('"""a"""  ', False),
    ],
)
def test_quotes_are_open_until_they_are_closed(text: str, is_it: bool) -> None:
    assert is_open(text) == is_it


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0.5", 0.5),
        ("top_k", "40", 40),
        ("num_predict", "100", 100),
        ("repeat_penalty", "1.1", 1.1),
        ("max_tokens", "none", None),
        ("seed", "7", 7),
        ("stop", "END", ("END",)),
        ("stop", '"the end" .', ("the end", ".")),
        ("logit_bias", "12=-5 40=2.5", {12: -5.0, 40: 2.5}),
        ("watch", "on", True),
    ],
)
def test_values_of_settings(name: str, text: str, value: Any) -> None:
    assert parse_value(setting_named(name, dict(SETTINGS)), text) == value


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("temperature", "warm", "temperature is 'warm'; it must be a number."),
        ("top_k", "1.5", "top_k is '1.5'; it must be a whole number."),
        ("seed", "9" * 5000, "it must be a whole number"),
        ("watch", "maybe", "it must be on or off"),
        ("stop", '"open', "in quotes"),
        ("stop", '""', "stop string"),
        ("logit_bias", "12", "such as 12=-5"),
        ("temprature", "1", "did you mean temperature?"),
        ("num_ctx", "4096", "--context"),
    ],
)
def test_a_wrong_value_gets_a_sentence(name: str, text: str, sentence: str) -> None:
    with pytest.raises(InputError) as error:
        parse_value(setting_named(name, dict(SETTINGS)), text)
    assert sentence in str(error.value)


def test_every_setting_can_be_set() -> None:
    texts = {"stop": "END", "logit_bias": "1=2", "watch": "on", "speculate": "off"}
    for name, setting in SETTINGS.items():
        setting.check(parse_value(setting, texts.get(name, "1")))
