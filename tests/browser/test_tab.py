"""The engine in a browser tab: the same wheel, the same programs, the same results."""

import io
import json
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser.serving import serving
from conftest import FIXTURES, SHARED, needs_shared
from helpers.constrained import lines
from helpers.everyday_schemas import SCHEMAS
from helpers.gpu import device
from helpers.sessions import SHORT
from helpers.tiny import DIFFUSION, KINDS, tiny_gguf
from helpers.tiny_audio import TINY_AUDIO, audio_bytes, audio_gguf, audio_weights
from helpers.tiny_drafter import TinyDrafter, drafter_gguf
from jsonschema import Draft202012Validator
from tolerance import (
    GPU_LOGITS_OF_TRANSFORMERS,
    GPU_SOFT_TOKENS,
    GPU_VECTORS,
    MEL_OF_TRANSFORMERS,
)

import webgemma
from webgemma import Gemma
from webgemma.reference.audio import AudioEncoder
from webgemma.reference.weights import Weights

SOURCE = Path(webgemma.__file__).parent
HERE = Path(__file__).resolve().parent
PACKAGES = HERE.parents[1] / "node_modules"
PYODIDE = PACKAGES / "pyodide"
XGRAMMAR = PACKAGES / "@mlc-ai" / "web-xgrammar" / "lib" / "index.js"
MODELS = ["small", "moe", "gemma3"]
MTP = SHARED / "mtp" / "e2b"
EMBED = SHARED / "embed"
EMBEDDERS = {
    "v1": "embed1-Q8_0.gguf",
    "v1-ollama": "embed1-ollama-F16.gguf",
    "v2": "embed2-F16.gguf",
}
GEMMA3 = SHARED / "gemma3"
LLAMA_CPP = {"plain": "plain-Q4_K_M.gguf", "scaled": "scaled-F16.gguf"}  # its files of Gemma 3


DRAFTER = TinyDrafter(SHORT, centroids=40)


