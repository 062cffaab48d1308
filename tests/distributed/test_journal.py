"""The journal of a job: what a process that ends in any way leaves is read again."""

from pathlib import Path

import pytest

from webgemma.distributed.journal import Journal
from webgemma.errors import InputError

JOB = {"data": "abc", "settings": {"stop": ("a",), "logit_bias": {1: 2.0}}}


def test_answers_are_there_again(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with Journal.opened(out, JOB, 4, force=False) as journal:
        journal.add([(2, {"reply": "two", "error": None}), (0, {"error": "no"})])
    with Journal.opened(out, JOB, 4, force=False) as journal:
        assert [journal.has(row) for row in range(4)] == [True, False, True, False]
        assert (journal.done, journal.failed) == (2, 1)
        assert journal.answer(2) == {"reply": "two", "error": None}
        journal.add([(2, {"reply": "again"}), (3, {"reply": "three"})])
        assert journal.answer(2)["reply"] == "two"
        assert journal.answer(3) == {"reply": "three"}
        assert journal.done == 3


@pytest.mark.parametrize("rest", [b'{"row": 1, "rep', b"\x00\x00\n", b'{"row": 99}\n', b"[]\n"])
def test_what_was_never_complete_is_dropped(tmp_path: Path, rest: bytes) -> None:
    out = tmp_path / "out.jsonl"
    with Journal.opened(out, JOB, 4, force=False) as journal:
        journal.add([(0, {"reply": "zero"})])
    path = journal.path
    whole = path.read_bytes()
    path.write_bytes(whole + rest)
    with Journal.opened(out, JOB, 4, force=False) as journal:
        assert journal.done == 1
        journal.add([(1, {"reply": "one"})])
        assert journal.answer(1) == {"reply": "one"}
    assert path.read_bytes() == whole + b'{"row": 1, "reply": "one"}\n'


def test_a_journal_of_another_job_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with Journal.opened(out, JOB, 4, force=False) as journal:
        journal.add([(0, {"reply": "zero"})])
    with (
        pytest.raises(InputError, match="differs in: data"),
        Journal.opened(out, JOB | {"data": "other"}, 4, force=False),
    ):
        pass
    with Journal.opened(out, JOB | {"data": "other"}, 4, force=True) as journal:
        assert journal.done == 0
    assert not journal.path.exists()  # there is nothing in it
    journal.path.write_text("somebody's\nletter\n")
    with (
        pytest.raises(InputError, match="no journal"),
        Journal.opened(out, JOB, 4, force=False),
    ):
        pass
    assert journal.path.read_text() == "somebody's\nletter\n"


def test_one_job_at_a_time(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with (
        Journal.opened(out, JOB, 4, force=False),
        pytest.raises(InputError, match="Another job"),
        Journal.opened(out, JOB, 4, force=False),
    ):
        pass
