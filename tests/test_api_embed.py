"""Embeddings by `Gemma`: tasks, sizes, texts and ids, both engines, threads and tasks, refusals."""

import asyncio
import builtins
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import SHARED, needs_shared
from helpers.sessions import open_tiny
from helpers.tiny import EMBEDDING, EMBEDDING2, SMALL, Tiny, tiny_gguf, tiny_metadata, tiny_tensors
from helpers.tiny_adapter import LAYER, tiny_adapter, tiny_pairs
from tolerance import GPU_VECTORS, VECTORS_OF_TRANSFORMERS

from webgemma import Gemma, GgufError, InputError
from webgemma.embeddings import PREFIXES, unit_rows
from webgemma.gguf.sources import BytesSource
from webgemma.gguf.writer import NewTensor, gguf_bytes
from webgemma.lora.peft_folder import write_peft_folder
from webgemma.reference.lora import EMBEDDING as EMBEDDED

TINY = {"1": EMBEDDING, "2": EMBEDDING2}
TEXTS = ["the inner", "", "there in the thinner end", "x" * 40]
WITHIN = GPU_VECTORS["exact"]


def load(tiny: Tiny = EMBEDDING, device: Any = "cpu", **options: Any) -> Gemma:
    options = {"precision": "exact", **options}
    return Gemma.load(BytesSource(tiny_gguf(tiny), "tiny.gguf"), device, **options)


@pytest.fixture(scope="module")
def gemma() -> Iterator[Gemma]:
    with load() as loaded:
        yield loaded


@pytest.fixture(scope="module")
def on_gpu() -> Iterator[Gemma]:
    with load(device="gpu") as loaded:
        yield loaded


@needs_shared
@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("name", ["v1", "v2"])
def test_texts_agree_with_transformers(name: str, device: Any) -> None:
    """With the tokens around them, of which each file says which there are."""
    folder = SHARED / "embed" / name
    texts = json.loads((folder / "texts.json").read_text())
    truth = np.load(folder / "truth.npz")
    chosen = [number for number, text in enumerate(texts) if text is not None]
    with Gemma.load(next(folder.glob("*.gguf")), device, precision="exact") as model:
        found = model.embed([texts[number] for number in chosen])
        cut = model.embed([texts[chosen[3]]], size=256)
    np.testing.assert_allclose(
        found, truth["embeddings"][chosen], rtol=0, atol=VECTORS_OF_TRANSFORMERS
    )
    expected = truth["mrl256"][[chosen[3]]]
    np.testing.assert_allclose(cut, expected, rtol=0, atol=VECTORS_OF_TRANSFORMERS)


@pytest.mark.parametrize("kind", TINY)
def test_both_engines_agree(kind: str) -> None:
    with load(TINY[kind]) as cpu, load(TINY[kind], "gpu") as gpu:
        expected, found = cpu.embed(TEXTS), gpu.embed(TEXTS)
        assert gpu.memory_nbytes > 0
        assert (gpu.slots[0].busy, gpu.slots[0].tokens) == (False, 0)
    assert found.shape == (4, 64 if kind == "1" else 96)
    assert found.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(found, expected, rtol=0, atol=WITHIN)


def test_a_text_is_read_between_bos_and_eos(gemma: Gemma) -> None:
    tokenizer = gemma.tokenizer
    ids = [[tokenizer.bos, *tokenizer.encode(text), tokenizer.eos] for text in TEXTS]
    np.testing.assert_array_equal(gemma.embed(TEXTS), gemma.embed(ids))
    arrays = (np.array(text) for text in ids)
    np.testing.assert_array_equal(gemma.embed(TEXTS), gemma.embed(arrays))
    with load(EMBEDDING2) as other:  # which has no <eos>
        plain = [text[:-1] for text in ids if len(text) < 40]
        tokens = [[other.tokenizer.bos, *other.tokenizer.encode(text)] for text in TEXTS[:3]]
        assert len(plain) == 3
        np.testing.assert_array_equal(other.embed(TEXTS[:3]), other.embed(tokens))


