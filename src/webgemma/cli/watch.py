"""`webgemma run --watch`: a block comes into focus, settled text bright and noise dim."""

from collections.abc import Iterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from webgemma.api import Gemma
from webgemma.cli.terminal import out
from webgemma.denoising import Canvas
from webgemma.pieces import Piece, spelled
from webgemma.text.tokenizer import Tokenizer


def watched(pieces: Iterator[Piece], gemma: Gemma, console: Console = out) -> Iterator[Piece]:
    """The pieces of a reply; on a terminal, the canvas is drawn over and over until it is done."""
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
            live.update(picture(piece.canvas, gemma.tokenizer), refresh=True)
            if piece.canvas.done:
                live.stop()
                live = None
    finally:
        if live is not None:
            live.stop()


def picture(canvas: Canvas, tokenizer: Tokenizer) -> Text:
    """The canvas as text, and how far it is."""
    text = Text(overflow="fold")
    for run, is_settled in spelled(canvas, tokenizer):
        text.append(run, style="bold" if is_settled else "dim")
    settled = sum(canvas.accepted)
    facts = (
        f"\nblock {canvas.block + 1}, step {canvas.step}: {settled} of {len(canvas.ids)} settled"
    )
    text.append(facts, style="dim italic")
    return text
