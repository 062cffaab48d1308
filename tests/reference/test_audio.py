"""The reference's hearing: against transformers, against plain loops, and at the edges."""

import math
from dataclasses import replace

import numpy as np
import pytest
from conftest import FIXTURES, SHARED, needs_shared
from helpers.tiny_ears import BOUND, EARS, RAW_EARS, as_ollama, audio_of, ears_gguf, ears_tensors
from tolerance import (
    HEARD_OF_TRANSFORMERS,
    LOGITS_OF_TRANSFORMERS,
    MEL_OF_TRANSFORMERS,
)

from webgemma import GgufError
from webgemma.gemma.config import Config
from webgemma.gemma.encoder_config import PART_SAMPLES, AudioConfig
from webgemma.gguf.reader import Gguf
from webgemma.gguf.writer import NewTensor
from webgemma.reference.audio import AudioModel, log_mel, mel_filters, raw_frames
from webgemma.reference.text import Cache, Soft, TextModel
from webgemma.reference.weights import Weights

SOUND = np.fromfile(FIXTURES / "mm" / "audio-24000.f32", "<f4")
SHARED_SOUNDS = (24000, 40123)
AUDIO_TOKEN = 21  # the placeholder in the vocabulary of the shared model


def tower_of(gguf: Gguf) -> AudioModel:
    return AudioModel(audio_of(gguf), Weights(gguf))


def ears(audio: AudioConfig = EARS, tensors: list[NewTensor] | None = None) -> AudioModel:
    return tower_of(ears_gguf(audio, tensors or ears_tensors(audio)))


def with_values(name: str, values: np.ndarray) -> list[NewTensor]:
    data = values.astype("<f4").tobytes()
    return [replace(t, data=data) if t.name == name else t for t in ears_tensors(EARS)]


def shared_sound(samples: int) -> np.ndarray:
    return np.fromfile(SHARED / "mm" / f"audio-{samples}.f32", "<f4")


def shared_truth(samples: int, what: str) -> np.ndarray:
    truth = np.load(SHARED / "mm" / f"audio{samples}.{what}.npy")
    return truth.reshape(-1, truth.shape[-1])


def same_mel(samples: np.ndarray, truth: np.ndarray) -> None:
    """Transformers fills a sound up with silence, and sets the frames that touch it to zero."""
    mel = log_mel(samples)
    np.testing.assert_allclose(mel, truth[: len(mel)], rtol=0, atol=MEL_OF_TRANSFORMERS)
    assert not truth[len(mel) :].any()


def test_mel_agrees_with_transformers() -> None:
    same_mel(SOUND, np.load(FIXTURES / "mm" / "audio24000.mel.npy").reshape(-1, 128))


@needs_shared
@pytest.mark.parametrize("samples", SHARED_SOUNDS)
def test_soft_tokens_agree_with_transformers(samples: int) -> None:
    sound, truth = shared_sound(samples), shared_truth(samples, "embd")
    same_mel(sound, shared_truth(samples, "mel"))
    with Gguf.open(SHARED / "mm" / "mmproj-mm-f16.gguf") as gguf:
        tower = tower_of(gguf)
        heard = tower.hear(sound)
        np.testing.assert_array_equal(heard, tower.encode(log_mel(sound)))
    np.testing.assert_allclose(heard, truth, rtol=0, atol=HEARD_OF_TRANSFORMERS)
    assert tower.audio.soft_tokens(samples) == len(truth)


