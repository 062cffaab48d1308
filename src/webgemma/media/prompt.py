"""The pictures, sounds and films of a conversation: what was handed in for each placeholder."""

import base64
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import unquote_to_bytes

from webgemma.errors import InputError
from webgemma.images import BUDGET, VIDEO_FRAME_BUDGET, RgbImage, chosen_frames, clock
from webgemma.media.encoders import EncodedMedia, Encoders, MediaSpan
from webgemma.progress import Progress, unwatched
from webgemma.text.chat import SpecialTokenizer, encode_parts
from webgemma.text.markup import (
    AUDIO,
    AUDIO_CLOSE,
    AUDIO_OPEN,
    IMAGE,
    IMAGE_CLOSE,
    IMAGE_OPEN,
    VIDEO,
    Markup,
    Media,
    Part,
)

FRAMES_PER_SECOND = 24.0  # of a film that does not say
TICKS = 100  # of progress for each picture or sound


class Shown(NamedTuple):
    """A picture in a prompt, or a frame of a film."""

    picture: RgbImage
    budget: int
    marker: Markup

    async def sensed(self, senses: Encoders, progress: Progress) -> EncodedMedia:
        """Its soft tokens."""
        return await senses.see(self.picture, self.budget, progress)

    def parts(self, count: int) -> list[Part]:
        """What stands for it."""
        return [IMAGE_OPEN, *[self.marker] * count, IMAGE_CLOSE]


class Played(NamedTuple):
    """A sound in a prompt."""

    samples: memoryview

    async def sensed(self, senses: Encoders, progress: Progress) -> EncodedMedia:
        """Its soft tokens."""
        return await senses.hear(self.samples, progress)

    def parts(self, count: int) -> list[Part]:
        """What stands for it."""
        return [AUDIO_OPEN, *[AUDIO] * count, AUDIO_CLOSE]


Item: TypeAlias = Part | Shown | Played


