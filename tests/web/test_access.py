"""The token and the cookie: who may use the server, from the command to the browser."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from browser.chromium import CHROMIUM
from helpers.store import add_model
from helpers.tiny import KINDS, tiny_gguf
from web.client import ACCESS, Client, serving
from web.page import Visitor, page_site

from webgemma.errors import InputError
from webgemma.web.access import NO_COOKIE, PUBLIC, TOKEN_FILE, WRONG_TOKEN, Access, kept_token
from webgemma.web.site import STATIC, Site

NOBODY = 65534
# Becomes another user where it may, then tries the port and the token's file.
INTRUDER = """
import http.client, json, os, sys
port, token_file, models, uid = json.loads(sys.argv[1])
http.client.HTTPConnection("localhost").host.encode("idna")  # imports while files can be read
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(uid); os.setuid(uid)
replies = {}
for path in ("/", "/api/models", "/api/about", "/api/offline", "/page.js", "/?token=x", *models):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path, headers={"Cookie": f"webgemma-{port}=guess"})
    response = connection.getresponse()
    replies[path] = [response.status, response.read().decode("latin-1")]
    connection.close()
try:
    read = open(token_file).read()
except PermissionError:
    read = None
print(json.dumps({"uid": os.geteuid(), "replies": replies, "token": read}))
"""


@contextmanager
def command(store: Path, state: Path) -> Iterator[str]:
    """Run `webgemma web`; the value is the address that it prints."""
    env = {**os.environ, "OLLAMA_MODELS": str(store), "XDG_STATE_HOME": str(state)}
    args = [sys.executable, "-m", "webgemma", "web", "--port", "0", "--no-open", "--json"]
    process = subprocess.Popen(args, stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    add_model(tmp_path / "store", "gemma4:e2b", gguf=tiny_gguf(KINDS["small"]))
    return tmp_path / "store"


def test_another_user_of_the_machine_lists_and_reads_nothing(store: Path, tmp_path: Path) -> None:
    with serving(Site(store)) as client:
        (model,) = json.loads(client.get("/api/models").body)["models"]
    with command(store, tmp_path / "state") as url:
        port, token = urlsplit(url).port, url.partition("token=")[2]
        file = tmp_path / "state" / "webgemma" / TOKEN_FILE
        given = json.dumps([port, str(file), [f"/{model['url']}"], NOBODY])
        intruder = subprocess.run(
            [sys.executable, "-c", INTRUDER, given], capture_output=True, text=True, check=True
        )
    found = json.loads(intruder.stdout)
    assert {status for status, _ in found["replies"].values()} == {403}
    texts = {text for _, text in found["replies"].values()}
    assert texts == {f"{NO_COOKIE}\n", f"{WRONG_TOKEN}\n"}
    assert "gemma4" not in intruder.stdout
    assert file.read_text().strip() == token
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    if os.geteuid() == 0:
        assert (found["uid"], found["token"]) == (NOBODY, None)


@pytest.fixture
def client(store: Path) -> Iterator[Client]:
    with serving(Site(store)) as client:
        yield client


def test_the_token_is_answered_by_a_cookie_and_a_redirect(client: Client) -> None:
    reply = client.get(f"/?token={ACCESS.token}", Cookie="")
    assert (reply.status, reply.headers["Location"], reply.body) == (303, "/", b"")
    cookie = reply.headers["Set-Cookie"]
    (morsel,) = SimpleCookie(cookie).values()
    assert morsel.key == f"webgemma-{client.port}"
    assert (morsel["httponly"], morsel["samesite"], morsel["path"]) == (True, "Strict", "/")
    assert ACCESS.token not in cookie
    assert client.get("/api/models", Cookie=f"other=1; {morsel.key}={morsel.value}").status == 200


@pytest.mark.parametrize(
    "cookie", ["", "webgemma-{port}=", "webgemma-{port}={value}0", "webgemma-1={value}", "é=ü; ="]
)
def test_other_cookies_are_refused(client: Client, cookie: str) -> None:
    value = ACCESS.cookie(client.port)[1]
    given = cookie.format(port=client.port, value=value)
    for path in (
        "/",
        "/api/models",
        "/api/offline",
        "/lib/pyodide/pyodide.mjs",
        "/nowhere",
        "/sw.js",
    ):
        reply = client.get(path, Cookie=given)
        assert (reply.status, reply.text) == (403, f"{NO_COOKIE}\n"), path


def test_a_cookie_of_another_port_or_token_is_refused(client: Client) -> None:
    name, _ = ACCESS.cookie(client.port)
    for value in (ACCESS.cookie(client.port + 1)[1], Access().cookie(client.port)[1]):
        assert client.get("/api/models", Cookie=f"{name}={value}").status == 403


def test_a_wrong_token_is_refused(client: Client) -> None:
    for token in ("", "x", "%ff", "%C3%A9", ACCESS.token[:-1], ACCESS.token + "x"):
        reply = client.get(f"/?token={token}", Cookie="")
        assert reply.status == 403
        assert "Set-Cookie" not in reply.headers


def test_a_program_may_send_the_token_with_each_request(client: Client) -> None:
    assert client.get(f"/api/models?token={ACCESS.token}", Cookie="").status == 200
    assert client.get("/api/models?token=wrong", Cookie="").text == f"{WRONG_TOKEN}\n"


def test_only_pictures_and_styles_are_public(client: Client) -> None:
    public = {
        path.name
        for path in STATIC.iterdir()
        if client.get(f"/{path.name}", Cookie="").status == 200
    }
    assert public == PUBLIC


def test_the_token_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "webgemma"
    token = kept_token(folder)
    assert re.fullmatch(r"[\w-]{43}", token)
    assert kept_token(folder) == token
    assert kept_token(tmp_path / "other") != token
    assert sorted(path.name for path in folder.iterdir()) == [TOKEN_FILE]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("damage", ["readable", "empty", "cut", "long", "binary"])
def test_a_token_that_is_not_secret_is_replaced(tmp_path: Path, damage: str) -> None:
    token = kept_token(tmp_path)
    file = tmp_path / TOKEN_FILE
    if damage == "readable":
        file.chmod(0o644)
    else:
        data = {
            "empty": b"",
            "cut": token[:-1].encode(),
            "long": b"x" * 999,
            "binary": b"\xff" * 43,
        }
        file.write_bytes(data[damage])
    replaced = kept_token(tmp_path)
    assert replaced != token
    assert kept_token(tmp_path) == replaced
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_token_that_cannot_be_kept_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(InputError, match=r"cannot be kept in .*: Not a directory"):
        kept_token(tmp_path / "file" / "webgemma")
    (tmp_path / "real").write_text("x" * 43)
    (tmp_path / TOKEN_FILE).symlink_to(tmp_path / "real")
    with pytest.raises(InputError, match="symbolic links"):
        kept_token(tmp_path)
    with command(tmp_path, tmp_path / "file") as url:
        assert len(url.partition("token=")[2]) == 43


needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")


@needs_chromium
def test_the_printed_address_opens_the_page_and_hides_the_token(
    context: Any, tmp_path: Path
) -> None:
    with serving(page_site(tmp_path)) as client:
        visitor = Visitor(context, f"http://localhost:{client.port}/")
        context.clear_cookies()
        page = visitor.page
        page.goto(visitor.url)
        assert page.locator("main p").first.inner_text() == NO_COOKIE.replace("`", "")
        page.goto(f"{visitor.url}?token=wrong")
        assert page.locator("main p").first.inner_text() == WRONG_TOKEN.replace("`", "")
        opening = tmp_path / "open.html"  # as the command opens it: from outside the site
        address = f"{visitor.url}?token={ACCESS.token}"
        opening.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={address}">')
        page.goto(opening.as_uri())
        page.locator("#model-name", has_text="Bundled model").wait_for()
        assert page.url == visitor.url
        (cookie,) = context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        assert page.evaluate("document.cookie") == ""
        # A link of another site, which does not send the cookie, leads to the page too.
        opening.write_text(f'<!doctype html><a href="{visitor.url}">webgemma</a>')
        page.goto(opening.as_uri())
        page.get_by_text("webgemma").click()
        page.locator("#model-name", has_text="Bundled model").wait_for()
        assert page.url == visitor.url


@needs_chromium
def test_a_page_in_the_browser_takes_the_token_of_a_new_server(
    context: Any, tmp_path: Path
) -> None:
    """The service worker answers for the page, but only the server for an address with a token."""
    site = page_site(tmp_path)
    with serving(site) as client:
        visitor = Visitor(context, f"http://localhost:{client.port}/")
        visitor.open()
        visitor.page.evaluate("navigator.serviceWorker.ready.then(() => true)")
    page = visitor.page
    address = f"{visitor.url}?token={ACCESS.token}"
    page.goto(address)  # no server: the cached page
    page.locator("#model-name", has_text="Bundled model").wait_for()
    assert page.url == visitor.url
    context.clear_cookies()
    with serving(site, client.port):
        page.goto(visitor.url)
        page.get_by_text("webgemma is locked").wait_for()
        page.goto(address)
        page.locator("#model-name", has_text="Bundled model").wait_for()
        assert page.url == visitor.url
        assert len(context.cookies()) == 1