@needs_shared
@pytest.mark.parametrize("samples", SHARED_SOUNDS)
def test_text_with_sound_agrees_with_transformers(samples: int) -> None:
    ids, greedy = (
        [int(word) for word in (SHARED / "mm" / f"audio{samples}.{what}.txt").read_text().split()]
        for what in ("ids", "greedy")
    )
    with Gguf.open(SHARED / "mm" / "mmproj-mm-f16.gguf") as gguf:
        soft = Soft(ids.index(AUDIO_TOKEN), tower_of(gguf).hear(shared_sound(samples)))
    assert ids.count(AUDIO_TOKEN) == len(soft.rows)
    with Gguf.open(SHARED / "mm" / "mm-f16.gguf") as gguf:
        model = TextModel(Config.from_gguf(gguf), Weights(gguf))
        cache = Cache(model.config)
        logits = model.forward(ids, cache, soft=[soft])
        np.testing.assert_allclose(
            logits, shared_truth(samples, "logits"), rtol=0, atol=LOGITS_OF_TRANSFORMERS
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


def test_filters_are_triangles_side_by_side() -> None:
    filters = mel_filters()
    assert filters.shape == (257, 128)
    assert filters.min() == 0
    assert filters.max() <= 1
    inner = filters[4:240]  # between the first and the last peak, neighbours share each bin
    np.testing.assert_allclose(inner.sum(axis=1), 1, atol=1e-9)


@pytest.mark.parametrize("samples", [1, 16, 160, 161, 320, 321, 480, 16000])
def test_frames_by_their_definition(samples: int) -> None:
    """A frame ends before the sound's last sample; there is always one."""
    mel = log_mel(SOUND[:samples])
    assert len(mel) == max(1, (samples + 160 - 321) // 160 + 1)
    first = np.concatenate([np.zeros(160), SOUND[: min(samples, 160)]])
    window = np.sin(np.pi * np.arange(320) / 320) ** 2
    wave = np.pad(first, (0, 320 - len(first))) * window
    angles = 2 * np.pi * np.outer(np.arange(257), np.arange(320)) / 512
    magnitudes = np.hypot(np.cos(angles) @ wave, np.sin(angles) @ wave)
    np.testing.assert_allclose(mel[0], np.log(magnitudes @ mel_filters() + 0.001), atol=1e-5)


def test_silence_is_the_floor_everywhere_and_can_be_heard() -> None:
    mel = log_mel(np.zeros(16000, np.float32))
    np.testing.assert_allclose(mel, math.log(0.001), atol=1e-6)
    heard = ears().encode(mel)
    assert heard.shape == (25, EARS.output)
    assert np.isfinite(heard).all()


@pytest.mark.parametrize("audio", [EARS, RAW_EARS], ids=["layers", "raw"])
@pytest.mark.parametrize("samples", [1, 16, 161, 640, 641, 24000])
def test_as_many_soft_tokens_as_were_promised(audio: AudioConfig, samples: int) -> None:
    heard = ears(audio).hear(SOUND[:samples])
    assert heard.shape == (audio.soft_tokens(samples), audio.output)


@pytest.mark.parametrize(
    ("samples", "tokens"),
    [
        (PART_SAMPLES, 750),
        (PART_SAMPLES + 1, 751),
        (2 * PART_SAMPLES, 1500),
        (2 * PART_SAMPLES + 24000, 1538),
    ],
)
def test_soft_tokens_of_long_sounds(samples: int, tokens: int) -> None:
    assert EARS.soft_tokens(samples) == RAW_EARS.soft_tokens(samples) == tokens


def test_each_part_of_a_long_sound_is_heard_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("webgemma.gemma.encoder_config.PART_SAMPLES", 9600)
    tower = ears()
    alone = [tower.encode(log_mel(part)) for part in np.split(SOUND, [9600, 19200])]
    np.testing.assert_array_equal(tower.hear(SOUND), np.concatenate(alone))
    assert tower.audio.soft_tokens(len(SOUND)) == sum(map(len, alone))


def test_what_comes_later_changes_nothing_before() -> None:
    """But for the convolutions over mel frames, which look one step ahead."""
    tower, mel = ears(), log_mel(SOUND)
    changed = mel.copy()
    changed[80:] += 1
    same = tower.encode(mel) == tower.encode(changed)
    assert same[:19].all()
    assert not same[21:].any(axis=0).all()


def test_attention_by_its_definition() -> None:
    tower, name = ears(), "a.blk.0."
    heads, size = EARS.heads, EARS.width // EARS.heads
    h = np.random.default_rng(5).standard_normal((30, EARS.width)).astype(np.float32)
    q, k, v = (tower.linear(h, f"{name}attn_{x}").reshape(30, heads, size) for x in "qkv")
    speeds = [10000 ** (-j / (EARS.width // 2 - 1)) for j in range(EARS.width // 2)]
    out = np.zeros((30, heads, size))
    for p in range(30):
        for head in range(heads):
            scaled = q[p, head] * tower.weights[name + "per_dim_scale.weight"]
            scaled = scaled / math.sqrt(size) / math.log(2)
            shares, values = [], []
            for s in range(max(0, p - 11), p + 1):
                wave = [f((p - s) * x) for f in (math.sin, math.cos) for x in speeds]
                r = (tower.weights[name + "attn_k_rel.weight"] @ wave).reshape(heads, size)
                key = k[s, head] * math.log(1 + math.e) / math.log(2) + r[head]
                shares.append(math.exp(50 * math.tanh(scaled @ key / 50)))
                values.append(v[s, head])
            out[p, head] = np.array(shares) @ np.array(values) / sum(shares)
    wanted = tower.linear(out.reshape(30, -1).astype(np.float32), name + "attn_out")
    np.testing.assert_allclose(tower.attention(name, h), wanted, atol=1e-5)


def test_linears_clamp_both_sides() -> None:
    x = 3 * np.random.default_rng(5).standard_normal((4, EARS.width)).astype(np.float32)
    weight = ears().weights["a.blk.0.attn_q.weight"]
    wanted = np.clip(np.clip(x, -BOUND, BOUND) @ weight.T, -BOUND, BOUND)
    np.testing.assert_allclose(ears().linear(x, "a.blk.0.attn_q"), wanted, atol=1e-6)
    free = ears(EARS, ears_tensors(EARS, clamped=False))
    np.testing.assert_allclose(free.linear(x, "a.blk.0.attn_q"), x @ weight.T, atol=1e-5)


def test_ollamas_names_mean_the_same() -> None:
    tensors = ears_tensors(EARS)
    ollama = tower_of(ears_gguf(EARS, as_ollama(tensors), "gemma4"))
    np.testing.assert_array_equal(ollama.hear(SOUND), ears(EARS, tensors).hear(SOUND))


def test_raw_frames_are_normed_and_projected() -> None:
    tower = ears(RAW_EARS)
    frames = np.pad(SOUND[:1000], (0, 280)).reshape(2, 640)
    normed = frames / np.sqrt((frames**2).mean(axis=1, keepdims=True) + 1e-6)
    wanted = normed @ tower.weights["mm.a.input_projection.weight"].T
    np.testing.assert_allclose(tower.encode(raw_frames(SOUND[:1000])), wanted, atol=1e-5)
    np.testing.assert_array_equal(tower.hear(np.zeros(700, np.float32)), np.zeros((2, 24)))


@pytest.mark.parametrize("missing", ["a.conv1d.1.norm.weight", "a.blk.1.attn_k_rel.weight"])
def test_a_missing_tensor_gets_a_sentence(missing: str) -> None:
    with pytest.raises(GgufError, match=f"{missing} is missing"):
        ears(EARS, [t for t in ears_tensors(EARS) if t.name != missing])


def test_a_wrong_shape_gets_a_sentence() -> None:
    wide = NewTensor("a.pre_encode.out.bias", (41,), "F32", bytes(4 * 41))
    tensors = [wide if t.name == wide.name else t for t in ears_tensors(EARS)]
    with pytest.raises(GgufError, match=r"a\.pre_encode\.out\.bias is 41; this model needs 40"):
        ears(EARS, tensors)


def test_heads_that_do_not_divide_the_width_get_a_sentence() -> None:
    with pytest.raises(GgufError, match="width 32 cannot have 3 heads"):
        audio_of(ears_gguf(replace(EARS, heads=3), ears_tensors(EARS)))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_damaged_weights_get_a_sentence(value: float) -> None:
    tower = ears(EARS, with_values("a.pre_encode.out.bias", np.full(40, value)))
    with pytest.raises(GgufError, match="hears NaN or infinity"):
        tower.hear(SOUND)
