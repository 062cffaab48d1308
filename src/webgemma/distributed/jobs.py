"""Batches of work over Ray Data: a file of prompts in, a file of replies out.

Only the process that begins a job touches its files: it sends rows to the others and writes each
answer to a journal. Begun again after any end, it goes on with the rows that have none yet."""

import json
import os
import pickle
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Unpack

from webgemma.distributed.cluster import (
    ADDRESS_VARIABLE,
    cause_of,
    check_resources,
    connected,
    count_replicas,
    import_ray,
    quiet,
    remove_locks,
)
from webgemma.distributed.journal import ENDING, Answer, Journal
from webgemma.distributed.rows import (
    DEFAULT_COLUMNS,
    JSON_ENDINGS,
    PARQUET_ENDING,
    BadRow,
    Row,
    Rows,
    Survey,
    asked_of,
    open_rows,
    written,
)
from webgemma.distributed.worker import GIVEN_UP, RowWorker, Tries, Work
from webgemma.engine.interface import DeviceName, KvName, PrecisionName
from webgemma.errors import GgufError, InputError, WebgemmaError
from webgemma.gguf.writer import written_beside
from webgemma.models import find_model, is_address
from webgemma.progress import Progress, ignore_progress
from webgemma.settings import SETTINGS, Settings
from webgemma.values import shortened, shown

