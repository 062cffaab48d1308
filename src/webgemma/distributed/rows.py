"""Rows of a JSONL or Parquet file: read one after another, and written with what was answered."""

import base64
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from webgemma.distributed.cluster import NEEDS_RAY
from webgemma.errors import InputError
from webgemma.values import shortened, shown

JSON_ENDINGS, PARQUET_ENDING = (".jsonl", ".ndjson"), ".parquet"
DEFAULT_COLUMNS = ("messages", "prompt")  # the first that a row has
LINE = "line"  # the column of a line that is no object
GROUP = 1000  # rows of a Parquet file that are in memory at once
INT64 = 1 << 63

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be read: what is kept of it, and why."""

    kept: Row
    error: str


@dataclass(slots=True)
class Survey:
    """What one pass over a file found."""

    rows: int = 0
    digest: str = ""
    columns: dict[str, str] = field(default_factory=dict)  # names, and the kind of all their values

    def note(self, row: Row) -> None:
        """Note a row's columns."""
        for name, value in row.items():
            kind = _kind(value)
            before = self.columns.get(name, "null")
            if kind != before and kind != "null":
                numbers = {kind, before} == {"int", "float"}
                self.columns[name] = kind if before == "null" else "float" if numbers else "json"
            else:
                self.columns.setdefault(name, before)


