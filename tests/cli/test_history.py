"""What was typed in earlier chats: kept for its owner, bounded, and never in the way."""

import os
import stat
from pathlib import Path

import pytest

from webgemma.cli.history import MAX_ENTRIES, MAX_ENTRY_CHARS, HistoryFile, history_path


def test_entries_are_kept_in_order_for_their_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "webgemma" / "history.jsonl"
    history = HistoryFile(path)
    assert history.load() == []
    for entry in ("Hello", "two\nlines", "half a pair \udc80", "ja 日本"):
        history.append(entry)
    assert HistoryFile(path).load() == ["Hello", "two\nlines", "half a pair \udc80", "ja 日本"]
    if os.name != "nt":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_the_file_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text("".join(f'"{n}"\n' for n in range(2 * MAX_ENTRIES + 1)))
    kept = [str(n) for n in range(MAX_ENTRIES + 1, 2 * MAX_ENTRIES + 1)]
    assert HistoryFile(path).load() == kept
    assert len(path.read_text().splitlines()) == MAX_ENTRIES
    assert HistoryFile(path).load() == kept
    HistoryFile(path).append("x" * (MAX_ENTRY_CHARS + 1))
    assert HistoryFile(path).load() == kept


def test_damaged_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    lines = [b'"one"', b"\xff\xfe", b"{", b"[" * 5000, b"3", b'["list"]', b"", b'"two"', b'"cut']
    path.write_bytes(b"\n".join(lines))
    assert HistoryFile(path).load() == ["one", "two"]


def test_a_chat_goes_on_where_nothing_can_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "history.jsonl", tmp_path, None):
        history = HistoryFile(path)
        history.append("Hello")
        assert history.load() == []


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WEBGEMMA_NOHISTORY", raising=False)
    monkeypatch.setenv("LOCALAPPDATA" if os.name == "nt" else "XDG_STATE_HOME", str(tmp_path))
    assert history_path() == tmp_path / "webgemma" / "history.jsonl"
    monkeypatch.setenv("WEBGEMMA_NOHISTORY", "1")
    assert history_path() is None
