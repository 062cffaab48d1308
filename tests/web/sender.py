"""Someone at the chat page who attaches pictures and sounds, and the files they have."""

import io
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import soundfile
from PIL import Image
from web.page import Visitor

SECONDS = 2

DROP = """(files) => {
  const data = new DataTransfer();
  for (const [name, type, text] of files) {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    data.items.add(new File([bytes], name, { type }));
  }
  for (const kind of ["dragover", "drop"]) {
    const options = { dataTransfer: data, bubbles: true, cancelable: true };
    document.body.dispatchEvent(new DragEvent(kind, options));
  }
}"""
PASTE = """([name, type, text, words]) => {
  const data = new DataTransfer();
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  data.items.add(new File([bytes], name, { type }));
  if (words) data.setData("text/plain", words);
  const options = { clipboardData: data, bubbles: true, cancelable: true };
  document.getElementById("prompt").dispatchEvent(new ClipboardEvent("paste", options));
}"""


def picture(colour: str, size: tuple[int, int] = (64, 48)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


def sound(rate: int = 44_100) -> bytes:
    file = io.BytesIO()
    times = np.arange(SECONDS * rate) / rate
    soundfile.write(file, 0.5 * np.sin(2 * np.pi * 440 * times), rate, format="WAV")
    return file.getvalue()


FILES = {
    "red.png": ("image/png", picture("red")),
    "blue.png": ("image/png", picture("blue", (30, 90))),
    "song.wav": ("audio/wav", sound()),
    "cut.png": ("image/png", picture("red")[:50]),
    "torn.wav": ("audio/wav", b"RIFF"),
    "photo.heic": ("image/heic", b"heic"),
    "model.gguf": ("", b"GGUF"),
    "mmproj-model.gguf": ("", b"GGUF"),
}


def given(*names: str) -> list[tuple[str, str, str]]:
    return [(name, FILES[name][0], b64encode(FILES[name][1]).decode()) for name in names]


class Sender(Visitor):
    """A visitor who attaches things."""

    def attach(self, *names: str) -> None:
        payload = [
            {"name": name, "mimeType": FILES[name][0], "buffer": FILES[name][1]} for name in names
        ]
        before = self.tray()
        self.page.locator("#attach-file").set_input_files(payload)
        self.wait_for_tray(before + list(names))

    def tray(self) -> list[str]:
        """The names of what is to be sent."""
        names = self.page.locator("#tray button").evaluate_all(
            "(all) => all.map((b) => b.ariaLabel)"
        )
        return [str(name).removeprefix("Remove ") for name in names]

    def wait_for_tray(self, names: list[str]) -> None:
        self.page.wait_for_function(
            """(names) => JSON.stringify(names.map((name) => `Remove ${name}`)) === JSON.stringify(
              [...document.querySelectorAll("#tray button")].map((button) => button.ariaLabel))""",
            arg=names,
        )

    def pictures(self) -> list[str]:
        """The names of the pictures in messages that are truly shown."""
        shown = self.page.locator(".message .media img")
        return [str(name) for name in shown.evaluate_all(
            "(all) => all.filter((image) => image.naturalWidth).map((image) => image.alt)"
        )]  # fmt: skip

    def parts(self) -> Any:
        """What the worker is asked about the last message of the user."""
        return self.request()["messages"][-1]["content"]


@contextmanager
def sending(context: Any, url: str) -> Iterator[Sender]:
    """Someone with the page open; whatever they do, no error and no other host."""
    sender = Sender(context, url)
    sender.open()
    yield sender
    assert sender.errors == []
    assert [r for r in sender.requests if not r.startswith((url, f"blob:{url}"))] == []