def test_special_tokens_in_a_text_are_text(gemma: Gemma) -> None:
    assert 1 not in gemma.texts.read(["the <eos> end"]).ids[0][:-1]


@pytest.mark.parametrize("task", PREFIXES)
def test_tasks_have_the_prefixes_of_the_model_card(gemma: Gemma, task: Any) -> None:
    prefixed = [PREFIXES[task] + text for text in TEXTS]
    np.testing.assert_array_equal(gemma.embed(TEXTS, task=task), gemma.embed(prefixed))


def test_documents_have_titles(gemma: Gemma) -> None:
    titles = ["inner", None, "", "end"]
    pairs = zip(titles, TEXTS, strict=True)
    prefixed = [f"title: {title or 'none'} | text: {text}" for title, text in pairs]
    found = gemma.embed(TEXTS, "document", titles=titles)
    np.testing.assert_array_equal(found, gemma.embed(prefixed))


@pytest.mark.parametrize(
    ("task", "titles", "message"),
    [
        ("query", ["a", "b"], "Only documents have titles"),
        (None, ["a", "b"], "Only documents have titles"),
        ("document", ["a"], "There are 1 titles for 2 texts"),
        ("document", "ab", "titles must be a list"),
        ("document", ["a", 3], "Title 1 must be a string or None, not int"),
    ],
)
def test_wrong_titles(gemma: Gemma, task: Any, titles: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        gemma.embed(["in", "the"], task, titles=titles)


def test_the_prefixes() -> None:
    assert PREFIXES["query"] == "task: search result | query: "
    assert PREFIXES["document"] == "title: none | text: "
    assert PREFIXES["similarity"] == "task: sentence similarity | query: "
    assert PREFIXES["code"] == "task: code retrieval | query: "


def test_sizes_are_beginnings_of_length_one(gemma: Gemma) -> None:
    whole, cut = gemma.embed(TEXTS), gemma.embed(TEXTS, size=16)
    assert cut.shape == (4, 16)
    expected = whole[:, :16] / np.linalg.norm(whole[:, :16], axis=1, keepdims=True)
    np.testing.assert_allclose(cut, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_no_texts(device: str, gemma: Gemma, on_gpu: Gemma) -> None:
    model = gemma if device == "cpu" else on_gpu
    assert model.embed([]).shape == (0, 64)
    assert model.embed([], size=8).shape == (0, 8)


def test_batches_do_not_change_vectors(on_gpu: Gemma) -> None:
    texts = [word * 3 for word in ("the ", "in ", "er", "then ", "a", "b", "")] * 4
    for batch in (1, 20, 64):
        np.testing.assert_allclose(
            on_gpu.embed(texts, batch=batch), on_gpu.embed(texts), rtol=0, atol=WITHIN
        )


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_progress(device: str, gemma: Gemma, on_gpu: Gemma) -> None:
    model, seen = gemma if device == "cpu" else on_gpu, list[tuple[int, int]]()

    def stop(done: int, total: int) -> None:
        raise RuntimeError(f"{done} of {total}")

    model.embed(TEXTS, batch=1, progress=lambda *counts: seen.append(counts))
    assert seen == [(n + 1, 4) for n in range(4)]
    with pytest.raises(RuntimeError, match="1 of 4"):
        model.embed(TEXTS, batch=1, progress=stop)


@pytest.mark.parametrize("model", ["1", "2"])
def test_long_texts_are_cut_with_a_warning(model: str) -> None:
    """The last token remains <eos>, if there is one."""
    with load(TINY[model], context=16) as gemma:
        eos = [gemma.tokenizer.eos] if model == "1" else []
        whole = [gemma.tokenizer.bos, *gemma.tokenizer.encode("the " * 40)]
        expected = [*whole[: 16 - len(eos)], *eos]
        with pytest.warns(UserWarning, match="Text 1 has more than 16 tokens: the rest is not"):
            vectors = gemma.embed(["in", "the " * 40])
        with pytest.warns(UserWarning, match="2 of 2 texts have more than 16 tokens"):
            gemma.embed(["x" * 10**6, list(range(20, 60))])
        np.testing.assert_array_equal(vectors[1:], gemma.embed([expected]))
        fitting = [*whole[:14], gemma.tokenizer.eos, 30]
        gemma.embed([fitting])  # without a warning, which would be an error


def test_a_context_of_one_token() -> None:
    with load(EMBEDDING2, context=1) as gemma:
        assert gemma.embed([""]).shape == (1, 96)


@pytest.mark.parametrize("kind", TINY)
def test_adapters_change_vectors_alike_on_both_engines(kind: str, tmp_path: Path) -> None:
    gguf = open_tiny(TINY[kind])[0]
    folder = tmp_path / "adapter"
    write_peft_folder(tiny_adapter(tiny_pairs(gguf, (*LAYER, EMBEDDED))), folder)
    with load(TINY[kind]) as cpu, load(TINY[kind], "gpu") as gpu:
        plain = gpu.embed(TEXTS)
        for model in (cpu, gpu):
            model.set_lora(folder)
        found, expected = gpu.embed(TEXTS), cpu.embed(TEXTS)
        assert np.abs(found - plain).max() > 0.01
        np.testing.assert_allclose(found, expected, rtol=0, atol=10 * WITHIN)
        for model in (cpu, gpu):
            model.set_lora(None)
            model.attach_lora({"own": folder})
        np.testing.assert_array_equal(gpu.embed(TEXTS), plain)
        np.testing.assert_array_equal(gpu.embed(TEXTS, lora="own"), found)
        np.testing.assert_array_equal(cpu.embed(TEXTS, lora="own"), expected)
        np.testing.assert_array_equal(gpu.embed(TEXTS), plain)
        with pytest.raises(InputError, match="other"):
            gpu.embed(TEXTS, lora="other")


# Threads and tasks


def test_threads_and_tasks_take_turns(on_gpu: Gemma) -> None:
    expected = on_gpu.embed(TEXTS)
    found: list[np.ndarray] = []

    def work() -> None:
        found.append(on_gpu.embed(TEXTS, batch=8))

    async def tasks() -> None:
        found.extend(await asyncio.gather(*(on_gpu.aembed(TEXTS) for _ in range(3))))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    asyncio.run(tasks())
    for thread in threads:
        thread.join()
    assert len(found) == 6
    for vectors in found:
        np.testing.assert_allclose(vectors, expected, rtol=0, atol=WITHIN)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_cancelled_task_ends(device: str, gemma: Gemma, on_gpu: Gemma) -> None:
    model, done = gemma if device == "cpu" else on_gpu, list[int]()

    async def cancel() -> None:
        report = asyncio.Event()
        loop = asyncio.get_running_loop()

        def note(count: int, total: int) -> None:
            assert total == 5000
            done.append(count)
            loop.call_soon_threadsafe(report.set)

        task = asyncio.create_task(model.aembed(["the end"] * 5000, batch=1, progress=note))
        await report.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert done[-1] < 5000
    assert model.embed(["in"]).shape == (1, 64)


# Without numpy


def test_without_numpy_vectors_are_lists(on_gpu: Gemma, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = on_gpu.embed(TEXTS, size=16)
    imported = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "numpy":
            raise ImportError(name)
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    found: Any = on_gpu.embed(TEXTS, size=16)
    none: Any = on_gpu.embed([])
    monkeypatch.undo()
    assert isinstance(found, list)
    assert isinstance(found[0][0], float)
    assert none == []
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    assert unit_rows([memoryview(bytes(8)).cast("f")], 2) == [[0.0, 0.0]]


# Refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("the end",), "texts must be a list of texts"),
        ((None,), "texts must be a list of texts"),
        (([3],), "Text 0 must be a string or a list of token ids, not int"),
        ((["in", None],), "Text 1 must be a string or a list of token ids, not nothing"),
        (([b"in"],), "Text 0 must be a string"),
        (([bytearray(b"in")],), "Text 0 must be a string or a list of token ids, not bytearray"),
        (([[]],), "Text 0 has no ids"),
        (([[2, 999]],), "Text 0 holds the id 999 at position 1"),
        (([["in"]],), "Text 0 holds 'in' at position 0"),
        ((["in"], "search"), "The task 'search' does not exist; use query, document"),
        ((["in"], 3), "The task 3 does not exist"),
        ((["in"], None, 65), "A size of 65 is not possible; this model's vectors have 64"),
        ((["in"], None, 0), "A size of 0"),
        ((["in"], None, 2.5), "A size of 2.5"),
        ((["in"], None, True), "A size of True"),
    ],
    ids=str,
)
def test_wrong_arguments(gemma: Gemma, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        gemma.embed(*arguments)


@pytest.mark.parametrize("batch", [0, -1, 1.5, "many"])
def test_wrong_batches(gemma: Gemma, batch: Any) -> None:
    with pytest.raises(InputError, match="it must be a whole number of tokens above zero"):
        gemma.embed(["in"], batch=batch)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_model_that_writes_does_not_embed(device: str) -> None:
    with load(SMALL, device, context=32) as gemma:
        message = "tiny.gguf writes text and does not embed: load EmbeddingGemma"
        with pytest.raises(InputError, match=message):
            gemma.embed(["in"])
        with pytest.raises(InputError, match=message):
            gemma.embed([])


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_an_embedding_model_writes_no_text(device: str, gemma: Gemma, on_gpu: Gemma) -> None:
    model = gemma if device == "cpu" else on_gpu
    for write in (
        lambda: list(model.chat("the end")),
        lambda: list(model.chat("the end", tools=[{"name": "look", "parameters": {}}])),
        lambda: list(model.generate("the end")),
        lambda: list(model.batch(["the end"])),
        lambda: model.logits([2, 30]),
        model.fork,
        lambda: model.save("never"),
    ):
        with pytest.raises(InputError, match="an embedding model, which writes no text"):
            write()


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_closed_model(device: str) -> None:
    gemma = load(device=device)
    gemma.close()
    gemma.close()
    with pytest.raises(InputError, match="closed"):
        gemma.embed(["in"])


def with_tensors(*changed: NewTensor, without: tuple[str, ...]) -> BytesSource:
    tensors = [tensor for tensor in tiny_tensors(EMBEDDING) if tensor.name not in without]
    return BytesSource(gguf_bytes(tiny_metadata(EMBEDDING), [*tensors, *changed]), "tiny.gguf")


def test_a_file_without_dense_layers_is_announced() -> None:
    source = with_tensors(without=("dense_2.weight", "dense_3.weight"))
    with pytest.warns(UserWarning, match="tiny.gguf lacks EmbeddingGemma's dense layers"):
        gemma = Gemma.load(source, "cpu")
    with gemma, Gemma.load(BytesSource(tiny_gguf(EMBEDDING), "whole.gguf"), "cpu") as whole:
        assert np.abs(gemma.embed(["in"]) - whole.embed(["in"])).max() > 0.01


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_damaged_weights(device: Any) -> None:
    shape = next(t.shape for t in tiny_tensors(EMBEDDING) if t.name == "dense_3.weight")
    nan = NewTensor("dense_3.weight", shape, "F32", np.full(shape, np.nan, "<f4").tobytes())
    source = with_tensors(nan, without=("dense_3.weight",))
    with (
        Gemma.load(source, device, precision="exact") as gemma,
        pytest.raises(GgufError, match="NaN or infinity"),
    ):
        gemma.embed(["in"])


def test_the_usual_context_is_that_of_a_text() -> None:
    with load(replace(EMBEDDING2, context=100_000)) as gemma:
        assert gemma.context == 8192
