"""The page's Python without a browser: the messages it sends for each request."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.pretend_files import PretendFile, PretendFiles
from helpers.sessions import SHORT
from helpers.standin import standin_gguf
from helpers.tiny import EMBEDDING, SMALL, tiny_gguf, tiny_metadata, tiny_tensors
from helpers.tiny_drafter import TinyDrafter, drafter_gguf
from helpers.tiny_vision import (
    SMALL_VISION,
    tiny_image,
    vision_gguf,
    vision_metadata,
    vision_weights,
)

from webgemma import Gemma, InputError
from webgemma.errors import DeviceLostError, MissingPackageError
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import gguf_bytes
from webgemma.lora.adapter import Adapter, new_adapter
from webgemma.lora.gguf_file import gguf_adapter_bytes
from webgemma.models import BUNDLED_PATH
from webgemma.replies import Piece
from webgemma.text.calls import ToolCall
from webgemma.web.tab import BUNDLED_URL, Tab

DATA = standin_gguf()
GREEDY = json.dumps({"temperature": 0, "max_tokens": 5, "seed": None, "think": False})
DIGEST = f"sha256:{hashlib.sha256(DATA).hexdigest()}"
HELLO = json.dumps([{"role": "user", "content": "Hello"}])


SUM = {"type": "object", "properties": {"sum": {"enum": [1, 2]}}}
SUM |= {"required": ["sum"], "additionalProperties": False}
BUNDLED = SimpleNamespace(kind="bundled")


def file_spec(data: bytes, size: int | None = None) -> SimpleNamespace:
    """Return the source of a chosen file, as the worker passes it."""
    file = PretendFile("mine.gguf", data, size)
    return SimpleNamespace(kind="file", file=file, name=file.name, nbytes=file.size, digest=None)


def ollama_spec(files: PretendFiles, data: bytes, digest: str) -> SimpleNamespace:
    """Return the source of a model of Ollama, as the worker passes it."""
    files.servers["/models/x"] = PretendFile("x", data)
    facts = {"name": "gemma:x", "nbytes": len(data), "digest": digest}
    return SimpleNamespace(kind="url", url="/models/x", **facts)


def messages_of(
    act: Callable[[Tab], Coroutine[Any, Any, None]], files: PretendFiles | None = None
) -> list[dict[str, Any]]:
    """Return all messages that a tab sends to the page during `act`."""
    messages: list[dict[str, Any]] = []
    files = files or PretendFiles()
    files.servers[BUNDLED_URL] = PretendFile("demo", DATA)  # the fastest model

    async def run() -> None:
        tab = Tab(lambda text: messages.append(json.loads(text)), files)
        await act(tab)
        await tab.unload()

    asyncio.run(run())
    return messages


def test_a_file_is_loaded_and_replies() -> None:
    async def act(tab: Tab) -> None:
        await tab.load(file_spec(DATA), None, "auto")
        await tab.chat(7, HELLO, GREEDY)

    messages = messages_of(act)
    loaded = next(m for m in messages if m["type"] == "loaded")
    assert loaded["name"] == "mine.gguf"
    assert loaded["nbytes"] > len(DATA)
    text = "".join(m["text"] for m in messages if m["type"] == "piece")
    with Gemma.load(BytesSource(DATA), "cpu") as model:
        pieces = model.chat(json.loads(HELLO), temperature=0, max_tokens=5)
        assert text == "".join(piece.text for piece in pieces)
    done = messages[-1]
    assert (done["type"], done["id"], done["tokens"]) == ("done", 7, 5)


def test_a_reply_carries_its_usage_and_is_continued() -> None:
    asked = json.loads(HELLO)
    with Gemma.load(BytesSource(DATA), "cpu") as model:
        pieces = list(model.chat(asked, temperature=0, max_tokens=5))
        reply = {"role": "assistant", "content": "".join(piece.text for piece in pieces)}
        rest = list(model.chat([*asked, reply], continue_last=True, temperature=0, max_tokens=5))

    async def act(tab: Tab) -> None:
        await tab.load(BUNDLED, None, "auto")
        await tab.chat(1, HELLO, GREEDY)
        await tab.chat(2, json.dumps([*asked, reply]), GREEDY, (), True)

    messages = messages_of(act)
    first, second = (m for m in messages if m["type"] == "done")
    assert pieces[-1].usage
    assert rest[-1].usage
    for done in (first, second):
        done["usage"]["cached"] = 0  # as on the CPU, which computes the expected ones
    assert first["usage"] == asdict(pieces[-1].usage)
    assert first["finish"] == "length"
    assert first["usage"]["reply"] == 5
    assert second["usage"] == asdict(rest[-1].usage)
    text = "".join(m["text"] for m in messages if m["type"] == "piece" and m["id"] == 2)
    assert text == "".join(piece.text for piece in rest)
    shown = [m["usage"] for m in messages if m["type"] == "piece" and m["id"] == 1]
    assert all(usage["prompt"] == first["usage"]["prompt"] for usage in shown)


def test_turns_that_do_not_fit_are_left_out() -> None:
    turn = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    conversation = json.dumps([*turn * 20, turn[0]])

    async def act(tab: Tab) -> None:
        await tab.load(BUNDLED, 256, "auto")
        await tab.chat(1, conversation, GREEDY)

    usage = messages_of(act)[-1]["usage"]
    assert usage["context"] == 256
    assert 0 < usage["left_out"] < 40
    assert usage["left_out"] % 2 == 0


def test_a_tool_call_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    call = ToolCall("get_weather", {"city": "Bern"})

    async def achat(*_: Any, **__: Any) -> AsyncIterator[Piece]:
        yield Piece(1, "I look", 0.0)
        yield Piece(2, " it up.", 0.0, tool_calls=(call,), finish="stop")

    async def act(tab: Tab) -> None:
        await tab.load(BUNDLED, None, "auto")
        monkeypatch.setattr(Gemma, "achat", achat)
        await tab.chat(3, HELLO, GREEDY)

    *_, before, sent, done = messages_of(act)
    assert before["text"].endswith(" it up.")
    arguments = {"city": "Bern"}
    assert sent == {"type": "tool_call", "id": 3, "name": "get_weather", "arguments": arguments}
    assert (done["type"], done["tokens"], done["usage"]) == ("done", 2, None)


def test_images_are_passed_beside_the_messages() -> None:
    tiny, vision = replace(SMALL, context=512), replace(SMALL_VISION, positions=96)
    metadata = tiny_metadata(tiny) | vision_metadata(vision, "gemma4.")
    data = gguf_bytes(metadata, [*tiny_tensors(tiny), *vision_weights(vision)])
    rgb = tiny_image(vision, 3, 2)
    settings = {"temperature": 0, "max_tokens": 6}

    def conversation(image: Any) -> list[dict[str, Any]]:
        parts = [{"type": "image", "image": image}, {"type": "text", "text": "this?"}]
        return [{"role": "user", "content": parts}]

    async def act(tab: Tab) -> None:
        await tab.load(file_spec(data), None, "auto")
        await tab.chat(1, json.dumps(conversation(0)), json.dumps(settings), [rgb])
        await tab.chat(2, HELLO, json.dumps(settings))

    messages = [m for m in messages_of(act) if m.get("id") == 1]
    encoding = [m for m in messages if m["type"] == "encoding"]
    assert encoding[0] == {"type": "encoding", "id": 1, "media": ["image"], "done": 0, "total": 1}
    assert encoding[-1]["done"] == encoding[-1]["total"] == 100
    text = "".join(m["text"] for m in messages if m["type"] == "piece")
    with Gemma.load(BytesSource(data), "gpu") as model:
        assert text == "".join(p.text for p in model.chat(conversation(rgb), **settings))
    assert messages[-1]["tokens"] == 6


def test_a_missing_encoder_is_reported() -> None:
    async def act(tab: Tab) -> None:
        await tab.load(BUNDLED, None, "auto")
        parts = [{"type": "image", "image": 0}]
        conversation = json.dumps([{"role": "user", "content": parts}])
        await tab.chat(1, conversation, GREEDY, [tiny_image(SMALL_VISION, 3, 2)])

    error = messages_of(act)[-1]
    assert (error["type"], error["id"], error["kind"]) == ("error", 1, "no-encoder")
    # Without "load it with mmproj, the path of …", which is for Python.
    assert error["message"] == (
        "the bundled model cannot read images: there is no vision encoder in its file."
    )


def test_a_reply_is_stopped() -> None:
    async def act(tab: Tab) -> None:
        await tab.load(BUNDLED, None, "auto")
        reply = asyncio.ensure_future(tab.chat(1, HELLO, GREEDY))
        await asyncio.sleep(0)
        tab.stop(1)
        await reply
        tab.stop(1)  # it has ended: nothing happens

    assert messages_of(act)[-1]["finish"] == "stopped"


def test_a_reply_is_stopped_that_waits_for_another_request() -> None:
    """The worker stops at once, but replies after what it was asked before, as to examine data."""

    async def act(tab: Tab) -> None:
        await tab.load(BUNDLED, None, "auto")
        tab.stop(1)
        await tab.chat(1, HELLO, GREEDY)
        await tab.chat(2, HELLO, GREEDY)

    messages = messages_of(act)
    assert [m["finish"] for m in messages if m["type"] == "done"] == ["stopped", "length"]
    assert {m["id"] for m in messages if m["type"] == "piece"} == {2}


@pytest.mark.parametrize(
    ("data", "nbytes", "expected"),
    [
        (b"GIF89a" * 9, 54, "is not a GGUF file"),
        (DATA[:5000], len(DATA), "became shorter while it was read"),
    ],
)
def test_files_that_are_not_models_are_reported(data: bytes, nbytes: int, expected: str) -> None:
    message = messages_of(lambda tab: tab.load(file_spec(data, nbytes), None, "auto"))[-1]
    assert (message["type"], message["kind"]) == ("error", "file")
    assert expected in message["message"]


def test_a_bad_file_leaves_the_loaded_model() -> None:
    tiny = replace(SMALL, context=512)
    missing = tiny_metadata(tiny) | {"gemma4.block_count": 0}
    bad = {
        "junk": b"GIF89a" * 9,
        "cut short": DATA[:5000],
        "another architecture": gguf_bytes({"general.architecture": "llama"}, []),
        "no layers": gguf_bytes(missing, tiny_tensors(tiny)),
    }

    async def act(tab: Tab) -> None:
        await tab.load(BUNDLED, None, "auto")
        for id, data in bad.items():
            await tab.inspect(id, file_spec(data))
        spec = file_spec(DATA)
        spec.mmproj = file_spec(DATA)
        await tab.inspect("mmproj", spec)
        await tab.chat(1, HELLO, GREEDY)

    messages = messages_of(act)
    errors = [m for m in messages if m["type"] == "error"]
    assert [m["inspect"] for m in errors] == [*bad, "mmproj"]
    assert {m["kind"] for m in errors} == {"file"}
    assert errors[-1]["message"] == "mine.gguf holds neither a vision nor an audio encoder."
    assert messages[-1]["type"] == "done"


def test_a_header_is_read_once() -> None:
    spec = file_spec(DATA)

    async def act(tab: Tab) -> None:
        await tab.inspect("one", file_spec(DATA))
        await tab.inspect("two", spec)
        await tab.load(spec, None, "auto", "two")
        await tab.load(file_spec(DATA), None, "auto", "one")  # another was inspected after it

    messages = messages_of(act)
    kinds = [(m["id"], m["kind"]) for m in messages if m["type"] == "inspected"]
    assert kinds == [("one", "model"), ("two", "model")]
    assert [m["name"] for m in messages if m["type"] == "loaded"] == ["mine.gguf"] * 2
    assert [first for first, _ in spec.file.reads].count(0) == 1


def test_a_context_is_at_most_the_models() -> None:
    with Gemma.load(BytesSource(DATA), "cpu") as model:
        longest = model.config.context

    async def act(tab: Tab) -> None:
        for context in (longest + 1, longest - 1, None):
            await tab.load(BUNDLED, context, "auto")

    contexts = [m["context"] for m in messages_of(act) if m["type"] == "loaded"]
    assert contexts == [longest, longest - 1, min(longest, 32768)]


def test_a_context_that_is_no_number_is_refused() -> None:
    (error,) = messages_of(lambda tab: tab.load(BUNDLED, "many", "auto"))  # type: ignore[arg-type]
    assert error["message"].startswith("A context of 'many' is not possible")


def test_a_chosen_adapter_is_stored_and_applied() -> None:
    data = gguf_adapter_bytes(tiny_adapter_for(DATA))
    files = PretendFiles()

    async def act(tab: Tab) -> None:
        await tab.load(BUNDLED, None, "auto")
        await tab.inspect("adapter", file_spec(data))
        await tab.add_adapter(file_spec(data))
        await tab.add_adapter(file_spec(data))  # again: it stays one
        await tab.tuning.apply_adapter(hashlib.sha256(data).hexdigest())
        await tab.add_adapter(file_spec(DATA))

    messages = messages_of(act, files)
    (inspected,) = [m for m in messages if m["type"] == "inspected"]
    assert inspected["kind"] == "adapter"
    listed = [m["adapters"] for m in messages if m["type"] == "adapters"][-1]
    facts = [(adapter["name"], adapter["nbytes"], adapter["stored"]) for adapter in listed]
    assert facts == [("mine", len(data), True)]
    assert [m["name"] for m in messages if m["type"] == "adapter_added"] == ["mine"] * 2
    assert len([m for m in messages if m["type"] == "adapter_applied"]) == 1
    assert messages[-1]["tune"] == "add_adapter"
    assert messages[-1]["message"] == "mine.gguf is a model, not an adapter."


def tiny_adapter_for(data: bytes) -> Adapter:
    """Return an adapter for a model."""
    with Gemma.load(BytesSource(data), "cpu") as model:
        return new_adapter(model.config, ("attn_q",), rank=2, name="mine")


class LostDevice:
    """A device whose loss is reported when `happened` is set."""

    def __init__(self) -> None:
        self.happened = asyncio.Event()

    async def lost(self) -> DeviceLostError:
        await self.happened.wait()
        return DeviceLostError("The GPU was lost.")


def test_a_lost_gpu_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[LostDevice] = []

    async def act(tab: Tab) -> None:
        def engine(_: Gemma, __: str) -> SimpleNamespace:
            devices.append(LostDevice())
            return SimpleNamespace(model=SimpleNamespace(device=devices[-1]))

        with monkeypatch.context() as patch:
            patch.setattr(Gemma, "gpu_engine", engine)
            for _ in range(2):
                await tab.load(BUNDLED, None, "auto")
                await asyncio.sleep(0)
            for device in devices:  # the first belongs to a model that was closed
                device.happened.set()
                await asyncio.sleep(0.01)

    messages = messages_of(act)
    assert len(devices) == 2
    assert [m["type"] for m in messages if m["type"] != "progress"] == ["loaded", "loaded", "error"]
    assert messages[-1]["kind"] == "device-lost"
    assert "id" not in messages[-1]


def test_an_invalid_setting_fails_the_reply_only() -> None:
    async def act(tab: Tab) -> None:
        await tab.load(BUNDLED, None, "auto")
        await tab.chat(1, HELLO, json.dumps({"temperature": -1}))
        await tab.chat(2, HELLO, GREEDY)

    messages = messages_of(act)
    errors = [m for m in messages if m["type"] == "error"]
    assert [m["id"] for m in errors] == [1]
    assert "temperature" in errors[0]["message"]
    assert messages[-1]["type"] == "done"


def test_a_setting_that_is_none_is_named() -> None:
    async def act(tab: Tab) -> None:
        await tab.load(BUNDLED, None, "auto")
        await tab.chat(1, HELLO, json.dumps({"temprature": 1}))
        await tab.chat(2, HELLO, json.dumps({"choices": ["yes"], "regex": "no"}))

    unknown, several = [m for m in messages_of(act) if m["type"] == "error"]
    assert unknown["message"].startswith("There is no setting 'temprature'")
    assert "choices" in several["message"]


def test_texts_are_embedded_or_the_error_is_reported() -> None:
    texts, embedded = ["the inner", "there"], []
    spec = file_spec(tiny_gguf(EMBEDDING))

    async def act(tab: Tab) -> None:
        await tab.load(spec, None, "exact")
        embedded.append(await tab.embed(1, json.dumps(texts), "query", 16))
        assert await tab.embed(2, json.dumps([5])) is None
        tab.stop(3)
        assert await tab.embed(3, json.dumps(texts)) is None
        await tab.chat(4, HELLO, GREEDY)
        await tab.load(BUNDLED, None, "auto")
        assert await tab.embed(5, json.dumps(texts)) is None

    errors = {m["id"]: m["message"] for m in messages_of(act) if m["type"] == "error"}
    with Gemma.load(BytesSource(tiny_gguf(EMBEDDING), "e"), "gpu", precision="exact") as model:
        expected = model.embed(texts, "query", 16)
    assert (np.frombuffer(embedded[0], np.float32).reshape(2, 16) == expected).all()
    assert {*errors} == {2, 4, 5}
    assert "embedding model" in errors[4]


def test_a_reply_requires_a_model() -> None:
    error = messages_of(lambda tab: tab.chat(1, HELLO, GREEDY))[-1]
    assert error["message"] == "No model is loaded: choose one."


def test_a_model_is_stored_then_loaded_from_storage() -> None:
    files = PretendFiles()

    async def act(tab: Tab) -> None:
        await tab.stored.store(ollama_spec(files, DATA, DIGEST))
        id = DIGEST.removeprefix("sha256:")
        await tab.load(SimpleNamespace(kind="stored", id=id, name="gemma:x"), None, "auto")
        await tab.unload()
        await tab.delete(id)

    messages = messages_of(act, files)
    stored, deleted = [m for m in messages if m["type"] == "stored_models"]
    (model,) = stored["models"]
    facts = (model["name"], model["stored_nbytes"], model["complete"])
    assert facts == ("gemma:x", len(DATA), True)
    assert 0 < model["gpu_min_nbytes"] <= model["gpu_nbytes"]
    assert [m["name"] for m in messages if m["type"] in ("stored", "loaded")] == ["gemma:x"] * 2
    stages = {m["stage"] for m in messages if m["type"] == "storing" and m["done"] == m["total"]}
    assert stages == {"copying", "checking"}
    assert deleted["models"] == []


def test_a_drafter_is_loaded_with_its_model_stored_and_deleted() -> None:
    data, drafter = tiny_gguf(SHORT), drafter_gguf(TinyDrafter(SHORT))
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    files = PretendFiles()
    spec = ollama_spec(files, data, digest)
    files.servers["/models/draft"] = PretendFile("draft", drafter)
    facts = {"name": "draft", "nbytes": len(drafter), "digest": None}
    spec.draft = SimpleNamespace(kind="url", url="/models/draft", **facts)
    id = digest.removeprefix("sha256:")
    stored_spec = SimpleNamespace(kind="stored", id=id, name="gemma:x")

    async def act(tab: Tab) -> None:
        await tab.stored.store(spec)
        for each in (spec, stored_spec):
            await tab.inspect("one", each)
            await tab.load(each, None, "auto", "one")
            assert tab._model is not None
            assert tab._model.gpu_engine("The test").model.drafter is not None
        of_another = ollama_spec(files, DATA, DIGEST)
        of_another.draft = spec.draft
        await tab.inspect("two", of_another)
        await tab.unload()
        await tab.delete(id)

    messages = messages_of(act, files)
    stored, deleted = [m["models"] for m in messages if m["type"] == "stored_models"]
    names = {model["id"]: model["name"] for model in stored}
    (model,) = [model for model in stored if model["name"] == "gemma:x"]
    assert (names[model["draft"]], model["mmproj"]) == ("draft", None)
    (error,) = [m for m in messages if m["type"] == "error"]
    assert error["inspect"] == "two"
    assert error["kind"] == "file"
    assert deleted == []


def test_a_reply_keeps_to_a_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    def settings(schema: Any) -> str:
        return json.dumps({"schema": schema, "think": False, "temperature": 1.5, "seed": 3})

    async def act(tab: Tab) -> None:
        await tab.load(file_spec(BUNDLED_PATH.read_bytes()), None, "auto")
        await tab.chat(1, HELLO, settings({"enum": ["*one*", 2]}))
        await tab.chat(2, HELLO, settings({"type": "circle"}))
        monkeypatch.setattr("webgemma.structured.open_compiler", missing)
        tab._model._structures._compiler = None  # type: ignore[union-attr]
        await tab.chat(3, HELLO, settings({"enum": [1]}))

    def missing(*_: Any) -> Any:
        raise MissingPackageError("install it") from ValueError("it is not here")

    messages = messages_of(act)
    text = "".join(m["text"] for m in messages if m["type"] == "piece" and m["id"] == 1)
    assert json.loads(text) in ("*one*", 2)
    unsupported, gone = (m for m in messages if m["type"] == "error")
    assert "circle" in unsupported["message"]
    assert gone["kind"] == "no-schemas"


def test_a_reply_may_call_the_tools_of_the_page() -> None:
    calculator = {"name": "calculator", "description": "Computes", "parameters": SUM}
    settings = {"temperature": 0, "max_tokens": 40, "seed": 1, "tools": [calculator]}
    asked = {"role": "user", "content": "One and one?"}
    function = {"name": "calculator", "arguments": {"sum": 1}}
    call = {"id": "call_0_0", "type": "function", "function": function}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_0_0", "name": "calculator", "content": "2"}

    async def act(tab: Tab) -> None:
        await tab.load(file_spec(BUNDLED_PATH.read_bytes()), None, "auto")
        await tab.chat(1, HELLO, json.dumps(settings | {"tool_choice": "required"}))
        said_so_far = json.dumps([asked, said, result])
        await tab.chat(2, said_so_far, json.dumps(settings | {"tool_choice": "none"}))

    messages = messages_of(act)
    assert not [m for m in messages if m["type"] == "error"]
    (called,) = [m for m in messages if m["type"] == "tool_call"]
    assert called["id"] == 1
    assert called["name"] == "calculator"
    assert called["arguments"]["sum"] in (1, 2)
    last = messages[-1]
    assert (last["type"], last["id"]) == ("done", 2)
    assert last["tokens"] > 0


def test_an_mmproj_is_stored_and_deleted_with_its_model() -> None:
    files = PretendFiles()
    mmproj = vision_gguf(SMALL_VISION)
    spec = ollama_spec(files, DATA, DIGEST)
    files.servers["/models/mmproj"] = PretendFile("mmproj", mmproj)
    facts = {"name": "mmproj", "nbytes": len(mmproj), "digest": None}
    spec.mmproj = SimpleNamespace(kind="url", url="/models/mmproj", **facts)
    id = DIGEST.removeprefix("sha256:")
    opened = []

    async def act(tab: Tab) -> None:
        await tab.stored.store(spec)
        stored = SimpleNamespace(kind="stored", id=id, name="gemma:x")
        source = await tab._open_part(stored, "mmproj")
        assert source is not None
        opened.append(await source.read(0, source.nbytes))
        source.close()
        await tab.delete(id)

    messages = messages_of(act, files)
    stored, deleted = [m["models"] for m in messages if m["type"] == "stored_models"]
    names = {model["id"]: model["name"] for model in stored}
    assert sorted(names.values()) == ["gemma:x", "mmproj"]
    (model,) = [model for model in stored if model["name"] == "gemma:x"]
    assert names[model["mmproj"]] == "mmproj"
    assert opened == [mmproj]
    assert deleted == []


def test_a_stored_model_that_was_inspected_and_not_loaded_can_be_deleted() -> None:
    """As when loading it was cancelled; the browser removes no file that is open."""
    files = PretendFiles()
    id = DIGEST.removeprefix("sha256:")

    async def act(tab: Tab) -> None:
        await tab.stored.store(ollama_spec(files, DATA, DIGEST))
        await tab.inspect("one", SimpleNamespace(kind="stored", id=id, name="gemma:x"))
        await tab.delete(id)

    messages = messages_of(act, files)
    assert [m["message"] for m in messages if m["type"] == "error"] == []
    assert messages[-1]["models"] == []


def test_notes_of_stored_models_keep_their_keys() -> None:
    files = PretendFiles()
    spec = ollama_spec(files, DATA, DIGEST)
    spec.mmproj = SimpleNamespace(kind="url", url="/models/x", name="m", nbytes=1, digest=None)
    spec.draft = spec.mmproj
    messages_of(lambda tab: tab.stored.store(spec), files)
    notes = json.loads(files.disk[f"webgemma/models/{DIGEST.removeprefix('sha256:')}.json"])[
        "notes"
    ]
    assert set(notes) == {"eyes", "draft", "gpu_nbytes", "gpu_least_nbytes"}


def test_a_damaged_download_is_reported_and_the_model_stays() -> None:
    files = PretendFiles()

    async def act(tab: Tab) -> None:
        await tab.load(BUNDLED, None, "auto")
        await tab.stored.store(ollama_spec(files, DATA[:-1] + b"!", DIGEST))
        await tab.chat(1, HELLO, GREEDY)

    messages = messages_of(act, files)
    (error,) = [m for m in messages if m["type"] == "error"]
    assert (error["kind"], error["store"]) == ("file", DIGEST.removeprefix("sha256:"))
    assert "is damaged" in error["message"]
    assert messages[-1]["type"] == "done"


def test_a_copy_is_cancelled_and_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("webgemma.gguf.opfs.CHUNK_NBYTES", 1 << 12)
    files = PretendFiles()
    spec = ollama_spec(files, DATA, DIGEST)

    async def act(tab: Tab) -> None:
        copy = asyncio.ensure_future(tab.stored.store(spec))
        while not sum(map(len, files.disk.values())) > 1 << 13:
            await asyncio.sleep(0)
        tab.stored.cancel(DIGEST.removeprefix("sha256:"))
        await copy
        await tab.stored.store(spec)

    messages = messages_of(act, files)
    partial, complete = [m["models"][0] for m in messages if m["type"] == "stored_models"]
    assert 0 < partial["stored_nbytes"] < partial["nbytes"]
    assert complete["complete"]
    kinds = ("stored_models", "store_cancelled", "stored")
    ends = [m["type"] for m in messages if m["type"] in kinds]
    assert ends == ["stored_models", "store_cancelled", "stored_models", "stored"]


@pytest.mark.parametrize(("free", "kind"), [(1, "storage"), (None, "file")])
def test_a_failed_copy_is_reported(free: int | None, kind: str) -> None:
    files = PretendFiles()
    files.free = free
    digest = DIGEST if free else "sha256:nonsense"
    messages = messages_of(lambda tab: tab.stored.store(ollama_spec(files, DATA, digest)), files)
    error = next(m for m in messages if m["type"] == "error")
    assert error["kind"] == kind
    assert "store" in error


def test_the_gpu_memory_is_measured() -> None:
    async def act(tab: Tab) -> None:
        await tab.probe_gpu_memory(1 << 20)
        await tab.load(BUNDLED, None, "auto")
        await tab.probe_gpu_memory(1 << 30)

    first, second = [m["nbytes"] for m in messages_of(act) if m["type"] == "gpu_memory"]
    assert (first, second) == (1 << 20, 1 << 30)


def test_a_model_that_does_not_fit_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("webgemma.engine.gpu.free_host_nbytes", lambda: 1000)
    message = messages_of(lambda tab: tab.load(BUNDLED, None, "auto"))[-1]
    assert (message["type"], message["kind"]) == ("error", "memory")


def test_a_source_can_be_loaded_natively() -> None:
    with Gemma.load(BytesSource(DATA, "bytes.gguf"), "cpu") as model:
        assert model.name == "bytes.gguf"
    for wrong in (5, [1], b"GGUF"):
        with pytest.raises(InputError, match="is not a model: give an Ollama name"):
            Gemma.load(wrong)  # type: ignore[arg-type]
