"""The chat page and the context: tokens, messages that are left out, replies that are continued."""

import pytest
from browser.chromium import CHROMIUM
from web.page import Visitor

pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")


def set_context(visitor: Visitor, tokens: int) -> None:
    visitor.button("Settings").click()
    visitor.page.locator("[name=context]").fill(str(tokens))
    visitor.button("Save").click()
    visitor.button("Load the model again").click()
    visitor.page.locator(f"#model-button[title*='context of {tokens} tokens']").wait_for()


def left_out(visitor: Visitor) -> list[str]:
    return visitor.texts(".left-out")


def test_every_turn_is_answered_and_what_was_left_out_is_shown(visitor: Visitor) -> None:
    set_context(visitor, 256)
    assert visitor.texts("#tokens") == ["0 of 256 tokens"]
    words = " ".join(["word"] * 20)
    for turn in range(30):
        assert visitor.ask(f"turn {turn} {words}").startswith(f"You said turn {turn} ")
        used = int(visitor.texts("#tokens")[0].split()[0])
        assert 0 < used <= 256
        if turn == 0:
            assert left_out(visitor) == []
    # A question takes 22 words, a reply 24; half of the context holds two turns and a question.
    text = "The 54 messages above no longer fit the context; the model did not read them."
    assert left_out(visitor) == [text]
    place = (
        "[...document.querySelector('#messages').children].findIndex((n) => !n.matches('.message'))"
    )
    assert visitor.page.evaluate(place) == 54
    visitor.open()
    assert left_out(visitor) == [text]
    assert len(visitor.texts(".message")) == 60


def test_messages_without_text_count_among_those_left_out(visitor: Visitor) -> None:
    set_context(visitor, 64)
    visitor.ask("call")  # its reply has no text and is not sent
    for turn in range(4):
        visitor.ask(f"turn {turn} " + " ".join(["word"] * 10))
    (text,) = left_out(visitor)
    count = int(text.split()[1])
    nodes = visitor.page.locator("#messages > li").evaluate_all(
        "(all) => all.map((n) => n.className)"
    )
    assert nodes.index("left-out") == count
    assert nodes[count + 1] == "message user"  # a turn begins with its question


def test_a_reply_that_was_cut_can_be_continued(visitor: Visitor) -> None:
    visitor.ask("hello")
    assert visitor.button("Continue").is_hidden()
    visitor.ask("cut here")
    assert "stopped at the token limit" in visitor.texts(".facts")[-1]
    visitor.button("Continue").click()
    visitor.page.locator(".body", has_text="and the rest.").wait_for()
    visitor.page.locator(".message:last-child .facts:not(:empty)").wait_for()
    assert visitor.reply() == "You said cut here. and the rest."
    assert visitor.texts(".facts")[-1].startswith("5 tokens")  # three, then two
    assert visitor.button("Continue").is_hidden()
    visitor.open()
    assert visitor.reply() == "You said cut here. and the rest."
    assert len(visitor.texts(".message")) == 4


@pytest.mark.parametrize("how", ["stop", "reload"])
def test_a_reply_that_was_stopped_can_be_continued(visitor: Visitor, how: str) -> None:
    visitor.say("forever")
    visitor.page.locator(".body", has_text="on and").wait_for()
    if how == "stop":
        visitor.button("Stop").click()
        visitor.page.locator(".facts", has_text="stopped").wait_for()
    else:
        visitor.open()
        assert "not finished" in visitor.texts(".facts")[-1]
    visitor.button("Continue").click()
    visitor.page.locator(".body", has_text="and the rest.").wait_for()
    visitor.button("Send").wait_for()
    assert visitor.reply().startswith("on and")


def test_thoughts_that_were_stopped_are_continued(visitor: Visitor) -> None:
    visitor.button("Settings").click()
    visitor.page.get_by_label("Think before answering").check()
    visitor.button("Save").click()
    visitor.say("fail")
    assert visitor.notice() == "The prompt is too long."
    visitor.button("Continue").click()
    visitor.page.locator(".body", has_text="Half a and the rest.").wait_for()


def test_a_reply_names_its_model_and_a_tool_call_is_shown(visitor: Visitor) -> None:
    visitor.say("call")
    visitor.page.locator(".facts:not(:empty)").wait_for()
    assert visitor.texts(".author") == ["Bundled model"]
    assert "get_weather" in visitor.texts(".call summary")[0]
    assert visitor.texts(".call code") == ['{\n  "city": "<b>Bern</b>",\n  "days": 3\n}']
    visitor.open()
    assert visitor.texts(".author") == ["Bundled model"]
    assert len(visitor.texts(".call")) == 1
    visitor.page.locator(".assistant").get_by_role("button", name="Copy", exact=True).click()
    assert "get_weather" in visitor.page.evaluate("navigator.clipboard.readText()")
    assert visitor.ask("next") == "You said next."


def test_the_button_to_the_end_goes_with_its_conversation(visitor: Visitor) -> None:
    visitor.ask("short")
    visitor.button("New conversation").click()
    visitor.ask("echo " + "long\n\n" * 200)
    visitor.page.locator("#scroller").evaluate("(area) => { area.scrollTop = 0; }")
    visitor.page.locator("#to-end:not([hidden])").wait_for()
    visitor.page.locator(".conversation", has_text="short").click()
    visitor.page.locator("#to-end").wait_for(state="hidden")
