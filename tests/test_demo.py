"""The bundled model: its replies on CPU and GPU, its size, and its card."""

import json
from functools import cache
from pathlib import Path

import pytest

from webgemma import Gemma
from webgemma.gemma.config import Config
from webgemma.gguf.reader import Gguf
from webgemma.models import BUNDLED_PATH

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "tools" / "demo_model"
MAX_NBYTES = 20_000_000
# Greedy replies. GPUs may differ where two tokens are almost equally likely; nowhere here.
REPLIES = {
    "What are you?": (
        "I am a small computer program: the tiny demo model of webgemma. I am not a person."
    ),
    "What is 3 + 4?": "3 plus 4 is 7.",
    "hi!!": "Hi! I am Webgemma, a tiny demo model. What would you like to do?",
    "What sound does a dog make?": 'A dog says "woof".',
    "Tell me something about cats.": (
        "Cats sleep for many hours every day. Cats live in a house with people and eat fish and "
        "meat."
    ),
    "Why is the sky blue?": (
        "Sunlight is made of many colors. The air spreads blue light more than the other colors, "
        "so the sky looks blue."
    ),
}
CONVERSATION = [{"role": "user", "content": "Hi, I'm Anna."}]
CONVERSATION += [{"role": "assistant", "content": "Nice to meet you, Anna!"}]
CONVERSATION += [{"role": "user", "content": "What is my name?"}]


@cache
def gemma(device: str) -> Gemma:
    return Gemma.load(device=device)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("prompt", REPLIES)
def test_greedy_replies(prompt: str, device: str) -> None:
    pieces = list(gemma(device).chat(prompt, temperature=0, max_tokens=60))
    assert "".join(piece.text for piece in pieces) == REPLIES[prompt]
    assert pieces[-1].finish == "stop"


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_name_is_remembered(device: str) -> None:
    pieces = gemma(device).chat(CONVERSATION, temperature=0)
    assert "".join(piece.text for piece in pieces) == "Your name is Anna."


def test_a_story_is_long_and_complete() -> None:
    pieces = list(gemma("cpu").chat("Tell me a story about a small fox.", temperature=0))
    story = "".join(piece.text for piece in pieces)
    assert pieces[-1].finish == "stop"
    assert len(story.split()) >= 100
    assert "fox" in story


def test_the_file_is_small_and_has_every_kind_of_layer() -> None:
    assert BUNDLED_PATH.stat().st_size <= MAX_NBYTES
    with Gguf.open(BUNDLED_PATH) as gguf:
        config = Config.from_gguf(gguf)
        assert gguf.metadata["general.license"] == "apache-2.0"
    assert config.ple
    assert {layer.sliding for layer in config.layers} == {True, False}
    assert {layer.shares_kv for layer in config.layers} == {True, False}
    assert len({layer.head_dim for layer in config.layers}) == 2


@pytest.mark.parametrize(("file", "total"), [("evaluation.json", 60), ("evaluation_2.json", 100)])
def test_the_card_agrees_with_the_evaluations(file: str, total: int) -> None:
    card = (ROOT / "MODEL_CARD.md").read_text()
    measured = json.loads((RECIPE / file).read_text())
    for skill, (right, count) in measured["right"].items():
        assert f"| {skill} | {right} of {count} |" in card
    all_right = sum(right for right, _ in measured["right"].values())
    assert f"| all | {all_right} of {total} |" in card
    assert all_right >= 0.8 * total
    assert f"{measured['perplexity']:.1f}" in card


@pytest.mark.parametrize(("file", "unit"), [("log.jsonl", 1e9), ("log_2.jsonl", 1e6)])
def test_the_card_agrees_with_the_logs(file: str, unit: float) -> None:
    card = (ROOT / "MODEL_CARD.md").read_text()
    curve = [json.loads(line) for line in (RECIPE / file).read_text().splitlines()]
    last = [line for line in curve if "held_out" in line or "held_out_stories" in line][-1]
    assert f"{last['step']:,} steps" in card
    assert f"{last['tokens'] / unit:.2f} {'b' if unit == 1e9 else 'm'}illion tokens" in card
    held_out = last.get("held_out", last.get("held_out_stories"))
    assert f"| {held_out:.2f} |" in card
    assert "<!--" not in card
    assert "@@" not in card
    if "parameters" in curve[0]:
        assert f"| parameters | {curve[0]['parameters']:,} " in card
