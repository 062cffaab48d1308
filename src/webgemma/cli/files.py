"""`webgemma list`, `show` and `verify`: the model files of this machine."""

from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from webgemma.cli.options import JsonOption, ModelArgument
from webgemma.cli.terminal import (
    bytes_bar,
    err,
    fail,
    format_count,
    format_nbytes,
    out,
    reported_errors,
    write_json,
)
from webgemma.errors import GgufError, InputError
from webgemma.gemma.config import Config, Layer
from webgemma.gemma.encoder_config import EncoderConfigs
from webgemma.gemma.tensors import canonical_tensors
from webgemma.gguf.ollama import OllamaModel, OllamaStore, parse_digest, sha256_file
from webgemma.gguf.reader import Gguf
from webgemma.models import (
    BUNDLED_PATH,
    BUNDLED_SHA256,
    FoundModel,
    find_model,
    needs_await,
)
from webgemma.packages import PACKAGED, PackagedModel, fetched_model
from webgemma.web.gpu_memory import gpu_size


def list_models(as_json: JsonOption = False) -> None:
    """List the models on this machine: the bundled one, fetched ones, those in Ollama's store.

    Example: webgemma list
    """
    with reported_errors():
        store = OllamaStore()
        stored = [_stored_facts(model) for model in store.list()]
        fetched = [_fetched_facts(model) for model in PACKAGED.values() if model.is_fetched]
        facts = [_file_facts("-", BUNDLED_PATH), *fetched, *stored]
        if as_json:
            write_json(facts)
            return
        out.print(_model_table(facts))
        for each in facts:
            if each["problem"]:
                line = f"{each['name']} cannot run: {each['problem']}"
                out.print(line, style="dim", markup=False, soft_wrap=True)
        if not stored:
            out.print(f"No models in {store.root}. Pull one: ollama pull gemma4:e2b", markup=False)
        for problem in store.problems:
            err.print(f"[yellow]note:[/] {escape(problem)}", soft_wrap=True)


def _file_facts(name: str, path: Path) -> dict[str, Any]:
    """Return what is listed of a file; GgufError if it cannot run."""
    with Gguf.open(path) as gguf:
        config = Config.from_gguf(gguf)
        return {
            "name": name,
            "family": config.architecture,
            "parameters": format_count(config.parameters),
            "quantisation": _formats(gguf).most_common(1)[0][0],
            "nbytes": gguf.nbytes,
            "modified": _time(path.stat().st_mtime).isoformat(),
            "problem": None,
        }


def _fetched_facts(model: PackagedModel) -> dict[str, Any]:
    """Return what is listed of a fetched model, and why it cannot run, if it was damaged."""
    try:
        return _file_facts(model.name, model.path)
    except GgufError as error:
        unknown = {"family": "", "parameters": "", "quantisation": ""}
        modified = _time(model.path.stat().st_mtime).isoformat()
        facts = {"name": model.name, **unknown, "nbytes": model.nbytes, "modified": modified}
        return {**facts, "problem": str(error)}


def _stored_facts(model: OllamaModel) -> dict[str, Any]:
    """Return what is listed of a model of the store, and why it cannot run, if so."""
    try:
        problem = gpu_size(model.path, str(model.name)).problem
    except GgufError as error:  # it has no weights on this machine
        problem = str(error)
    return {
        "name": str(model.name),
        "family": str(model.config.get("model_family", "")),
        "parameters": str(model.config.get("model_type", "")),
        "quantisation": str(model.config.get("file_type", "")),
        "nbytes": model.nbytes,
        "modified": _time(model.modified_seconds).isoformat(),
        "problem": problem,
    }


def _model_table(models: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "family", "parameters", "quantisation", "size", "modified", "runs"):
        table.add_column(column, justify="right" if column in ("parameters", "size") else "left")
    for model in models:
        bundled = model["name"] == "-"
        modified = datetime.fromisoformat(model["modified"])
        table.add_row(
            "- (bundled)" if bundled else model["name"],
            model["family"],
            model["parameters"],
            model["quantisation"],
            format_nbytes(model["nbytes"]),
            "" if bundled else f"{modified:%Y-%m-%d %H:%M}",
            "no" if model["problem"] else "yes",
            style="dim" if model["problem"] else None,
        )
    return table


