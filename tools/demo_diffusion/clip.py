"""Draw a reply while it is denoised, as `webgemma run --watch` shows it: an animated SVG."""

import argparse
from collections.abc import Iterator
from html import escape
from pathlib import Path

import shape  # noqa: F401  (puts src on the path)
from rich.console import Console
from rich.text import Text

from webgemma import Gemma
from webgemma.cli.watch import canvas_text

COLUMNS, SIZE, ADVANCE, LEADING, MARGIN = 92, 14, 8.4, 20, 18  # characters, then pixels
STEP_S, CANVAS_S, END_S = 0.22, 0.8, 5.0  # of a step, of a canvas's last one, of the reply
CLASSES = {"bold": "b", "dim": "d", "dim italic": "i", "green": "g"}
HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">
<title>{title}</title>
<style>
text {{ font: {size}px ui-monospace, Menlo, Consolas, monospace; fill: #c9d1d9; white-space: pre }}
.b {{ fill: #ffffff; font-weight: bold }} .g {{ fill: #7ee787 }}
.d {{ fill: #5d6672 }} .i {{ fill: #6e7681; font-style: italic }}
</style>
<rect width="100%" height="100%" rx="8" fill="#0d1117"/>
"""
Frame = tuple[float, list[Text]]  # seconds, lines
console = Console(width=COLUMNS, file=None)


def main() -> None:
    """Generate a reply and draw it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a DiffusionGemma")
    parser.add_argument("out", type=Path, help="the SVG to write")
    parser.add_argument("prompt", help='such as "Tell me a story about a frog."')
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--max-tokens", type=int)
    options = parser.parse_args()
    frames = list(screens(options))
    options.out.write_text(svg(frames, options.prompt))
    print("\n".join(line.plain for line in frames[-1][1]))
    print(f"{options.out}: {len(frames)} frames, {options.out.stat().st_size:,} bytes")


def screens(options: argparse.Namespace) -> Iterator[Frame]:
    """Yield the lines of the terminal after each step, and in the end."""
    values = {"seed": options.seed, "steps": options.steps, "max_tokens": options.max_tokens}
    settings = {name: value for name, value in values.items() if value is not None}
    shown = f'webgemma run focus.gguf "{options.prompt}" --watch'
    command = Text.assemble(("$ ", "green"), shown, "\n")
    with Gemma.load(options.model) as gemma:
        reply = Text()
        for piece in gemma.chat(options.prompt, watch=True, **settings):
            reply.append(piece.text)
            if piece.canvas is not None:
                seconds = CANVAS_S if piece.canvas.done else STEP_S
                canvas = canvas_text(piece.canvas, gemma.tokenizer)
                yield seconds, lines(Text.assemble(command, reply, canvas))
    yield END_S, lines(Text.assemble(command, reply))


def lines(text: Text) -> list[Text]:
    """Wrap a text as a terminal does."""
    return list(text.wrap(console, COLUMNS, overflow="fold"))


def svg(frames: list[Frame], title: str) -> str:
    """Return an SVG of all frames, each shown in its time; without animation, of the last one."""
    height = max(len(shown) for _, shown in frames) * LEADING + 2 * MARGIN
    width = round(COLUMNS * ADVANCE) + 2 * MARGIN
    total, start = sum(seconds for seconds, _ in frames), 0.0
    elements = [HEAD.format(width=width, height=height, title=escape(title), size=SIZE)]
    for number, (seconds, shown) in enumerate(frames):
        last = number == len(frames) - 1
        begin, end = start / total, 1.0 if last else (start + seconds) / total
        values, times = (
            ("none;inline", (0, begin)) if last else ("none;inline;none", (0, begin, end))
        )
        if not number:
            values, times = "inline;none", (0, end)
        at = ";".join(f"{time:.4f}" for time in times)
        elements.append(f'<g display="{"inline" if last else "none"}">')
        elements.append(
            f'<animate attributeName="display" calcMode="discrete" repeatCount="indefinite" '
            f'dur="{total:.2f}s" values="{values}" keyTimes="{at}"/>'
        )
        elements += [
            text_element(line, row) for row, line in enumerate(shown) if line.plain.strip()
        ]
        elements.append("</g>")
        start += seconds
    return "\n".join([*elements, "</svg>\n"])


def text_element(line: Text, row: int) -> str:
    """Return a line of text as an SVG element, as wide as its characters."""
    line = line.copy()
    line.rstrip()
    y = MARGIN + SIZE + row * LEADING
    runs = "".join(
        span(run.text, CLASSES.get(str(run.style), "")) for run in line.render(console) if run.text
    )
    length = f"{len(line.plain) * ADVANCE:.1f}"
    return f'<text x="{MARGIN}" y="{y}" textLength="{length}" xml:space="preserve">{runs}</text>'


def span(text: str, style: str) -> str:
    """Return a run of one style; characters that are not printable become spaces."""
    escaped = escape("".join(c if c.isprintable() else " " for c in text), quote=False)
    return f'<tspan class="{style}">{escaped}</tspan>' if style else escaped


if __name__ == "__main__":
    main()
