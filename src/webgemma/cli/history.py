"""What was typed in earlier chats: a file of JSON strings, one a line, for its owner alone."""

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from webgemma.cli.state import state_folder
from webgemma.errors import InputError

MAX_ENTRIES = 1000
MAX_ENTRY_CHARS = 10_000  # a pasted book is not worth keeping
OFF = "WEBGEMMA_NOHISTORY"


def history_path() -> Path | None:
    """Return the file in the user's state folder; None if the environment says not to keep one."""
    if os.environ.get(OFF, "") not in ("", "0"):
        return None
    with suppress(InputError):  # there is no home
        return state_folder() / "history.jsonl"
    return None


class HistoryFile:
    """The file of one user. A chat goes on without it where it cannot be read or written."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def load(self) -> list[str]:
        """Return the last entries, the oldest first; a file that grew long is shortened."""
        if self.path is None:
            return []
        try:
            lines = self.path.read_text("utf-8", "replace").split("\n")
        except OSError:
            return []
        entries = [entry for line in lines if (entry := _parse(line))]
        if len(entries) > 2 * MAX_ENTRIES:
            with suppress(OSError):
                self._rewrite(entries[-MAX_ENTRIES:])
        return entries[-MAX_ENTRIES:]

    def append(self, entry: str) -> None:
        """Add what was typed."""
        if self.path is None or len(entry) > MAX_ENTRY_CHARS:
            return
        with suppress(OSError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            with open(os.open(self.path, flags, 0o600), "ab") as file:
                file.write(_line(entry))

    def _rewrite(self, entries: list[str]) -> None:
        assert self.path is not None
        handle, name = tempfile.mkstemp(dir=self.path.parent)  # for its owner alone, too
        try:
            with open(handle, "wb") as file:
                file.writelines(map(_line, entries))
            os.replace(name, self.path)
        except BaseException:
            os.unlink(name)
            raise


def _line(entry: str) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _parse(line: str) -> str:
    """Return an entry; an empty one for a line that is none."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    return entry if isinstance(entry, str) else ""
