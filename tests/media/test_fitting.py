"""Conversations that outgrow the context: which turns are left out, and what the caller is told."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.questions import image
from helpers.tiny import DIFFUSION, SMALL, Tiny, tiny_gguf
from helpers.tiny_vision import SMALL_VISION, vision_gguf

from webgemma import Gemma, InputError, Usage
from webgemma.media.fitting import fit_turns
from webgemma.media.prompt import Turn

CONTEXT = 256
Message = dict[str, object]


def turn(role: str, length: int) -> Turn:
    return Turn(role, [0] * length)


def lengths(turns: list[Turn]) -> list[int]:
    return [len(each.ids) for each in turns]


def test_a_conversation_that_fits_is_whole() -> None:
    turns = [turn("", 1), turn("user", 40), turn("model", 39)]
    assert fit_turns(turns, 100, 20) == turns


def test_the_oldest_exchanges_go_until_half_is_free() -> None:
    turns = [turn("", 1)]
    for length in (10, 11, 12, 13):
        turns += [turn("user", length), turn("model", 10)]
    assert lengths(fit_turns(turns, 100, 20)) == [1, 12, 10, 13, 10]


def test_a_reply_never_stays_without_its_question() -> None:
    turns = [turn("user", 5), turn("model", 90), turn("model", 3), turn("user", 6)]
    assert lengths(fit_turns(turns, 100, 20)) == [6]


def test_system_turns_stay_wherever_they_are() -> None:
    turns = [turn("", 1), turn("system", 7), turn("user", 50), turn("developer", 8)]
    turns += [turn("model", 40), turn("user", 9)]
    assert lengths(fit_turns(turns, 100, 20)) == [1, 7, 8, 9]


def test_the_last_exchange_stays_even_if_it_is_too_long() -> None:
    turns = [turn("user", 5), turn("model", 5), turn("user", 200), turn("model", 30)]
    assert lengths(fit_turns(turns, 100, 20)) == [200, 30]


def test_what_is_left_out_stays_so_for_several_turns() -> None:
    """The prompt begins as the one before did, so that the cache holds most of it."""
    turns, begins = [turn("", 1)], []
    for at in range(200):
        turns += [turn("user", 4), turn("model", 4)]
        begins.append(at + 1 - len(fit_turns(turns, 100, 20)) // 2)
    changes = sum(a != b for a, b in itertools.pairwise(begins))
    assert changes <= 200 * 8 // (100 // 2 - 20)


# With models


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[..., Gemma]]:
    loaded: list[Gemma] = []

    def from_tiny(tiny: Tiny = SMALL, **options: object) -> Gemma:
        path = tmp_path / "tiny.gguf"
        path.write_bytes(tiny_gguf(tiny))
        loaded.append(Gemma.load(path, **({"context": CONTEXT, "device": "cpu"} | options)))
        return loaded[-1]

    yield from_tiny
    for model in loaded:
        model.close()


def answer(model: Gemma, messages: list[Message], **options: object) -> tuple[str, Usage]:
    pieces = list(model.chat(messages, seed=1, **options))
    usage = pieces[-1].usage
    assert usage is not None
    assert usage.reply == len(pieces)
    return "".join(piece.text for piece in pieces), usage


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_thirty_turns_are_all_answered(load: Callable[..., Gemma], device: str) -> None:
    model = load(device=device)
    messages: list[Message] = [{"role": "system", "content": "be brief."}]
    left_out = []
    for number in range(30):
        messages.append({"role": "user", "content": f"the {'in ' * (number % 5)}?"})
        text, usage = answer(model, messages, max_tokens=12)
        assert usage.prompt + usage.reply <= usage.context == CONTEXT
        messages.append({"role": "assistant", "content": text})
        left_out.append(usage.left_out)
    assert left_out == sorted(left_out)
    assert left_out[0] == 0
    assert left_out[-1] > 20
    assert all(count % 2 == 0 for count in left_out)


def test_the_reply_is_that_to_the_rest_of_the_conversation(load: Callable[..., Gemma]) -> None:
    model = load()
    system: Message = {"role": "system", "content": "be brief."}
    said: list[Message] = [
        {"role": role, "content": f"{role[0]} {'the ' * 9}{at}"}
        for at in range(12)
        for role in ("user", "assistant")
    ]
    said.append({"role": "user", "content": "in?"})
    reply, usage = answer(model, [system, *said], max_tokens=12)
    assert usage.left_out > 0
    rest, other = answer(model, [system, *said[usage.left_out :]], max_tokens=12)
    assert (rest, other.prompt, other.left_out) == (reply, usage.prompt, 0)
    with pytest.raises(InputError, match=r"The prompt has \d+ tokens, but the context holds 256"):
        answer(model, [system, *said], overflow="error")


def test_a_last_message_that_is_too_long_is_refused(load: Callable[..., Gemma]) -> None:
    model = load()
    for content in ("a" * CONTEXT, "a" * 1000):
        with pytest.raises(InputError, match="tokens, but the context holds 256 for prompt and"):
            answer(model, [{"role": "user", "content": content}])
    with pytest.raises(InputError, match="overflow is 'cut'; it must be 'drop' or 'error'"):
        answer(model, [{"role": "user", "content": "a"}], overflow="cut")


def test_a_full_reply_can_be_continued(load: Callable[..., Gemma]) -> None:
    model = load()
    messages: list[Message] = [
        {"role": "user", "content": "the " * 20},
        {"role": "assistant", "content": "in " * 20},
        {"role": "user", "content": "the inner"},
    ]
    pieces = list(
        model.chat(messages, seed=1, logit_bias=dict.fromkeys(model.tokenizer.ends, -100))
    )
    usage = pieces[-1].usage
    assert usage is not None
    assert pieces[-1].finish == "length"
    assert usage.prompt + usage.reply == usage.context
    assert usage.left_out == 0
    said = "".join(piece.text for piece in pieces)[:150]
    messages.append({"role": "assistant", "content": said})
    _, usage = answer(model, messages, continue_last=True, max_tokens=5)
    assert usage.left_out == 2


def test_the_opening_of_a_model_is_not_counted(load: Callable[..., Gemma]) -> None:
    model = load()
    model.opening = (
        {"role": "system", "content": "be brief."},
        {"role": "user", "content": "the " * 30},
        {"role": "assistant", "content": "the " * 30},
    )
    said: list[Message] = [
        {"role": "user", "content": "in " * 20},
        {"role": "assistant", "content": "in " * 20},
        {"role": "user", "content": "the inner"},
    ]
    assert answer(model, said[2:], max_tokens=5)[1].left_out == 0
    usage = answer(model, said, max_tokens=5)[1]
    assert usage.left_out == 0
    model.opening += ({"role": "system", "content": "a" * 130},)
    assert answer(model, said, max_tokens=5)[1].left_out == 2


def test_pictures_go_with_their_turn_and_are_not_encoded(
    load: Callable[..., Gemma], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webgemma.media.prompt.BUDGET", 70)
    mmproj = tmp_path / "mmproj.gguf"
    mmproj.write_bytes(vision_gguf(replace(SMALL_VISION, positions=96)))
    model = load(mmproj=mmproj)
    pictures = np.random.default_rng(5).integers(0, 256, (6, 30, 47, 3), np.uint8)
    messages: list[Message] = []
    for picture in pictures:
        messages += [
            {"role": "user", "content": [image(picture), {"type": "text", "text": "the?"}]},
            {"role": "assistant", "content": "in."},
        ]
    messages[-1:] = []
    encoded: list[object] = []
    model.encode_image(pictures[0], budget=140)  # loads the encoder
    encoder = model._engine.encoders._vision.encoder
    encode = encoder.encode

    async def counted(picture: object, *rest: object) -> object:
        encoded.append(picture)
        return await encode(picture, *rest)

    monkeypatch.setattr(encoder, "encode", counted)
    _, usage = answer(model, messages, max_tokens=4)
    kept = (len(messages) - usage.left_out + 1) // 2
    assert 0 < kept < 6
    assert len(encoded) == kept


def test_diffusion_leaves_room_for_a_canvas(load: Callable[..., Gemma]) -> None:
    model = load(replace(DIFFUSION, context=128), context=64)
    messages: list[Message] = []
    for _ in range(8):
        messages.append({"role": "user", "content": "the inner"})
        text, usage = answer(model, messages, max_tokens=4)
        messages.append({"role": "assistant", "content": text})
    assert usage.left_out > 0
