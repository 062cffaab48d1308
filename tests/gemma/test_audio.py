"""The audio encoder on the GPU: mel and soft tokens against the reference and transformers."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from conftest import FIXTURES, SHARED, needs_shared
from helpers.gpu import device, get, hardware
from helpers.tiny import uniform
from helpers.tiny_audio import (
    RAW_AUDIO,
    TINY_AUDIO,
    as_ollama,
    audio_config,
    audio_gguf,
    audio_weights,
)
from tolerance import (
    AUDIO_TOKENS_OF_TRANSFORMERS,
    GPU_MEL,
    GPU_MEL_OF_A_TONE,
    GPU_SOFT_TOKENS,
    MEL_OF_TRANSFORMERS,
)

from webgemma.device.native import NativeDevice
from webgemma.errors import DeviceError, GgufError, InputError
from webgemma.gemma.audio import AudioEncoder, encode_audio
from webgemma.gemma.encoder_config import SEGMENT_SAMPLES, AudioConfig
from webgemma.gemma.mel import mel_filters
from webgemma.gguf.reader import Gguf
from webgemma.gguf.writer import NewTensor
from webgemma.reference import audio as reference
from webgemma.reference.weights import Weights
from webgemma.sync import run_sync

SAMPLES = np.fromfile(FIXTURES / "mm" / "audio-24000.f32", "<f4")
ODD_AUDIO = AudioConfig(width=260, layers=5, heads=5, ffn=100, features=44, output=6)
WIDE_AUDIO = AudioConfig(width=1040, layers=1, heads=2, ffn=36, features=1044, output=20)


def encoded(
    gguf: Gguf, samples: np.ndarray, on: NativeDevice | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Encode audio on a device, and check that its memory is freed: log-mel rows, soft tokens."""
    on = on or device()
    before = on.nbytes
    with run_sync(AudioEncoder.load(gguf, audio_config(gguf), on)) as encoder:
        loaded = on.nbytes
        result = run_sync(encode_audio(encoder, samples.astype("<f4")))
        mel, tokens = get(result.mel, on=on), get(result.tokens, on=on)
        result.close()
        encoder.free_idle()
        assert on.nbytes == loaded
    assert on.nbytes == before
    return mel, tokens


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= GPU_SOFT_TOKENS * np.abs(expected).max()


def assert_agrees_with_the_reference(
    gguf: Gguf, samples: np.ndarray, on: NativeDevice | None = None
) -> np.ndarray:
    """Compare mel and soft tokens; return the soft tokens."""
    mel, tokens = encoded(gguf, samples, on)
    np.testing.assert_allclose(mel, reference.log_mel(samples), rtol=0, atol=GPU_MEL)
    encoder = reference.AudioEncoder(audio_config(gguf), Weights(gguf))
    assert_close(tokens, encoder.encode(samples))
    return tokens


def with_floats(tensors: list[NewTensor], name: str, values: np.ndarray) -> list[NewTensor]:
    """Return the same tensors, one of them added or with other values."""
    changed = NewTensor(name, values.shape, "F32", values.astype("<f4").tobytes())
    return [*(tensor for tensor in tensors if tensor.name != name), changed]


def with_different_bounds(tensors: list[NewTensor]) -> list[NewTensor]:
    """Return the same tensors, with different bounds of every linear's input and output."""
    for name in [t.name for t in tensors if t.name.endswith(("_min", "_max"))]:
        bound = np.float32(1) + 0.5 * uniform(7, name, 1)
        tensors = with_floats(tensors, name, -bound if name.endswith("_min") else bound)
    return tensors


@pytest.mark.parametrize("samples", [1, 16, 161, 320, 321, 1000, 1121, 24000])
def test_agrees_with_the_reference(samples: int) -> None:
    assert_agrees_with_the_reference(
        audio_gguf(TINY_AUDIO, audio_weights(TINY_AUDIO)), SAMPLES[:samples]
    )


@pytest.mark.parametrize("on", ["hardware", "plain"])
def test_agrees_with_the_reference_on_other_devices(on: str) -> None:
    """Divide work as for a hardware GPU, and use only what WebGPU guarantees."""
    other = hardware() if on == "hardware" else device(device().features)
    assert_agrees_with_the_reference(
        audio_gguf(TINY_AUDIO, audio_weights(TINY_AUDIO)), SAMPLES[:9000], other
    )


@pytest.mark.parametrize("audio", [ODD_AUDIO, WIDE_AUDIO], ids=["odd", "wide"])
@pytest.mark.parametrize("on", [device, hardware])
def test_shapes_that_do_not_fill_workgroups(
    audio: AudioConfig, on: Callable[[], NativeDevice]
) -> None:
    assert_agrees_with_the_reference(audio_gguf(audio, audio_weights(audio)), SAMPLES[:7000], on())


def test_thirty_seconds() -> None:
    samples = np.tile(SAMPLES, 20) * np.linspace(0, 1, SEGMENT_SAMPLES, dtype=np.float32)
    tokens = assert_agrees_with_the_reference(
        audio_gguf(TINY_AUDIO, audio_weights(TINY_AUDIO)), samples
    )
    assert tokens.shape == (750, TINY_AUDIO.output)


@pytest.mark.parametrize("clamped", ["not", "differently", "on one side"])
def test_bounds(clamped: str) -> None:
    tensors = audio_weights(TINY_AUDIO, clamped=clamped != "not")
    if clamped == "differently":
        tensors = with_different_bounds(tensors)
    elif clamped == "on one side":
        tensors = [tensor for tensor in tensors if not tensor.name.endswith("input_min")]
    assert_agrees_with_the_reference(audio_gguf(TINY_AUDIO, tensors), SAMPLES[:9000])