async def place_media(
    parts: Sequence[Part],
    tokenizer: SpecialTokenizer,
    senses: Encoders,
    progress: Progress = unwatched,
) -> tuple[list[int], list[MediaSpan]]:
    """The ids of a prompt and what is to be seen and heard in it, which the caller releases.

    Everything is decoded before the first picture or sound is encoded, which takes longer."""
    items = joined([item for part in parts for item in await items_of(part)])
    total = TICKS * sum(isinstance(item, Shown | Played) for item in items)
    ids: list[int] = []
    placed: list[MediaSpan] = []

    def tell(done: int, of: int) -> None:
        progress(TICKS * len(placed) + TICKS * done // of, total)

    try:
        for item in items:
            if not isinstance(item, Shown | Played):
                ids += encode_parts(tokenizer, [item])
                continue
            sensed = await item.sensed(senses, tell)
            placed.append(MediaSpan(len(ids) + 1, sensed))
            ids += encode_parts(tokenizer, item.parts(sensed.count))
    except BaseException:
        senses.release(*(each.sensed for each in placed))
        raise
    return ids, placed


def joined(items: Sequence[Item]) -> list[Item]:
    """The same with neighbouring plain strings as one, which is how they are cut into tokens."""
    result: list[Item] = []
    for item in items:
        last = result[-1] if result else None
        if _is_text(item) and _is_text(last):
            result[-1] = f"{last}{item}"
        else:
            result.append(item)
    return result


def _is_text(item: object) -> bool:
    return isinstance(item, str) and not isinstance(item, Markup)


async def items_of(part: Part) -> list[Item]:
    """What a part of a prompt holds; InputError where its picture or sound cannot be read."""
    if not isinstance(part, Media):
        return [part]
    if part == AUDIO:
        return [Played(await read_audio(_source(part, "sound", "audio"), part.where))]
    if part == VIDEO:
        return await _film(part)
    source = _source(part, "picture", "image")
    if part.field == "images":  # Ollama's list, in which sounds are too
        source = _attachment(source)
        if _is_sound(source):
            return [Played(await read_audio(source, part.where))]
    budget = part.given.get("budget", BUDGET)
    return [Shown(await read_image(source, part.where), budget, IMAGE)]


def _source(media: Media, what: str, field: str) -> Any:
    where, source = media.where, media.source
    if source is None:
        kinds = {
            "image": "a path, bytes, a PIL image or an array",
            "audio": "a path, bytes or samples at 16 kHz",
            "video": "a list of pictures, or the path of an animated one",
        }
        raise InputError(
            f"{where} has no {what}: give it as '{field}' ({kinds[field]}), "
            "'path' or 'url' (a data: URL)."
        )
    if media.field.endswith("url") and not _begins(source, "data:", "http:", "https:"):
        raise InputError(f"{where} must be a data: URL; a file is given as 'path'.")
    if media.field == "input_audio":  # OpenAI's: base64 and a format, which the data tell too
        if not isinstance(source, Mapping) or not isinstance(source.get("data"), str):
            raise InputError(f"{where} must be an object with the sound as base64 in 'data'.")
        return _data(f"data:;base64,{source['data']}", where)
    return source


async def _film(media: Media) -> list[Item]:
    """Frames with the time of each in front: at most 32 of them, evenly chosen."""
    source = _source(media, "film", "video")
    rate = media.given.get("fps", FRAMES_PER_SECOND)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < 1e6:
        raise InputError(f"{media.where}: fps is {rate!r}, but it must be a number above zero.")
    if isinstance(source, str | os.PathLike | bytes | bytearray):
        frames = _animation(_local(source, media.where), media.where)
    else:
        try:
            chosen = chosen_frames(len(source))
            given = [source[at] for at in chosen]
        except (TypeError, KeyError, IndexError):
            raise InputError(
                f"{media.where} must be a list of pictures, not {type(source).__name__}."
            ) from None
        where = f"{media.where}: frame {{}}"
        pictures = [
            await read_image(x, where.format(at)) for at, x in zip(chosen, given, strict=True)
        ]
        frames = [(at / rate, x) for at, x in zip(chosen, pictures, strict=True)]
    if not frames:
        raise InputError(f"{media.where} is a film without a frame.")
    items: list[Item] = []
    for seconds, picture in frames:
        items += [
            " " * bool(items) + clock(seconds) + " ",
            Shown(picture, VIDEO_FRAME_BUDGET, VIDEO),
        ]
    return items


def _animation(source: Any, where: str) -> list[tuple[float, RgbImage]]:
    try:
        from webgemma.media.image_files import decode_frames
    except ImportError:
        raise InputError(
            f"{where}: films are cut into frames by Pillow, which is not installed here; "
            "give a list of pictures."
        ) from None
    return decode_frames(source, chosen_frames)


async def read_image(source: Any, where: str) -> RgbImage:
    """A picture from a path, the bytes of a file, a data: URL, a PIL image or an array.

    In a browser, also from what its scripts have: a Blob, an ImageBitmap, …"""
    source = _local(source, where)
    if sys.platform == "emscripten":
        from webgemma.media.browser import decode_image

        return await decode_image(source, where)
    try:
        from webgemma.media.image_files import decode
    except ImportError:
        raise InputError(
            "Pictures are decoded by Pillow, which is not installed here: "
            "`pip install pillow` brings it."
        ) from None
    if isinstance(source, str | os.PathLike):
        return decode(source)
    try:
        return decode(source)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


async def read_audio(source: Any, where: str) -> memoryview:
    """A sound as float32 samples at 16 kHz: from a path, the bytes of a file, a data: URL, or
    float samples at that rate. In a browser, also from what its scripts have: a Float32Array, …"""
    source = _local(source, where)
    if sys.platform == "emscripten":
        from webgemma.media.browser import decode_audio

        return memoryview(await decode_audio(source, where))
    from webgemma.media import audio_files as sounds

    if isinstance(source, str | os.PathLike):
        return sounds.read_audio(source).data
    try:
        return sounds.read_audio(source).data
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _local(source: Any, where: str) -> Any:
    """The same, once it is clear that it is not on a server; a data: URL becomes its bytes."""
    if _begins(source, "http:", "https:"):
        raise InputError(
            f"{where} is on a server, and nothing is fetched from there: download it "
            "and give its path or bytes."
        )
    return _data(source, where) if _begins(source, "data:") else source


def _attachment(source: Any) -> Any:
    """Ollama takes base64 here; that of a JPEG looks like a path."""
    if isinstance(source, str) and not os.path.isfile(source) and not _begins(source, "data:", "h"):
        return f"data:;base64,{source}"
    return source


def _is_sound(source: Any) -> bool:
    """Whether the first bytes are those of a WAV, FLAC, OGG or MP3."""
    if _begins(source, "data:"):
        source = _data(source, "")
    elif isinstance(source, str | os.PathLike) and os.path.isfile(source):
        with suppress(OSError), open(source, "rb") as file:  # who decodes it says why it is closed
            source = file.read(12)
    if not isinstance(source, bytes | bytearray):
        return False
    if source[:4] == b"RIFF":
        return bytes(source[8:12]) == b"WAVE"
    mp3 = len(source) > 1 and source[0] == 0xFF and source[1] >= 0xE0
    return mp3 or bytes(source[:4]) in (b"fLaC", b"OggS") or source[:3] == b"ID3"


def _begins(source: object, *starts: str) -> bool:
    return isinstance(source, str) and source[:8].lower().startswith(starts)


def _data(url: str, where: str) -> bytes:
    """The bytes in a data: URL."""
    kind, comma, text = url.partition(",")
    if not comma:
        raise InputError(f"{where} is a data: URL without a comma, so there is nothing in it.")
    if not kind.lower().endswith(";base64"):
        return unquote_to_bytes(text)
    text = "".join(text.split()).rstrip("=")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except ValueError:
        raise InputError(f"{where} is neither a file nor base64.") from None
