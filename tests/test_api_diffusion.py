"""DiffusionGemma in the API and the command line: canvases, their settings, and errors."""

from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from helpers.tiny import DIFFUSION, SMALL, tiny_gguf
from rich.console import Console
from typer.testing import CliRunner

from webgemma import Canvas, Gemma, InputError, Piece
from webgemma.cli.program import app
from webgemma.cli.watch import canvas_text, watched

IDS = [2, *range(30, 51)]
CANVAS = DIFFUSION.canvas
DEVICES = ("cpu", "gpu")
QUICK = {"steps": 2, "entropy_bound": 3.0, "seed": 5}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    path.write_bytes(tiny_gguf(DIFFUSION))
    return path


@pytest.fixture(scope="module", params=DEVICES)
def gemma(path: Path, request: pytest.FixtureRequest) -> Iterator[Gemma]:
    with Gemma.load(path, request.param, context=100, kv="f32") as gemma:
        yield gemma


def test_both_devices_generate_the_same_tokens(path: Path) -> None:
    replies = []
    for device in DEVICES:
        with Gemma.load(path, device, context=100, kv="f32") as gemma:
            replies.append([piece.token for piece in gemma.generate(IDS, max_tokens=20, **QUICK)])
    assert replies[0] == replies[1]
    assert len(replies[0]) == 20  # all of a canvas, and some of the next


def test_tokens_come_canvas_by_canvas_and_steps_with_watch(gemma: Gemma) -> None:
    plain = list(gemma.generate(IDS, max_tokens=15, **QUICK))
    assert [piece.finish for piece in plain] == [""] * 14 + ["length"]
    assert all(piece.canvas is None for piece in plain)
    pieces = list(gemma.generate(IDS, max_tokens=15, watch=True, **QUICK))
    assert [piece for piece in pieces if piece.canvas is None] == plain
    canvases = [piece.canvas for piece in pieces if piece.canvas]
    assert [(x.number, x.step, x.done) for x in canvases] == [
        *((0, 1, False), (0, 2, True), (1, 1, False), (1, 2, True))
    ]
    assert all(piece.token == -1 and not piece.text for piece in pieces if piece.canvas)
    assert list(canvases[1].best) == [piece.token for piece in plain[:CANVAS]]
    assert list(canvases[1].logprobs) == [piece.logprob for piece in plain[:CANVAS]]
    assert all(any(canvas.accepted) for canvas in canvases)


def test_seed_and_settings_determine_the_tokens(gemma: Gemma) -> None:
    def tokens(**settings: float) -> list[int]:
        return [p.token for p in gemma.generate(IDS, max_tokens=CANVAS, **(QUICK | settings))]

    assert tokens() == tokens()
    assert tokens() != tokens(seed=6)
    assert tokens() != tokens(steps=1)
    pieces = gemma.generate(IDS, max_tokens=1, watch=True, **(QUICK | {"entropy_bound": 1e6}))
    assert all(all(piece.canvas.accepted) for piece in pieces if piece.canvas)


def test_the_schedule_of_the_file_is_the_default(gemma: Gemma) -> None:
    pieces = list(gemma.generate(IDS, max_tokens=1, seed=5, watch=True))
    assert sum(piece.canvas is not None for piece in pieces) == 4  # eb_max_steps


def test_a_generation_may_be_closed_at_any_step(gemma: Gemma) -> None:
    expected = [piece.token for piece in gemma.generate(IDS, max_tokens=CANVAS, **QUICK)]
    stream = gemma.generate(IDS, watch=True, **QUICK)
    assert next(stream).canvas is not None
    stream.close()
    again = [piece.token for piece in gemma.generate(IDS, max_tokens=CANVAS, **QUICK)]
    assert again == expected


def test_the_context_holds_whole_canvases(gemma: Gemma) -> None:
    pieces = list(gemma.generate([2] * 60, **QUICK))
    assert len(pieces) == (100 - 60) // CANVAS * CANVAS or pieces[-1].finish == "stop"
    with pytest.raises(InputError, match="no space for a canvas of 12 in a context of 100"):
        list(gemma.generate([2] * 89, **QUICK))
    assert list(gemma.generate(IDS, max_tokens=0)) == []


