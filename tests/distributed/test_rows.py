"""Files of rows: what is read, what is wrong with one row, and what is written."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from webgemma.distributed.rows import BadRow, JsonLines, asked_of, open_rows, written
from webgemma.errors import InputError


def write_lines(path: Path, *lines: bytes) -> JsonLines:
    path.write_bytes(b"\n".join(lines))
    return JsonLines(path)


def test_each_line_is_a_row_and_a_wrong_one_says_why(tmp_path: Path) -> None:
    rows = list(
        write_lines(
            tmp_path / "a.jsonl",
            b'{"prompt": "a"}',
            b"",
            b"{nonsense",
            b"[1, 2]",
            b'{"prompt": NaN}',
            b'{"prompt": "\xff"}',
            b"[" * 100_000,
            b'{"n": ' + b"9" * 10_000 + b"}",
        )
    )
    assert rows[0] == {"prompt": "a"}
    assert len(rows) == 7
    wrong = [row for row in rows if isinstance(row, BadRow)]
    assert len(wrong) == 6
    assert wrong[0].kept == {"line": "{nonsense"}
    assert wrong[0].error.startswith("Line 3 is not JSON")
    assert "must be a JSON object" in wrong[1].error
    assert all(row.error.endswith(".") for row in wrong)


def test_a_row_has_a_prompt_or_messages() -> None:
    messages = [{"role": "user", "content": "hi", "images": None}]
    assert asked_of({"prompt": "a"}, None) == "a"
    assert asked_of({"prompt": "a", "messages": messages}, None) == [
        {"role": "user", "content": "hi"}
    ]
    assert asked_of({"prompt": "a", "text": "b"}, "text") == "b"
    for row, column in [({}, None), ({"prompt": None}, None), ({"prompt": "a"}, "text")]:
        with pytest.raises(InputError, match="has no"):
            asked_of(row, column)
    with pytest.raises(InputError, match="must be text or a list"):
        asked_of({"prompt": 7}, None)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file"):
        open_rows(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match=r"\.parquet"):
        open_rows(tmp_path / "none.csv")
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 but nothing else")
    with pytest.raises(InputError, match="damaged"):
        list(open_rows(broken))


def rewritten(source: Path, target: Path, answers: list[dict[str, Any]]) -> None:
    rows = open_rows(source)
    survey = rows.survey()
    added = {"reply": "text", "usage": "usage"}
    kept = [row.kept if isinstance(row, BadRow) else row for row in rows]
    both = (row | answer for row, answer in zip(kept, answers, strict=True))
    target.write_bytes(b"".join(written(both, target, rows, survey, added)))


ANSWERS: list[dict[str, Any]] = [
    {"reply": "ä", "usage": {"prompt": 1, "reply": 2}},
    {"reply": None, "usage": None},
]


def test_json_becomes_parquet_whatever_it_holds(tmp_path: Path) -> None:
    """A column of one simple kind keeps it; all others are JSON as text."""
    lines = [
        {"n": 1, "x": 1, "any": [1, {"a": None}], "big": 2**70, "flag": True, "half": "\ud800"},
        {"n": None, "x": 0.5, "any": "text", "big": 1, "new": "only here"},
    ]
    source, target = tmp_path / "a.jsonl", tmp_path / "b.parquet"
    source.write_text("\n".join(map(json.dumps, lines)))
    rewritten(source, target, ANSWERS)
    first, second = parquet.read_table(target).to_pylist()
    assert (first["n"], first["x"], first["flag"], first["new"]) == (1, 1.0, True, None)
    assert json.loads(first["any"]) == [1, {"a": None}]
    assert json.loads(first["big"]) == 2**70
    assert json.loads(first["half"]) == "\ud800"
    assert (first["reply"], first["usage"]) == ("ä", {"prompt": 1, "reply": 2})
    assert (second["n"], second["x"], json.loads(second["any"])) == (None, 0.5, "text")
    assert (second["reply"], second["usage"], second["new"]) == (None, None, "only here")


def test_parquet_keeps_its_types_and_becomes_json(tmp_path: Path) -> None:
    source = tmp_path / "a.parquet"
    table = pa.table(
        {
            "prompt": ["a", "b"],
            "id": pa.array([1, 2], pa.int16()),
            "image": [b"\x00\xff", None],
            "day": pa.array([0, 1], pa.date32()),
        }
    )
    parquet.write_table(table, source)
    rewritten(source, tmp_path / "b.parquet", ANSWERS)
    back = parquet.read_table(tmp_path / "b.parquet")
    assert back.select(table.column_names).equals(table)
    assert back["reply"].to_pylist() == ["ä", None]
    rewritten(source, tmp_path / "b.jsonl", ANSWERS)
    first, second = map(json.loads, (tmp_path / "b.jsonl").read_text("utf-8").splitlines())
    assert first == {"prompt": "a", "id": 1, "image": "AP8=", "day": "1970-01-01", **ANSWERS[0]}
    assert second["image"] is None


def test_half_characters_survive_in_json(tmp_path: Path) -> None:
    source, target = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    source.write_text('{"prompt": "\\ud800"}\n{}')
    rewritten(source, target, ANSWERS)
    assert json.loads(target.read_bytes().splitlines()[0])["prompt"] == "\ud800"
