"""Reference audio encoder against transformers, against plain loops, and at its limits."""

import math
from dataclasses import replace

import numpy as np
import pytest
from conftest import FIXTURES, SHARED, needs_shared
from helpers.tiny_audio import (
    BOUND,
    RAW_AUDIO,
    TINY_AUDIO,
    as_ollama,
    audio_config,
    audio_gguf,
    audio_weights,
)
from tolerance import (
    AUDIO_TOKENS_OF_TRANSFORMERS,
    LOGITS_OF_TRANSFORMERS,
    MEL_OF_TRANSFORMERS,
)

from webgemma import GgufError
from webgemma.gemma.config import Config
from webgemma.gemma.encoder_config import SEGMENT_SAMPLES, AudioConfig
from webgemma.gguf.reader import Gguf
from webgemma.gguf.writer import NewTensor
from webgemma.reference.audio import AudioEncoder, log_mel, mel_filters, raw_frames
from webgemma.reference.text import Cache, Soft, TextModel
from webgemma.reference.weights import Weights

AUDIO = np.fromfile(FIXTURES / "mm" / "audio-24000.f32", "<f4")
SHARED_AUDIO = (24000, 40123)
AUDIO_TOKEN = 21  # placeholder in the vocabulary of the shared model


def encoder_of(gguf: Gguf) -> AudioEncoder:
    return AudioEncoder(audio_config(gguf), Weights(gguf))


def tiny_encoder(
    audio: AudioConfig = TINY_AUDIO, tensors: list[NewTensor] | None = None
) -> AudioEncoder:
    return encoder_of(audio_gguf(audio, tensors or audio_weights(audio)))


def with_values(name: str, values: np.ndarray) -> list[NewTensor]:
    data = values.astype("<f4").tobytes()
    return [replace(t, data=data) if t.name == name else t for t in audio_weights(TINY_AUDIO)]


def shared_audio(samples: int) -> np.ndarray:
    return np.fromfile(SHARED / "mm" / f"audio-{samples}.f32", "<f4")


def shared_array(samples: int, what: str) -> np.ndarray:
    recorded = np.load(SHARED / "mm" / f"audio{samples}.{what}.npy")
    return recorded.reshape(-1, recorded.shape[-1])


def assert_mel(samples: np.ndarray, recorded: np.ndarray) -> None:
    """Assert that log_mel agrees with transformers, which zeroes the frames of its padding."""
    mel = log_mel(samples)
    np.testing.assert_allclose(mel, recorded[: len(mel)], rtol=0, atol=MEL_OF_TRANSFORMERS)
    assert not recorded[len(mel) :].any()


def test_mel_agrees_with_transformers() -> None:
    assert_mel(AUDIO, np.load(FIXTURES / "mm" / "audio24000.mel.npy").reshape(-1, 128))


@needs_shared
@pytest.mark.parametrize("samples", SHARED_AUDIO)
def test_soft_tokens_agree_with_transformers(samples: int) -> None:
    audio, recorded = shared_audio(samples), shared_array(samples, "embd")
    assert_mel(audio, shared_array(samples, "mel"))
    with Gguf.open(SHARED / "mm" / "mmproj-mm-f16.gguf") as gguf:
        encoder = encoder_of(gguf)
        encoded = encoder.encode(audio)
        np.testing.assert_array_equal(encoded, encoder.encode_features(log_mel(audio)))
    np.testing.assert_allclose(encoded, recorded, rtol=0, atol=AUDIO_TOKENS_OF_TRANSFORMERS)
    assert encoder.audio.soft_tokens(samples) == len(recorded)


@needs_shared
@pytest.mark.parametrize("samples", SHARED_AUDIO)
def test_logits_of_text_with_audio_agree_with_transformers(samples: int) -> None:
    ids, greedy = (
        [int(word) for word in (SHARED / "mm" / f"audio{samples}.{what}.txt").read_text().split()]
        for what in ("ids", "greedy")
    )
    with Gguf.open(SHARED / "mm" / "mmproj-mm-f16.gguf") as gguf:
        soft = Soft(ids.index(AUDIO_TOKEN), encoder_of(gguf).encode(shared_audio(samples)))
    assert ids.count(AUDIO_TOKEN) == len(soft.rows)
    with Gguf.open(SHARED / "mm" / "mm-f16.gguf") as gguf:
        model = TextModel(Config.from_gguf(gguf), Weights(gguf))
        cache = Cache(model.config)
        logits = model.forward(ids, cache, soft=[soft])
        np.testing.assert_allclose(
            logits, shared_array(samples, "logits"), rtol=0, atol=LOGITS_OF_TRANSFORMERS
        )
        answer: list[int] = []
        while len(answer) < len(greedy):
            answer.append(int(logits[-1].argmax()))
            logits = model.forward(answer[-1:], cache)
    assert answer == greedy


