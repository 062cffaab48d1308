"""A visitor of the chat page who attaches images and audio, and the files to attach."""

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
  for (const [name, type, base64] of files) {
    const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
    data.items.add(new File([bytes], name, { type }));
  }
  for (const kind of ["dragover", "drop"]) {
    const options = { dataTransfer: data, bubbles: true, cancelable: true };
    document.body.dispatchEvent(new DragEvent(kind, options));
  }
}"""
DECODED = """async (images) => {
  await Promise.allSettled(images.map((image) => image.decode()));
  return images.filter((image) => image.naturalWidth).map((image) => image.alt);
}"""
PASTE = """([name, type, base64, plainText]) => {
  const data = new DataTransfer();
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  data.items.add(new File([bytes], name, { type }));
  if (plainText) data.setData("text/plain", plainText);
  const options = { clipboardData: data, bubbles: true, cancelable: true };
  document.getElementById("prompt").dispatchEvent(new ClipboardEvent("paste", options));
}"""


def png(colour: str, size: tuple[int, int] = (64, 48)) -> bytes:
    """Return a PNG file of one colour."""
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


def wav(rate: int = 44_100) -> bytes:
    """Return a WAV file of a tone."""
    file = io.BytesIO()
    times = np.arange(SECONDS * rate) / rate
    soundfile.write(file, 0.5 * np.sin(2 * np.pi * 440 * times), rate, format="WAV")
    return file.getvalue()


FILES = {
    "red.png": ("image/png", png("red")),
    "blue.png": ("image/png", png("blue", (30, 90))),
    "song.wav": ("audio/wav", wav()),
    "cut.png": ("image/png", png("red")[:50]),
    "torn.wav": ("audio/wav", b"RIFF"),
    "photo.heic": ("image/heic", b"heic"),
    "model.gguf": ("", b"GGUF"),
    "mmproj-model.gguf": ("", b"GGUF"),
}


def as_base64(*names: str) -> list[tuple[str, str, str]]:
    """Return name, MIME type and base64 data of files, as DROP and PASTE take them."""
    return [(name, FILES[name][0], b64encode(FILES[name][1]).decode()) for name in names]


class Sender(Visitor):
    """A visitor who attaches files."""

    def attach(self, *names: str) -> None:
        """Choose files, and wait until they are in the tray."""
        payload = [
            {"name": name, "mimeType": FILES[name][0], "buffer": FILES[name][1]} for name in names
        ]
        before = self.tray()
        self.page.locator("#attach-file").set_input_files(payload)
        self.wait_for_tray(before + list(names))

    def tray(self) -> list[str]:
        """Return the names of the attachments of the next message."""
        names = self.page.locator("#tray .icon").evaluate_all(
            "(all) => all.map((b) => b.ariaLabel)"
        )
        return [str(name).removeprefix("Remove ") for name in names]

    def wait_for_tray(self, names: list[str]) -> None:
        """Wait until the tray has exactly these attachments."""
        self.page.wait_for_function(
            """(names) => JSON.stringify(names.map((name) => `Remove ${name}`)) === JSON.stringify(
              [...document.querySelectorAll("#tray .icon")].map((button) => button.ariaLabel))""",
            arg=names,
        )

    def images(self) -> list[str]:
        """Return the names of the images in messages that the browser has decoded."""
        shown = self.page.locator(".message .media img")
        return [str(name) for name in shown.evaluate_all(DECODED)]

    def parts(self) -> Any:
        """Return the content of the message "request" as the worker receives it."""
        return self.request()["messages"][-1]["content"]


@contextmanager
def sending(context: Any, url: str) -> Iterator[Sender]:
    """A sender with the page open; errors and requests to other hosts fail the test."""
    sender = Sender(context, url)
    sender.open()
    yield sender
    assert sender.errors == []
    assert [r for r in sender.requests if not r.startswith((url, f"blob:{url}"))] == []