ROWS_AT_ONCE = 16  # that a process is given together
CALLS = 2  # blocks that a process has at once, so that none of its GPU's time is spent waiting
DIED = "The process that answered this row ended each time; its log says why."
ADDED = {"reply": "text", "finish": "text", "usage": "usage", "error": "text"}
THINKING = {"thinking": "text"}


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What became of a job."""

    out: Path
    rows: int
    failed: int  # of them have an error instead of a reply
    resumed: int  # of them were answered by an earlier process


def batch(
    dataset: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    model: str | os.PathLike[str] | None = None,
    column: str | None = None,
    system: str | None = None,
    think: bool = False,
    replicas: int | None = None,
    gpus: Sequence[str] = (),
    num_gpus: float = 0,
    rows_at_once: int = ROWS_AT_ONCE,
    force: bool = False,
    progress: Progress | None = None,
    device: DeviceName = "auto",
    context: int | None = None,
    kv: KvName = "f16",
    precision: PrecisionName = "auto",
    memory_gb: float | None = None,
    lora: str | Sequence[str] | None = None,
    **settings: Unpack[Settings],
) -> BatchResult:
    """Answer all rows of a .jsonl or .parquet file; write them with their replies to `out`.

    A row has a text in `prompt` or a list of chat messages in `messages`; `column` names another
    column, of either. In `out`, which may be of either kind, too, each row is followed by `reply`,
    `finish` ("stop" or "length"), `usage` (tokens) and, with `think`, `thinking`; a row that cannot
    be answered has a sentence in `error` instead, and the others are answered all the same.

    A job that ended in any way goes on when it is begun again with the same arguments: answers are
    kept beside `out`, in a file that ends in .partial, until `out` is complete. `force` begins anew
    and replaces `out`.

    - `replicas`: processes, each with a model of its own; by default one, or as many as `gpus`.
    - `gpus`: names of GPUs, as the `gpu` of `Gemma.load` takes them, of which each process on a
      machine takes the next. Vulkan does not see which ones Ray assigns.
    - `num_gpus`: what each process requests of Ray, so that Ray chooses the machines by it.
    - `rows_at_once`: rows that a process is given together, and that are lost with it.
    - `progress`: called with the rows that are done and their number.

    Ray is the one that this process is connected to, else that of RAY_ADDRESS, else one that is
    started on this machine. The other arguments are those of `Gemma.load` and `Gemma.chat`."""
    import_ray("ray.data")
    source, target = open_rows(Path(dataset)), Path(out)
    _check_target(target, source, force=force)
    checked = _check_settings(settings)
    if not 1 <= rows_at_once <= 1 << 16:
        raise InputError(f"rows_at_once is {shown(rows_at_once)}; it must be at least 1.")
    count = count_replicas(replicas, gpus)
    added = ADDED | (THINKING if think else {})
    survey = source.survey()
    _check_columns(source, survey, column, added)
    work = Work(
        model=None if model is None else os.fspath(model),
        load={
            "device": device,
            "context": context,
            "kv": kv,
            "precision": precision,
            "memory_gb": memory_gb,
            "lora": lora,
        },
        settings=checked,
        system=system,
        think=think,
        gpus=tuple(gpus),
        job=secrets.token_hex(8),
        folder=os.getcwd(),
    )
    job = {
        "data": survey.digest,
        "column": column,
        "model": _model_identity(work.model),
        "system": system,
        "think": think,
        "settings": checked,
        "lora": None if lora is None else repr(lora),
        "context": context,
        "kv": kv,
        "precision": precision,
    }
    report = progress or ignore_progress
    with Journal.opened(target, job, survey.rows, force=force) as journal:
        resumed = journal.done
        journal.add(_unreadable(source, column))
        report(journal.done, survey.rows)
        if journal.done < survey.rows:
            with connected(count) as ray:
                check_resources(ray, count, num_gpus)
                pool = _Pool(ray, work, count, num_gpus)
                try:
                    for answers in pool.answers(source, column, journal, rows_at_once):
                        journal.add(answers)
                        report(journal.done, survey.rows)
                except KeyboardInterrupt:  # perhaps while a row was written, before its report
                    report(journal.done, survey.rows)
                    raise
        _write(target, source, survey, journal, added)
        journal.remove()
        return BatchResult(target, survey.rows, journal.failed, resumed)


@dataclass(frozen=True, slots=True)
class _Pool:
    """A pool of Ray Data's actors."""

    ray: Any
    work: Work
    count: int
    num_gpus: float

    def answers(
        self, source: Rows, column: str | None, journal: Journal, size: int
    ) -> Iterator[list[tuple[int, Answer]]]:
        """Yield the answers to the rows that have none, as they come.

        A block whose process died again and again is divided into rows, so that only the row that
        ends processes has an error."""
        for rows in (size, 1):
            yield from self._run(_unanswered(source, column, journal), rows)
        left = [row for row, _ in _unanswered(source, column, journal)]
        yield [(row, {"error": DIED}) for row in left]

    def _run(
        self, rows: Iterable[tuple[int, Any]], size: int
    ) -> Iterator[list[tuple[int, Answer]]]:
        """Yield the answers to rows, block by block; those of a lost block do not come."""
        import pyarrow as pa

        data, blocks = import_ray("ray.data"), []
        for block in _chunks(rows, size):
            asked = [pickle.dumps(value) for _, value in block]
            table = pa.table({"row": [row for row, _ in block], "asked": asked})
            blocks.append(self.ray.put(table))
        if not blocks:
            return
        with quiet():
            dataset = data.from_arrow_refs(blocks)
            dataset.context.max_errored_blocks = -1
            dataset.context.enable_progress_bars = False
            dataset.context.print_on_execution_start = False
            calls = CALLS if size > 1 else 1  # a row that ends its process ends no other
            dataset = dataset.map_batches(
                RowWorker,
                fn_constructor_args=[self.work, self.ray.remote(num_cpus=0)(Tries).remote()],
                batch_size=size,
                batch_format="pyarrow",
                compute=data.ActorPoolStrategy(
                    size=min(self.count, len(blocks)),
                    max_tasks_in_flight_per_actor=calls,
                    max_concurrent_calls_per_actor=calls,
                    enable_true_multi_threading=True,
                ),
                num_gpus=self.num_gpus or None,
            )
            try:
                for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
                    answers = map(json.loads, table["answer"].to_pylist())
                    pairs = zip(table["row"].to_pylist(), answers, strict=True)
                    yield [(row, answer) for row, answer in pairs if answer != GIVEN_UP]
            except Exception as error:
                raise InputError(f"The job cannot go on: {cause_of(error)}") from None
            finally:
                remove_locks(self.work.job)


