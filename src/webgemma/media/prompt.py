"""Media in a prompt: images, audio and video are decoded, encoded and inserted as soft tokens."""

import base64
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import unquote_to_bytes

from webgemma.errors import InputError
from webgemma.images import BUDGET, VIDEO_FRAME_BUDGET, RgbImage, chosen_frames, timestamp
from webgemma.media.encoders import EncodedMedia, Encoders, MediaSpan
from webgemma.progress import Progress, ignore_progress
from webgemma.sync import IN_BROWSER
from webgemma.text.chat import encode_parts
from webgemma.text.markup import (
    AUDIO,
    AUDIO_CLOSE,
    AUDIO_OPEN,
    IMAGE,
    IMAGE_CLOSE,
    IMAGE_OPEN,
    START_OF_TURN,
    TURN_OPEN,
    VIDEO,
    Lead,
    Markup,
    Media,
    Part,
)
from webgemma.text.tokenizer import Tokenizer
from webgemma.values import real_number, shown

FRAMES_PER_SECOND = 24.0  # of a video without `fps`
TICKS = 100  # of progress for each image or audio


class ImageItem(NamedTuple):
    """An image in a prompt, or a frame of a video."""

    image: RgbImage
    budget: int
    marker: Markup

    async def soft_tokens(self, encoders: Encoders) -> int:
        """Return the number of its soft tokens."""
        return await encoders.image_tokens(self.image, self.budget)

    async def encode(self, encoders: Encoders, progress: Progress) -> EncodedMedia:
        """Return its soft tokens."""
        return await encoders.encode_image(self.image, self.budget, progress)

    def parts(self, count: int) -> list[Part]:
        """Return the markup that stands for so many soft tokens."""
        return [IMAGE_OPEN, *[self.marker] * count, IMAGE_CLOSE]


class AudioItem(NamedTuple):
    """Audio in a prompt."""

    samples: memoryview

    async def soft_tokens(self, encoders: Encoders) -> int:
        """Return the number of its soft tokens."""
        return await encoders.audio_tokens(self.samples)

    async def encode(self, encoders: Encoders, progress: Progress) -> EncodedMedia:
        """Return its soft tokens."""
        return await encoders.encode_audio(self.samples, progress)

    def parts(self, count: int) -> list[Part]:
        """Return the markup that stands for so many soft tokens."""
        return [AUDIO_OPEN, *[AUDIO] * count, AUDIO_CLOSE]


MediaItem: TypeAlias = ImageItem | AudioItem
Item: TypeAlias = Part | MediaItem


@dataclass(slots=True)
class Turn:
    """A turn of a prompt as ids, and the media whose soft tokens are read in place of some."""

    role: str  # empty for what comes before the first turn
    ids: list[int] = field(default_factory=list)
    media: list[tuple[int, MediaItem]] = field(default_factory=list)  # with the first one's place
    cut: bool = False  # whether ids are missing, because it has more than the context anyway
    lead: list[int] = field(
        default_factory=list
    )  # the ids, after the first, of what it begins with
    usual_lead: int = 0  # how many ids another turn of its role begins with instead


async def read_turns(
    parts: Sequence[Part],
    tokenizer: Tokenizer,
    encoders: Encoders,
    context: int | None = None,
) -> list[Turn]:
    """Return the turns of a prompt, with its media decoded and counted, but not yet encoded.

    Turns are separated by special tokens, so that each is tokenised as it would be with others. Of
    a text that alone is longer than the context, only as much is tokenised."""
    decoded = [
        (role, join_text([item for part in turn for item in await items_of(part)]))
        for role, turn in split_turns(parts)
    ]
    turns = []
    for role, items in decoded:
        turn = Turn(role)
        for item in items:
            if isinstance(item, MediaItem):
                turn.media.append((len(turn.ids) + 1, item))
                turn.ids += encode_parts(tokenizer, item.parts(await item.soft_tokens(encoders)))
            elif isinstance(item, Markup):
                turn.ids += encode_parts(tokenizer, [item])
            else:
                if isinstance(item, Lead):
                    turn.lead = tokenizer.encode(item, most=context)
                    turn.usual_lead = len(tokenizer.encode(item.partition("\n")[0] + "\n"))
                turn.ids += tokenizer.encode(item, most=context)
                turn.cut |= context is not None and tokenizer.exceeds(item, context)
        turns.append(turn)
    return turns


