"""What notebooks show: replies while they are written, the progress of loading, a model.

IPython (Jupyter, JupyterLite) asks the last value of a cell how it is shown. It is imported only
where it runs already; programs see iterators as ever. What models write is escaped."""

import asyncio
import base64
import json
import sys
import time
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

from webgemma.denoising import Canvas
from webgemma.errors import WebgemmaError
from webgemma.replies import Piece
from webgemma.text.parser import ToolCall

UPDATE_SECONDS = 0.1  # between two updates of what is shown
MAX_IMAGE_NBYTES = 4_000_000  # of one that is shown; notebooks store what they show
IMAGES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}  # heads
Bundle: TypeAlias = dict[str, str]

_tasks: set["asyncio.Task[None]"] = set()  # that show replies; the event loop holds weak references


def shell() -> Any:
    """Return the IPython that runs this code, or None."""
    module = sys.modules.get("IPython")
    return module.get_ipython() if module is not None else None


def is_notebook() -> bool:
    """Return whether what is shown can be changed afterwards: in a notebook, not in a terminal."""
    running = shell()
    return running is not None and type(running).__name__ != "TerminalInteractiveShell"


class Output:
    """One place in a cell's output, whose content changes."""

    def __init__(self, content: Any) -> None:
        self._content = content
        self._handle = self._show(display_id=True)
        self._update_seconds = time.monotonic()

    def update(self, *, at_once: bool = False) -> None:
        """Show the content as it is now, unless that was done just now."""
        now = time.monotonic()
        if at_once or now - self._update_seconds >= UPDATE_SECONDS:
            self._update_seconds = now
            self._handle.update(self._content)

    def _show(self, **options: Any) -> Any:
        from IPython import display

        show: Any = display.display
        return show(self._content, **options)


# Replies


class Reply:
    """What a reply has said so far, as text and HTML."""

    def __init__(self, given: object = ()) -> None:
        self._images = list(_images(given))
        self._text, self._thinking = "", ""
        self._calls: list[ToolCall] = []
        self._canvas: Canvas | None = None
        self._error = ""
        self._is_cut = False

    def read(self, piece: Piece) -> None:
        """Add a piece."""
        self._text += piece.text
        self._thinking += piece.thinking
        self._calls += piece.tool_calls
        self._canvas = piece.canvas
        self._is_cut |= piece.finish == "length"

    def fail(self, error: WebgemmaError) -> None:
        """Say why there is no more of it."""
        self._error = str(error)

    def __repr__(self) -> str:
        calls = [_call(call) for call in self._calls]
        canvas = self._noise() if self._canvas else ""
        return "\n".join(filter(None, [self._text + canvas, *calls, self._error]))

    def _repr_mimebundle_(self, **_: object) -> Bundle:
        parts = [f'<img src="{escape(image)}" style="max-height: 12em">' for image in self._images]
        if self._thinking:
            is_open = "" if self._text or self._calls else " open"
            parts.append(f"<details{is_open}><summary>Thought</summary>{_html(self._thinking)}")
            parts.append("</details>")
        if self._text:
            parts.append(_html(self._text))
        if self._canvas:
            parts.append(f'<div style="opacity: 0.6">{_html(self._noise())}</div>')
        parts += [f"<pre>{escape(_call(call))}</pre>" for call in self._calls]
        if self._is_cut:
            parts.append("<p><small>The reply was cut by max_tokens or the context.</small></p>")
        if self._error:
            parts.append(f"<p><strong>{escape(self._error)}</strong></p>")
        return {"text/plain": repr(self), "text/html": "".join(parts)}

    def _noise(self) -> str:
        assert self._canvas is not None
        kept = sum(self._canvas.accepted)
        return f"(canvas {self._canvas.number + 1}: {kept} of {len(self._canvas.ids)} tokens)"


class Stream(Generator[Piece, None, None]):
    """Pieces of a reply to iterate over. As the last value of a cell it shows the reply."""

    def __init__(self, stream: Iterator[Piece], given: object = ()) -> None:
        self._stream: Any = stream
        self._given = given
        self._reply: Reply | None = None  # once it is shown

    def __iter__(self) -> Any:
        return self._stream

    def __next__(self) -> Piece:
        piece: Piece = next(self._stream)
        return piece

    def send(self, value: None) -> Piece:
        """Return the next piece."""
        piece: Piece = self._stream.send(value)
        return piece

    def throw(self, *given: Any) -> Piece:
        """Raise an exception where the reply is written."""
        piece: Piece = self._stream.throw(*given)
        return piece

    def close(self) -> None:
        """End the reply."""
        self._stream.close()

    def _ipython_display_(self) -> None:
        if not is_notebook():
            for piece in self._stream:
                print(piece.text, end="", flush=True)
            print()
            return
        reply = self._reply or Reply(self._given)
        output = Output(reply)
        if self._reply is None:
            self._reply = reply
            try:
                for piece in self._stream:
                    reply.read(piece)
                    output.update()
            except WebgemmaError as error:
                reply.fail(error)
            finally:  # also if the cell is interrupted
                self._stream.close()
                output.update(at_once=True)


