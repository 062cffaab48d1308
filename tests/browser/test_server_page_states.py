"""The chat page of a server in its states: locked, loading, busy, on a phone, with media."""

import asyncio
import io
import re
import threading
from base64 import b64decode
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from browser.axe import violations
from browser.person import LAST
from browser.served import ServedPerson, visiting
from helpers.endless import endless_replies
from helpers.live_server import Live, live_server, tiny_model, wait_until
from helpers.scripted import follow_script
from helpers.tiny_encoders import with_encoders
from PIL import Image
from web.page import give_access, serving_page
from web.sender import FILES

from webgemma import Gemma
from webgemma.server import registry

KEY = "0123456789abcdef"
SCRIPT = {
    "a table": "<h3>hello\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
    "```\n<img src=x onerror=alert(1)>\n```",
    # The first pattern in a prompt decides, and a prompt holds the whole conversation.
    r"a sum.*response:calculator\{value:<\|\"\|>12<\|": "It is 12.",
    "a sum": '<|tool_call>call:calculator{expression:<|"|>15% of 80<|"|>}<tool_call|>',
    "a tool": '<|tool_call>call:time{city:<|"|>Bern<|"|>}<tool_call|>',
    "think": "<|channel>thought\nLet me see.<channel|>Done.",
}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server that other machines reach, whose model has both encoders and follows a script."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "media.gguf").write_bytes(with_encoders())
    models = [folder / "media.gguf", tiny_model(folder, "<b>plain")]
    with pytest.MonkeyPatch.context() as patch:
        follow_script(patch, SCRIPT)
        with live_server(*models, keys=[KEY], host="0.0.0.0", max_loaded=2) as server:
            yield server


@contextmanager
def at_page(
    chromium: Any,
    live: Live,
    host: str = "phone.test",
    *expected: str,
    model: str = "media",
    **options: Any,
) -> Iterator[ServedPerson]:
    """A person with a browser of their own at a server's page, who had a model there before.

    `chromium` takes all names of "*.test" for this machine; pages there are not secure."""
    context = chromium.new_context(**options)
    context.add_init_script(f"localStorage['webgemma.server-model'] ??= '{model}'")
    with visiting(context, f"http://{host}:{live.port}", expected=("401", *expected)) as person:
        yield person
    context.close()


@pytest.fixture
def person(chromium: Any, live: Live) -> Iterator[ServedPerson]:
    """A person who has entered the key, at a page that is not secure."""
    with at_page(chromium, live, "phone.test", "503", "400") as person:
        person.page.goto(person.url)
        person.enter_key(KEY)
        person.wait_for_model("media")
        yield person


# Keys


def test_the_page_asks_for_the_key_and_keeps_it_in_its_tab(chromium: Any, live: Live) -> None:
    with at_page(chromium, live) as person:
        person.page.goto(person.url)
        person.enter_key("k\u00e9y")
        person.page.get_by_text("letters, digits and signs").wait_for()
        person.enter_key("wrong")
        person.page.get_by_text("not one of the server’s API keys").wait_for()
        person.button("Cancel").click()
        assert person.notice().startswith("A valid API key is missing")
        assert person.texts("#model-name") == ["no model"]
        person.button("Try again").click()
        person.enter_key(KEY)
        person.wait_for_model("media")
        person.ask("a table")
        assert KEY not in person.exported()
        stored = "JSON.stringify([localStorage, sessionStorage, document.cookie])"
        assert person.page.evaluate(stored).count(KEY) == 1
        assert KEY not in person.page.evaluate("JSON.stringify(localStorage)")
        assert not [request for request in person.requests if KEY in request]
        person.open("media")  # a reload needs it no more,
        other = ServedPerson(person.page.context, person.origin)
        other.page.goto(other.url)  # another tab does
        other.page.locator("#key-dialog").wait_for()
        other.page.close()


def test_a_key_is_remembered_if_the_person_wants_that(chromium: Any, live: Live) -> None:
    with at_page(chromium, live) as person:
        person.page.goto(person.url)
        person.enter_key(KEY, remember=True)
        person.wait_for_model("media")
        other = ServedPerson(person.page.context, person.origin)
        other.page.goto(other.url)
        other.page.evaluate("sessionStorage.setItem('webgemma.key', 'one-of-before')")
        other.open("media")  # by the key of the first tab
        assert "one-of-before" not in other.page.evaluate("JSON.stringify(sessionStorage)")
        other.button("Forget the API key").click()
        assert KEY not in other.page.evaluate("JSON.stringify([localStorage, sessionStorage])")
        other.say("hello")
        other.page.locator("#key-dialog").wait_for()  # and then the message is sent
        other.enter_key(KEY)
        assert other.wait_for_reply()
        other.page.close()


# What other pages may do