class Rows(ABC):
    """The rows of a file, in the same order each time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def __iter__(self) -> Iterator[Row | BadRow]:
        """Yield the rows; InputError if the file cannot be read."""

    @abstractmethod
    def schema(self, survey: Survey) -> Any:
        """Return the file's columns as pyarrow's."""

    def survey(self) -> Survey:
        """Return what the file holds."""
        found = Survey(digest=_digest(self.path))
        for row in self:
            found.rows += 1
            found.note(row.kept if isinstance(row, BadRow) else row)
        return found


class JsonLines(Rows):
    """Objects of JSON, one a line; lines that are none have an error of their own."""

    def __iter__(self) -> Iterator[Row | BadRow]:
        with _reading(self.path), self.path.open("rb") as file:
            for number, data in enumerate(file, 1):
                if data.strip():
                    yield _json_row(data, number)

    def schema(self, survey: Survey) -> Any:
        """Return columns of text, numbers and truth values; everything else is JSON as text."""
        pa = _pyarrow()
        types = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
        columns = survey.columns.items()
        return pa.schema([(name, types.get(kind, pa.string())) for name, kind in columns])


class Parquet(Rows):
    """The rows of a Parquet file; what is null counts as missing."""

    def __iter__(self) -> Iterator[Row | BadRow]:
        with _reading(self.path), self._open() as file:
            for group in file.iter_batches(batch_size=GROUP):
                yield from group.to_pylist()

    def schema(self, survey: Survey) -> Any:
        """Return the columns of the file itself."""
        del survey
        with _reading(self.path), self._open() as file:
            return file.schema_arrow

    def _open(self) -> Any:
        _pyarrow()
        from pyarrow import parquet

        return parquet.ParquetFile(self.path)


def open_rows(path: Path) -> Rows:
    """Return the rows of a file, by the ending of its name."""
    ending = path.suffix.lower()
    if ending not in (*JSON_ENDINGS, PARQUET_ENDING):
        raise InputError(f"{shortened(path)} must be a .jsonl or a .parquet file.")
    if not path.is_file():
        raise InputError(f"There is no file {shortened(path)}.")
    return Parquet(path) if ending == PARQUET_ENDING else JsonLines(path)


def asked_of(row: Row, column: str | None) -> Any:
    """Return the prompt or the messages of a row; InputError if it has none."""
    names = DEFAULT_COLUMNS if column is None else (column,)
    value = next((row[name] for name in names if row.get(name) is not None), None)
    if value is None:
        wanted = " and no ".join(map(repr, names))
        raise InputError(f"This row has no {wanted}.")
    value = _without_nulls(value)
    if not isinstance(value, str | list):
        raise InputError(f"The prompt is {shown(value)}; it must be text or a list of messages.")
    return value


def written(
    rows: Iterable[Row], path: Path, source: Rows, survey: Survey, added: Mapping[str, str]
) -> Iterator[bytes]:
    """Yield the bytes of a file of rows, which have the columns of the source and those added.

    `added` gives for each of these what it holds: "text" or "usage"."""
    if path.suffix.lower() != PARQUET_ENDING:
        return (_json_line(row) for row in rows)
    pa = _pyarrow()
    usage = pa.struct([("prompt", pa.int64()), ("reply", pa.int64())])
    kinds = {"text": pa.string(), "usage": usage}
    schema = source.schema(survey)
    for name, kind in added.items():
        schema = schema.append(pa.field(name, kinds[kind]))
    if isinstance(source, JsonLines):
        as_json = {name for name, kind in survey.columns.items() if kind == "json"}
        rows = (_with_json(row, as_json) for row in rows)
    return _parquet_bytes(rows, schema)


def _parquet_bytes(rows: Iterable[Row], schema: Any) -> Iterator[bytes]:
    import pyarrow as pa
    from pyarrow import parquet

    sink, rest = _Sink(), iter(rows)
    with parquet.ParquetWriter(pa.PythonFile(sink, "w"), schema) as writer:
        while group := list(islice(rest, GROUP)):
            writer.write_table(pa.Table.from_pylist(group, schema))
            yield sink.taken()
    yield sink.taken()


class _Sink:
    """A file for pyarrow, whose bytes are taken as they come."""

    def __init__(self) -> None:
        self.closed = False
        self._chunks: list[bytes] = []
        self._at = 0

    def write(self, data: Any) -> int:
        self._chunks.append(bytes(data))
        self._at += len(self._chunks[-1])
        return len(self._chunks[-1])

    def tell(self) -> int:
        return self._at

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def taken(self) -> bytes:
        data = b"".join(self._chunks)
        self._chunks.clear()
        return data


def _json_row(data: bytes, number: int) -> Row | BadRow:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        row = json.loads(data, parse_constant=refuse)
    except (ValueError, RecursionError) as error:  # also for bytes that are not UTF-8
        return _bad_line(data, f"Line {number} is not JSON: {error}.")
    if not isinstance(row, dict):
        return _bad_line(data, f"Line {number} must be a JSON object, not {shown(row)}.")
    return row


def _bad_line(data: bytes, error: str) -> BadRow:
    return BadRow({LINE: data.decode("utf-8", "replace").strip()}, error)


def _json_line(row: Row) -> bytes:
    text = json.dumps(row, ensure_ascii=False, default=_as_json)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:  # half a character, which only its number can spell
        return json.dumps(row, default=_as_json).encode() + b"\n"


def _as_json(value: Any) -> Any:
    """Return a value of Parquet that JSON has no form for."""
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _with_json(row: Row, names: set[str]) -> Row:
    return {
        name: json.dumps(value) if name in names and value is not None else value
        for name, value in row.items()
    }


def _kind(value: Any) -> str:
    """Return which column of a Parquet file can hold a value of JSON."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int" if -INT64 <= value < INT64 else "json"
    if isinstance(value, str):
        return "text" if value.isascii() or _is_unicode(value) else "json"
    return "float" if isinstance(value, float) else "json"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _without_nulls(value: Any) -> Any:
    """Return messages without the fields that only other rows of a Parquet file have."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _digest(path: Path) -> str:
    with _reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Report what goes wrong with a file in a sentence."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{shortened(path)} cannot be read: {error.strerror or error}.") from None
    except ValueError as error:  # pyarrow's errors are this
        raise InputError(f"{shortened(path)} is damaged: {shown(str(error))}.") from None


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise InputError(f"Parquet files need pyarrow. {NEEDS_RAY}") from None
    return pyarrow
