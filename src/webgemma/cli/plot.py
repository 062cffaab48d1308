"""The loss of a training: a line of bars for the terminal, an image for a file."""

from pathlib import Path

from PIL import Image, ImageDraw

from webgemma.cli.terminal import writes_unicode
from webgemma.errors import InputError

BARS, PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.,-=+*#"
SIZE, EDGE = (960, 540), 60  # of the image, in pixels
INK, FAINT, LINE = "#222222", "#bbbbbb", "#1f5fd0"


def bars(values: list[float], width: int = 60) -> str:
    """Return a line of at most `width` bars, each the mean of several values."""
    size = -(-len(values) // width)
    means = [sum(part) / len(part) for part in _runs(values, size)]
    low, high = min(means), max(means)
    spread = (high - low) or 1.0
    shapes = BARS if writes_unicode() else PLAIN_BARS
    return "".join(shapes[round(7 * (mean - low) / spread)] for mean in means)


def check_plot(path: Path) -> None:
    """Raise InputError if no image can be written there, before hours of training."""
    if path.suffix.lower() not in Image.registered_extensions():
        raise InputError(f"{path} has no known image ending; use a name like loss.png.")
    if not path.parent.is_dir():
        raise InputError(f"The plot cannot be written to {path}: there is no {path.parent}.")


def draw_losses(losses: list[float], path: Path) -> None:
    """Draw the loss of each step to an image file, whose ending decides its format."""
    image = Image.new("RGB", SIZE, "white")
    pen = ImageDraw.Draw(image)
    left, top, right, bottom = EDGE, EDGE // 2, SIZE[0] - EDGE // 2, SIZE[1] - EDGE
    highest = max([*losses, 1e-9])
    for part in range(5):
        y = bottom - (bottom - top) * part / 4
        pen.line((left, y, right, y), fill=FAINT)
        pen.text((8, y - 6), f"{highest * part / 4:.3g}", fill=INK)
    across = (right - left) / max(1, len(losses) - 1)
    points = [
        (left + at * across, bottom - (bottom - top) * loss / highest)
        for at, loss in enumerate(losses)
    ]
    pen.line(points * (2 if len(points) == 1 else 1), fill=LINE, width=3)
    pen.text((left, bottom + 16), "loss of each step", fill=INK)
    pen.text((right - 40, bottom + 16), f"{len(losses)} steps", fill=INK)
    try:
        image.save(path)
    except (OSError, ValueError) as error:  # ValueError: an unknown ending
        raise InputError(f"The plot cannot be written to {path}: {error}.") from None


def _runs(values: list[float], size: int) -> list[list[float]]:
    return [values[at : at + size] for at in range(0, len(values), size)]
