"""Tools on the page: the menu, calls in a reply, results, the end of rounds, files of strangers."""

import json
from typing import Any

import pytest
from browser.axe import AXE, violations
from browser.chromium import CHROMIUM
from web.page import Visitor

pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")

MODULES = """async ([calculations, times, now]) => {
  const { calculate } = await import("./calculator.js");
  const { tellTime } = await import("./clock.js");
  const result = (make) => {
    try { return make(); } catch (error) { return `Error: ${error.message}`; }
  };
  return [
    calculations.map((text) => result(() => calculate(text))),
    times.map((given) => result(() => tellTime(given, now))),
  ];
}"""
DIGITS_OF_100 = (
    "93326215443944152681699238856266700490715968264381621468592963895217599993229915608941463976156"
    "518286253697920827223758251185210916864000000000000000000000000"
)
CALCULATIONS = {
    "1 + 2 * 3": "7",
    "0.1 + 0.2": "0.3",
    "2^100": "1267650600228229401496703205376",
    "-2^2": "-4",
    "2^3^2": "512",
    "100!": DIGITS_OF_100,
    "400!": "≈ 6.40345228466238e868 (869 digits)",
    "1/3": "1/3 ≈ 0.333333333333333",
    "10/4": "2.5",
    "15% of 80": "12",
    "80 + 15%": "92",
    "80 * 15%": "12",
    "5 + (10%)": "5.1",
    "17 % 5": "2",
    "-17 mod 5": "3",
    "7 // 2": "3",
    "sqrt(144) + √16": "16",
    "sqrt(2)": "≈ 1.4142135623731",
    "8^(1/3)": "2",
    "root(-8, 3)": "-2",
    "log(1000) + log2(1024)": "13",
    "ln(10^5000)": "≈ 11512.9254649702",
    "sin(pi)": "≈ 0",
    "round(-2.5) + round(3.14159, 2)": "0.14",
    "ncr(52, 5)": "2598960",
    "lcm(4, 6) + gcd(12, 18)": "18",
    "mean(1, 2, 4)": "7/3 ≈ 2.33333333333333",
    "3 × 4 ÷ 2 − 1": "5",
    "1e-300 * 1e-300": "≈ 1e-600",
    "1/0": "Error: Division by zero.",
    "0^-1": "Error: Division by zero.",
    "": "Error: The expression is empty.",
    "2 3": "Error: An operator is missing before “3”.",
    "(1 + 2": "Error: “)” is missing at the end.",
    "1 + 2)": "Error: There is a “)” too many.",
    "1,000": "Error: Write numbers without thousands separators, and with a decimal point: 1234.5.",
    "@": "Error: The calculator does not know “@”.",
    "sqrt(-1)": "Error: A negative number has no real root of an even degree.",
    "sin(1, 2)": "Error: sin was given 2 arguments, but takes 1.",
    "9^9^9^9": ("Error: The power is too long to be written: it has more than 60 000 digits."),
    "(" * 200 + "1": "Error: The expression has too many parentheses within each other.",
    "1" * 2001: "Error: The expression is longer than 2000 characters.",
}
NOW = 1795038605000  # 2026-11-18, 21:50:05 UTC
BERLIN = "Europe/Berlin"
TIMES: list[tuple[dict[str, Any], str]] = [
    (
        {"time_zone": "Asia/Kolkata"},
        "Thursday, 2026-11-19, 03:20:05, Asia/Kolkata (UTC+05:30), week 47, day 323 of the year",
    ),
    (
        {"date": "2024-02-29", "add_months": 12, "until": "2026-11-18"},
        "Friday, 2025-02-28, week 9, day 59 of the year\nUntil Wednesday, 2026-11-18: 628 days = "
        "1 year 8 months 21 days = 89 weeks 5 days",
    ),
    (
        {"date": "2026-12-31", "add_days": 3},
        "Sunday, 2027-01-03, week 53, day 3 of the year\nToday is Wednesday, 2026-11-18; until "
        "that date: 46 days = 1 month 16 days = 6 weeks 4 days",
    ),
    (  # the night in which clocks are put forward
        {"date": "2026-03-28T12:00", "until": "2026-03-29T12:00", "time_zone": BERLIN},
        "Saturday, 2026-03-28, 12:00:00, Europe/Berlin (UTC+01:00), week 13, day 87 of the year\n"
        "Until Sunday, 2026-03-29, 12:00:00: 23 hours",
    ),
    ({"date": "2026-02-30"}, "Error: date is a day that does not exist: 2026-02-30."),
    (
        {"until": "soon"},
        "Error: until must be written as 2026-12-24 or 2026-12-24T18:30, not “soon”.",
    ),
    (
        {"time_zone": "Mars"},
        "Error: “Mars” is not a time zone: use a name such as Europe/Berlin, America/New_York "
        "or UTC.",
    ),
    (
        {"add_days": 1.5},
        "Error: add_days must be a whole number from -4000000 to 4000000.",
    ),
]