def wheel() -> bytes:
    """Return a wheel with the package, and the functions that the tests call in the tab."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        for path in SOURCE.rglob("*"):
            if path.suffix in (".py", ".wgsl", ".js", ".gguf"):
                file.write(path, Path("webgemma") / path.relative_to(SOURCE))
        for path in HERE.glob("inside*.py"):
            file.write(path, path.name)
    return data.getvalue()


@dataclass
class Tab:
    """A page whose worker runs Python, and the addresses that it has requested."""

    page: Any
    origin: str
    requested: list[str]

    def call(self, name: str, *given: Any, **named: Any) -> Any:
        """Return the result of a function of inside.py in the tab."""
        module, _, function = name.rpartition(".")
        code = (
            f"import {module or 'inside'} as inside, json\n"
            f"given, named = json.loads({json.dumps([given, named])!r})\n"
            f"json.dumps(await inside.{function}(*given, **named))"
        )
        return json.loads(self.page.evaluate("(code) => python(code)", code))


@pytest.fixture(scope="module")
def tab(chromium: Any) -> Iterator[Tab]:
    files = {f"pyodide/{path.name}": path for path in PYODIDE.iterdir() if path.is_file()}
    models = {f"{kind}.gguf": tiny_gguf(KINDS[kind]) for kind in MODELS}
    models["diffusion.gguf"] = tiny_gguf(DIFFUSION)
    models |= {"short.gguf": tiny_gguf(SHORT), "short-drafter.gguf": drafter_gguf(DRAFTER)}
    shared: dict[str, bytes | Path] = {"xgrammar.js": XGRAMMAR}
    shared |= {"mtp.gguf": MTP / "target-F16.gguf", "mtp-drafter.gguf": MTP / "assistant-F16.gguf"}
    shared |= {f"{kind}.gguf": EMBED / kind / name for kind, name in EMBEDDERS.items()}
    shared |= {f"{kind}.gguf": GEMMA3 / kind / name for kind, name in LLAMA_CPP.items()}
    audio = {"audio.gguf": audio_bytes(TINY_AUDIO, audio_weights(TINY_AUDIO))}
    with serving({**files, **models, **shared, **audio, "webgemma.whl": wheel()}) as origin:
        page, requested = chromium.new_page(), []
        page.context.on("request", lambda request: requested.append(request.url))
        page.goto(f"{origin}/python.html")
        yield Tab(page, origin, requested)
        page.close()


def truth(kind: str) -> tuple[list[int], list[int]]:
    """Return a prompt, and how transformers continues it."""
    with np.load(FIXTURES / "tiny" / f"{kind}.npz") as stored:
        return stored["ids"].tolist(), stored["greedy"].tolist()


@pytest.mark.parametrize("kind", MODELS)
def test_greedy_ids_equal_those_natively_and_of_transformers(
    tab: Tab, kind: str, tmp_path: Path
) -> None:
    ids, wanted = truth(kind)
    settings = {"temperature": 0, "max_tokens": len(wanted)}
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf(KINDS[kind]))
    with Gemma.load(path, "gpu", kv="f32") as gemma:
        natively = [piece.token for piece in gemma.generate(ids, **settings)]
        assert gemma.device == device().name
    name, found = tab.call("tokens", kind, ids, settings, kv="f32")
    assert name.endswith("(WebGPU)")
    assert found == natively == wanted


@pytest.mark.parametrize("kind", MODELS)
def test_logits_equal_those_of_transformers(tab: Tab, kind: str) -> None:
    with np.load(FIXTURES / "tiny" / f"{kind}.npz") as stored:
        ids, expected = stored["ids"].tolist(), stored["logits"]
    np.testing.assert_allclose(
        tab.call("logits", kind, ids), expected, rtol=0, atol=GPU_LOGITS_OF_TRANSFORMERS
    )


@needs_shared
@pytest.mark.parametrize("kind", LLAMA_CPP)
def test_files_of_gemma_3_equal_transformers(tab: Tab, kind: str) -> None:
    """Longer than their windows, from weights of 4 and 6 bits, and with scaled positions."""
    folder = GEMMA3 / kind
    ids, wanted = (
        list(map(int, (folder / name).read_text().split())) for name in ("ids.txt", "greedy.txt")
    )
    logits = tab.call("logits", kind, ids)
    expected = np.load(folder / "logits.npy")
    np.testing.assert_allclose(logits, expected, rtol=0, atol=GPU_LOGITS_OF_TRANSFORMERS)
    settings = {"temperature": 0, "max_tokens": len(wanted)}
    assert tab.call("tokens", kind, ids, settings, kv="f32")[1] == wanted


@needs_shared
@pytest.mark.parametrize("kind", EMBEDDERS)
def test_vectors_equal_those_of_transformers(tab: Tab, kind: str) -> None:
    rows = (EMBED / kind / "ids.txt").read_text().splitlines()
    texts = [[int(token) for token in row.split()] for row in rows]
    expected = np.load(EMBED / kind / "truth.npz")["embeddings"]
    found = tab.call("embedded", kind, texts)
    np.testing.assert_allclose(found, expected, rtol=0, atol=GPU_VECTORS["exact"])


def test_the_same_tokens_are_sampled_as_natively(tab: Tab, tmp_path: Path) -> None:
    ids, _ = truth("small")
    settings = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 5, "max_tokens": 16}
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf(KINDS["small"]))
    with Gemma.load(path, "gpu", kv="f32") as gemma:
        natively = [piece.token for piece in gemma.generate(ids, **settings)]
    assert tab.call("tokens", "small", ids, settings, kv="f32")[1] == natively


def test_conversations_side_by_side(tab: Tab, tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(tiny_gguf(KINDS["small"]))
    texts = ["in the end", "then", "here and there", "the", "hint", "in"]
    settings = {"seed": 3, "max_tokens": 6}
    with Gemma.load(path, "gpu", kv="f32") as gemma:
        expected = [[piece.token for piece in gemma.chat(text, **settings)] for text in texts]
    assert tab.call("side_by_side", "small", texts, settings) == [expected, expected]


def test_structures_without_a_library(tab: Tab) -> None:
    sentence, (first, second) = tab.call("without_xgrammar", "small")
    assert "web-xgrammar" in sentence
    assert len(first) == 5
    assert first == second


# Short ones: a software GPU takes a tenth of a second for a token.
EVERYDAY = ["sentiment", "yes or no", "rating", "even", "year", "mixed enum", "plate", "hex colour"]
FEATURES = ["pattern-anchored", "any-of-types", "additional-false"]
REGEX = r"0[1-9][0-9]{2,4} [0-9]{3}"
WEATHER = {"type": "object", "properties": {"days": {"type": "integer", "minimum": 1}}}
WEATHER |= {"required": ["days"], "additionalProperties": False}


def test_replies_keep_to_structures(tab: Tab) -> None:
    features = {line["name"]: line["schema"] for line in lines("schemas.jsonl")}
    schemas = [SCHEMAS[name] for name in EVERYDAY] + [features[name] for name in FEATURES]
    tool = {"name": "weather", "description": "Tell the weather", "parameters": WEATHER}
    cases: list[dict[str, Any]] = [
        *({"schema": schema, "seed": seed} for schema in schemas for seed in (1, 2)),
        {"schema": SCHEMAS["any object"], "max_tokens": 2},
        {"regex": REGEX},
        {"choices": ["to be", "not to be"]},
        {"tools": [tool], "tool_choice": "required", "max_tokens": 32},
    ]
    settings = {"temperature": 1.5, "max_tokens": 14, "seed": 1}
    replies = tab.call("inside_structures.structured", [settings | case for case in cases])
    for case, (text, calls, finish) in zip(cases, replies, strict=True):
        if finish == "length":
            assert text or "tools" in case
        elif "schema" in case:
            Draft202012Validator(case["schema"]).validate(json.loads(text))
        elif "tools" in case:
            ((name, arguments),) = calls
            assert name == "weather"
            Draft202012Validator(WEATHER).validate(arguments)
        else:
            assert text in case.get("choices", [text])
            assert re.fullmatch(case.get("regex", ".*"), text)
    finishes = [finish for _, _, finish in replies]
    assert finishes[-4] == "length"
    assert finishes.count("stop") > len(schemas)
    sentence = tab.call("inside_structures.unsupported", features["array-unique"])
    assert "uniqueItems is not supported" in sentence


def drafted_natively(kind: str, folder: Path, ids: list[int], settings: Any) -> list[int]:
    paths = [MTP / "target-F16.gguf", MTP / "assistant-F16.gguf"]
    if kind == "short":
        paths = [folder / "short.gguf", folder / "drafter.gguf"]
        for path, data in zip(paths, (tiny_gguf(SHORT), drafter_gguf(DRAFTER)), strict=True):
            path.write_bytes(data)
    with Gemma.load(paths[0], "gpu", kv="f32", draft=paths[1]) as gemma:
        return [piece.token for piece in gemma.generate(ids, speculate="mtp", **settings)]


@pytest.mark.parametrize("kind", ["short", pytest.param("mtp", marks=needs_shared)])
def test_drafts_change_no_token(tab: Tab, tmp_path: Path, kind: str) -> None:
    ids = [2, *(24 + i * 7 % 280 for i in range(1, 30))]
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 4, "max_tokens": 24}
    ways = ["mtp", "lookup", "off"]
    if kind == "mtp":
        ways = ["mtp"]
        ids = [int(token) for token in (MTP / "ids.txt").read_text().split()]
        settings |= {"temperature": 0}
    natively = drafted_natively(kind, tmp_path, ids, settings)
    if kind == "mtp":
        greedy = [int(token) for token in (MTP / "greedy.txt").read_text().split()]
        assert natively == greedy[:24]
    found = tab.call("inside_structures.drafted", kind, ids, settings, ways)
    assert [tokens for tokens, _, _ in found] == [natively] * len(ways)
    drafts = {way: counts for way, (_, *counts) in zip(ways, found, strict=True)}
    assert drafts["mtp"][0] > 0
    assert drafts["mtp"][0] >= drafts["mtp"][1]
    assert drafts.get("off", [0, 0]) == [0, 0]


def test_canvases_are_denoised_as_natively(tab: Tab, tmp_path: Path) -> None:
    ids = [2, *range(30, 51)]
    settings = {"steps": 2, "entropy_bound": 3.0, "seed": 5, "max_tokens": 20, "watch": True}
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf(DIFFUSION))
    with Gemma.load(path, "gpu", kv="f32") as gemma:
        natively = [piece.token for piece in gemma.generate(ids, **settings)]
    found = tab.call("tokens", "diffusion", ids, settings, kv="f32")[1]
    assert found == natively
    assert found.count(-1) == 4  # the canvas after each step of two canvases


def test_a_conversation_continues_after_a_stop_and_after_a_restore(tab: Tab) -> None:
    ids, wanted = truth("small")
    assert tab.call("continued", "small", ids, 8) == [wanted[:8]] * 3


def test_audio_is_encoded_as_by_transformers_and_the_reference(tab: Tab) -> None:
    samples = np.fromfile(FIXTURES / "mm" / "audio-24000.f32", "<f4")[:9000]
    mel, tokens = (np.array(rows) for rows in tab.call("encoded_audio", "audio", samples.tolist()))
    frames = np.load(FIXTURES / "mm" / "audio24000.mel.npy").reshape(-1, 128)[: len(mel)]
    np.testing.assert_allclose(mel, frames, rtol=0, atol=MEL_OF_TRANSFORMERS)
    encoder = AudioEncoder(TINY_AUDIO, Weights(audio_gguf(TINY_AUDIO, audio_weights(TINY_AUDIO))))
    wanted = encoder.encode(samples)
    bound = GPU_SOFT_TOKENS * np.abs(wanted).max()
    np.testing.assert_allclose(tokens, wanted, rtol=0, atol=bound)


def test_the_bundled_model_replies(tab: Tab) -> None:
    with Gemma.load(device="gpu") as gemma:
        pieces = gemma.chat("What are you?", temperature=0, max_tokens=16)
        assert tab.call("bundled", "What are you?") == "".join(piece.text for piece in pieces)


def test_the_facts_of_the_device(tab: Tab) -> None:
    facts = tab.call("facts")
    assert facts["software"]
    assert {"subgroups", "enable-subgroups", "shuffle4", "packed-dots"} <= set(facts["features"])
    assert facts["binding_nbytes"] > 128 << 20
    assert facts["threads"] >= 256


def test_plans_readings_copies_and_writes(tab: Tab) -> None:
    assert tab.call("counted") == [15, 3, 9, 6, 12, 15, 7]


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("nothing", "nothing went wrong"),
        ("lost", "was lost"),
        ("lost while reading", "was lost"),
        ("freed and run", '[Buffer "total"] used in submit while destroyed'),
        ("kernel", "Error while parsing WGSL: :1:22"),
        ("binding", "Number of entries (1) did not match"),
        ("odd write", "must be a multiple of 4"),
        (
            "large buffer",
            "DeviceMemoryError: The GPU has no 1073741840 bytes for all in one buffer",
        ),
        ("no memory", "DeviceMemoryError: The GPU has no 1073741824 bytes for much beside "),
    ],
)
def test_a_mistake_gets_a_sentence(tab: Tab, kind: str, sentence: str) -> None:
    assert sentence in tab.call("mistake", kind)


def test_a_program_that_does_not_compile_leaves_the_device_usable(tab: Tab) -> None:
    """So that kernels for matrix units can be given up where they do not compile."""
    error, total = tab.call("recovered")
    assert "Error while parsing WGSL" in error
    assert total == 3


def test_only_the_own_origin_is_requested(tab: Tab) -> None:
    tab.call("facts")
    assert any(url.endswith("pyodide.asm.wasm") for url in tab.requested)
    assert [url for url in tab.requested if not url.startswith(f"{tab.origin}/")] == []
