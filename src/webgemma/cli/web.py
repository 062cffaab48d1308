"""`webgemma web`: serve the page to this machine only, and open it in the browser."""

import json
import threading
import webbrowser
from contextlib import suppress
from typing import Annotated

import typer

from webgemma.cli.options import JsonOption
from webgemma.cli.state import state_folder
from webgemma.cli.terminal import err, out, reported_errors
from webgemma.errors import InputError
from webgemma.web.access import kept_token, opening_page
from webgemma.web.libraries import missing_message
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
    as_json: JsonOption = False,
) -> None:
    """Serve the page on this machine, for its user only, and open it in the browser.

    The address has a token, without which nothing is served: other users of the machine can reach
    the port too. It stays the same from start to start; a browser needs it once.

    Example: webgemma web
    """
    with reported_errors():
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