def show(
    model: ModelArgument = None,
    context: Annotated[
        int, typer.Option(help="The context length for the memory of the cache.")
    ] = 8192,
    as_json: JsonOption = False,
) -> None:
    """Show the sizes, layers and formats of a model, and the memory it needs.

    Example: webgemma show gemma4:e2b
    """
    with reported_errors():
        if context < 1:
            raise InputError(f"A context of {context} is not possible.")
        found = find_model(model)
        with found.open() as gguf:
            facts = describe(found, gguf, context)
        if as_json:
            write_json(facts)
            return
        _print_facts(facts)


def describe(found: FoundModel, gguf: Gguf, context: int) -> dict[str, Any]:
    """Return the facts that `show` prints."""
    config = Config.from_gguf(gguf)
    context = min(context, config.context)
    tensors = canonical_tensors(gguf)
    projector = _projector(found)
    encoders = EncoderConfigs.from_gguf(projector) if projector else EncoderConfigs.from_gguf(gguf)
    text_nbytes = sum(x.nbytes for n, x in tensors.items() if not n.startswith(("v.", "a.", "mm.")))
    table = tensors.get("per_layer_token_embd.weight")
    table_nbytes = table.nbytes if table else 0
    kv_nbytes = config.kv_nbytes(context)
    return {
        "name": found.label,
        "path": str(found.path or ""),
        "architecture": config.architecture,
        "title": config.name,
        "parameters": config.parameters,
        "vocabulary": config.vocab,
        "width": config.width,
        "context": config.context,
        "window": config.window,
        "per_layer_embedding": config.ple,
        "experts": None
        if config.experts is None
        else {
            "count": config.experts.count,
            "used": config.experts.used,
            "ffn": config.experts.ffn,
        },
        "embedding": config.embedding
        and {"size": config.embedding.size, "complete": not config.embedding.is_cut},
        "encoders": {
            "vision": encoders.vision
            and {"layers": encoders.vision.layers, "width": encoders.vision.width},
            "audio": encoders.audio
            and {"layers": encoders.audio.layers, "width": encoders.audio.width},
        },
        "file_nbytes": gguf.nbytes,
        "formats_nbytes": dict(_formats(gguf).most_common()),
        "memory_nbytes": {
            "weights": text_nbytes - table_nbytes,
            "per_layer_table": table_nbytes,
            "encoders": encoders.nbytes,
            "kv_cache": kv_nbytes,
            "kv_context": context,
        },
        "layers": [_layer_facts(layer) for layer in config.layers],
    }