def split_turns(parts: Sequence[Part]) -> Iterator[tuple[str, Sequence[Part]]]:
    """Yield the role and the parts of each turn; text cannot forge the markup that begins one."""
    opens = (TURN_OPEN, START_OF_TURN)
    starts = [at for at, part in enumerate(parts) if isinstance(part, Markup) and part in opens]
    for start, end in pairwise([0, *starts, len(parts)]):
        if start < end:
            turn = parts[start:end]
            yield turn[1].partition("\n")[0] if turn[0] in opens else "", turn


async def encode_media(
    turns: Sequence[Turn], encoders: Encoders, progress: Progress = ignore_progress
) -> tuple[list[int], list[MediaSpan]]:
    """Return the ids of a prompt and the encoded media in it, which the caller releases."""
    total = TICKS * sum(len(turn.media) for turn in turns)
    ids: list[int] = []
    spans: list[MediaSpan] = []

    def report(done: int, of: int) -> None:
        progress(TICKS * len(spans) + TICKS * done // of, total)

    try:
        for turn in turns:
            for at, item in turn.media:
                media = await item.encode(encoders, report)
                spans.append(MediaSpan(len(ids) + at, media))
            ids += turn.ids
    except BaseException:
        encoders.release(*(span.media for span in spans))
        raise
    return ids, spans


def join_text(items: Sequence[Item]) -> list[Item]:
    """Join neighbouring plain strings, because they are tokenised as one."""
    joined: list[Item] = []
    for item in items:
        last = joined[-1] if joined else None
        if _is_text(item) and _is_text(last):
            joined[-1] = f"{last}{item}"
        else:
            joined.append(item)
    return joined


def _is_text(item: object) -> bool:
    return isinstance(item, str) and not isinstance(item, Markup | Lead)


async def items_of(part: Part) -> list[Item]:
    """Return the items of a part of a prompt; InputError if its media cannot be read."""
    if not isinstance(part, Media):
        return [part]
    if part == AUDIO:
        return [AudioItem(await read_audio(_source(part, "audio"), part.where))]
    if part == VIDEO:
        return await _video_items(part)
    source = _source(part, "image")
    if part.field == "images":  # Ollama's list, in which audio may be too
        source = _attachment(source)
        if _is_audio(source):
            return [AudioItem(await read_audio(source, part.where))]
    budget = part.given.get("budget", BUDGET)
    return [ImageItem(await read_image(source, part.where), budget, IMAGE)]


def _source(media: Media, kind: str) -> Any:
    where, source = media.where, media.source
    if source is None:
        accepted = {
            "image": "a path, bytes, a PIL image or an array",
            "audio": "a path, bytes or samples at 16 kHz",
            "video": "a list of images, or the path of an animated one",
        }
        raise InputError(
            f"{where} has no {kind}: give it as '{kind}' ({accepted[kind]}), "
            "'path' or 'url' (a data: URL)."
        )
    if media.field.endswith("url") and not _has_scheme(source, "data:", "http:", "https:"):
        raise InputError(f"{where} must be a data: URL; a file is given as 'path'.")
    if media.field == "input_audio":  # OpenAI's: base64 and a format, which the data has too
        if not isinstance(source, Mapping) or not isinstance(source.get("data"), str):
            raise InputError(f"{where} must be an object with the audio as base64 in 'data'.")
        return _decode_data_url(f"data:;base64,{source['data']}", where)
    return source


async def _video_items(media: Media) -> list[Item]:
    """Return at most 32 evenly chosen frames, each after its timestamp."""
    source = _source(media, "video")
    rate = media.given.get("fps", FRAMES_PER_SECOND)
    per_second = real_number(rate)
    if per_second is None or not 0 < per_second < 1e6:
        raise InputError(
            f"{media.where}: fps is {shown(rate)}, but it must be a number above zero."
        )
    if isinstance(source, str | os.PathLike | bytes | bytearray):
        frames = _animation_frames(_local(source, media.where), media.where)
    else:
        frames = await _listed_frames(source, per_second, media.where)
    if not frames:
        raise InputError(f"{media.where} is a video without frames.")
    items: list[Item] = []
    for seconds, image in frames:
        separator = " " if items else ""
        items += [f"{separator}{timestamp(seconds)} ", ImageItem(image, VIDEO_FRAME_BUDGET, VIDEO)]
    return items


async def _listed_frames(source: Any, rate: float, where: str) -> list[tuple[float, RgbImage]]:
    try:
        chosen = chosen_frames(len(source))
        listed = [source[at] for at in chosen]
    except (TypeError, KeyError, IndexError):
        raise InputError(
            f"{where} must be a list of images, not {type(source).__name__}."
        ) from None
    return [
        (at / rate, await read_image(frame, f"{where}: frame {at}"))
        for at, frame in zip(chosen, listed, strict=True)
    ]


def _animation_frames(source: Any, where: str) -> list[tuple[float, RgbImage]]:
    try:
        from webgemma.media.image_files import decode_frames
    except ImportError:
        raise InputError(
            f"{where}: videos are split into frames by Pillow, which is not installed; "
            "give a list of images."
        ) from None
    return decode_frames(source, chosen_frames)


async def read_image(source: Any, where: str) -> RgbImage:
    """Read an image from a path, the bytes of a file, a data: URL, a PIL image or an array.

    In a browser, also from JavaScript's objects: a Blob, an ImageBitmap, …"""
    source = _local(source, where)
    if IN_BROWSER:
        from webgemma.media.browser import decode_image

        return await decode_image(source, where)
    try:
        from webgemma.media.image_files import decode
    except ImportError:
        raise InputError(
            "Images are decoded by Pillow, which is not installed", "run `pip install pillow`"
        ) from None
    if isinstance(source, str | os.PathLike):
        return decode(source)
    try:
        return decode(source)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


async def read_audio(source: Any, where: str) -> memoryview:
    """Read audio as float32 samples at 16 kHz: from a path, the bytes of a file, a data: URL, or
    float samples at that rate. In a browser, also from JavaScript's objects: a Float32Array, …"""
    source = _local(source, where)
    if IN_BROWSER:
        from webgemma.media.browser import decode_audio

        return memoryview(await decode_audio(source, where))
    from webgemma.media import audio_files

    if isinstance(source, str | os.PathLike):
        return audio_files.read_audio(source).data
    try:
        return audio_files.read_audio(source).data
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _local(source: Any, where: str) -> Any:
    """Return the source, a data: URL as its bytes; InputError if it is on a server."""
    if _has_scheme(source, "http:", "https:"):
        raise InputError(
            f"{where} is on a server, and nothing is fetched from servers: download it "
            "and give its path or bytes."
        )
    return _decode_data_url(source, where) if _has_scheme(source, "data:") else source


def _attachment(source: Any) -> Any:
    """Return what Ollama's `images` hold: base64, which may look like a path, as a data: URL."""
    is_text = isinstance(source, str) and not os.path.isfile(source)
    if is_text and not _has_scheme(source, "data:", "h"):
        return f"data:;base64,{source}"
    return source


def _is_audio(source: Any) -> bool:
    """Return whether the first bytes are those of a WAV, FLAC, OGG or MP3."""
    if _has_scheme(source, "data:"):
        source = _decode_data_url(source, "")
    elif isinstance(source, str | os.PathLike) and os.path.isfile(source):
        with suppress(OSError), open(source, "rb") as file:  # the decoder reports the reason
            source = file.read(12)
    if not isinstance(source, bytes | bytearray):
        return False
    if source[:4] == b"RIFF":
        return bytes(source[8:12]) == b"WAVE"
    mp3 = len(source) > 1 and source[0] == 0xFF and source[1] >= 0xE0
    return mp3 or bytes(source[:4]) in (b"fLaC", b"OggS") or source[:3] == b"ID3"


def _has_scheme(source: object, *schemes: str) -> bool:
    return isinstance(source, str) and source[:8].lower().startswith(schemes)


def _decode_data_url(url: str, where: str) -> bytes:
    kind, comma, text = url.partition(",")
    if not comma:
        raise InputError(f"{where} is a data: URL without a comma, so it has no data.")
    if not kind.lower().endswith(";base64"):
        return unquote_to_bytes(text)
    text = "".join(text.split()).rstrip("=")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except ValueError:
        raise InputError(f"{where} is neither a file nor base64.") from None
