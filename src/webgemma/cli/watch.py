"""`webgemma run --watch`: the canvas after each step, accepted text bright and noise dim."""

from collections.abc import Iterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from webgemma.api import Gemma
from webgemma.cli.terminal import out
from webgemma.denoising import Canvas
from webgemma.replies import Piece, canvas_runs
from webgemma.text.tokenizer import Tokenizer


def watched(pieces: Iterator[Piece], gemma: Gemma, console: Console = out) -> Iterator[Piece]:
    """Yield the pieces of a reply; on a terminal, draw the canvas between them."""
    live: Live | None = None
    try:
        for piece in pieces:
            if piece.canvas is None:
                yield piece
                continue
            if not console.is_terminal:
                continue
            if live is None:
                live = Live(console=console, transient=True, auto_refresh=False)
                live.start()
            live.update(canvas_text(piece.canvas, gemma.tokenizer), refresh=True)
            if piece.canvas.done:
                live.stop()
                live = None
    finally:
        if live is not None:
            live.stop()


def canvas_text(canvas: Canvas, tokenizer: Tokenizer) -> Text:
    """Return the canvas as text, with its number and step."""
    text = Text(overflow="fold")
    for run, is_accepted in canvas_runs(canvas, tokenizer):
        text.append(run, style="bold" if is_accepted else "dim")
    accepted, count = sum(canvas.accepted), len(canvas.ids)
    facts = f"\ncanvas {canvas.number + 1}, step {canvas.step}: {accepted} of {count} accepted"
    text.append(facts, style="dim italic")
    return text
