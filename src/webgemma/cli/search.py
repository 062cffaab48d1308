"""`webgemma index` and `webgemma ask`: search in a folder of one's own files."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from webgemma.api import Gemma
from webgemma.cli.embedder import DEFAULT, ModelEmbedder
from webgemma.cli.options import (
    ContextOption,
    Device,
    DeviceOption,
    GpuOption,
    JsonOption,
    Kv,
    KvOption,
    ModelArgument,
    Precision,
    PrecisionOption,
    ThinkOption,
    with_settings,
)
from webgemma.cli.preflight import check_question_order, check_request, check_settings
from webgemma.cli.reply import Received, note, print_reply
from webgemma.cli.stopping import StopSignals
from webgemma.cli.terminal import (
    bytes_bar,
    err,
    out,
    reported_errors,
    say,
    steps_bar,
    write_json,
)
from webgemma.errors import InputError
from webgemma.search import (
    Citations,
    Index,
    Passage,
    Update,
    check_citations,
    index_lock,
    update_index,
)
from webgemma.search.answering import fitting, question_messages, shown_path
from webgemma.search.embedding import DEFAULT_SIZE, check_size, embed_texts
from webgemma.search.index import NAME, Facts, delete_index
from webgemma.search.indexing import check_embedder
from webgemma.search.lock import lock_path
from webgemma.search.retrieval import MAX_TOP, find_passages, has_changed

SHOWN = 160  # characters of a source
SHOWN_PROBLEMS = 20
SKIPPED = {  # in words, in this order
    "hidden": "hidden or generated",
    "binary": "not text",
    "large": "too large",
    "links": "links",
    "special": "not plain files",
    "pdf": 'PDF, which needs pip install "webgemma[search]"',
}

EmbedderOption = Annotated[
    str | None,
    typer.Option(
        "--embedder",
        metavar="NAME",
        help=f"The embedding model, as MODEL; by default that of the index, else {DEFAULT}.",
    ),
]


def index(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to search in.")],
    *,
    index_path: Annotated[
        Path | None,
        typer.Option("--index", metavar="FILE", help=f"The index; by default FOLDER/{NAME}."),
    ] = None,
    embedder: EmbedderOption = None,
    size: Annotated[
        int | None,
        typer.Option(
            help="Numbers of a vector: 768, 512, 256 or 128, say; by default those of the index, "
            f"else {DEFAULT_SIZE}."
        ),
    ] = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Delete the index, and make it anew.")
    ] = False,
    device: DeviceOption = Device.auto,
    gpu: GpuOption = None,
    as_json: JsonOption = False,
) -> None:
    """Index the text, HTML, PDF and source files of a folder, to ask about them.

    Run again, it embeds only what is new or has changed, and removes what is gone. Ctrl-C keeps
    what is done.

    Examples:
      webgemma index ~/notes
      webgemma index ~/papers --embedder embeddinggemma --size 768
      webgemma index . --index /tmp/project.sqlite --json
    """
    update = Update()
    with reported_errors(), steps_bar("indexing") as bar, StopSignals() as signals:
        if not folder.is_dir():
            what = "is not a folder" if folder.exists() else "does not exist"
            raise InputError(f"{folder} {what}.")
        path = _index_at(index_path or folder)
        if size is not None:
            check_size(size)
        again = "the same command without --rebuild" if rebuild else "the same command"
        try:
            with ExitStack() as stack:
                stack.enter_context(index_lock(path))
                made = None
                if _exists(path) and not rebuild:
                    made = stack.enter_context(Index.open(path))
                    _check_size(made, size)
                before = made.facts if made else _facts_of(path)
                name = embedder or (before.embedder if before else DEFAULT)
                model = stack.enter_context(
                    ModelEmbedder(name, device, gpu, quiet=as_json, before_loading=bar.hide)
                )
                if made is None:
                    vector_size = size or (before.size if before else DEFAULT_SIZE)
                    embed_texts(model, ["?"], "query", vector_size)  # can it? before one is deleted
                    delete_index(path)
                    created = Index.create(path, folder, model.name, model.fingerprint, vector_size)
                    made = stack.enter_context(created)
                update_index(folder, made, model, progress=bar.show, update=update)
                documents, passages = made.counts()
        except KeyboardInterrupt:
            bar.hide()
            done = f"{update.done} of {update.files} files are" if update.files else "nothing is"
            say(err, f"stopped: {done} done; {again} goes on")
            raise typer.Exit(signals.exit_code) from None
        except InputError as error:
            bar.hide()
            if update.added + update.changed == 0:
                raise
            kept = f"{update.done} of {update.files} files are done; {again} goes on."
            raise InputError(f"{error} {kept}") from None
        bar.hide()
        if as_json:
            write_json(_update_facts(path, update, documents, passages))
            return
        _print_update(path, update, documents, passages)


def _index_at(path: Path) -> Path:
    """Return the path of an index that a user names, perhaps by its folder."""
    return path / NAME if path.is_dir() else path


def _exists(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _facts_of(path: Path) -> Facts | None:
    """Return what an index is made with; None if there is none, or it cannot be read."""
    try:
        with Index.open(path) as index:
            return index.facts
    except InputError:
        return None


def _check_size(index: Index, size: int | None) -> None:
    if size not in (None, index.facts.size):
        raise InputError(
            f"{index.path} has vectors of {index.facts.size} numbers; --rebuild makes it anew with "
            f"{size}."
        )


def _update_facts(path: Path, update: Update, documents: int, passages: int) -> dict[str, Any]:
    return {
        "index": str(path),
        "documents": documents,
        "passages": passages,
        "embedded": update.embedded,
        "added": update.added,
        "changed": update.changed,
        "unchanged": update.unchanged,
        "removed": update.removed,
        "skipped": dict(update.skipped),
        "problems": [{"path": path, "problem": why} for path, why in update.problems.items()],
    }


def _print_update(path: Path, update: Update, documents: int, passages: int) -> None:
    for at, (name, why) in enumerate(sorted(update.problems.items())):
        if at == SHOWN_PROBLEMS:
            note(f"… and {len(update.problems) - at} more; --json lists them all")
            break
        note(f"{shown_path(name)}: {why}", "yellow")
    done = [
        f"{count} {word}"
        for word, count in (
            ("added", update.added),
            ("changed", update.changed),
            ("removed", update.removed),
        )
        if count
    ]
    say(
        out,
        f"{shown_path(str(path))}: {documents} files, {passages} passages; "
        + (", ".join(done) or "nothing has changed"),
    )
    skipped = [
        f"{update.skipped[why]} {words}" for why, words in SKIPPED.items() if update.skipped[why]
    ]
    if skipped:
        note(f"skipped: {', '.join(skipped)}")


@with_settings
def ask(
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="The question.")],
    model: ModelArgument = None,
    *,
    index_path: Annotated[
        Path | None,
        typer.Option(
            "--index", metavar="FILE", help=f"The index, or its folder; by default {NAME} here."
        ),
    ] = None,
    embedder: EmbedderOption = None,
    top: Annotated[int, typer.Option(help=f"Passages to answer from, 1 to {MAX_TOP}.")] = 6,
    sources_only: Annotated[
        bool, typer.Option("--sources-only", help="List the passages, without a reply.")
    ] = False,
    think: ThinkOption = False,
    context: ContextOption = None,
    device: DeviceOption = Device.auto,
    gpu: GpuOption = None,
    kv: KvOption = Kv.f16,
    precision: PrecisionOption = Precision.auto,
    as_json: JsonOption = False,
    settings: Any,
) -> None:
    """Answer a question from the files of an index, with the passages that say so.

    Examples:
      webgemma ask "When does the lease end?" gemma4:e2b
      webgemma ask "Which papers measure drift?" gemma4:e2b --index ~/papers/.webgemma-index.sqlite
      webgemma ask "lease" --sources-only --top 3
    """
    with reported_errors():
        check_question_order(question, model)
        check_settings(settings)
        if settings.get("top_logprobs") and not as_json:
            raise InputError("--top-logprobs needs --json, which prints them.")
        path = _index_at(index_path or Path())
        if not path.is_file():
            raise InputError(
                f"There is no index {path}. Make one: webgemma index FOLDER"
                + (f" --index {path}." if index_path else ", and ask there or with --index FILE.")
            )
        if not sources_only:
            check_request(
                model,
                question,
                settings,
                system=None,
                context=context,
                raw=False,
                structure={},
                draft=None,
            )
        with Index.open(path) as opened:
            passages = _find(opened, embedder, question, top, device, gpu, quiet=as_json)
            if sources_only:
                _give_sources(opened, passages, as_json)
                return
            with bytes_bar("loading") as show:
                gemma = Gemma.load(
                    model,
                    device.value,
                    context=context,
                    kv=kv.value,
                    precision=precision.value,
                    gpu=gpu,
                    progress=None if as_json else show,
                )
            with gemma:
                _answer(opened, gemma, question, passages, as_json, think=think, settings=settings)


def _find(
    index: Index,
    embedder: str | None,
    question: str,
    top: int,
    device: Device,
    gpu: str | None,
    *,
    quiet: bool,
) -> list[Passage]:
    """Return the passages for a question; the embedding model is gone before the other comes."""
    with ModelEmbedder(embedder or index.facts.embedder, device, gpu, quiet=quiet) as model:
        check_embedder(index, model.name, model.fingerprint)
        passages = find_passages(index, model, question, top)
    if not passages:
        if lock_path(index.path).exists():  # a run makes it, or was killed
            raise InputError(
                f"{index.path} has no passages yet: wait for `webgemma index`, or run it again."
            )
        raise InputError(f"{index.path} has no passages: no file of {index.folder} has text.")
    return passages


def _give_sources(index: Index, passages: Sequence[Passage], as_json: bool) -> None:
    if as_json:
        write_json({"sources": _source_facts(index, passages)})
        return
    for number, passage in enumerate(passages, 1):
        _print_source(index, number, passage, whole=True)


def _answer(
    index: Index,
    gemma: Gemma,
    question: str,
    passages: Sequence[Passage],
    as_json: bool,
    *,
    think: bool,
    settings: Any,
) -> None:
    """Write the reply and its sources."""
    given = fitting(question, passages, gemma.context, gemma.count_tokens)
    received = Received(by_canvas=gemma.config.diffusion is not None)
    messages = question_messages(question, given)
    pieces: Any = gemma.chat(messages, think=think, overflow="error", **settings)
    with closing(pieces):
        if as_json:
            for piece in pieces:
                received.add(piece)
        else:
            print_reply((piece for piece in pieces if piece.canvas is None), received)
    citations = check_citations(received.text, len(given))
    if as_json:
        write_json(
            {
                **received.facts(),
                "cited": citations.cited,
                "unknown": citations.unknown,
                "sources": _source_facts(index, given),
            }
        )
        return
    if len(given) < len(passages):
        note(
            f"The context of {gemma.context} tokens had room for {len(given)} of {len(passages)} "
            "passages."
        )
    if received.finish == "length":
        note("The reply was cut: --max-tokens or the context allows no more.")
    _print_citations(index, given, citations)


def _print_citations(index: Index, given: Sequence[Passage], citations: Citations) -> None:
    for number in citations.unknown:
        note(f"The reply cites [{number}], but no such passage was given.", "yellow")
    numbers: Sequence[int] = citations.cited
    if not numbers:
        note("The reply cites no passage. These were given:", "yellow")
        numbers = range(1, len(given) + 1)
    sys.stdout.write("\n")
    for number in sorted(numbers):
        _print_source(index, number, given[number - 1])


def _print_source(index: Index, number: int, passage: Passage, *, whole: bool = False) -> None:
    line = f"[{number}] {shown_path(passage.path)}, {passage.place}"
    if whole:
        line += f" ({passage.score:.2f})"
    if has_changed(index, passage):
        line += " (has changed since it was indexed)"
    words = " ".join(passage.text.split())
    text = words[:SHOWN] + ("…" if len(words) > SHOWN else "")
    out.print(Text(line), soft_wrap=True)
    out.print(Text(f"    {shown_path(text)}", style="dim"), soft_wrap=True)


def _source_facts(index: Index, passages: Sequence[Passage]) -> list[dict[str, Any]]:
    return [
        {
            "number": number,
            "path": each.path,
            "file": str(index.folder / each.path),
            "title": each.title,
            f"first_{each.unit}": each.first,
            f"last_{each.unit}": each.last,
            "begin": each.begin,
            "end": each.end,
            "score": round(each.score, 4),
            "changed": has_changed(index, each),
            "text": each.text,
        }
        for number, each in enumerate(passages, 1)
    ]
