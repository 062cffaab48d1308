"""`webgemma serve`: what it prints, how it ends, and what it refuses in one sentence."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from helpers.command import refused, webgemma
from helpers.live_server import PATIENCE, tiny_model
from helpers.store import add_model
from helpers.tiny import LARGE, SMALL, tiny_gguf
from helpers.tiny_drafter import TinyDrafter, drafter_gguf

from webgemma import Gemma
from webgemma.gguf.ollama import OllamaStore
from webgemma.models import FoundModel, with_draft
from webgemma.server.registry import Registry


def start(*args: object, **env: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "webgemma", "serve", *map(str, args), "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | env,
    )


def ask(url: str, body: Any) -> list[Any]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{url}/api/chat", json.dumps(body).encode(), timeout=PATIENCE) as answer:
        return [json.loads(line) for line in answer]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_told_to_stop(tmp_path: Path, number: int) -> None:
    with start(tiny_model(tmp_path), "--port", 0, "--json") as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        assert said["models"] == ["small"]
        assert said["chat"] == f"{said['url']}/chat/"
        messages = [{"role": "user", "content": "hello"}]
        lines = ask(said["url"], {"model": "small", "messages": messages})
        assert lines[-1]["done"]
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (0, "", "stopped\n")


def test_a_stream_that_has_begun_is_finished(tmp_path: Path) -> None:
    with start(tiny_model(tmp_path), "--port", 0, "--json") as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        body = {"model": "small", "prompt": "hello", "raw": True, "options": {"num_predict": 80}}
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        data = json.dumps(body).encode()
        with opener.open(f"{url}/api/generate", data, timeout=PATIENCE) as answer:
            answer.readline()
            process.send_signal(signal.SIGTERM)
            last = [json.loads(line) for line in answer][-1]
        _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (0, "stopped\n")
    assert last["done"]


def test_it_says_what_to_set_in_clients(tmp_path: Path) -> None:
    """It takes Ollama's port, or the next one that is free."""
    with start(tiny_model(tmp_path), WEBGEMMA_API_KEY="0123456789abcdef") as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(8)]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)
    url = lines[0].split()[-1]
    assert lines[0] == f"webgemma serves small at {url}\n"
    assert lines[1].endswith(f" {url}/chat/\n")
    assert f"OPENAI_BASE_URL={url}/v1 " in lines[2]
    assert f"ANTHROPIC_BASE_URL={url} " in lines[3]
    assert f"OLLAMA_HOST={url}" in lines[4]
    assert lines[5].endswith(f" {url}/status\n")
    assert "small: 0.00111 GB for weights and " in lines[6]
    assert int(url.rpartition(":")[2]) >= 11434
    assert "0123456789abcdef" not in "".join(lines)


def test_the_page_is_at_an_address_that_others_reach_or_nowhere(tmp_path: Path) -> None:
    model, key = tiny_model(tmp_path), {"WEBGEMMA_API_KEY": "0123456789abcdef"}
    for options, address in (
        (("--host", "0.0.0.0"), r"http://[\d.]+:\d+/chat/"),
        (("--no-page",), None),
    ):
        with start(model, "--port", 0, "--json", *options, **key) as process:
            assert process.stdout is not None
            chat = json.loads(process.stdout.readline())["chat"]
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=PATIENCE)
        assert chat is None if address is None else re.fullmatch(address, chat)


def test_what_it_refuses(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    assert "need an API key" in refused("serve", model, "--host", "0.0.0.0")
    assert "There is no file" in refused("serve", tmp_path / "missing.gguf")
    assert "slots is 65; it must be" in refused("serve", model, "--slots", "65")
    for models in ([model], ["-", model]):
        sentence = refused("serve", *models, "--context", 1000)
        assert "small cannot be served: A context of 1000 is not possible" in sentence
    assert "is no origin" in refused("serve", model, "--origin", "*")
    assert "no GPU named 'Voodoo 2'" in refused("serve", model, "--gpu", "Voodoo 2")
    missing = refused("serve", model, "--lora", tmp_path / "missing")
    assert "There is no file" in missing
    assert "No such file" in refused("serve", model, "--api-key-file", tmp_path / "none")
    keys = tmp_path / "keys.txt"
    keys.write_text("\n\n")
    assert "has no API key" in refused("serve", model, "--api-key-file", keys)
    keys.write_text("short\n")
    assert "at least 16" in refused("serve", model, "--api-key-file", keys)
    keys.write_bytes(b"\xff")
    assert "not UTF-8" in refused("serve", model, "--api-key-file", keys)
    keys.write_text("0123456789abcdef\n")
    for wrong in ("0", "-1", "nan"):
        assert "above zero" in refused("serve", model, "--memory-gb", wrong)
    elsewhere = ("--host", "192.0.2.1", "--api-key-file", keys)
    assert "cannot listen" in refused("serve", model, *elsewhere)
    for host in ("no..name", "x" * 300):
        sentence = refused("serve", model, "--host", host, "--api-key-file", keys)
        assert "cannot listen" in sentence


def test_the_drafter_of_the_one_model(tmp_path: Path) -> None:
    """It is counted before the model is loaded, and one that does not fit is refused at once."""
    model, draft = tiny_model(tmp_path), tmp_path / "draft.gguf"
    assert "There is no file" in refused("serve", model, "--draft", draft)
    draft.write_bytes(drafter_gguf(TinyDrafter(LARGE)))
    assert "not the drafter of this model" in refused("serve", model, "--draft", draft)
    draft.write_bytes(drafter_gguf(TinyDrafter(SMALL)))
    assert "choose one" in refused("serve", model, "--draft", draft, "--no-draft")
    assert "belongs to one model" in refused("serve", "--draft", draft)
    assert "belongs to one model" in refused("serve", model, "-", "--draft", draft)
    sentences = [
        Registry([str(model)], draft=given).memory_sentences()["small"] for given in (None, draft)
    ]
    assert sentences[0] != sentences[1]


def test_ollamas_drafter_is_loaded_unless_it_is_declined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [("draft", drafter_gguf(TinyDrafter(SMALL)))]
    add_model(tmp_path, "gemma4:tiny", gguf=tiny_gguf(SMALL), layers=layers)
    loaded: list[bool] = []
    real = Gemma.aload

    async def load(found: FoundModel, **options: Any) -> Gemma:
        loaded.append(with_draft(found, options.pop("draft")).draft() is not None)
        return await real(found, **options)

    async def use(registry: Registry) -> None:
        async with registry.use("gemma4:tiny"):
            pass
        await registry.close()

    monkeypatch.setattr(Gemma, "aload", load)
    for draft in (None, False):
        store = OllamaStore(tmp_path)
        asyncio.run(use(Registry(store=store, device="cpu", draft=draft)))
    assert loaded == [True, False]


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        sentence = refused("serve", tiny_model(tmp_path), "--port", port)
    assert f"port {port}" in sentence
    assert "in use" in sentence


def test_without_its_packages_it_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("webgemma.server.listening", "uvicorn"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert 'pip install "webgemma[server]"' in refused("serve", tiny_model(tmp_path))


def test_help_has_examples() -> None:
    text = webgemma("serve", "--help").stdout
    assert "webgemma serve gemma4:e2b --port 8080" in text
