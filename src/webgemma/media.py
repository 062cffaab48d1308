"""The pictures of a conversation: what was handed in for each placeholder, as pixels."""

import base64
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

from webgemma.errors import InputError
from webgemma.pictures import BUDGET, Picture
from webgemma.seeing import Placed, Seeing
from webgemma.text.chat import SpecialTokenizer, encode_parts
from webgemma.text.markup import IMAGE, IMAGE_CLOSE, IMAGE_OPEN, Media, Part


async def place_pictures(
    parts: Sequence[Part], tokenizer: SpecialTokenizer, seeing: Seeing
) -> tuple[list[int], list[Placed]]:
    """The ids of a prompt and the pictures in it, which the caller releases.

    Every picture is decoded before the first is encoded, which takes longer."""
    pictures = iter([picture_of(part) for part in parts if isinstance(part, Media)])
    ids: list[int] = []
    placed: list[Placed] = []
    try:
        for part in parts:
            if not isinstance(part, Media):
                ids += encode_parts(tokenizer, [part])
                continue
            seen = await seeing.see(next(pictures), BUDGET)
            placed.append(Placed(len(ids) + 1, seen))
            ids += encode_parts(tokenizer, [IMAGE_OPEN, *[IMAGE] * seen.count, IMAGE_CLOSE])
    except BaseException:
        seeing.release(*(picture.seen for picture in placed))
        raise
    return ids, placed


def picture_of(media: Media) -> Picture:
    """The picture of a placeholder; InputError where there is none that can be read."""
    where, source = media.where, media.source
    if media != IMAGE:
        verb = "watch videos" if "video" in media else "hear"
        raise InputError(f"{where} cannot be taken: this version sees, but cannot {verb} yet.")
    if source is None:
        raise InputError(
            f"{where} has no picture: give it as 'image' (a path, bytes, a PIL image or an array), "
            "'path' or 'url' (a data: URL)."
        )
    if media.field in ("url", "image_url") and not _begins(source, "data:", "http:", "https:"):
        raise InputError(f"{where} must be a data: URL; a file is given as 'path'.")
    # Ollama takes base64 here; that of a JPEG looks like a path.
    if media.field == "images" and isinstance(source, str) and not os.path.isfile(source):
        source = f"data:;base64,{source}" if not _begins(source, "data:", "http") else source
    return read_picture(source, where)


def read_picture(source: Any, where: str) -> Picture:
    """A picture from a path, the bytes of a file, a data: URL, a PIL image or an array."""
    try:
        from webgemma.picture_files import decode
    except ImportError:
        raise InputError(
            "Pictures are decoded by Pillow, which is not installed here; natively, "
            "`pip install pillow` brings it."
        ) from None
    if _begins(source, "http:", "https:"):
        raise InputError(
            f"{where} is on a server, and nothing is fetched from there: download the picture "
            "and give its path or bytes."
        )
    if _begins(source, "data:"):
        source = _data(source, where)
    if isinstance(source, str | os.PathLike):
        return decode(source)
    try:
        return decode(source)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _begins(source: object, *starts: str) -> bool:
    return isinstance(source, str) and source[:8].lower().startswith(starts)


def _data(url: str, where: str) -> bytes:
    """The bytes in a data: URL."""
    kind, comma, text = url.partition(",")
    if not comma:
        raise InputError(f"{where} is a data: URL without a comma, so there is no picture in it.")
    if not kind.lower().endswith(";base64"):
        return unquote_to_bytes(text)
    text = "".join(text.split()).rstrip("=")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except ValueError:
        raise InputError(f"{where} is neither a file nor a picture in base64.") from None
