"""`webgemma train`: data in, an adapter out, and going on with it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import gpu
from helpers.command import answer, refused, webgemma
from helpers.tiny import SMALL, tiny_gguf
from PIL import Image

from webgemma import Gemma
from webgemma.cli.plot import bars, draw_losses
from webgemma.errors import InputError
from webgemma.lora.adapter import Adapter
from webgemma.lora.course import Course
from webgemma.lora.trainer import Trainer

GPU = ("--adapter", gpu.device().name)
SMALL_ONE = ("--rank", 2, "--parts", "attn_q,ffn_down", "--batch", 2, *GPU)
PLAIN = ("--schedule", "constant", "--warmup", 0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf(SMALL))
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{"prompt": f"the {x}", "completion": f"{x} in the {x}"} for x in "abcd"]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_an_adapter_is_trained_and_can_be_run(model: Path, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    told = answer("train", model, data, "--out", folder, *SMALL_ONE, "--epochs", 4, "--rate", 0.01)
    assert told["steps"] == len(told["losses"]) == 8
    assert not told["stopped"]
    assert told["losses"][-1] < told["losses"][0]
    assert min(told[f"{part}_nbytes"] for part in ("model", "adapter", "work")) > 0
    pairs = Adapter.open(folder).pairs
    assert len(pairs) == 12
    assert all(pair.rank == 2 and any(pair.b) for pair in pairs.values())
    with Gemma.load(model, lora=[folder]) as gemma:
        assert list(gemma.generate("the a", max_tokens=2, temperature=0))


def test_the_best_is_kept(model: Path, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    options = ("--evaluation", 0.25, "--epochs", 2, *SMALL_ONE)
    told = answer("train", model, data, "--out", folder, *options)
    assert len(told["judged"]) == 2
    assert Adapter.open(folder / "best").pairs.keys() == Adapter.open(folder).pairs.keys()


def test_stopped_and_gone_on_with_is_as_in_one_go(
    model: Path, data: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "parts"
    options = ("--epochs", 2, *SMALL_ONE, *PLAIN)
    wanted = answer("train", model, data, "--out", whole, *options)["losses"]
    step = Trainer.step

    async def interrupted(self: Trainer, *given: Any) -> Any:
        if self.steps == 2:
            raise KeyboardInterrupt
        return await step(self, *given)

    monkeypatch.setattr(Trainer, "step", interrupted)
    first = webgemma("train", model, data, "--out", folder, *options)
    assert first.exit_code == 0, first.output
    assert "stopped after 2 steps" in first.stdout
    assert "--resume goes on" in first.stdout
    monkeypatch.undo()
    rest = answer("train", model, data, "--out", folder, *options, "--resume")
    assert rest["losses"] == pytest.approx(wanted[2:], rel=1e-4)


def test_an_estimate_trains_nothing(model: Path, data: Path, tmp_path: Path) -> None:
    result = webgemma("train", model, data, "--out", tmp_path / "a", *SMALL_ONE, "--estimate")
    assert result.exit_code == 0, result.output
    assert "4 rows: 4 examples" in result.stderr
    assert "batches of 2 x 32" in result.stderr
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--parts", "attn_x"), "no part 'attn_x' to adapt; take of all, attention"),
        (("--schedule", "square"), "no schedule 'square'"),
        (("--rate", 3), "learning rate must be above 0"),
        (("--rank", 0), "rank 0"),
        (("--batch", 0), "at least one sequence"),
        (("--dropout", 1), "dropout must be from 0"),
        (("--epochs", 0), "at least one epoch"),
        (("--rank", -1), "take 1 to 4096"),
        (("--rank", 999_999), "take 1 to 4096"),
        (("--max-length", -5), "at least 2 tokens"),
        (("--layers", "1-x"), "names no layers; write them like 0-5,9"),
        (("--layers", "99"), "has the layers 0 to"),
        (("--resume",), "no file"),
    ],
)
def test_what_cannot_be(model: Path, data: Path, tmp_path: Path, options: Any, said: str) -> None:
    assert said in refused("train", model, data, "--out", tmp_path / "none", *GPU, *options)


def test_a_plot_falls_with_the_loss() -> None:
    assert bars([4.0, 3.0, 2.0, 1.0]) == "█▆▃▁"
    assert len(bars([1.0] * 1000)) <= 60


def test_a_picture_of_the_loss(tmp_path: Path) -> None:
    draw_losses([4.0, 3.0, 2.0, 1.0], tmp_path / "loss.png")
    picture = np.asarray(Image.open(tmp_path / "loss.png").convert("RGB"))
    blue = (picture == (0x1F, 0x5F, 0xD0)).all(axis=2)
    heights = [int(blue[:, x].argmax()) for x in (100, 500, 900)]
    assert heights == sorted(heights)  # it falls
    assert heights[0] < heights[-1]
    draw_losses([1.0], tmp_path / "one.png")
    for path in (tmp_path / "loss.nothing", tmp_path / "no" / "loss.png"):
        with pytest.raises(InputError, match="The plot cannot be written"):
            draw_losses([1.0], path)


@pytest.mark.parametrize(
    ("plot", "said"),
    [("loss.nothing", "ends like no kind of picture"), ("no/loss.png", "there is no")],
)
def test_a_plot_that_cannot_be_is_said_before_training(
    model: Path, data: Path, tmp_path: Path, plot: str, said: str
) -> None:
    out = tmp_path / "none"
    assert said in refused("train", model, data, "--out", out, "--plot", tmp_path / plot, *GPU)
    assert not out.exists()


def test_layers_are_chosen(model: Path, data: Path, tmp_path: Path) -> None:
    options = ("--layers", "0,2-3", "--steps", 1, "--plot", tmp_path / "loss.png", *GPU, "--json")
    webgemma("train", model, data, "--out", tmp_path / "some", "--gguf", *options)
    names = Adapter.open(tmp_path / "some").pairs
    assert Adapter.open(tmp_path / "some" / "adapter.gguf").pairs == names
    assert {name.split(".")[1] for name in names} == {"0", "2", "3"}
    assert (tmp_path / "loss.png").stat().st_size > 1000


def test_a_course_counts_its_steps() -> None:
    from webgemma.lora.data import Example

    examples = [Example((2, 3), (True, True), line) for line in range(5)]
    assert len(Course(epochs=2).steps(examples, 2)) == 6
    assert len(Course(epochs=2, accumulate=2).steps(examples, 2)) == 4
    for total in (3, 50):  # fewer and more than three epochs have
        assert len(Course(total=total).steps(examples, 2)) == total
    schedule = Course(rate=0.1, warmup=0.5).schedule(10)
    assert schedule.rate(4) == pytest.approx(0.1)
