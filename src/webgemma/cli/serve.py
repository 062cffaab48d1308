"""`webgemma serve`: models for programs that speak OpenAI's, Ollama's or Anthropic's API."""

import json
import logging
import math
import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from webgemma.cli.options import (
    ContextOption,
    Device,
    DeviceOption,
    DraftOption,
    JsonOption,
    Kv,
    KvOption,
    LoraOption,
    NoDraftOption,
    Precision,
    PrecisionOption,
    chosen_draft,
)
from webgemma.cli.stopping import StopSignals
from webgemma.cli.terminal import err, out, reported_errors
from webgemma.device.opening import find_gpus
from webgemma.errors import InputError

if TYPE_CHECKING:
    from webgemma.distributed.replicas import Replicas

KEY_VARIABLE = "WEBGEMMA_API_KEY"
HOST, PORT = "localhost", 11434  # of server/listening, which needs packages of an extra


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="Ollama names, paths to .gguf files, or - for the bundled model; without any, all "
            "of Ollama's models and the bundled one, as demo.",
        ),
    ] = None,
    *,
    host: Annotated[
        str, typer.Option(help="The address; one that other machines reach needs an API key.")
    ] = HOST,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help=f"The port; if not given, Ollama's {PORT} or the next free one; 0 takes any.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help=f"A file of API keys, one a line, of which clients need one; {KEY_VARIABLE} may "
            "hold one, too."
        ),
    ] = None,
    origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Let pages of this origin use the server, such as https://chat.example.com; may "
            "repeat.",
        ),
    ] = None,
    page: Annotated[
        bool,
        typer.Option("--page/--no-page", help="Serve a chat page at /chat/, for people."),
    ] = True,
    keep_alive: Annotated[
        float,
        typer.Option(min=-1, help="Seconds that an idle model stays in memory; -1: for ever."),
    ] = 300,
    memory_gb: Annotated[
        float | None,
        typer.Option(
            help="Keep as many models in memory as fit into so many gigabytes of the GPU's; the "
            "least recently used ones leave for others."
        ),
    ] = None,
    max_loaded: Annotated[
        int | None,
        typer.Option(
            "--models",
            min=1,
            help="Keep at most so many models in memory; 1 unless --memory-gb says how many.",
        ),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            help="Conversations that a model computes at once, at most; their memory is taken when "
            "it is loaded. If not given: 4, or as many as there is memory for."
        ),
    ] = None,
    context: ContextOption = None,
    device: DeviceOption = Device.auto,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            "--gpu",
            metavar="NAME",
            help="Use the GPU whose name contains this; dawn, wgpu, dawn:NAME and wgpu:NAME choose "
            "the WebGPU library. With --ray it may repeat: a replica for each.",
        ),
    ] = None,
    lora: LoraOption = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH",
            help="Offer a LoRA adapter of the one MODEL (a PEFT folder or GGUF file, or PATH:SCALE)"
            " as a model of this name; may repeat.",
        ),
    ] = None,
    draft: DraftOption = None,
    no_draft: NoDraftOption = False,
    kv: KvOption = Kv.f16,
    precision: PrecisionOption = Precision.auto,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray", help="Serve from replicas under Ray: here, or where RAY_ADDRESS says."
        ),
    ] = False,
    replicas: Annotated[
        int | None,
        typer.Option(min=1, help="With --ray: processes that have the models in memory."),
    ] = None,
    num_gpus: Annotated[
        float, typer.Option(min=0, help="With --ray: what each replica requests of Ray's GPUs.")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Serve models to programs that speak OpenAI's, Ollama's or Anthropic's API, and a chat page.

    Only this machine can reach it unless --host says otherwise. Models are loaded when they are
    first asked for. Nothing is downloaded, and no request names a file.

    Examples:
      webgemma serve
      webgemma serve gemma4:e2b --port 8080
      webgemma serve --memory-gb 20
      webgemma serve gemma4:e4b --slots 16 --context 8192
      webgemma serve gemma4:e2b --adapter pirate=adapters/pirate --adapter terse=terse.gguf:0.5
      webgemma serve model.gguf --host 0.0.0.0 --api-key-file keys.txt
      webgemma serve gemma4:e2b --ray --gpu dawn:H200 --replicas 2
    """
    with reported_errors():
        try:
            from webgemma.server.listening import Server
            from webgemma.server.registry import Registry
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn"):
                raise
            raise InputError(
                'The server needs two packages more: run `pip install "webgemma[server]"`.'
            ) from None
        if memory_gb is not None and not memory_gb > 0:  # also for NaN
            raise InputError(f"--memory-gb is {memory_gb:g}; it must be a number above zero.")
        if replicas is not None and not ray:
            raise InputError("--replicas needs --ray, which starts them.")
        if gpu and len(gpu) > 1 and not ray:
            raise InputError("Several GPUs need --ray, which serves from each of them.")
        if gpu and not ray and device != Device.cpu:
            find_gpus(gpu[0])
        options: dict[str, Any] = {
            "max_loaded": max_loaded,
            "memory_gb": None if memory_gb == math.inf else memory_gb,
            "keep_seconds": float("inf") if keep_alive < 0 else keep_alive,
            "device": device.value,
            "lora": lora,
            "adapters": adapter or (),
            "draft": chosen_draft(draft, no_draft),
            "kv": kv.value,
            "precision": precision.value,
            "context": context,
            "slots": slots,
        }
        keys = _keys(api_key_file)
        listening: dict[str, Any] = {"keys": keys, "origins": origin or (), "page": page}
        registry = Registry(models or (), gpu=gpu[0] if gpu else None, **options)
        names = [entry.name for entry in registry.entries()]
        memory = registry.memory_sentences() if models and not as_json else {}
        if not as_json:
            _show_log()
        with ExitStack() as stack:
            stack.enter_context(StopSignals())
            try:
                source: Any = registry
                if ray:
                    source = _replicas(models or (), options, gpu or (), replicas, num_gpus)
                    from webgemma.distributed.ingress import make_ingress

                    listening["make"] = make_ingress
                server = stack.enter_context(closing(Server(source, host, port, **listening)))
                if ray:
                    if err.is_terminal:
                        err.print("starting Ray ...", style="dim")
                    stack.enter_context(source.running())
                _announce(server.url, server.port, names, memory, bool(keys), page, as_json)
                server.run()
            except KeyboardInterrupt:  # the usual end, also by SIGTERM
                err.print("stopped")


def _replicas(
    models: Sequence[str],
    options: dict[str, Any],
    gpus: Sequence[str],
    replicas: int | None,
    num_gpus: float,
) -> "Replicas":
    """Return the replicas to start; InputError where Ray is not installed."""
    from webgemma.distributed.cluster import count_replicas, import_ray
    from webgemma.distributed.replicas import Replicas, Served

    import_ray("ray.serve")
    name = f"webgemma-{secrets.token_hex(8)}"
    served = Served(models, options, gpus, name, os.getcwd())
    return Replicas(served, count_replicas(replicas, gpus), num_gpus)


def _keys(path: Path | None) -> list[str]:
    """Return the API keys of a file and of the environment."""
    keys = [os.environ.get(KEY_VARIABLE, "").strip()]
    if path is not None:
        try:
            lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
        except UnicodeDecodeError:
            raise InputError(f"{path} is not UTF-8 text.") from None
        if not any(lines):
            raise InputError(f"{path} has no API key: write one into it.")
        keys += lines
    return [key for key in keys if key]


def _show_log() -> None:
    """Print what the server logs, such as which model it loads."""
    log = logging.getLogger("webgemma.server")
    log.addHandler(logging.StreamHandler())
    log.setLevel(logging.INFO)
    log.propagate = False


def _reachable(url: str) -> str:
    """Return an address for people: this machine's, where the server listens on all of them."""
    parts = urlsplit(url)
    family = {"0.0.0.0": socket.AF_INET, "::": socket.AF_INET6}.get(parts.hostname or "")
    if family is None:
        return url
    # Nothing is sent: this asks which of the addresses would be used.
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1" if family == socket.AF_INET else "2001:db8::1", 9))
        name = str(probe.getsockname()[0])
        return f"http://{f'[{name}]' if ':' in name else name}:{parts.port}"
    return url


def _announce(
    url: str,
    port: int,
    names: list[str],
    memory: dict[str, str],
    has_keys: bool,
    page: bool,
    as_json: bool,
) -> None:
    chat = f"{_reachable(url)}/chat/" if page else None
    if as_json:
        typer.echo(json.dumps({"url": url, "chat": chat, "models": names}))
        return
    key = "one of your API keys" if has_keys else "anything"
    lines = [
        f"webgemma serves {', '.join(names[:8])}{', …' if len(names) > 8 else ''} at {url}",
        *([f"  Chat       {chat}"] if chat else []),
        f"  OpenAI     OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY=… ({key})",
        f"  Anthropic  ANTHROPIC_BASE_URL={url} ANTHROPIC_API_KEY=… ({key})",
        f"  Ollama     OLLAMA_HOST={url}"
        + (" (its clients' default)" if port == PORT else "")
        + (f", OLLAMA_API_KEY=… ({key})" if has_keys else ""),
        f"  Status     {url}/status",
        *(f"  Memory     {name}: {sentence}" for name, sentence in islice(memory.items(), 8)),
        "Ctrl-C stops it.",
    ]
    for line in lines:
        out.print(line, markup=False, soft_wrap=True)
