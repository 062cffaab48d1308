"""The ears on the GPU: mel and soft tokens as the reference's and transformers'."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from conftest import FIXTURES, SHARED, needs_shared
from helpers.gpu import device, get, hardware
from helpers.tiny import uniform
from helpers.tiny_ears import EARS, RAW_EARS, as_ollama, audio_of, ears_gguf, ears_tensors
from tolerance import (
    GPU_MEL,
    GPU_MEL_OF_A_TONE,
    GPU_SOFT_TOKENS,
    HEARD_OF_TRANSFORMERS,
    MEL_OF_TRANSFORMERS,
)

from webgemma.device.native import NativeDevice
from webgemma.errors import DeviceError, GgufError, InputError
from webgemma.gemma.audio import Ears, hear
from webgemma.gemma.encoder_config import PART_SAMPLES, AudioConfig
from webgemma.gemma.mel import mel_triangles
from webgemma.gguf.reader import Gguf
from webgemma.gguf.writer import NewTensor
from webgemma.reference.audio import AudioModel, log_mel, mel_filters
from webgemma.reference.weights import Weights
from webgemma.sync import run_sync

SOUND = np.fromfile(FIXTURES / "mm" / "audio-24000.f32", "<f4")
ODD_EARS = AudioConfig(width=260, layers=5, heads=5, ffn=100, features=44, output=6)
WIDE_EARS = AudioConfig(width=1040, layers=1, heads=2, ffn=36, features=1044, output=20)


def heard(
    gguf: Gguf, sound: np.ndarray, on: NativeDevice | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """What the device makes of a sound: log-mel rows, soft tokens."""
    on = on or device()
    held = on.nbytes
    with run_sync(Ears.load(gguf, audio_of(gguf), on)) as ears:
        loaded = on.nbytes
        sound_on_device = run_sync(hear(ears, sound.astype("<f4")))
        found = get(sound_on_device.mel, on=on), get(sound_on_device.tokens, on=on)
        sound_on_device.close()
        ears.rest()
        assert on.nbytes == loaded
    assert on.nbytes == held
    return found


def assert_same(found: np.ndarray, truth: np.ndarray) -> None:
    assert found.shape == truth.shape
    assert np.abs(found - truth).max() <= GPU_SOFT_TOKENS * np.abs(truth).max()


def assert_as_the_reference(
    gguf: Gguf, sound: np.ndarray, on: NativeDevice | None = None
) -> np.ndarray:
    mel, tokens = heard(gguf, sound, on)
    np.testing.assert_allclose(mel, log_mel(sound), rtol=0, atol=GPU_MEL)
    assert_same(tokens, AudioModel(audio_of(gguf), Weights(gguf)).hear(sound))
    return tokens


def with_floats(tensors: list[NewTensor], name: str, values: np.ndarray) -> list[NewTensor]:
    """The same tensors, one of them new or with other values."""
    changed = NewTensor(name, values.shape, "F32", values.astype("<f4").tobytes())
    return [*(tensor for tensor in tensors if tensor.name != name), changed]


def with_bounds_of_their_own(tensors: list[NewTensor]) -> list[NewTensor]:
    """Every linear holds what goes in and what comes out between other values."""
    for name in [t.name for t in tensors if t.name.endswith(("_min", "_max"))]:
        bound = np.float32(1) + 0.5 * uniform(7, name, 1)
        tensors = with_floats(tensors, name, -bound if name.endswith("_min") else bound)
    return tensors


@pytest.mark.parametrize("samples", [1, 16, 161, 320, 321, 1000, 1121, 24000])
def test_as_the_reference(samples: int) -> None:
    assert_as_the_reference(ears_gguf(EARS, ears_tensors(EARS)), SOUND[:samples])


@pytest.mark.parametrize("on", ["hardware", "plain"])
def test_as_the_reference_as_other_devices_compute(on: str) -> None:
    """Cut up as for a real GPU; and without anything that WebGPU does not promise."""
    other = hardware() if on == "hardware" else device(device().features)
    assert_as_the_reference(ears_gguf(EARS, ears_tensors(EARS)), SOUND[:9000], other)


@pytest.mark.parametrize("audio", [ODD_EARS, WIDE_EARS], ids=["odd", "wide"])
@pytest.mark.parametrize("on", [device, hardware])
def test_shapes_that_fill_no_workgroup(audio: AudioConfig, on: Callable[[], NativeDevice]) -> None:
    assert_as_the_reference(ears_gguf(audio, ears_tensors(audio)), SOUND[:7000], on())


def test_thirty_seconds() -> None:
    sound = np.tile(SOUND, 20) * np.linspace(0, 1, PART_SAMPLES, dtype=np.float32)
    tokens = assert_as_the_reference(ears_gguf(EARS, ears_tensors(EARS)), sound)
    assert tokens.shape == (750, EARS.output)


@pytest.mark.parametrize("clamped", ["not", "each in its own way", "on one side"])
def test_bounds(clamped: str) -> None:
    tensors = ears_tensors(EARS, clamped=clamped != "not")
    if clamped == "each in its own way":
        tensors = with_bounds_of_their_own(tensors)
    elif clamped == "on one side":
        tensors = [tensor for tensor in tensors if not tensor.name.endswith("input_min")]
    assert_as_the_reference(ears_gguf(EARS, tensors), SOUND[:9000])


def test_ollamas_names_mean_the_same() -> None:
    tensors = with_bounds_of_their_own(ears_tensors(EARS))
    tokens = assert_as_the_reference(ears_gguf(EARS, tensors), SOUND[:9000])
    _, ollama = heard(ears_gguf(EARS, as_ollama(tensors), "gemma4"), SOUND[:9000])
    np.testing.assert_array_equal(ollama, tokens)


def test_soft_tokens_may_have_a_norm() -> None:
    weights = 1 + 0.5 * uniform(5, "soft_emb_norm", EARS.features)
    tensors = with_floats(ears_tensors(EARS), "mm.a.soft_emb_norm.weight", weights)
    assert_as_the_reference(ears_gguf(EARS, tensors), SOUND[:9000])


def test_silence() -> None:
    mel, tokens = heard(ears_gguf(EARS, ears_tensors(EARS)), np.zeros(4000, np.float32))
    np.testing.assert_allclose(mel, np.log(0.001), rtol=0, atol=GPU_MEL)
    assert np.isfinite(tokens).all()


@pytest.mark.parametrize("hertz", [100, 1000, 7777])
def test_a_loud_tone(hertz: int) -> None:
    tone = np.sin(2 * np.pi * hertz * np.arange(4000) / 16000).astype(np.float32)
    mel, _ = heard(ears_gguf(EARS, ears_tensors(EARS)), tone)
    found, truth = np.exp(mel), np.exp(log_mel(tone))
    assert np.abs(found - truth).max() <= GPU_MEL_OF_A_TONE * truth.max()


@pytest.mark.parametrize("samples", [1, 16, 640, 641, 24000])
def test_raw_frames_of_the_12b(samples: int) -> None:
    gguf = ears_gguf(RAW_EARS, ears_tensors(RAW_EARS))
    _, tokens = heard(gguf, SOUND[:samples])
    assert_same(tokens, AudioModel(RAW_EARS, Weights(gguf)).hear(SOUND[:samples]))


def test_mel_agrees_with_transformers() -> None:
    mel, _ = heard(ears_gguf(EARS, ears_tensors(EARS)), SOUND)
    truth = np.load(FIXTURES / "mm" / "audio24000.mel.npy").reshape(-1, 128)
    np.testing.assert_allclose(mel, truth[: len(mel)], rtol=0, atol=MEL_OF_TRANSFORMERS)


@needs_shared
@pytest.mark.parametrize("samples", [24000, 40123])
def test_soft_tokens_agree_with_transformers(samples: int) -> None:
    sound = np.fromfile(SHARED / "mm" / f"audio-{samples}.f32", "<f4")
    with Gguf.open(SHARED / "mm" / "mmproj-mm-f16.gguf") as gguf:
        _, tokens = heard(gguf, sound)
    truth = np.load(SHARED / "mm" / f"audio{samples}.embd.npy").reshape(tokens.shape)
    np.testing.assert_allclose(tokens, truth, rtol=0, atol=HEARD_OF_TRANSFORMERS)


def test_filters_are_the_references() -> None:
    filters = np.zeros((257, 128))
    for bin, (first, shares) in enumerate(mel_triangles()):
        filters[first : first + len(shares), bin] = shares
    np.testing.assert_allclose(filters, mel_filters(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"width": 36, "heads": 2}, "heads of 18"),
        ({"ffn": 50}, "feed-forward layers of 50"),
        ({"features": 42}, "features of 42"),
    ],
)
def test_shapes_without_a_kernel_get_a_sentence(change: dict[str, int], sentence: str) -> None:
    audio = replace(EARS, **change)
    gguf = ears_gguf(audio, ears_tensors(audio))
    with pytest.raises(DeviceError, match=f"{sentence}.*use device='cpu'"):
        run_sync(Ears.load(gguf, audio_of(gguf), device()))


@pytest.mark.parametrize(
    ("samples", "sentence"),
    [(0, "the sound has no samples"), (PART_SAMPLES + 1, "480001 samples is longer than the 30 s")],
)
def test_lengths_that_ears_do_not_hear_get_a_sentence(samples: int, sentence: str) -> None:
    gguf = ears_gguf(RAW_EARS, ears_tensors(RAW_EARS))
    with (
        run_sync(Ears.load(gguf, RAW_EARS, device())) as ears,
        pytest.raises(InputError, match=sentence),
    ):
        run_sync(hear(ears, np.zeros(samples, np.float32)))


def test_a_load_that_fails_gives_the_memory_back() -> None:
    broken = NewTensor("a.conv1d.1.norm.weight", (32,), "Q8_0", bytes(34))
    tensors = [broken if t.name == broken.name else t for t in ears_tensors(EARS)]
    gguf, held = ears_gguf(EARS, tensors), device().nbytes
    with pytest.raises(GgufError, match="stored as Q8_0, not as floats"):
        run_sync(Ears.load(gguf, EARS, device()))
    assert device().nbytes == held
