"""Draw docs/terminal.svg: real commands and their output, as a terminal shows them."""

import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COMMANDS = (
    (
        "echo 'Hello, who are you?' | webgemma run --seed 2",
        ["run", "--seed", "2"],
        "Hello, who are you?",
    ),
    ("webgemma show -", ["show", "-"], ""),
)
# rich's own SVG template, without the fonts that it would fetch from a server.
SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


def main() -> None:
    """Run the commands and save their output as an SVG."""
    console = Console(record=True, width=96, file=open(os.devnull, "w"))  # noqa: SIM115
    env = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": "96"}
    for line, args, stdin in COMMANDS:
        result = subprocess.run(
            [sys.executable, "-m", "webgemma", *args],
            input=stdin,
            capture_output=True,
            text=True,
            env=env,
            check=True,
        )
        console.print(Text.assemble(("$ ", "green"), (line, "bold")))
        console.print(Text.from_ansi(result.stdout))
    target = Path(__file__).with_suffix(".svg")
    console.save_svg(str(target), title="webgemma", code_format=SVG, unique_id="webgemma")


if __name__ == "__main__":
    main()