def test_a_chat_ends_at_an_end_token(gemma: Gemma, monkeypatch: pytest.MonkeyPatch) -> None:
    first = next(gemma.chat("the thin", **QUICK))
    monkeypatch.setattr(gemma.tokenizer, "ends", frozenset({first.token}))
    (only,) = gemma.chat("the thin", **QUICK)
    assert (only.token, only.finish) == (first.token, "stop")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_k": 5}, "top_k does not apply to a model that denoises canvases; there are: max"),
        ({"temperature": 0.5}, "temperature does not apply"),
        ({"steps": 0}, "steps is 0"),
        ({"t_min": -1.0}, "t_min is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"wrong": 1}, "There is no setting 'wrong'"),
    ],
)
def test_invalid_settings_raise_an_error(
    gemma: Gemma, settings: dict[str, float], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        list(gemma.generate(IDS, **settings))


def test_logits_raise_an_error(gemma: Gemma) -> None:
    with pytest.raises(InputError, match="no logits of a next token"):
        gemma.logits(IDS)


def test_settings_of_canvases_do_not_apply_to_other_models(tmp_path: Path) -> None:
    (tmp_path / "small.gguf").write_bytes(tiny_gguf(SMALL))
    with (
        Gemma.load(tmp_path / "small.gguf", "cpu") as gemma,
        pytest.raises(InputError, match="steps does not apply to a model that samples tokens"),
    ):
        list(gemma.generate(IDS, steps=3))


def test_conversations_are_saved_and_forked(path: Path, tmp_path: Path) -> None:
    with Gemma.load(path, "gpu", context=100, kv="f32") as gemma:
        tokens = [piece.token for piece in gemma.generate(IDS, max_tokens=CANVAS, **QUICK)]
        gemma.save(tmp_path / "saved")
        assert gemma.restore(tmp_path / "saved") == IDS
        with gemma.fork() as other:
            again = [piece.token for piece in other.generate(IDS, max_tokens=CANVAS, **QUICK)]
        assert again == tokens


def test_the_command_line_streams_canvases(path: Path) -> None:
    options = ["--device", "cpu", "--max-tokens", "14", "--steps", "2", "--seed", "5"]
    plain = CliRunner().invoke(app, ["run", str(path), "the thin", *options])
    assert plain.exit_code == 0, plain.output
    watching = CliRunner().invoke(app, ["run", str(path), "the thin", "--watch", *options])
    assert watching.output == plain.output  # canvases are drawn on a terminal only
    facts = CliRunner().invoke(app, ["run", str(path), "the thin", "--watch", "--json", *options])
    assert facts.exit_code == 0, facts.output
    assert "-1" not in facts.output.split('"tokens"')[1].split("]")[0].split()
    invalid = CliRunner().invoke(app, ["run", str(path), "the thin", "--top-k", "3", *options])
    assert invalid.exit_code == 1
    assert "top_k does not apply" in invalid.output


def test_check_supports_it_and_bench_names_another_program(path: Path) -> None:
    checked = CliRunner().invoke(app, ["check", str(path), "--gpu", ""])
    assert checked.exit_code == 0, checked.output
    assert "Everything agrees" in checked.output
    timed = CliRunner().invoke(app, ["bench", str(path), "--device", "gpu"])
    assert timed.exit_code == 1
    assert "bench/diffusion.py" in timed.output


@pytest.mark.parametrize("colours", [True, False])
def test_a_terminal_draws_the_canvas(path: Path, colours: bool) -> None:
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, no_color=not colours, width=80)
    with Gemma.load(path, "cpu", context=100) as gemma:
        pieces = gemma.generate(IDS, max_tokens=CANVAS, watch=True, **QUICK)
        yielded = list(watched(pieces, gemma, console))
    assert len(yielded) == CANVAS
    assert all(piece.canvas is None for piece in yielded)
    assert "canvas 1, step 1: " in screen.getvalue()
    assert "canvas 1, step 2: " in screen.getvalue()


def test_accepted_text_is_bold_and_noise_dim(path: Path) -> None:
    with Gemma.load(path, "cpu", context=100) as gemma:
        tokenizer = gemma.tokenizer
        line_break = tokenizer.encode("\n")[0]
        ids = (tokenizer.encode("the")[0], line_break, tokenizer.bos, line_break)
        canvas = Canvas(0, 3, ids, (True, False, True, True), ids, (0.0,) * 4, 0.5, False)
        text = canvas_text(canvas, tokenizer)
    assert text.plain == "the↵\n\ncanvas 1, step 3: 3 of 4 accepted"
    assert [str(span.style) for span in text.spans[:2]] == ["bold", "dim"]


def test_pieces_without_canvases_are_unchanged(path: Path) -> None:
    with Gemma.load(path, "cpu", context=100) as gemma:
        pieces = [Piece(5, "a", -0.5), Piece(6, "b", -0.5, finish="stop")]
        assert list(watched(iter(pieces), gemma)) == pieces