def switch(visitor: Visitor, *names: str) -> None:
    """Switch tools on or off."""
    visitor.page.locator("#tools-button").click()
    for name in names:
        visitor.page.get_by_label(name, exact=True).click()
    visitor.page.keyboard.press("Escape")


def states(visitor: Visitor) -> list[str]:
    """Return the names of the calls that are shown, and how they stand."""
    script = (
        "(calls) => calls.map((c) => `${c.querySelector('strong').innerText} ${c.classList[1]}`)"
    )
    return list(visitor.page.locator(".call").evaluate_all(script))


def conversation(visitor: Visitor) -> Any:
    """Return the latest conversation as Export writes it."""
    return json.loads(visitor.exported())["conversations"][0]


def test_the_calculator_and_the_clock(visitor: Visitor) -> None:
    given = [list(CALCULATIONS), [each for each, _ in TIMES], NOW]
    calculated, told = visitor.page.evaluate(MODULES, given)
    assert dict(zip(CALCULATIONS, calculated, strict=True)) == CALCULATIONS
    assert told == [expected for _, expected in TIMES]


def test_tools_are_off_until_they_are_switched_on(visitor: Visitor) -> None:
    page = visitor.page
    assert "tools" not in visitor.request()["settings"]
    switch(visitor, "Calculator")
    assert page.get_by_role("button", name="Tools: 1 is on").get_attribute("aria-expanded")
    request = visitor.request()
    (tool,) = request["settings"]["tools"]
    assert tool["function"]["name"] == "calculator"
    assert "tool_choice" not in request["settings"]
    page.reload()
    page.locator("#model-name", has_text="Bundled model").wait_for()
    page.get_by_role("button", name="Tools: 1 is on").wait_for()
    visitor.button("New conversation").click()
    page.get_by_role("button", name="Tools", exact=True).wait_for()
    assert "tools" not in visitor.request()["settings"]
    assert page.locator("#tool-python").is_hidden()  # this server has no Pyodide


def test_a_reply_goes_on_with_the_results_of_its_calls(visitor: Visitor) -> None:
    page = visitor.page
    switch(visitor, "Calculator", "Clock")
    calls = [
        'tool calculator {"expression": "15% of 80"}',
        'tool calculator {"expression": "1/0"}',
        'tool clock {"date": "2026-12-24", "until": "2027-01-01"}',
        'tool weather {"city": "Bern"}',
    ]
    reply = visitor.ask("\n".join(calls))
    assert reply.startswith("The tools said: 12 and Error: Division by zero. and Thursday")
    assert "8 days = 1 week 1 day" in reply
    assert reply.endswith("There are: calculator, clock.")
    assert visitor.texts(".round .body") == ["I calculate."]
    shown = states(visitor)
    assert shown == ["Calculator done", "Calculator failed", "Clock done", "weather failed"]
    assert visitor.texts(".call .preview") == ["15% of 80", "1/0"]
    assert page.locator(".call[open]").count() == 0
    page.locator(".call summary").first.click()
    assert page.locator(".call").first.locator("pre").all_inner_texts() == ["15% of 80", "12"]
    if AXE.is_file():
        assert violations(page) == []
    # What is stored is what the model is told next time, also after a reload.
    page.reload()
    page.locator("#model-name", has_text="Bundled model").wait_for()
    assert states(visitor) == shown
    sent = visitor.request()["messages"]
    assert [message["role"] for message in sent] == [
        *("user", "assistant", "tool", "tool", "tool", "tool", "assistant", "user")
    ]
    call = {"name": "calculator", "arguments": {"expression": "15% of 80"}}
    assert sent[1]["tool_calls"][0] == {"id": "call_0_0", "type": "function", "function": call}
    assert sent[1]["content"] == "I calculate."
    result = {"role": "tool", "tool_call_id": "call_0_0", "name": "calculator", "content": "12"}
    assert sent[2] == result
    assert sent[6]["content"] == reply
    text = visitor.saved("Save as Markdown")[1].read_text("utf-8")
    made, result = '{\n  "expression": "15% of 80"\n}', "12"
    assert (
        f"I calculate.\n\n**Tool call: calculator**\n\n```json\n{made}\n```\n\n```\n{result}\n```"
        in text
    )
    assert text.index("Thursday") < text.index("The tools said")


