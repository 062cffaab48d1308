"""The public API with a Gemma 3: chats, structured replies, several side by side, refusals."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.tiny import GEMMA3, tiny_gguf

from webgemma import Gemma, InputError
from webgemma.gguf.reader import Gguf
from webgemma.server.ollama_models import capabilities_of

CHATS = [
    "the in",
    [{"role": "system", "content": "be"}, {"role": "user", "content": "in the\n\nin"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "th"},
    ],
    "er er er",
]
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma3") / "tiny.gguf"
    path.write_bytes(tiny_gguf(GEMMA3))
    return path


@pytest.fixture(scope="module", params=["cpu", "gpu"])
def gemma(request: pytest.FixtureRequest, path: Path) -> Iterator[Gemma]:
    with Gemma.load(path, request.param, context=256, kv="f32", precision="exact") as loaded:
        yield loaded


def test_conversations_side_by_side_are_as_they_are_alone(gemma: Gemma) -> None:
    alone = [[piece.token for piece in gemma.chat(chat, **GREEDY)] for chat in CHATS]
    assert len({tuple(tokens) for tokens in alone}) == len(CHATS)
    together = dict(gemma.batch(CHATS, **GREEDY))
    assert [[p.token for p in together[at].pieces] for at in range(len(CHATS))] == alone


def test_a_chat_is_what_its_prompt_continues(gemma: Gemma) -> None:
    prompt = gemma.render(CHATS[1])
    assert (
        prompt
        == "<bos><start_of_turn>user\nbe\n\nin the\n\nin<end_of_turn>\n<start_of_turn>model\n"
    )
    replied = [piece.token for piece in gemma.chat(CHATS[1], **GREEDY)]
    assert [p.token for p in gemma.generate(prompt, special=True, **GREEDY)] == replied
    assert gemma.count_tokens(CHATS[1]) == len(gemma.tokenizer.encode(prompt, special=True))


def test_a_reply_keeps_to_choices_and_to_a_pattern(gemma: Gemma) -> None:
    *_, last = gemma.chat("the", choices=["in the\n\n  in", "er"], temperature=0)
    assert last.value in ("in the\n\n  in", "er")
    *_, last = gemma.chat("the", regex=r"<td>[ab]{3}\n\n\nx", temperature=0)
    assert last.finish == "stop"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"think": True}, "Gemma 3 does not think"),
        ({"tools": [{"name": "f", "parameters": {}}]}, "Gemma 3 calls no tools"),
    ],
    ids=str,
)
def test_what_gemma_3_does_not_have(gemma: Gemma, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        list(gemma.chat("the", **options))  # type: ignore[arg-type]


def test_images_and_audio_are_refused(gemma: Gemma) -> None:
    image = {"type": "image", "image": "missing.png"}
    with pytest.raises(InputError, match="runs only the text model of Gemma 3"):
        list(gemma.chat([{"role": "user", "content": [image]}]))
    with pytest.raises(InputError, match="cannot read audio: webgemma runs only the text model"):
        gemma.encode_audio([0.0] * 1000)


def test_servers_say_what_it_can_do(path: Path) -> None:
    with Gguf.open(path) as gguf:
        assert capabilities_of(gguf) == ["completion"]