def _unanswered(source: Rows, column: str | None, journal: Journal) -> Iterator[tuple[int, Any]]:
    for number, row in enumerate(source):
        if not isinstance(row, BadRow) and not journal.has(number):
            yield number, asked_of(row, column)


def _unreadable(source: Rows, column: str | None) -> list[tuple[int, Answer]]:
    """Return the errors of rows that no model needs to see."""
    errors: list[tuple[int, Answer]] = []
    for number, row in enumerate(source):
        try:
            error = row.error if isinstance(row, BadRow) else ""
            if not error:
                asked_of(row, column)  # type: ignore[arg-type]
        except InputError as caught:
            error = str(caught)
        if error:
            errors.append((number, {"error": error}))
    return errors


def _write(
    target: Path, source: Rows, survey: Survey, journal: Journal, added: dict[str, str]
) -> None:
    """Write all rows, in their order, with their answers."""

    changed = InputError(f"{shortened(source.path)} has changed meanwhile: begin anew.")

    def rows() -> Iterator[Row]:
        left = survey.rows
        for number, row in enumerate(source):
            left -= 1
            if left < 0:
                raise changed
            kept = row.kept if isinstance(row, BadRow) else row
            answer = journal.answer(number)
            yield kept | {name: answer.get(name) for name in added}
        if left:
            raise changed

    try:
        with written_beside(target, written(rows(), target, source, survey, added)) as rename:
            rename()
    except GgufError as error:
        raise InputError(str(error)) from None


def _check_target(target: Path, source: Rows, *, force: bool) -> None:
    if target.suffix.lower() not in (*JSON_ENDINGS, PARQUET_ENDING):
        raise InputError(f"{shortened(target)} must be named .jsonl or .parquet.")
    if not target.parent.is_dir():
        raise InputError(f"There is no folder {shortened(target.parent)} to write to.")
    if target.exists():
        if target.samefile(source.path):
            raise InputError(f"{shortened(target)} is the data itself: choose another file.")
        if not force and not target.with_name(target.name + ENDING).exists():
            raise InputError(
                f"{shortened(target)} already exists: --force (in Python force=True) replaces it."
            )


def _check_settings(settings: Settings) -> dict[str, Any]:
    checked: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in SETTINGS:
            names = ", ".join(SETTINGS)
            raise InputError(f"There is no setting {shown(name)}; there are: {names}.")
        checked[name] = SETTINGS[name].check(value)
    return checked


def _check_columns(source: Rows, survey: Survey, column: str | None, added: dict[str, str]) -> None:
    """Raise InputError for data that has no prompts, or would lose a column."""
    wanted = DEFAULT_COLUMNS if column is None else (column,)
    if not survey.rows:
        raise InputError(f"{shortened(source.path)} has no rows.")
    if not any(name in survey.columns for name in wanted):
        names = ", ".join(shown(name) for name in list(survey.columns)[:8])
        raise InputError(
            f"No row of {shortened(source.path)} has {' or '.join(map(repr, wanted))}: name the "
            f"column of prompts or messages with --column (in Python column=…). It has {names}."
        )
    for name in added:
        if name in survey.columns:
            raise InputError(
                f"{shortened(source.path)} has a column {name!r}, which is where the replies go: "
                "rename it."
            )


def _model_identity(model: str | None) -> list[Any]:
    """Return by what a model is known again: its name and, where it is here, its size."""
    if is_address(model):
        raise InputError(f"{model} is on another server: download it, and name the file.")
    try:
        path = find_model(model).path
    except WebgemmaError:
        if not os.environ.get(ADDRESS_VARIABLE):
            raise
        return [model, None]  # only the machines that compute need it
    return [model, path.stat().st_size if path else None]


def _chunks(rows: Iterable[tuple[int, Any]], size: int) -> Iterator[list[tuple[int, Any]]]:
    rest = iter(rows)
    while chunk := list(islice(rest, size)):
        yield chunk