def test_a_reply_calls_tools_for_so_many_rounds(visitor: Visitor) -> None:
    switch(visitor, "Calculator")
    visitor.ask("loop")
    rounds = visitor.page.locator(".round")
    assert rounds.count() == 10
    note = visitor.page.locator(".rounds > p").inner_text()
    assert note.startswith("The model has called tools 10 times in this reply")
    assert visitor.reply() == "The tools said: 1"
    (_, reply) = conversation(visitor)["messages"]
    assert reply["tokens"] > 50  # of all rounds
    assert len(reply["rounds"]) == 10


def test_a_call_that_was_cut_is_told_to_the_model(visitor: Visitor) -> None:
    """A page that is closed while a tool runs leaves a call that nobody will end."""
    call = {"name": "python", "arguments": {"code": "1"}, "state": "running"}
    cut = {"content": "Let me see.", "thinking": "Hm.", "calls": [call]}
    reply = {"role": "assistant", "content": "", "finish": "unfinished", "rounds": [cut]}
    visitor.import_text(_file(reply))
    visitor.page.locator(".conversation").first.click()
    assert states(visitor) == ["Python stopped"]
    visitor.button("Continue").click()
    visitor.page.locator(".message.assistant:last-child .facts:not(:empty)").wait_for()
    assert visitor.reply() == "The tools said: The user stopped this call."


@pytest.mark.parametrize(
    "rounds",
    [
        {},
        [{"content": "", "calls": []}],
        [{"content": 1, "calls": [{"name": "a", "arguments": {}}]}],
        [{"content": "", "calls": [{"name": "a", "arguments": []}]}],
        [{"content": "", "calls": [{"name": "a", "arguments": {}, "result": {"a": 1}}]}],
    ],
)
def test_wrong_rounds_of_a_file_are_refused(visitor: Visitor, rounds: Any) -> None:
    reply = {"role": "assistant", "content": "", "rounds": rounds}
    assert "message (number 2) that cannot be read" in visitor.import_text(_file(reply))


def test_a_file_switches_nothing_on_and_runs_nothing(visitor: Visitor) -> None:
    call = {"name": "<b>x</b>", "arguments": {"code": "a\u202eb<i>"}, "state": "<asking>"}
    reply = {"role": "assistant", "content": "Hi", "rounds": [{"content": "", "calls": [call]}]}
    data = json.loads(_file(reply))
    data["conversations"][0] |= {"tools": ["calculator", "python"], "tooled": 9e15}
    visitor.import_text(json.dumps(data))
    visitor.page.locator(".conversation").first.click()
    assert visitor.page.get_by_role("button", name="Tools", exact=True).is_visible()
    assert states(visitor) == ["<b>x</b> stopped"]
    visitor.page.locator(".call summary").click()
    assert visitor.page.locator(".call pre").inner_text() == "aU+202Eb<i>"
    assert not visitor.page.locator(".answers").count()
    again = json.loads(visitor.exported())
    assert again["conversations"][0]["messages"][1]["rounds"][0]["calls"][0]["state"] == "stopped"
    assert visitor.import_text(json.dumps(again)) == "0 conversations were imported."


def _file(reply: dict[str, Any]) -> str:
    """Return an exported file of one conversation with this reply."""
    question = {"id": "q", "parent": None, "created": 1, "role": "user", "content": "Hello"}
    messages = [question, {"id": "a", "parent": "q", "created": 2, **reply}]
    facts = {"id": "c", "title": "Hello", "created": 1, "updated": 2, "leaf": "a", "files": []}
    head = {"format": "webgemma-conversations", "version": 2}
    return json.dumps({**head, "conversations": [{**facts, "messages": messages}]})
