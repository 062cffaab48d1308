"""Word wrap of streamed text: lines fit, and no word or code is changed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from webgemma.cli.wrap import WordWrap


def wrapped(text: str, width: int = 20, step: int = 3) -> str:
    """Return the text, fed in pieces."""
    wrap = WordWrap(lambda: width)
    pieces = [text[at : at + step] for at in range(0, len(text), step)]
    return "".join([wrap.feed(piece) for piece in pieces]) + wrap.flush()


def test_lines_break_between_words() -> None:
    text = "The quick brown fox jumps over the lazy dog."
    assert wrapped(text) == "The quick brown fox\njumps over the lazy\ndog."


def test_line_breaks_of_the_text_stay() -> None:
    assert wrapped("one\n\n  two\nthree four five six seven") == (
        "one\n\n  two\nthree four five six\nseven"
    )


def test_a_word_as_long_as_the_line_fits_and_a_longer_one_is_left_to_the_terminal() -> None:
    assert wrapped("see " + "x" * 20 + " now") == "see\n" + "x" * 20 + "\nnow"
    url = "https://example.org/" + "y" * 25  # 45 cells: two lines and a quarter
    assert wrapped(f"see {url} for a longer text") == f"see\n{url} for a longer\ntext"


@pytest.mark.parametrize(
    "code",
    [
        "```sh\necho one two three four five six seven\n```",
        "~~~\na ``` b c d e f g h i j k l m n o p\n~~~",
        "    for x in range(10): print(x, x * x)",
        "\treturn one + two + three + four + five",
        "| a table | has rows | that are | wide |",
    ],
)
def test_code_and_tables_are_not_wrapped(code: str) -> None:
    prose = "words that are many and wrap"
    assert wrapped(f"{code}\n{prose}").expandtabs(8) == (
        f"{code}\nwords that are many\nand wrap".expandtabs(8)
    )


def test_the_end_of_a_block_is_the_fence_that_began_it() -> None:
    inner = "````\n```\na b c d e f g h i j k l m n o p q r\n```\n````\n"
    assert wrapped(inner + "a b c d e f g h i j k l m n") == inner + "a b c d e f g h i j\nk l m n"


def test_code_in_backticks_is_one_word() -> None:
    assert wrapped("Now type `git status` here.") == "Now type\n`git status` here."


def test_a_lone_backtick_does_not_hold_the_rest_of_the_text() -> None:
    shown = wrapped("it`s one two three four five six seven eight nine ten")
    assert max(map(len, shown.split("\n"))) <= 20
    assert shown.replace("\n", " ") == "it`s one two three four five six seven eight nine ten"


def test_chinese_breaks_between_characters_but_not_before_a_full_stop() -> None:
    assert wrapped("一二三四五六七八九十。好", 20) == "一二三四五六七八九\n十。好"


def test_a_word_is_shown_when_it_is_complete_and_a_pause_shows_all() -> None:
    wrap = WordWrap(lambda: 20)
    assert wrap.feed("Hello") == ""
    assert wrap.feed(" wor") == "Hello"
    assert wrap.flush() == " wor"
    assert wrap.feed("ld") == ""
    assert wrap.flush() == "ld"


def test_a_window_may_become_narrower() -> None:
    width = 20
    wrap = WordWrap(lambda: width)
    first = wrap.feed("aaaa bbbb cccc dddd eeee ")
    width = 10
    assert first + wrap.feed("ffff gggg hhhh ") == "aaaa bbbb cccc dddd\neeee ffff\ngggg hhhh"


TEXT = st.text(st.sampled_from("ab cd`\n|~ 一。\t-"), max_size=200)


@given(TEXT, st.integers(4, 30), st.integers(1, 7))
def test_nothing_is_lost_or_added_but_line_breaks(text: str, width: int, step: int) -> None:
    shown = wrapped(text, width, step)
    assert "".join(shown.split()) == "".join(text.split())
    assert shown.count("\n") >= text.count("\n")
    assert wrapped(text, width, 1) == shown


@given(st.lists(st.text(st.sampled_from("abcd"), min_size=1, max_size=8), max_size=40))
def test_every_line_of_prose_fits(words: list[str]) -> None:
    shown = wrapped(" ".join(words), 12)
    assert all(cell_len(line) <= 12 for line in shown.split("\n"))
    assert shown.replace("\n", " ") == " ".join(words)