def test_ollamas_tensor_names_mean_the_same() -> None:
    tensors = with_different_bounds(audio_weights(TINY_AUDIO))
    tokens = assert_agrees_with_the_reference(audio_gguf(TINY_AUDIO, tensors), SAMPLES[:9000])
    _, ollama = encoded(audio_gguf(TINY_AUDIO, as_ollama(tensors), "gemma4"), SAMPLES[:9000])
    np.testing.assert_array_equal(ollama, tokens)


def test_soft_tokens_may_have_a_norm() -> None:
    weights = 1 + 0.5 * uniform(5, "soft_emb_norm", TINY_AUDIO.features)
    tensors = with_floats(audio_weights(TINY_AUDIO), "mm.a.soft_emb_norm.weight", weights)
    assert_agrees_with_the_reference(audio_gguf(TINY_AUDIO, tensors), SAMPLES[:9000])


def test_silence() -> None:
    mel, tokens = encoded(
        audio_gguf(TINY_AUDIO, audio_weights(TINY_AUDIO)), np.zeros(4000, np.float32)
    )
    np.testing.assert_allclose(mel, np.log(0.001), rtol=0, atol=GPU_MEL)
    assert np.isfinite(tokens).all()


@pytest.mark.parametrize("hertz", [100, 1000, 7777])
def test_a_loud_tone(hertz: int) -> None:
    tone = np.sin(2 * np.pi * hertz * np.arange(4000) / 16000).astype(np.float32)
    mel, _ = encoded(audio_gguf(TINY_AUDIO, audio_weights(TINY_AUDIO)), tone)
    found, expected = np.exp(mel), np.exp(reference.log_mel(tone))
    assert np.abs(found - expected).max() <= GPU_MEL_OF_A_TONE * expected.max()


@pytest.mark.parametrize("samples", [1, 16, 640, 641, 24000])
def test_raw_frames_of_the_12b(samples: int) -> None:
    gguf = audio_gguf(RAW_AUDIO, audio_weights(RAW_AUDIO))
    _, tokens = encoded(gguf, SAMPLES[:samples])
    encoder = reference.AudioEncoder(RAW_AUDIO, Weights(gguf))
    assert_close(tokens, encoder.encode(SAMPLES[:samples]))


def test_mel_agrees_with_transformers() -> None:
    mel, _ = encoded(audio_gguf(TINY_AUDIO, audio_weights(TINY_AUDIO)), SAMPLES)
    expected = np.load(FIXTURES / "mm" / "audio24000.mel.npy").reshape(-1, 128)
    np.testing.assert_allclose(mel, expected[: len(mel)], rtol=0, atol=MEL_OF_TRANSFORMERS)


@needs_shared
@pytest.mark.parametrize("count", [24000, 40123])
def test_soft_tokens_agree_with_transformers(count: int) -> None:
    samples = np.fromfile(SHARED / "mm" / f"audio-{count}.f32", "<f4")
    with Gguf.open(SHARED / "mm" / "mmproj-mm-f16.gguf") as gguf:
        _, tokens = encoded(gguf, samples)
    expected = np.load(SHARED / "mm" / f"audio{count}.embd.npy").reshape(tokens.shape)
    np.testing.assert_allclose(tokens, expected, rtol=0, atol=AUDIO_TOKENS_OF_TRANSFORMERS)


def test_mel_filters_agree_with_the_reference() -> None:
    filters = np.zeros((257, 128))
    for bin, (first, weights) in enumerate(mel_filters()):
        filters[first : first + len(weights), bin] = weights
    np.testing.assert_allclose(filters, reference.mel_filters(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 36, "heads": 2}, "heads of 18"),
        ({"ffn": 50}, "feed-forward layers of 50"),
        ({"features": 42}, "features of 42"),
    ],
)
def test_shapes_without_a_kernel_raise_an_error(change: dict[str, int], message: str) -> None:
    audio = replace(TINY_AUDIO, **change)
    gguf = audio_gguf(audio, audio_weights(audio))
    with pytest.raises(DeviceError, match=f"{message}.*use device='cpu'"):
        run_sync(AudioEncoder.load(gguf, audio_config(gguf), device()))


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (0, "The audio has no samples"),
        (SEGMENT_SAMPLES + 1, "480001 samples is longer than the 30 s"),
    ],
)
def test_lengths_that_cannot_be_encoded_raise_an_error(samples: int, message: str) -> None:
    gguf = audio_gguf(RAW_AUDIO, audio_weights(RAW_AUDIO))
    with (
        run_sync(AudioEncoder.load(gguf, RAW_AUDIO, device())) as encoder,
        pytest.raises(InputError, match=message),
    ):
        run_sync(encode_audio(encoder, np.zeros(samples, np.float32)))


def test_a_failed_load_frees_its_memory() -> None:
    broken = NewTensor("a.conv1d.1.norm.weight", (32,), "F32", b"\0\0\xc0\x7f" * 32)  # NaN
    tensors = [broken if t.name == broken.name else t for t in audio_weights(TINY_AUDIO)]
    gguf, before = audio_gguf(TINY_AUDIO, tensors), device().nbytes
    with pytest.raises(GgufError, match=r"a\.conv1d\.1\.norm\.weight holds NaN or infinity"):
        run_sync(AudioEncoder.load(gguf, TINY_AUDIO, device()))
    assert device().nbytes == before