@pytest.mark.parametrize("hertz", [300, 1000, 3500, 7000])
def test_a_tone_is_loudest_in_its_filter(hertz: int) -> None:
    tone = 0.5 * np.sin(2 * np.pi * hertz * np.arange(8000) / 16000)
    nearest = mel_filters()[round(hertz * 512 / 16000)].argmax()
    loudest = log_mel(tone.astype(np.float32))[10:-10].argmax(axis=1)
    assert (np.abs(loudest - nearest) <= 1).all()


def test_mel_filters_are_adjacent_triangles() -> None:
    filters = mel_filters()
    assert filters.shape == (257, 128)
    assert filters.min() == 0
    assert filters.max() <= 1
    inner = filters[4:240]  # between the first and the last peak, neighbours share each bin
    np.testing.assert_allclose(inner.sum(axis=1), 1, atol=1e-9)


@pytest.mark.parametrize("samples", [1, 16, 160, 161, 320, 321, 480, 16000])
def test_frames_follow_their_definition(samples: int) -> None:
    """A frame ends before the last sample; there is always at least one."""
    mel = log_mel(AUDIO[:samples])
    assert len(mel) == max(1, (samples + 160 - 321) // 160 + 1)
    first = np.concatenate([np.zeros(160), AUDIO[: min(samples, 160)]])
    window = np.sin(np.pi * np.arange(320) / 320) ** 2
    wave = np.pad(first, (0, 320 - len(first))) * window
    angles = 2 * np.pi * np.outer(np.arange(257), np.arange(320)) / 512
    magnitudes = np.hypot(np.cos(angles) @ wave, np.sin(angles) @ wave)
    np.testing.assert_allclose(mel[0], np.log(magnitudes @ mel_filters() + 0.001), atol=1e-5)


def test_silence_has_the_mel_floor_in_every_bin_and_is_encoded() -> None:
    mel = log_mel(np.zeros(16000, np.float32))
    np.testing.assert_allclose(mel, math.log(0.001), atol=1e-6)
    encoded = tiny_encoder().encode_features(mel)
    assert encoded.shape == (25, TINY_AUDIO.output)
    assert np.isfinite(encoded).all()


@pytest.mark.parametrize("audio", [TINY_AUDIO, RAW_AUDIO], ids=["layers", "raw"])
@pytest.mark.parametrize("samples", [1, 16, 161, 640, 641, 24000])
def test_the_number_of_soft_tokens_is_as_predicted(audio: AudioConfig, samples: int) -> None:
    encoded = tiny_encoder(audio).encode(AUDIO[:samples])
    assert encoded.shape == (audio.soft_tokens(samples), audio.output)


@pytest.mark.parametrize(
    ("samples", "tokens"),
    [
        (SEGMENT_SAMPLES, 750),
        (SEGMENT_SAMPLES + 1, 751),
        (2 * SEGMENT_SAMPLES, 1500),
        (2 * SEGMENT_SAMPLES + 24000, 1538),
    ],
)
def test_long_audio_has_soft_tokens_of_all_segments(samples: int, tokens: int) -> None:
    assert TINY_AUDIO.soft_tokens(samples) == RAW_AUDIO.soft_tokens(samples) == tokens


def test_segments_of_long_audio_are_encoded_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("webgemma.gemma.encoder_config.SEGMENT_SAMPLES", 9600)
    encoder = tiny_encoder()
    alone = [
        encoder.encode_features(log_mel(segment)) for segment in np.split(AUDIO, [9600, 19200])
    ]
    np.testing.assert_array_equal(encoder.encode(AUDIO), np.concatenate(alone))
    assert encoder.audio.soft_tokens(len(AUDIO)) == sum(map(len, alone))


def test_later_frames_do_not_change_earlier_soft_tokens() -> None:
    """The encoder is causal, except that the convolutions of mel frames reach one frame ahead."""
    encoder, mel = tiny_encoder(), log_mel(AUDIO)
    changed = mel.copy()
    changed[80:] += 1
    same = encoder.encode_features(mel) == encoder.encode_features(changed)
    assert same[:19].all()
    assert not same[21:].any(axis=0).all()


def test_attention_equals_its_definition() -> None:
    encoder, name = tiny_encoder(), "a.blk.0."
    heads, size = TINY_AUDIO.heads, TINY_AUDIO.width // TINY_AUDIO.heads
    h = np.random.default_rng(5).standard_normal((30, TINY_AUDIO.width)).astype(np.float32)
    q, k, v = (encoder.linear(h, f"{name}attn_{x}").reshape(30, heads, size) for x in "qkv")
    frequencies = [
        10000 ** (-j / (TINY_AUDIO.width // 2 - 1)) for j in range(TINY_AUDIO.width // 2)
    ]
    out = np.zeros((30, heads, size))
    for p in range(30):
        for head in range(heads):
            scaled = q[p, head] * encoder.weights[name + "per_dim_scale.weight"]
            scaled = scaled / math.sqrt(size) / math.log(2)
            probabilities, values = [], []
            for s in range(max(0, p - 11), p + 1):
                wave = [f((p - s) * x) for f in (math.sin, math.cos) for x in frequencies]
                r = (encoder.weights[name + "attn_k_rel.weight"] @ wave).reshape(heads, size)
                key = k[s, head] * math.log(1 + math.e) / math.log(2) + r[head]
                probabilities.append(math.exp(50 * math.tanh(scaled @ key / 50)))
                values.append(v[s, head])
            out[p, head] = np.array(probabilities) @ np.array(values) / sum(probabilities)
    expected = encoder.linear(out.reshape(30, -1).astype(np.float32), name + "attn_out")
    np.testing.assert_allclose(encoder.attention(name, h), expected, atol=1e-5)


def test_linears_clamp_their_input_and_output() -> None:
    x = 3 * np.random.default_rng(5).standard_normal((4, TINY_AUDIO.width)).astype(np.float32)
    weight = tiny_encoder().weights["a.blk.0.attn_q.weight"]
    expected = np.clip(np.clip(x, -BOUND, BOUND) @ weight.T, -BOUND, BOUND)
    np.testing.assert_allclose(tiny_encoder().linear(x, "a.blk.0.attn_q"), expected, atol=1e-6)
    unclipped = tiny_encoder(TINY_AUDIO, audio_weights(TINY_AUDIO, clamped=False))
    np.testing.assert_allclose(unclipped.linear(x, "a.blk.0.attn_q"), x @ weight.T, atol=1e-5)


def test_ollama_tensor_names_give_the_same_encoder() -> None:
    tensors = audio_weights(TINY_AUDIO)
    ollama = encoder_of(audio_gguf(TINY_AUDIO, as_ollama(tensors), "gemma4"))
    np.testing.assert_array_equal(
        ollama.encode(AUDIO), tiny_encoder(TINY_AUDIO, tensors).encode(AUDIO)
    )


def test_raw_frames_are_normalised_and_projected() -> None:
    encoder = tiny_encoder(RAW_AUDIO)
    frames = np.pad(AUDIO[:1000], (0, 280)).reshape(2, 640)
    normed = frames / np.sqrt((frames**2).mean(axis=1, keepdims=True) + 1e-6)
    expected = normed @ encoder.weights["mm.a.input_projection.weight"].T
    np.testing.assert_allclose(
        encoder.encode_features(raw_frames(AUDIO[:1000])), expected, atol=1e-5
    )
    np.testing.assert_array_equal(encoder.encode(np.zeros(700, np.float32)), np.zeros((2, 24)))


@pytest.mark.parametrize("missing", ["a.conv1d.1.norm.weight", "a.blk.1.attn_k_rel.weight"])
def test_a_missing_tensor_raises_an_error(missing: str) -> None:
    with pytest.raises(GgufError, match=f"{missing} is missing"):
        tiny_encoder(TINY_AUDIO, [t for t in audio_weights(TINY_AUDIO) if t.name != missing])


def test_a_wrong_shape_raises_an_error() -> None:
    wide = NewTensor("a.pre_encode.out.bias", (41,), "F32", bytes(4 * 41))
    tensors = [wide if t.name == wide.name else t for t in audio_weights(TINY_AUDIO)]
    with pytest.raises(GgufError, match=r"a\.pre_encode\.out\.bias is 41; this model needs 40"):
        tiny_encoder(TINY_AUDIO, tensors)


def test_heads_that_do_not_divide_the_width_raise_an_error() -> None:
    with pytest.raises(GgufError, match="width 32 cannot have 3 heads"):
        audio_config(audio_gguf(replace(TINY_AUDIO, heads=3), audio_weights(TINY_AUDIO)))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_damaged_weights_raise_an_error(value: float) -> None:
    damaged = np.full((24, 40), value)
    encoder = tiny_encoder(TINY_AUDIO, with_values("mm.a.input_projection.weight", damaged))
    with pytest.raises(GgufError, match="computes NaN or infinity"):
        encoder.encode(AUDIO)
    encoder = tiny_encoder(TINY_AUDIO, with_values("a.pre_encode.out.bias", damaged[0]))
    with pytest.raises(GgufError, match=r"a\.pre_encode\.out\.bias holds NaN or infinity"):
        encoder.encode(AUDIO)
