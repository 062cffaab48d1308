"""An engine's eyes: opened when they are first needed, with the last pictures they saw."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from webgemma.errors import GgufError, InputError
from webgemma.gemma.towers import Towers, Vision
from webgemma.gguf.reader import Gguf
from webgemma.pictures import Picture, check_sides, soft_tokens, target_size

KEPT = 8  # pictures that nobody uses at the moment


class Tower(Protocol):
    """A picture encoder where an engine computes; what it makes of a picture is its own affair."""

    vision: Vision

    def look(self, picture: Picture, width: int, height: int) -> Any: ...

    async def read(self, rows: Any) -> Any: ...

    def free(self, rows: Any) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Seen:
    """A picture as soft tokens; it stays as long as it has users."""

    count: int
    digest: int  # tells it from others
    rows: Any  # the tower's: [count, width]
    users: int = 0


class Placed(NamedTuple):
    """A picture in a prompt, in place of ids[first : first + seen.count]."""

    first: int
    seen: Seen

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.first + self.seen.count


@dataclass(frozen=True, slots=True)
class EyeFiles:
    """Where the tower of a model may be: in projectors or, where there are none, in its file."""

    name: str  # of the model, for sentences
    gguf: Gguf
    width: int  # of what the model reads
    projectors: Callable[[], Sequence[Path]] = tuple

    def open(self) -> tuple[Gguf, Vision]:
        """The file with the tower, and the tower's blueprint."""
        paths = self.projectors()
        for path in paths:
            gguf = Gguf.open(path)
            try:
                vision = Towers.from_gguf(gguf).vision
                if vision is not None:
                    return gguf, self._fitting(vision, gguf.name)
            except BaseException:
                gguf.close()
                raise
            gguf.close()
        if paths:
            names = ", ".join(path.name for path in paths)
            raise InputError(f"{self.name} cannot see: there is no vision tower in {names}.")
        vision = Towers.from_gguf(self.gguf).vision
        if vision is None:
            raise InputError(
                f"{self.name} cannot see: there is no vision tower in its file; "
                "load it with mmproj, the path of the file that holds it."
            )
        return self.gguf, self._fitting(vision, self.gguf.name)

    def _fitting(self, vision: Vision, file: str) -> Vision:
        if vision.output != self.width:
            raise GgufError(
                f"{file} makes soft tokens of {vision.output} values, but {self.name} reads "
                f"{self.width}: it belongs to another model."
            )
        return vision


class Seeing:
    """Pictures in, soft tokens out. What was seen before is not encoded again."""

    def __init__(
        self, files: EyeFiles, open_tower: Callable[[Gguf, Vision], Awaitable[Tower]]
    ) -> None:
        self.closed = False
        self._files = files
        self._open_tower = open_tower
        self._file: Gguf | None = None
        self._tower: Tower | None = None
        self._seen: dict[bytes, Seen] = {}  # the latest last

    async def see(self, picture: Picture, budget: int | None) -> Seen:
        """The soft tokens of a picture, until it is released.

        It is resized to fill a budget of them; without one it has to have a fitting size."""
        tower = await self._opened()
        key = _key(picture, budget)
        seen = self._seen.pop(key, None)
        if seen is None:
            side, size = tower.vision.patch * tower.vision.pool, (picture.width, picture.height)
            if budget is not None:
                size = target_size(*size, budget, side)
            check_sides(*size, tower.vision.positions // tower.vision.pool, side)
            rows = tower.look(picture, *size)
            seen = Seen(soft_tokens(*size, side), int.from_bytes(key[:6]), rows)
        self._seen[key] = seen
        seen.users += 1
        return seen

    async def read(self, seen: Seen) -> Any:
        """The soft tokens as numbers: float32 [count, width], or their bytes."""
        return await (await self._opened()).read(seen.rows)

    def release(self, *pictures: Seen) -> None:
        """Say that pictures are not in use any more; the last few of those are kept."""
        for seen in pictures:
            seen.users -= 1
        idle = [key for key, each in self._seen.items() if not each.users]
        for key in idle[:-KEPT]:
            self._free(self._seen.pop(key))

    def close(self) -> None:
        """Free the tower and all pictures."""
        self.closed = True
        while self._seen:
            self._free(self._seen.popitem()[1])
        if self._tower is not None:
            self._tower.close()
            self._tower = None
        if self._file is not None and self._file is not self._files.gguf:
            self._file.close()

    async def _opened(self) -> Tower:
        if self.closed:
            raise InputError(f"{self._files.name} is closed: load the model again.")
        if self._tower is None:
            self._file, vision = self._files.open()
            try:
                self._tower = await self._open_tower(self._file, vision)
            except BaseException:
                if self._file is not self._files.gguf:
                    self._file.close()
                raise
        return self._tower

    def _free(self, seen: Seen) -> None:
        if self._tower is not None:
            self._tower.free(seen.rows)


def _key(picture: Picture, budget: int | None) -> bytes:
    digest = sha256(f"{picture.width} {picture.height} {budget}\n".encode())
    digest.update(picture.rgb)
    return digest.digest()
