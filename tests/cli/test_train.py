"""`webgemma train`: data in, an adapter out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import gpu
from helpers.command import answer, refused, webgemma
from PIL import Image

from webgemma import Gemma
from webgemma.cli.plot import bars, draw_losses
from webgemma.errors import InputError
from webgemma.lora.data import Example
from webgemma.lora.loading import open_adapter
from webgemma.lora.schedule import Schedule

GPU = ("--gpu", gpu.device().name)
SMALL_ONE = ("--rank", 2, "--targets", "attn_q,ffn_down", "--batch", 2, *GPU)


def test_an_adapter_is_trained_and_can_be_run(model: Path, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    facts = answer(
        "train", model, data, "--out", folder, *SMALL_ONE, "--epochs", 4, "--learning-rate", 0.01
    )
    assert facts["steps"] == len(facts["losses"]) == 8
    assert not facts["stopped"]
    assert facts["losses"][-1] < facts["losses"][0]
    assert min(facts[f"{part}_nbytes"] for part in ("model", "adapter", "scratch")) > 0
    pairs = open_adapter(folder).pairs
    assert len(pairs) == 12
    assert all(pair.rank == 2 and any(pair.b) for pair in pairs.values())
    with Gemma.load(model, lora=[folder]) as gemma:
        assert list(gemma.generate("the a", max_tokens=2, temperature=0))


def test_the_best_adapter_is_saved(model: Path, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    options = ("--held-out", 0.25, "--epochs", 2, *SMALL_ONE)
    facts = answer("train", model, data, "--out", folder, *options)
    assert len(facts["held_out_losses"]) == 2
    assert open_adapter(folder / "best").pairs.keys() == open_adapter(folder).pairs.keys()


def test_an_estimate_trains_nothing(model: Path, data: Path, tmp_path: Path) -> None:
    result = webgemma("train", model, data, "--out", tmp_path / "a", *SMALL_ONE, "--estimate")
    assert result.exit_code == 0, result.output
    assert "4 rows: 4 examples" in result.stderr
    assert "batches of 2 x 32" in result.stderr
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--targets", "attn_x"), "no target 'attn_x'; there are: all, attention"),
        (("--schedule", "square"), "no schedule 'square'"),
        (("--learning-rate", 3), "learning rate must be above 0"),
        (("--rank", 0), "rank 0"),
        (("--batch", 0), "at least one sequence"),
        (("--dropout", 1), "dropout must be from 0"),
        (("--epochs", 0), "at least one epoch"),
        (("--rank", -1), "use 1 to 4096"),
        (("--rank", 999_999), "use 1 to 4096"),
        (("--max-length", -5), "at least 2 tokens"),
        (("--layers", "1-x"), "is not a range of layers; write them like 0-5,9"),
        (("--layers", "99"), "has layers 0 to"),
        (("--resume",), "there is nothing to resume"),
        (("--resume", "--force"), "choose one"),
        (("--checkpoint-steps", 0), "at least 1 step"),
        (("--checkpoint-minutes", -1), "minutes apart"),
    ],
)
def test_wrong_options_get_a_sentence(
    model: Path, data: Path, tmp_path: Path, options: Any, message: str
) -> None:
    assert message in refused("train", model, data, "--out", tmp_path / "none", *GPU, *options)
    assert not (tmp_path / "none").exists()


def test_a_plot_falls_with_the_loss() -> None:
    assert bars([4.0, 3.0, 2.0, 1.0]) == "█▆▃▁"
    assert len(bars([1.0] * 1000)) <= 60


def test_an_image_of_the_loss(tmp_path: Path) -> None:
    draw_losses([4.0, 3.0, 2.0, 1.0], tmp_path / "loss.png")
    image = np.asarray(Image.open(tmp_path / "loss.png").convert("RGB"))
    blue = (image == (0x1F, 0x5F, 0xD0)).all(axis=2)
    heights = [int(blue[:, x].argmax()) for x in (100, 500, 900)]
    assert heights == sorted(heights)  # it falls
    assert heights[0] < heights[-1]
    draw_losses([1.0], tmp_path / "one.png")
    for path in (tmp_path / "loss.nothing", tmp_path / "no" / "loss.png"):
        with pytest.raises(InputError, match="The plot cannot be written"):
            draw_losses([1.0], path)


@pytest.mark.parametrize(
    ("plot", "message"),
    [("loss.nothing", "has no known image ending"), ("no/loss.png", "there is no")],
)
def test_a_plot_that_cannot_be_written_is_refused_before_training(
    model: Path, data: Path, tmp_path: Path, plot: str, message: str
) -> None:
    out = tmp_path / "none"
    assert message in refused("train", model, data, "--out", out, "--plot", tmp_path / plot, *GPU)
    assert not out.exists()


def test_layers_are_chosen(model: Path, data: Path, tmp_path: Path) -> None:
    options = ("--layers", "0,2-3", "--steps", 1, "--plot", tmp_path / "loss.png", *GPU, "--json")
    webgemma("train", model, data, "--out", tmp_path / "some", "--gguf", *options)
    names = open_adapter(tmp_path / "some").pairs
    assert open_adapter(tmp_path / "some" / "adapter.gguf").pairs == names
    assert {name.split(".")[1] for name in names} == {"0", "2", "3"}
    assert (tmp_path / "loss.png").stat().st_size > 1000


def test_a_schedule_counts_its_steps() -> None:
    examples = [Example((2, 3), (True, True), line) for line in range(5)]
    assert len(Schedule(epochs=2).steps(examples, 2)) == 6
    assert len(Schedule(epochs=2, accumulate=2).steps(examples, 2)) == 4
    for total in (3, 50):  # fewer and more than three epochs have
        assert len(Schedule(max_steps=total).steps(examples, 2)) == total
    rates = Schedule(learning_rate=0.1, warmup=0.5).learning_rates(10)
    assert rates.at(4) == pytest.approx(0.1)
