"""Gemma 3 on the GPU: files of llama.cpp against transformers, in every precision, and images."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from conftest import FIXTURES, SHARED, needs_shared
from helpers.gpu import device, hardware
from helpers.sessions import open_tiny
from helpers.tiny import GEMMA3, SMALL, tiny_gguf, tiny_metadata, tiny_tensors
from tolerance import F16_LOGITS_OF_TRANSFORMERS, GPU_LOGITS, GPU_LOGITS_OF_TRANSFORMERS

from webgemma import Gemma, GgufError
from webgemma.engine.session import Session
from webgemma.errors import MissingEncoderError
from webgemma.gemma.config import Config
from webgemma.gemma.weights import Model
from webgemma.gguf.reader import Gguf
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import NewTensor, gguf_bytes
from webgemma.settings import resolve
from webgemma.sync import iterate_sync, run_sync

FILES = {name: SHARED / "gemma3" / name for name in ("plain", "scaled")}
IMAGE = np.zeros((48, 48, 3), np.uint8)
SIGLIP = [
    NewTensor("v.position_embd.weight", (8, 4), "F32", bytes(4 * 8 * 4)),
    NewTensor("mm.input_projection.weight", (8, 64), "F32", bytes(4 * 8 * 64)),
]


@cache
def loaded(name: str) -> Model:
    gguf = Gguf.open(next(FILES[name].glob("*.gguf")))
    return run_sync(Model.load(gguf, Config.from_gguf(gguf), device()))


def computed(
    model: Model, ids: list[int], count: int, **options: str
) -> tuple[np.ndarray, list[int]]:
    """Return the logits of a prompt, and so many greedy tokens after it."""
    session = Session(model, 256, **options)
    rows = np.frombuffer(run_sync(session.logits(ids)), np.float32).reshape(len(ids), -1)
    stream = iterate_sync(session.generate(ids, resolve({"temperature": 0}), 1))
    tokens = [next(stream)[0] for _ in range(count)]
    stream.close()
    session.close()
    return rows, tokens


def numbers(path: Path) -> list[int]:
    return [int(word) for word in path.read_text().split()]


@needs_shared
@pytest.mark.parametrize(
    ("name", "kv", "precision"),
    [
        ("plain", "f32", "exact"),
        ("plain", "f32", "int16"),
        ("plain", "f16", "f16"),
        ("scaled", "f32", "exact"),
        ("scaled", "f16", "f16"),
    ],
)
def test_llama_cpp_files_agree_with_transformers(name: str, kv: str, precision: str) -> None:
    folder = FILES[name]
    ids, expected = numbers(folder / "ids.txt"), np.load(folder / "logits.npy")
    greedy = numbers(folder / "greedy.txt")
    found, tokens = computed(loaded(name), ids, len(greedy), kv=kv, precision=precision)
    within = GPU_LOGITS_OF_TRANSFORMERS if kv == "f32" else F16_LOGITS_OF_TRANSFORMERS
    if precision == "int16":
        within = GPU_LOGITS * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=within)
    assert tokens == greedy


def test_work_divided_as_on_a_hardware_gpu() -> None:
    recorded = np.load(FIXTURES / "tiny" / "gemma3.npz")
    ids, greedy = recorded["ids"].tolist(), recorded["greedy"].tolist()
    gguf, config = open_tiny(GEMMA3)
    model = run_sync(Model.load(gguf, config, hardware()))
    found, tokens = computed(model, ids, len(greedy), kv="f32", precision="exact")
    model.close()
    np.testing.assert_allclose(found, recorded["logits"], rtol=0, atol=GPU_LOGITS_OF_TRANSFORMERS)
    assert tokens == greedy


@pytest.mark.parametrize("on", ["cpu", "gpu"])
def test_images_are_refused(on: str) -> None:
    """Ollama's files hold the vision encoder, too."""
    data = gguf_bytes(tiny_metadata(GEMMA3), [*tiny_tensors(GEMMA3), *SIGLIP])
    with Gemma.load(BytesSource(data, "gemma3.gguf"), on, context=64) as gemma:
        with pytest.raises(MissingEncoderError, match="runs only the text model of Gemma 3"):
            gemma.encode_image(IMAGE)
        assert len(list(gemma.generate([2, 30], max_tokens=2, temperature=0))) > 0


@pytest.mark.parametrize("tiny", [SMALL, GEMMA3], ids=["gemma4", "gemma3"])
def test_a_projector_of_gemma_3_is_refused(tiny: object) -> None:
    metadata = {"general.architecture": "clip", "clip.projector_type": "gemma3"}
    mmproj = BytesSource(gguf_bytes(metadata, SIGLIP), "mmproj.gguf")
    model = BytesSource(tiny_gguf(tiny), "tiny.gguf")  # type: ignore[arg-type]
    with (
        Gemma.load(model, "cpu", context=64, mmproj=mmproj) as gemma,
        pytest.raises((GgufError, MissingEncoderError), match="only the text model of"),
    ):
        gemma.encode_image(IMAGE)