FETCH = """async ([url, key]) => {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const attempts = [
    fetch(url + "/api/tags", { headers }).then((response) => response.text()),
    fetch(url + "/api/chat", { method: "POST", headers, body: "{}" }).then((r) => r.text()),
    fetch(url + "/chat/page.js", { mode: "no-cors" }).then((response) => response.type),
    new Promise((resolve, reject) => {
      const script = document.createElement("script");
      Object.assign(script, { src: url + "/chat/theme.js", onload: resolve, onerror: reject });
      document.head.append(script);
    }),
  ];
  return (await Promise.allSettled(attempts)).map(({ status }) => status);
}"""


def test_the_page_of_another_origin_can_neither_read_nor_embed(chromium: Any, live: Live) -> None:
    context = chromium.new_context()
    page = context.new_page()
    page.route(
        "http://evil.test/**", lambda route: route.fulfill(body="<p>", content_type="text/html")
    )
    page.goto("http://evil.test/")
    assert page.evaluate(FETCH, [live.url, KEY]) == ["rejected"] * 4
    page.set_content(f'<iframe src="{live.url}/chat/"></iframe>')
    frame = page.frames[-1]
    wait_until(lambda: frame.url.startswith("chrome-error:"))
    context.close()


def test_the_service_worker_of_the_other_page_is_no_obstacle(chromium: Any, tmp_path: Path) -> None:
    """Both pages were at one address, one after the other."""
    context = chromium.new_context()
    with serving_page(tmp_path / "site") as url:
        port = int(url.rstrip("/").rpartition(":")[2])
        person = ServedPerson(context, url.rstrip("/"))
        give_access(context, url)
        person.page.goto(url)
        person.wait_for_model("Bundled model")
        cached = (
            "caches.keys().then((names) => names.some((name) => name.startsWith('webgemma-page')))"
        )
        wait_until(lambda: bool(person.page.evaluate(cached)))
    with live_server(tiny_model(tmp_path), port=port):
        person.open("small")
        person.set(Max_tokens="3")
        person.ask("hello")
    context.close()


# Waiting


@contextmanager
def held_loading() -> Iterator[threading.Event]:
    """Let loading end when the event is set."""
    released, load = threading.Event(), Gemma.aload

    async def aload(*args: Any, **options: Any) -> Gemma:
        await asyncio.to_thread(released.wait, 30)
        return await load(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gemma, "aload", aload)
        yield released
        released.set()


def test_loading_and_stopping_are_shown(
    chromium: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = endless_replies(monkeypatch)
    with (
        live_server(tiny_model(tmp_path)) as live,
        at_page(chromium, live, "localhost") as first,
        at_page(chromium, live, "localhost") as second,
    ):
        with held_loading() as loaded:
            first.open("small")
            first.say("hello")
            first.page.locator(".stage", has_text="Loading small …").wait_for()
            first.page.locator("#device", has_text="is being loaded").wait_for()
            second.open("small")
            second.open_models()
            second.page.locator("#served", has_text="is being loaded").wait_for()
            second.close()
            loaded.set()
        first.wait_for_text(20)
        assert first.texts(".stage") == [""]
        first.page.locator("#device", has_text="in memory").wait_for()
        second.say("hello")
        second.wait_for_text(20)
        first.button("Stop").click()
        first.page.locator(f"{LAST} .facts", has_text=re.compile("tokens/s · stopped$")).wait_for()
        wait_until(lambda: endless.ended == 1)
        second.page.close()
        wait_until(lambda: endless.ended == 2 and live.registry.requests == 0)


def test_a_reply_waits_for_others(chromium: Any, tmp_path: Path) -> None:
    """The CPU has one slot."""
    released, chat = threading.Event(), Gemma.achat

    async def achat(self: Gemma, *args: Any, **more: Any) -> Any:
        async for piece in chat(self, *args, **more):
            yield piece
            await asyncio.to_thread(released.wait, 30)

    with live_server(tiny_model(tmp_path)) as live, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gemma, "achat", achat)
        with (
            at_page(chromium, live, "localhost") as first,
            at_page(chromium, live, "localhost") as second,
        ):
            for person in (first, second):
                person.open("small")
                person.set(Max_tokens="3")
                person.say("hello")
            second.page.locator(".stage", has_text="Waiting for other replies").wait_for()
            released.set()
            assert first.wait_for_reply()
            assert second.wait_for_reply()


