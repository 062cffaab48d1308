"""The chat page of `webgemma serve` as a person uses it: the server writes the replies."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from browser.person import LAST, endless_gguf
from browser.served import Served, ServedPerson, serving, visiting
from web.sender import DROP, as_base64

STORY = "Tell me a story."


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The bundled model, and one whose replies end only when its context is full."""
    path = tmp_path_factory.mktemp("models") / "on.gguf"
    with pytest.MonkeyPatch.context() as patch:
        path.write_bytes(endless_gguf(patch))
    with serving("-", path) as served:
        yield served


@pytest.fixture(scope="module")
def person(chromium: Any, served: Served) -> Iterator[ServedPerson]:
    """A person in a browser of their own; the tests are steps of one visit."""
    context = chromium.new_context()
    expected = ("net::ERR_", "404", "400")  # the server is killed, and refuses a schema
    with visiting(context, served.url, expected) as person:
        yield person
    context.close()


def test_the_root_leads_a_browser_to_the_page(person: ServedPerson, served: Served) -> None:
    person.page.goto(served.url)
    person.wait_for_model("demo")
    assert person.page.url == person.url
    assert person.texts("#welcome h2.server-only") == ["Gemma 4, on this server"]
    person.page.get_by_text("The bundled model is tiny").wait_for()
    assert person.texts(".suggestion")[1] == "What is 7 + 5?"
    person.button("Load a real model").wait_for()  # there is another one
    for hidden in ("#tune-button", "#welcome .tab-only", "#loading", "#forget-key"):
        assert person.page.locator(hidden).first.is_hidden()
    assert person.page.evaluate("navigator.serviceWorker.getRegistrations()") == []
    worklet = "new AudioContext().audioWorklet.addModule('microphone_worklet.js')"
    person.page.evaluate(worklet)  # which the page's policy allows


def test_a_reply_is_the_servers(person: ServedPerson, served: Served) -> None:
    person.set(Temperature="0", Max_tokens="40")
    person.ask(STORY)
    body = {"model": "demo", "messages": [{"role": "user", "content": STORY}]}
    answer = served.post("/v1/chat/completions", body | {"temperature": 0, "max_tokens": 40})
    assert person.copied() == answer["choices"][0]["message"]["content"]
    facts = person.texts(f"{LAST} .about")[0]
    assert facts.startswith("40 tokens · ")
    assert facts.endswith(" tokens/s · stopped at the token limitdemo")  # a style separates them
    used = answer["usage"]["total_tokens"]
    person.page.locator("#device", has_text="in memory").wait_for()
    assert person.texts("#tokens") == [f"{used} of 1024 tokens"]


def test_a_cut_reply_is_continued_and_another_version_is_equal(
    person: ServedPerson, served: Served
) -> None:
    cut = person.copied()
    person.button("Continue").click()
    person.page.locator(f"{LAST} .facts", has_text="80 tokens").wait_for()
    longer = person.copied()
    body = {"model": "demo", "messages": [{"role": "user", "content": STORY}]}
    answer = served.post("/v1/chat/completions", body | {"temperature": 0, "max_tokens": 80})
    assert longer == answer["choices"][0]["message"]["content"]
    assert longer.startswith(cut)
    person.button("Regenerate").click()
    person.page.locator(f"{LAST} .facts", has_text="40 tokens").wait_for()
    assert person.copied() == cut
    person.button("Previous version").click()
    assert person.copied() == longer


def test_settings_and_the_system_prompt_are_sent(person: ServedPerson) -> None:
    person.button("New conversation").click()
    values = {"Top_k": "5", "Typical_p": "0.9", "Repetition_penalty": "1.1", "Seed": "7"}
    person.set(System_prompt="Be brief.", **values)
    person.button("Settings").click()
    assert person.page.get_by_label("Context", exact=True).count() == 0  # the server's choice
    person.page.get_by_label("Think before").check()
    person.button("Save").click()
    with person.page.expect_request("**/v1/chat/completions") as sent:
        person.ask("Hello")
    body = sent.value.post_data_json
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    settings = {"top_k": 5, "typical_p": 0.9, "repetition_penalty": 1.1, "seed": 7, "think": True}
    assert settings.items() <= body.items()
    assert "min_p" not in body  # the model's default
    person.button("Settings").click()
    person.button("Reset").click()
    person.button("Save").click()


def test_a_reply_keeps_to_a_schema(person: ServedPerson) -> None:
    person.button("New conversation").click()
    schema = {"type": "object", "properties": {"mood": {"enum": ["*calm*", "_wild_"]}}}
    schema |= {"required": ["mood"], "additionalProperties": False}
    box, problem = "Reply_as_JSON_of_this_schema", person.page.locator("#schema-problem")
    person.set(**{box: '{"type": "object",}'})
    assert problem.inner_text().startswith("This is not JSON: Expected double-quoted property name")
    person.button("Close without saving").click()
    person.set(**{box: json.dumps(schema)})
    with person.page.expect_request("**/v1/chat/completions") as sent:
        person.ask("How is the sea?")
    format = sent.value.post_data_json["response_format"]
    assert (format["type"], format["json_schema"]["schema"]) == ("json_schema", schema)
    shown = person.page.locator(f"{LAST} .body figure.code code").inner_text()
    jsonschema.validate(json.loads(shown), schema)
    assert json.loads(person.copied()) == json.loads(shown)
    person.set(**{box: json.dumps({"type": "array", "uniqueItems": True})})
    person.say("And now?")
    assert "uniqueItems is not supported" in person.notice()
    person.set(**{box: ""})
    person.button("Try again").click()
    assert person.wait_for_reply()
    assert person.page.locator(f"{LAST} figure.code").count() == 0


