"""`webgemma embed`: files of texts, arrays and JSON lines, notes, and errors of one sentence."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.command import answer, refused
from helpers.tiny import EMBEDDING, EMBEDDING2, SMALL, tiny_gguf
from helpers.tiny_vision import SMALL_VISION, vision_gguf
from PIL import Image
from typer.testing import CliRunner, Result

from webgemma import Gemma
from webgemma.cli import embed
from webgemma.cli.program import app
from webgemma.embeddings import PREFIXES

LINES = ["the inner", "", "  in the end ", "“thin”"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "embedding.gguf"
    path.write_bytes(tiny_gguf(EMBEDDING))
    return path


@pytest.fixture(scope="module")
def expected(model: Path) -> np.ndarray:
    with Gemma.load(model, "cpu") as gemma:
        return gemma.embed(LINES, task="query", size=32)


def run(model: Path, *args: object, typed: str | None = None) -> Result:
    options = ["--model", model, "--device", "cpu", "--task", "query", "--size", "32"]
    runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"})
    return runner.invoke(app, [str(arg) for arg in ("embed", *args, *options)], input=typed)


def lines_of(result: Result) -> list[dict[str, object]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_text_a_line(model: Path, expected: np.ndarray, tmp_path: Path, newline: str) -> None:
    texts, to = tmp_path / "texts.txt", tmp_path / "vectors.npy"
    texts.write_bytes((newline.join(LINES) + newline).encode())
    result = run(model, texts, "--out", to)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{to}: 4 x 32 float32\n"
    assert result.stderr == ""
    np.testing.assert_array_equal(np.load(to), expected)


def test_json_lines_keep_their_fields(model: Path, expected: np.ndarray, tmp_path: Path) -> None:
    rows = [{"id": number, "text": text} for number, text in enumerate(LINES)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n\n".join(map(json.dumps, rows)))
    found = lines_of(run(model, file, "--jsonl"))
    assert [{"id": row["id"], "text": row["text"]} for row in found] == rows
    np.testing.assert_allclose([row["embedding"] for row in found], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("is_json", [True, False])
def test_standard_input(model: Path, expected: np.ndarray, is_json: bool) -> None:
    lines = [json.dumps({"text": text}) for text in LINES] if is_json else LINES
    found = lines_of(run(model, "-", "--jsonl", typed="\n".join(lines) + "\n"))
    assert [row["text"] for row in found] == LINES
    np.testing.assert_allclose([row["embedding"] for row in found], expected, rtol=0, atol=1e-6)


def test_many_rows_are_computed_some_at_a_time(
    model: Path, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(embed, "ROWS_AT_ONCE", 3)
    to = tmp_path / "vectors.npy"
    assert run(model, "-", "--out", to, typed="\n".join(LINES)).exit_code == 0
    np.testing.assert_array_equal(np.load(to), expected)


def test_facts_for_scripts(model: Path, tmp_path: Path) -> None:
    texts, to = tmp_path / "texts.txt", tmp_path / "vectors.npy"
    texts.write_text("the\nend\n")
    facts = answer("embed", texts, "--model", model, "--device", "cpu", "--out", to)
    assert facts == {"out": str(to), "shape": [2, 64]}


def test_cut_texts_are_noted(model: Path, tmp_path: Path) -> None:
    to = tmp_path / "vectors.npy"
    result = run(model, "-", "--out", to, "--context", 64, typed="the " * 90)
    assert result.exit_code == 0
    assert result.stderr == "note: Text 0 has more than 64 tokens: the rest is not embedded.\n"


def test_cut_texts_are_counted_over_all(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(embed, "ROWS_AT_ONCE", 2)
    typed = "\n".join(["in", "in", "in", "the " * 90])
    result = run(model, "-", "--out", tmp_path / "x.npy", "--context", 64, typed=typed)
    assert result.stderr.startswith("note: Text 3 has more than 64 tokens")


def test_the_tasks_are_those_of_python() -> None:
    assert {task.value for task in embed.Task} == set(PREFIXES)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("none.txt", None, "There is no file"),
        (".", None, "is a folder; name a file."),
        ("empty.txt", b"", "has no texts."),
        ("empty.jsonl", b"\n \n", "has no texts."),
        ("latin.txt", b"\xe9", "is not UTF-8 text"),
        ("rows.jsonl", b'{"text": "a"}\n{"text', "line 2, is not JSON"),
        ("rows.jsonl", b'{"text": "a"}\n\n{"name": 3}', "line 3, must be an object with a text"),
        ("rows.jsonl", b'["a"]', "line 1, must be an object with a text"),
        ("rows.jsonl", b'{"text": 3}', "line 1, must be an object with a text"),
    ],
)
def test_files_that_cannot_be_read(
    model: Path, tmp_path: Path, name: str, content: bytes | None, sentence: str
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    assert sentence in refused("embed", file, "--model", model, "--jsonl")


def test_wrong_options(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("in")
    given = ("embed", file, "--model", model)
    assert "--out FILE.npy, or --jsonl" in refused(*given)
    assert "--out FILE.npy, or --jsonl" in refused(*given, "--jsonl", "--out", tmp_path / "x.npy")
    assert "there is no folder" in refused(*given, "--out", tmp_path / "none" / "x.npy")
    assert "A size of 65 is not possible" in refused(*given, "--jsonl", "--size", 65)


def test_what_cannot_be_written_is_refused_before_it_is_computed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("in")
    monkeypatch.setattr(Gemma, "load", lambda *_, **__: pytest.fail("a model is loaded"))
    given = ("embed", file, "--model", model, "--out")
    assert "is a folder; name a file in it" in refused(*given, tmp_path)
    assert "is the file that is read" in refused(*given, file)
    assert file.read_text() == "in"
    if sys.platform == "linux":  # where nobody may write
        assert "/proc/x.npy cannot be written: " in refused(*given, "/proc/x.npy")


def test_a_model_that_writes_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    model, file = tmp_path / "small.gguf", tmp_path / "texts.txt"
    model.write_bytes(tiny_gguf(SMALL))
    file.write_text("in")
    sentence = refused("embed", file, "--model", model, "--jsonl")
    assert "writes text and does not embed: load EmbeddingGemma" in sentence


def test_show_describes_the_vectors(model: Path) -> None:
    assert answer("show", model)["embedding"] == {"size": 64, "complete": True}
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["show", str(model)]).stdout
    assert "64 numbers" in shown


@pytest.mark.parametrize("command", ["run", "bench", "check"])
def test_an_embedding_model_is_refused_by_what_writes(model: Path, command: str) -> None:
    message = ["in the end"] if command == "run" else []
    sentence = refused(command, model, *message)
    assert "is an embedding model, which writes no text" in sentence


@pytest.mark.skipif(os.name == "nt", reason="signals of one process only")
def test_ctrl_c_leaves_nothing_half_done(model: Path, tmp_path: Path) -> None:
    texts, to = tmp_path / "texts.txt", tmp_path / "vectors.npy"
    texts.write_text("in the end there is the inner thing\n" * 20_000)
    program = "import webgemma.cli; webgemma.cli.main()"
    command = [sys.executable, "-c", program, "embed", texts, "--model", model, "--out", to]
    process = subprocess.Popen(
        [*map(str, command), "--device", "cpu"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=2.5)
    process.send_signal(signal.SIGINT)
    output, error = process.communicate(timeout=60)
    assert (process.returncode, output, error) == (130, b"", b"")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts.txt"]


# Images


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    (folder / "model.gguf").write_bytes(tiny_gguf(replace(EMBEDDING2, context=512)))
    (folder / "mmproj.gguf").write_bytes(vision_gguf(replace(SMALL_VISION, positions=96)))
    for number, name in enumerate(("cat.png", "dog.png")):
        pixels = np.random.default_rng(number).integers(0, 256, (24, 36, 3), np.uint8)
        Image.fromarray(pixels).save(folder / name)
    return folder


def test_images_after_texts(seeing: Path, tmp_path: Path) -> None:
    cat, dog = seeing / "cat.png", seeing / "dog.png"
    with Gemma.load(seeing / "model.gguf", "cpu", mmproj=seeing / "mmproj.gguf") as gemma:
        parts = [[{"type": "image", "path": path}] for path in (cat, dog)]
        expected = gemma.embed(["the inner", *parts], task="query", size=32)
    texts, to = tmp_path / "texts.txt", tmp_path / "vectors.npy"
    texts.write_text("the inner\n")
    given = ("--image", cat, "--image", dog, "--mmproj", seeing / "mmproj.gguf")
    result = run(seeing / "model.gguf", texts, *given, "--out", to)
    assert result.exit_code == 0, result.output
    np.testing.assert_allclose(np.load(to), expected, rtol=0, atol=1e-6)
    lines = lines_of(run(seeing / "model.gguf", *given, "--jsonl"))
    assert [line["image"] for line in lines] == [str(cat), str(dog)]
    np.testing.assert_allclose([x["embedding"] for x in lines], expected[1:], rtol=0, atol=1e-6)


def test_media_that_cannot_be_embedded(seeing: Path, model: Path, tmp_path: Path) -> None:
    options = ("--jsonl", "--device", "cpu", "--model")
    assert "Say what to embed" in refused("embed", *options, model)
    assert "There is no file" in refused("embed", *options, model, "--audio", tmp_path / "no.wav")
    cat = seeing / "cat.png"
    assert f"error: {model.name} reads text only" in refused(
        "embed", *options, model, "--image", cat
    )
    message = refused("embed", *options, seeing / "model.gguf", "--image", cat)
    assert "cannot read images" in message