class AsyncStream(AsyncGenerator[Piece, None]):
    """Pieces of a reply to iterate over. As the last value of a cell it shows the reply.

    The cell ends at once, and the reply is shown while it is written."""

    def __init__(self, stream: AsyncGenerator[Piece, None], given: object = ()) -> None:
        self._stream = stream
        self._given = given
        self._reply: Reply | None = None

    def __aiter__(self) -> Any:
        return self._stream

    async def __anext__(self) -> Piece:
        return await anext(self._stream)

    async def asend(self, value: None) -> Piece:
        """Return the next piece."""
        return await self._stream.asend(value)

    async def athrow(self, *given: Any) -> Piece:
        """Raise an exception where the reply is written."""
        return await self._stream.athrow(*given)

    async def aclose(self) -> None:
        """End the reply."""
        await self._stream.aclose()

    def _ipython_display_(self) -> None:
        if not is_notebook():
            print(self)
            return
        is_new = self._reply is None
        reply = self._reply = self._reply or Reply(self._given)
        output = Output(reply)
        if is_new:
            task = asyncio.get_running_loop().create_task(self._show(reply, output))
            _tasks.add(task)
            task.add_done_callback(_tasks.discard)

    async def _show(self, reply: Reply, output: Output) -> None:
        try:
            async for piece in self._stream:
                reply.read(piece)
                output.update()
        except WebgemmaError as error:
            reply.fail(error)
        finally:
            output.update(at_once=True)


# Loading, and models


class LoadingBar:
    """How much of a model is loaded."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._done, self._total = 0, 0
        self._output: Output | None = None

    def __call__(self, done: int, total: int) -> None:
        self._done, self._total = done, total
        if self._output is None:
            self._output = Output(self)
        self._output.update(at_once=done == total)

    def end(self) -> None:
        """Show that all is loaded; what is left in the file is not counted."""
        if self._output is not None:
            self._done = self._total
            self._output.update(at_once=True)

    def __repr__(self) -> str:
        return f"{self._name}: {self._done / 1e6:,.0f} of {self._total / 1e6:,.0f} MB"

    def _repr_mimebundle_(self, **_: object) -> Bundle:
        bar = f'<progress value="{self._done}" max="{self._total}"></progress>'
        return {"text/plain": repr(self), "text/html": f"<p>{bar} {escape(repr(self))}</p>"}


def loading_bar(name: str) -> LoadingBar | None:
    """Return a progress that is shown in the notebook that runs this code; None outside of one."""
    return LoadingBar(name) if is_notebook() else None


def table(rows: Iterable[tuple[str, object]]) -> str:
    """Return facts as an HTML table."""
    cells = (
        f'<tr><th style="padding-right: 1em; text-align: left">{escape(name)}</th>'
        f"<td>{escape(str(fact))}</td></tr>"
        for name, fact in rows
    )
    return f"<table>{''.join(cells)}</table>"


def _html(text: str) -> str:
    return f'<div style="white-space: pre-wrap">{escape(text)}</div>'


def _call(call: ToolCall) -> str:
    return f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)})"


def _images(given: object) -> Iterator[str]:
    """Yield the images of the last message as data: URLs, as far as they are files or bytes."""
    last = given[-1] if isinstance(given, list | tuple) and given else None
    content = last.get("content") if isinstance(last, Mapping) else None
    for part in content if isinstance(content, list | tuple) else ():
        image = part.get("image") if isinstance(part, Mapping) else None
        data = _file_bytes(image)
        kind = next((kind for head, kind in IMAGES.items() if data.startswith(head)), None)
        if kind:
            yield f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _file_bytes(image: Any) -> bytes:
    """Return the bytes of an image; b"" if it is not one that can be shown."""
    if hasattr(image, "_repr_png_"):  # of PIL
        image = image._repr_png_()
    try:
        if isinstance(image, str) and image.startswith("data:"):
            image = base64.b64decode(image.partition(",")[2])
        if isinstance(image, str | Path):
            path = Path(image)
            image = path.read_bytes() if path.stat().st_size <= MAX_IMAGE_NBYTES else b""
    except (OSError, ValueError):  # said by who reads it
        return b""
    is_small = isinstance(image, bytes | bytearray) and len(image) <= MAX_IMAGE_NBYTES
    return bytes(image) if is_small else b""
