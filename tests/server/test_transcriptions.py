"""Speech to text with OpenAI's client, against a live server; one model has an audio encoder."""

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
from helpers.live_server import PATIENCE, Live, live_server, tiny_model
from helpers.tiny import SMALL, tiny_metadata, tiny_tensors
from helpers.tiny_audio import TINY_AUDIO, audio_metadata, audio_weights

from webgemma.gguf.writer import gguf_bytes
from webgemma.server.engine import Engine
from webgemma.server.forms import Form
from webgemma.server.openai_transcriptions import parse
from webgemma.server.protocol import Request, RequestError

SECONDS = 0.5
NOISE = (np.random.default_rng(3).random(round(SECONDS * 8000)) - 0.5).astype(np.float32)


def wav(samples: Any = NOISE) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, 8000, format="WAV")
    return file.getvalue()


def hearing_model(folder: Path) -> Path:
    tiny, audio = replace(SMALL, context=256), replace(TINY_AUDIO, output=SMALL.width)
    metadata = tiny_metadata(tiny) | audio_metadata(audio, "gemma4")
    path = folder / "hears.gguf"
    path.write_bytes(gguf_bytes(metadata, [*tiny_tensors(tiny), *audio_weights(audio)]))
    return path


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("models")
    with live_server(hearing_model(folder), tiny_model(folder, "deaf"), max_loaded=2) as server:
        yield server


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[Any]:
    with openai.OpenAI(
        base_url=f"{live.url}/v1", api_key="x", max_retries=0, timeout=PATIENCE
    ) as made:
        yield made.audio.transcriptions


def ask(client: Any, **more: Any) -> Any:
    asked = {"file": ("speech.wav", wav()), "model": "hears", "extra_body": {"max_tokens": 12}}
    return client.create(**asked | more)


def test_speech_becomes_text(client: Any) -> None:
    found = ask(client, include=["logprobs"])
    assert found.text
    assert found.text == found.text.strip()
    assert found.usage.output_tokens == 12
    assert found.usage.input_tokens > 12  # some of them are soft tokens
    assert found.logprobs
    plain = ask(client, response_format="text")
    assert plain == found.text + "\n"
    verbose = ask(client, response_format="verbose_json")
    assert (verbose.text, verbose.duration, verbose.language) == (found.text, SECONDS, "unknown")
    assert ask(client, response_format="verbose_json", language="en").language == "en"
    assert ask(client, file=wav(NOISE[:2000]), temperature=0.0).text != found.text
    assert ask(client, prompt="Anna, Otto").usage.input_tokens > found.usage.input_tokens


def test_a_stream_gives_the_same(client: Any) -> None:
    *deltas, done = ask(client, stream=True, include=["logprobs"])
    whole = ask(client, include=["logprobs"])
    assert done.type == "transcript.text.done"
    assert done.text == whole.text == "".join(event.delta for event in deltas)
    assert done.usage.output_tokens == 12
    assert [token.token for token in done.logprobs] == [token.token for token in whole.logprobs]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            {"model": "deaf"},
            r"^.*deaf.* cannot read audio: there is no audio encoder in its file\.",
        ),
        ({"model": "deaf", "stream": True}, "no audio encoder"),
        ({"response_format": "srt"}, "writes no times"),
        ({"response_format": "vtt"}, "writes no times"),
        ({"response_format": "diarized_json"}, "speakers"),
        ({"response_format": "xml"}, "one of json, text, verbose_json"),
        ({"response_format": "verbose_json", "timestamp_granularities": ["word"]}, "no times"),
        ({"known_speaker_names": ["Anna"]}, "speakers"),
        ({"file": b"no audio at all"}, "cannot be decoded"),
        ({"file": b"no audio", "response_format": "verbose_json"}, "cannot be decoded"),
        ({"file": b""}, "file is missing or empty"),
        ({"temperature": 200}, "temperature"),
        ({"include": ["everything"]}, "include"),
        ({"language": "x" * 61}, "language"),
        ({"prompt": "x" * 4001}, "4001 characters"),
        ({"file": wav(np.tile(NOISE, 30))}, "the context holds 256"),  # nothing is left out
    ],
)
def test_what_is_refused(client: Any, more: Any, sentence: str) -> None:
    with pytest.raises(openai.BadRequestError, match=sentence) as error:
        ask(client, **more)
    assert error.value.body["message"].endswith(".")
    assert "mmproj" not in str(error.value)


def test_other_errors(live: Live, client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="'whisper-1' not found"):
        ask(client, model="whisper-1")
    as_json = live.post("/v1/audio/transcriptions", {"model": "hears"})
    assert as_json.status_code == 400
    assert "multipart/form-data" in as_json.json()["error"]["message"]


def test_a_chat_without_an_encoder_gets_the_same_sentence(live: Live) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    messages = [{"role": "user", "content": [part]}]
    answer = live.post("/v1/chat/completions", {"model": "deaf", "messages": messages})
    assert answer.status_code == 400
    assert "mmproj" not in answer.text


def test_what_the_model_is_asked(monkeypatch: pytest.MonkeyPatch, client: Any) -> None:
    """The language and the text before are in the question; nothing else comes from the form."""
    seen: list[Request] = []
    real = Engine.replies

    def replies(self: Engine, request: Request, *rest: Any) -> Any:
        seen.append(request)
        return real(self, request, *rest)

    monkeypatch.setattr(Engine, "replies", replies)
    ask(client, language="de", prompt="Straße", file=("../../etc/passwd", wav()))
    audio, text = seen[0].messages[0]["content"]
    assert audio == {"type": "audio", "audio": wav()}
    assert "language de" in text["text"]
    assert text["text"].endswith("\nStraße")
    assert "passwd" not in repr(seen[0].own)
    assert seen[0].settings == {"temperature": 0, "max_tokens": 12}
    assert seen[0].overflow == "error"


def test_a_form_without_a_model_uses_the_one_that_is_there() -> None:
    assert parse(Form({"file": [b"x"]})).model == ""
    with pytest.raises(RequestError, match="seed"):
        parse(Form({"file": [b"x"], "seed": [b"1.5"]}))
