"""What the tests of images and audio have run inside the tab, by Pyodide's Python."""

from array import array
from base64 import b64decode, b64encode
from typing import Any

import js
from pyodide.ffi import to_js

from webgemma import Gemma
from webgemma.errors import InputError
from webgemma.media.browser import decode_audio, decode_image


async def source(kind: str, data: bytes) -> Any:
    """The bytes of a file, as one of the things they can be in a browser."""
    if kind in ("bytes", "bytearray", "memoryview"):
        return {"bytes": bytes, "bytearray": bytearray, "memoryview": memoryview}[kind](data)
    if kind == "path":
        with open("/given", "wb") as file:
            file.write(data)
        return "/given"
    view = to_js(data)
    if kind == "Uint8Array":
        return view
    if kind == "ArrayBuffer":
        return view.slice().buffer
    if kind == "Float32Array":
        return js.Float32Array.new(view.slice().buffer)
    if kind == "File":
        return js.File.new(to_js([view]), "given")
    bitmap = await js.createImageBitmap(js.Blob.new(to_js([view])))
    if kind == "ImageBitmap":
        return bitmap
    canvas = js.OffscreenCanvas.new(bitmap.width, bitmap.height)
    context = canvas.getContext("2d")
    context.drawImage(bitmap, 0, 0)
    return canvas if kind == "canvas" else context.getImageData(0, 0, bitmap.width, bitmap.height)


async def picture(kind: str, data: str) -> Any:
    """The width, the height and the pixels of an image, or the sentence why there are none."""
    try:
        found = await decode_image(await source(kind, b64decode(data)))
    except InputError as error:
        return str(error)
    return found.width, found.height, b64encode(found.rgb).decode()


async def pixels(shape: list[int], format: str = "B") -> Any:
    """The same for an array."""
    nbytes = shape[0] * shape[1] * shape[2]
    rows = memoryview(bytes(range(nbytes))).cast(format, shape)
    try:
        return list(await decode_image(rows))[:2]
    except InputError as error:
        return str(error)


async def sound(kind: str, data: str) -> Any:
    """The samples of a sound, or the sentence why there are none."""
    try:
        found = await decode_audio(await source(kind, b64decode(data)))
    except InputError as error:
        return str(error)
    assert isinstance(found, array)
    return b64encode(found.tobytes()).decode()


async def samples(values: list[Any], kind: str) -> Any:
    """The same for samples of Python's."""
    numbers = [float(value) if isinstance(value, str) else value for value in values]
    try:
        given = numbers if kind == "list" else array(kind, numbers)
        return list(await decode_audio(given))
    except InputError as error:
        return str(error)


async def soft_tokens(model: str, mmproj: str, data: str, song: list[float]) -> Any:
    """What the encoders of a file at an address make of an image and of samples."""
    base = js.location.href
    address, encoders = (js.URL.new(name, base).href for name in (model, mmproj))
    with await Gemma.aload(address, "gpu", mmproj=encoders, precision="exact") as gemma:
        image = js.Blob.new(to_js([to_js(b64decode(data))]))
        of_image = await gemma.aencode_image(image, budget=70)
        of_audio = await gemma.aencode_audio(js.Float32Array.new(to_js(song)))
        return [list(row) for row in of_image], [list(row) for row in of_audio]


async def nonsense(what: str) -> list[str]:
    """The sentences for what is neither."""
    found = []
    for decode in (decode_image, decode_audio):
        given: Any = {"dict": {"a": 1}, "number": 5, "url": js.URL.new("http://x/")}[what]
        try:
            await decode(given)
        except InputError as error:
            found.append(str(error))
    return found