def test_a_server_that_stops_says_so(
    chromium: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless_replies(monkeypatch)
    with ExitStack() as stack:
        server = stack.enter_context(ExitStack())
        live = server.enter_context(live_server(tiny_model(tmp_path)))
        person = stack.enter_context(at_page(chromium, live, "localhost", "net::ERR_"))
        person.open("small")
        person.say("hello")
        person.wait_for_text(20)
        server.close()
        assert person.notice() == "The server is stopping; send the request again later."
        assert person.reply().startswith("word word")
        assert person.button("Continue").is_visible()


def test_a_busy_server_is_tried_again(
    person: ServedPerson, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(registry, "MAX_REQUESTS", 0)
        person.say("a table")
        assert person.notice() == "The server is busy, please try again: its queue is full."
    person.button("Try again").click()
    person.page.locator(f"{LAST} table").wait_for()
    assert person.page.locator("#notice").is_hidden()
    assert person.texts(".user .body") == ["a table"]


# Contents


def test_thoughts_calls_and_markup_are_shown_as_in_the_tab(person: ServedPerson) -> None:
    assert person.ask("a table").startswith("<h3>hello")
    assert person.page.locator(f"{LAST} code").inner_text() == "<img src=x onerror=alert(1)>"
    person.button("New conversation").click()
    person.button("Settings").click()
    person.page.get_by_label("Think before").check()
    person.button("Save").click()
    assert person.ask("think") == "Done."
    assert person.page.locator(f"{LAST} .thoughts").text_content() == "Let me see."
    person.button("New conversation").click()
    person.ask("a tool")
    call = person.page.locator(f"{LAST} .call")
    shown = " ".join(call.locator("summary").inner_text().split())
    assert shown == "time not run by this page"
    assert call.locator("pre").inner_text() == "Bern"


def test_the_page_calls_a_tool_for_a_model_on_the_server(person: ServedPerson) -> None:
    person.page.locator("#tools-button").click()
    assert person.page.locator("#tool-python").is_hidden()  # it runs in tabs of `webgemma web`
    person.page.get_by_label("Calculator", exact=True).check()
    person.page.keyboard.press("Escape")
    assert person.ask("a sum") == "It is 12."
    assert person.page.locator(f"{LAST} .call.done .preview").inner_text() == "15% of 80"


def test_images_and_audio_are_sent_as_the_server_reads_them(
    person: ServedPerson, live: Live
) -> None:
    person.set(Temperature="0", Max_tokens="8")
    person.attach("red.png", "blue.png", "song.wav")
    person.ask("what is it")
    parts = [
        {"type": kind, kind: FILES[name][1]}
        for name in ("red.png", "blue.png", "song.wav")
        for kind in [FILES[name][0].split("/")[0]]
    ]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "what is it"}]}]
    (loaded,) = [each for each in live.registry.loaded() if each.offered.name == "media"]
    with Gemma.load(loaded.offered.found, "cpu") as gemma:
        pieces = list(gemma.chat(messages, temperature=0, max_tokens=8))
    assert person.copied() == "".join(piece.text for piece in pieces)
    assert pieces[-1].usage is not None
    assert person.texts("#tokens")[0].startswith(f"{pieces[-1].usage.prompt + 8} of 1024 ")
    assert person.page.locator("#microphone").is_hidden()  # which only secure pages have


@pytest.mark.parametrize(
    ("format", "sent_as", "size", "expected"),
    [
        ("png", "png", (300, 200), (300, 200)),
        ("ico", "png", (48, 48), (48, 48)),
        ("jpeg", "jpeg", (4500, 3000), (2508, 1672)),
    ],
)
def test_images_are_drawn_anew_if_that_helps(
    person: ServedPerson, format: str, sent_as: str, size: Any, expected: Any
) -> None:
    file = io.BytesIO()
    Image.new("RGB", size, "teal").save(file, format, sizes=[size])
    FILES["picture"] = (f"image/{'x-icon' if format == 'ico' else format}", file.getvalue())
    person.set(Max_tokens="3")
    person.attach("picture")
    with person.page.expect_request("**/v1/chat/completions") as sent:
        person.ask("what is it")
    url = sent.value.post_data_json["messages"][0]["content"][0]["image_url"]["url"]
    head, _, data = url.partition(",")
    assert head == f"data:image/{sent_as};base64"
    assert (b64decode(data) == file.getvalue()) == (format == "png")
    with Image.open(io.BytesIO(b64decode(data))) as image:
        assert image.size == expected


def test_a_model_without_encoders_and_a_long_body_get_a_sentence(person: ServedPerson) -> None:
    person.open_models()
    person.choose("served", "<b>plain")
    person.attach("red.png")
    person.say("what is it")
    assert person.notice().startswith("<b>plain.gguf cannot read images")
    person.button("Dismiss").click()
    limit = {"version": "1", "max_body_nbytes": 500}
    person.page.route("**/api/about", lambda route: route.fulfill(json=limit))
    person.open("<b>plain")
    person.attach("red.png")
    person.say("what is it")
    assert "but the server takes 500 B at a time" in person.notice()


# For everybody


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 320])
def test_the_page_breaks_no_rule_and_fits(
    chromium: Any, live: Live, scheme: str, width: int
) -> None:
    options: Any = {"color_scheme": scheme, "reduced_motion": "reduce"}
    options["viewport"] = {"width": width, "height": 700}
    with at_page(chromium, live, "phone.test", **options) as person:
        page = person.page

        def check(state: str) -> None:
            assert violations(page) == [], state
            assert page.evaluate("document.documentElement.scrollWidth") <= width, state

        page.goto(person.url)
        page.locator("#key-dialog").wait_for()
        check("key")
        person.enter_key(KEY)
        person.wait_for_model("media")
        check("start")
        person.ask("a table")
        check("chat")
        if width < 720:
            person.button("Conversations").click()
            check("drawer")
            page.keyboard.press("Escape")
        for opener in ("Settings", "Model: media"):
            person.button(opener).click()
            check(opener)
            page.keyboard.press("Escape")
