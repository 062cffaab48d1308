"""Who may use the page's server: a token in the address that it prints, and then a cookie.

Every user of the machine can reach the port, and only the user who started the server can read the
token: it is printed, and kept in a file of that user."""

import hmac
import os
import re
import secrets
import stat
import tempfile
from contextlib import suppress
from hashlib import sha256
from html import escape
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs

from webgemma.errors import InputError
from webgemma.web.http import Request, Response

LOCKED_PAGE = Path(__file__).parent / "static" / "locked.html"
TOKEN_FILE = "web-token"
COOKIE_SECONDS = 400 * 24 * 3600  # the longest that browsers keep one; each start sets it again
# What the locked page shows, and what browsers fetch without cookies to install the page.
PUBLIC = {"style.css", "icon.svg", "icon-192.png", "icon-512.png", "manifest.webmanifest"}
NO_COOKIE = "This browser has no access yet: open the address that `webgemma web` printed."
WRONG_TOKEN = (
    "The token in this address is not the one of this server: open the address that "
    "`webgemma web` printed."
)
_TOKEN = re.compile(rb"[A-Za-z0-9_-]{43}\n?")


class Access:
    """The check of requests against one token."""

    def __init__(self, token: str | None = None) -> None:
        """Take a token, or make one that is valid as long as this object."""
        self.token = token or secrets.token_urlsafe(32)

    def cookie(self, port: int) -> tuple[str, str]:
        """Return the name and value of a port's cookie.

        Browsers send a cookie to all ports of a host: the name tells them apart, and who receives
        the value has neither the token nor the cookie of another port."""
        value = hmac.new(self.token.encode(), f"cookie of port {port}".encode(), sha256)
        return f"webgemma-{port}", value.hexdigest()

    def answer(self, request: Request, port: int) -> Response | None:
        """Return the response to the page's address with the token, and to those who have neither
        the token nor the cookie; None if the request may be served."""
        given = parse_qs(request.query).get("token")
        is_known = self._has_cookie(request, port)
        is_known |= given is not None and _is_equal(given[-1], self.token)
        if is_known and given is not None and not request.segments:
            return self._welcome(request, port)
        if is_known or (len(request.segments) == 1 and request.segments[0] in PUBLIC):
            return None
        return _locked(request, NO_COOKIE if given is None else WRONG_TOKEN)

    def _has_cookie(self, request: Request, port: int) -> bool:
        name, value = self.cookie(port)
        cookies = request.headers.get("cookie", "").split(";")
        pairs = [cookie.strip().partition("=") for cookie in cookies]
        # Programs on other ports can set cookies of this name: one that is right is enough.
        return any(_is_equal(given, value) for key, _, given in pairs if key == name)

    def _welcome(self, request: Request, port: int) -> Response:
        """Set the cookie, and redirect to the address without the token."""
        name, value = self.cookie(port)
        cookie = f"{name}={value}; Max-Age={COOKIE_SECONDS}; Path=/; HttpOnly; SameSite=Strict"
        headers = {"Set-Cookie": cookie, "Cache-Control": "no-store"}
        if _is_from_elsewhere(request):  # a redirect would not send the cookie, this page does
            return Response(HTTPStatus.OK, headers | {"Refresh": "0; url=/"})
        return Response(HTTPStatus.SEE_OTHER, headers | {"Location": "/"})


def _is_from_elsewhere(request: Request) -> bool:
    """Return whether a link of another site was followed, or a file's: then no cookie is sent."""
    return request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none")


def _locked(request: Request, reason: str) -> Response:
    """Return the refusal of a request: a page for a person, else one line of text."""
    if request.headers.get("sec-fetch-mode") != "navigate":
        return Response.plain_text(HTTPStatus.FORBIDDEN, reason)
    headers = {"Content-Type": "text/html; charset=utf-8", "Cache-Control": "no-store"}
    if _is_from_elsewhere(request):  # the browser may have the cookie: from this page it is sent
        headers["Refresh"] = "0; url=/?from=link"  # of the same address it would be a reload
    text = LOCKED_PAGE.read_text(encoding="utf-8").replace("REASON", _with_code(reason))
    return Response(HTTPStatus.FORBIDDEN, headers, text.encode())


def _with_code(sentence: str) -> str:
    """Return a sentence as HTML."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(sentence))


def _is_equal(given: str, expected: str) -> bool:
    """Compare in a time that does not depend on where they differ."""
    return hmac.compare_digest(given.encode(errors="replace"), expected.encode())


# The token between runs: a page that is left open, a bookmark and the installed page stay valid.


def kept_token(folder: Path) -> str:
    """Return the token in a folder, which is made if it has none, or none that is secret.

    InputError if it can be neither read nor made."""
    path = folder / TOKEN_FILE
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        token = _read_token(path)
        if token is None:
            with suppress(FileNotFoundError):
                path.unlink()
            _write_private(path, secrets.token_urlsafe(32) + "\n", replace=False)
            token = _read_token(path)
    except OSError as error:
        raise InputError(f"The token cannot be kept in {path}: {error.strerror}.") from None
    if token is None:
        raise InputError(f"The token in {path} cannot be used: delete that file.")
    return token


def opening_page(folder: Path, url: str) -> Path:
    """Write a page that leads to an address, readable by this user only, and return its path.

    All users of a machine see the arguments of a browser, and the address has the token."""
    path = folder / "open.html"
    page = f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(url)}">\n'
    _write_private(path, page, replace=True)
    return path


def _read_token(path: Path) -> str | None:
    """Return the token of a file; None if there is none, or other users may know it."""
    try:
        file = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:
        return None
    with open(file, "rb") as opened:
        info, data = os.fstat(file), opened.read(100)
    if not _TOKEN.fullmatch(data) or not stat.S_ISREG(info.st_mode):
        return None
    if os.name == "posix" and (info.st_uid != os.geteuid() or info.st_mode & 0o077):
        return None
    return data.decode().strip()


def _write_private(path: Path, text: str, *, replace: bool) -> None:
    """Write a file of mode 0600, all of it at once; unless `replace`, an existing one stays."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # 0600
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        if replace:
            os.replace(temporary, path)
        elif os.name == "posix":
            with suppress(FileExistsError):  # another start was faster: its token is valid
                os.link(temporary, path)
        else:
            with suppress(FileExistsError):
                os.rename(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