def verify(
    model: ModelArgument = None,
    sha256: Annotated[
        str | None,
        typer.Option(help="The digest to compare with, for a file outside Ollama's store."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check every byte of a model against its SHA-256 digest.

    Example: webgemma verify gemma4:e2b
    """
    with reported_errors():
        results, found = [], find_model(model)
        for label, path, digest in _to_verify(found, sha256):
            with bytes_bar(label, path.stat().st_size) as advance:
                actual = sha256_file(path, advance)
            results.append({"file": str(path), "label": label, "digest": digest, "actual": actual})
        bad = [r for r in results if r["digest"] != r["actual"]]
        if as_json:
            write_json({"ok": not bad, "files": results})
            raise typer.Exit(1 if bad else 0)
        for result in results:
            mark = "[red]damaged[/]" if result in bad else "[green]ok[/]"
            out.print(f"{mark}  {result['label']}  sha256:{result['actual']}", soft_wrap=True)
        if bad:
            fail(
                f"{bad[0]['label']} is damaged: its digest should be sha256:{bad[0]['digest']}. "
                + _remedy(found)
            )


def _to_verify(found: FoundModel, sha256: str | None) -> list[tuple[str, Path, str]]:
    """Return (label, file, digest) of each file to check: of an Ollama model, each layer."""
    if found.path is None:
        raise needs_await(found.label)
    if found.ollama is not None:
        return [
            (layer.kind, layer.path, parse_digest(layer.digest)) for layer in found.ollama.layers
        ]
    if sha256 is not None:
        digest = parse_digest(sha256 if ":" in sha256 else f"sha256:{sha256}")
    elif found.path.name.startswith("sha256-"):  # a blob, named by its digest
        digest = parse_digest(found.path.name)
    elif found.path == BUNDLED_PATH:
        digest = BUNDLED_SHA256
    elif (packaged := fetched_model(found.label, found.path)) is not None:
        digest = packaged.sha256
    else:
        raise InputError(
            f"{found.path.name} is not from Ollama's store, so its digest is not known; "
            "give it with --sha256."
        )
    return [(found.path.name, found.path, digest)]


def _remedy(found: FoundModel) -> str:
    """Return what to do about a damaged file."""
    if found.path == BUNDLED_PATH:
        return "Install webgemma again."
    if packaged := fetched_model(found.label, found.path):
        return f"Delete {found.path} and run webgemma fetch {packaged.name}."
    return "Pull the model again."


def _formats(gguf: Gguf) -> Counter[str]:
    """Return how many bytes of a model are in each format."""
    formats: Counter[str] = Counter()
    for tensor in gguf.tensors.values():
        formats[tensor.format.name] += tensor.nbytes
    return formats


def _projector(found: FoundModel) -> Gguf | None:
    layers = found.ollama.projectors if found.ollama else ()
    return Gguf.open(layers[0]) if layers else None


def _layer_facts(layer: Layer) -> dict[str, Any]:
    return {
        "index": layer.index,
        "attention": "sliding" if layer.sliding else "full",
        "heads": layer.heads,
        "kv_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "kv": f"of {layer.kv_donor}" if layer.shares_kv else ("K=V" if layer.k_is_v else "own"),
        "ffn": layer.ffn,
        "experts": layer.experts,
    }


def _vectors(embedding: dict[str, Any] | None) -> str:
    """Describe the vectors of an embedding model."""
    if not embedding:
        return ""
    lacks = "" if embedding["complete"] else "; the file lacks the dense layers"
    return f"{embedding['size']} numbers{lacks}"


def _print_facts(facts: dict[str, Any]) -> None:
    memory = facts["memory_nbytes"]
    experts = facts["experts"]
    encoders = [f"{kind} ({e['layers']} layers)" for kind, e in facts["encoders"].items() if e]
    rows = [
        (
            "architecture",
            facts["architecture"] + (f" ({facts['title']})" if facts["title"] else ""),
        ),
        ("parameters", format_count(facts["parameters"])),
        ("vocabulary", f"{facts['vocabulary']} tokens"),
        ("width", str(facts["width"])),
        ("context", f"{facts['context']} tokens, sliding window {facts['window']}"),
        (
            "experts",
            f"{experts['used']} of {experts['count']}, width {experts['ffn']}" if experts else "",
        ),
        ("per-layer embedding", str(facts["per_layer_embedding"] or "")),
        ("vectors", _vectors(facts["embedding"])),
        ("encoders", ", ".join(encoders)),
        ("file", format_nbytes(facts["file_nbytes"])),
        (
            "formats",
            ", ".join(f"{k} {format_nbytes(v)}" for k, v in facts["formats_nbytes"].items()),
        ),
        ("memory: weights", format_nbytes(memory["weights"])),
        (
            "memory: per-layer table",
            format_nbytes(memory["per_layer_table"]) if memory["per_layer_table"] else "",
        ),
        ("memory: encoders", format_nbytes(memory["encoders"]) if memory["encoders"] else ""),
        (
            "memory: KV cache",
            f"{format_nbytes(memory['kv_cache'])} at {memory['kv_context']} tokens (f16)",
        ),
    ]
    out.print(facts["name"], style="bold", markup=False)
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        if value:
            out.print(f"  {label:<{width}}  {value}", markup=False, soft_wrap=True)
    out.print()
    out.print(_layer_table(facts["layers"]))


def _layer_table(layers: list[dict[str, Any]]) -> Table:
    """Return a table with one row for each layer."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in (
        "layers",
        "attention",
        "heads",
        "kv heads",
        "head dim",
        "keys, values",
        "ffn",
        "experts",
    ):
        table.add_column(
            column, justify="left" if column in ("attention", "keys, values") else "right"
        )
    for layer in layers:
        table.add_row(
            str(layer["index"]),
            layer["attention"],
            str(layer["heads"]),
            str(layer["kv_heads"]),
            str(layer["head_dim"]),
            layer["kv"],
            str(layer["ffn"]),
            "yes" if layer["experts"] else "",
        )
    return table


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds).astimezone()
