"""`webgemma web`: serve the page to this machine only, or write it as a folder to host."""

import json
import shlex
import threading
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from webgemma.cli.options import JsonOption
from webgemma.cli.state import state_folder
from webgemma.cli.terminal import bytes_bar, err, format_nbytes, out, reported_errors, write_json
from webgemma.errors import InputError
from webgemma.models import find_model
from webgemma.web.access import kept_token, opening_page
from webgemma.web.export import export
from webgemma.web.libraries import missing_message
from webgemma.web.npm_package import write_package
from webgemma.web.server import DEFAULT_PORT, Server
from webgemma.web.site import Site


def web(
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help=f"The port; if not given, {DEFAULT_PORT} or the next free one; 0 takes any.",
        ),
    ] = None,
    open_page: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in the browser.")
    ] = True,
    export_to: Annotated[
        Path | None,
        typer.Option(
            "--export",
            metavar="DIR",
            help="Write the page as a folder that any web server can host, instead of serving it.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="With --export: a model that the page offers beside the bundled one, a path to "
            "a .gguf or an Ollama name.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="With --export: write to a folder with other files.")
    ] = False,
    export_module: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write the JavaScript module, an npm package, into a new folder, and end.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Serve the page on this machine, for its user only, and open it in the browser.

    The address has a token, without which nothing is served: other users of the machine can reach
    the port too. It stays the same from start to start; a browser needs it once.

    Examples: webgemma web; webgemma web --export site/ --model gemma.gguf
    """
    with reported_errors():
        if export_module is not None:
            if export_to is not None:
                raise InputError("Name one folder: --export writes the page, --export-module not.")
            _export_module(export_module, as_json)
            return
        if export_to is not None:
            _export(export_to, model, force, as_json)
            return
        if model is not None or force:
            raise InputError("--model and --force are options of --export: name a folder, too.")
        notes = []
        try:
            token = kept_token(state_folder())
        except InputError as error:
            token = None
            notes.append(f"{error} The token of this address is valid until the server ends.")
        site = Site(token=token)
        server = Server(site, port)
        try:
            _announce(server, site, port, as_json, notes)
            if open_page:  # some browsers block the caller until they are closed
                threading.Thread(target=_open, args=(server.url,), daemon=True).start()
            server.run()
        except KeyboardInterrupt:  # the usual end
            err.print("stopped")


def _export(folder: Path, name: str | None, force: bool, as_json: bool) -> None:
    with bytes_bar("reading the model") as bar:
        found = find_model(name) if name is not None else None
        made = export(Site(), folder, found, force=force, progress=lambda _, *done: bar(*done))
    if as_json:
        facts = {"files": made.files, "nbytes": made.nbytes, "models": made.models}
        write_json({"folder": str(made.folder), **facts})
        return
    models = "".join(f", with {model}" for model in made.models)
    out.print(
        f"{made.folder}: {made.files} files, {format_nbytes(made.nbytes)}{models} · "
        "put it on any web server; to try it: "
        f"python -m http.server --directory {shlex.quote(str(made.folder))}",
        markup=False,
        soft_wrap=True,
    )


def _export_module(folder: Path, as_json: bool) -> None:
    nbytes = write_package(folder)
    if as_json:
        write_json({"folder": str(folder), "nbytes": nbytes})
        return
    said = f"webgemma.js and what it needs are in {folder} ({format_nbytes(nbytes)})"
    out.print(said, markup=False, soft_wrap=True)


def _announce(
    server: Server, site: Site, port: int | None, as_json: bool, notes: list[str]
) -> None:
    if as_json:
        typer.echo(json.dumps({"url": server.url}))
        return
    if port is None and server.port != DEFAULT_PORT:
        notes.append(
            f"Port {DEFAULT_PORT} is in use, so this is {server.port}. What the browser stores for "
            "one port is not visible from another."
        )
    if missing := missing_message(site.libraries):
        notes.append(missing)
    for note in notes:
        err.print(f"note: {note}", markup=False, soft_wrap=True)
    out.print(f"webgemma is at {server.url} · Ctrl-C stops it", markup=False, soft_wrap=True)


def _open(url: str) -> None:
    """Open the page through a file that only this user can read."""
    with suppress(OSError):  # it cannot be written: the address is printed
        webbrowser.open(opening_page(state_folder(), url).as_uri())