def test_a_reload_keeps_everything(person: ServedPerson) -> None:
    person.page.get_by_label("Message", exact=True).fill("a draft")
    before = person.texts(".message .body")
    person.page.wait_for_timeout(400)  # drafts are written a moment later
    person.open("demo")
    assert person.texts(".message .body") == before
    assert person.page.get_by_label("Message", exact=True).input_value() == "a draft"
    assert STORY in person.texts(".conversation")


def test_another_model_is_chosen_and_stays_chosen(person: ServedPerson) -> None:
    person.open_models()
    rows = dict(text.split("\n", 1) for text in person.texts("#served .model"))
    assert set(rows) == {"demo", "on"}
    assert rows["demo"].endswith("Q8_0 · in memory")
    person.page.locator("#served .model[aria-current]", has_text="demo").wait_for()
    person.choose("served", "on")
    assert person.texts("#device") == [""]
    person.button("New conversation").click()
    person.set(Max_tokens="5")
    assert person.ask("Are you there?") == "On" + " and on" * 4
    assert person.texts(f"{LAST} .author") == ["on"]
    person.page.locator("#device", has_text="in memory").wait_for()
    person.open("on")


def test_a_reload_in_the_middle_of_a_reply_is_no_error(person: ServedPerson) -> None:
    person.set(Max_tokens="")
    person.say("Are you there?")
    person.wait_for_text(5)
    person.open("on")
    person.page.locator(f"{LAST} .facts", has_text="not finished").wait_for()


def test_what_only_a_tab_can_do_gets_a_sentence(person: ServedPerson) -> None:
    person.page.evaluate(DROP, as_base64("model.gguf"))
    assert "the server writes the replies" in person.notice()
    person.button("Dismiss").click()


def test_a_killed_server_loses_nothing(person: ServedPerson, served: Served) -> None:
    person.set(Max_tokens="")
    person.button("New conversation").click()
    person.say("Are you there?")
    person.wait_for_text(40)
    served.kill()
    assert person.notice() == "The connection to the server was lost while it wrote this reply."
    person.page.locator(f"{LAST} .facts", has_text="ended with an error").wait_for()
    begun = person.copied()
    assert begun.startswith("On and on")
    person.button("Try again").click()
    person.page.locator("#notice-text", has_text="The server does not respond").wait_for()
    assert person.copied() == begun
    person.button("New conversation").click()
    person.say("Still there?")
    person.page.locator("#notice-text", has_text="The server does not respond").wait_for()
    person.page.locator(f"{LAST} .facts", has_text="ended with an error").wait_for()
    served.start()
    person.set(Max_tokens="3")
    person.button("Try again").click()  # in place: there is no version without text
    assert person.wait_for_text(10)
    assert person.wait_for_reply() == "On and on and on"
    assert person.texts(".message .body") == ["Still there?", "On and on and on"]
    assert person.page.locator(f"{LAST} .versions").is_hidden()


def test_a_cut_reply_goes_on_after_the_restart(person: ServedPerson) -> None:
    person.page.locator(".conversation", has_text="Are you there?").first.click()
    begun = person.copied()
    person.button("Continue").click()
    person.page.locator(f"{LAST} .facts", has_text="stopped at the token limit").wait_for()
    assert person.copied().startswith(begun)
    assert person.copied() != begun


def test_a_model_that_is_gone_is_named(person: ServedPerson) -> None:
    person.page.evaluate("localStorage.setItem('webgemma.server-model', 'on')")
    person.page.route("**/v1/chat/completions", rename_model)
    person.button("New conversation").click()
    person.say("Hello?")
    assert person.notice() == "model '<img src=x onerror=alert(1)>' not found"
    person.page.unroute("**/v1/chat/completions")
    person.button("Try again").click()
    assert person.wait_for_reply() == "On and on and on"


def rename_model(route: Any) -> None:
    body = route.request.post_data_json | {"model": "<img src=x onerror=alert(1)>"}
    route.continue_(post_data=json.dumps(body))


def test_an_export_has_the_conversations(person: ServedPerson) -> None:
    text = person.exported()
    titles = {conversation["title"] for conversation in json.loads(text)["conversations"]}
    told = {STORY, "Hello", "How is the sea?", "Are you there?", "Still there?", "Hello?"}
    assert titles == told
    context = person.page.context.browser.new_context()
    other = ServedPerson(context, person.origin)
    other.open("on")  # the one that the server has in memory
    assert (
        other.import_text(text)
        == f"{len(json.loads(text)['conversations'])} conversations were imported."
    )
    assert STORY in other.texts(".conversation")
    context.close()


def test_who_closes_the_tab_ends_the_reply(person: ServedPerson, served: Served) -> None:
    person.set(Max_tokens="")
    page = person.page.context.new_page()
    page.goto(person.url)
    page.locator("#model-name", has_text="on").wait_for()
    page.get_by_label("Message", exact=True).fill("Are you there?")
    page.keyboard.press("Enter")
    page.locator(f"{LAST} .body:not(:empty)").wait_for()
    tokens = served.get("/status.json")["reply"]["tokens"]
    page.close()
    served.wait_until_idle()
    assert served.get("/status.json")["reply"]["tokens"] < tokens + 3000  # of 4096
