"""The chat page as the server serves it: its files, its headers, and who may read them."""

import re
from collections.abc import Iterator
from pathlib import Path, PurePath
from urllib.parse import urljoin

import pytest
from helpers.live_server import Live, live_server, tiny_model

from webgemma import __version__
from webgemma.errors import InputError
from webgemma.server import page
from webgemma.settings import SETTINGS
from webgemma.web.site import STATIC

KEY = "0123456789abcdef"
HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}  # as browsers send it
REFERENCES = {  # by the type of a file
    "": r'(?:href|src)="([^"#]+)"',
    ".js": r'(?m)(?:^import |^\} from |^import .* from |import\(|addModule\()"([^"]+)"',
    ".css": r"url\(([^)]+)\)",
}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server that other machines reach."""
    model = tiny_model(tmp_path_factory.mktemp("models"))
    with live_server(model, keys=[KEY], host="0.0.0.0") as server:
        yield server


def test_it_is_the_page_of_webgemma_web_with_another_home(live: Live) -> None:
    answer = live.http.get("/chat/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    page = (STATIC / "index.html").read_text("utf-8")
    assert answer.text == page.replace('data-home="tab"', 'data-home="server"') != page
    assert live.http.get("/chat/page.js").content == (STATIC / "page.js").read_bytes()


def test_all_that_the_page_refers_to_is_there(live: Live) -> None:
    seen, left = set(), ["/chat/"]
    while left:
        path = left.pop()
        if path in seen:
            continue
        seen.add(path)
        answer = live.http.get(path)
        assert answer.status_code == 200, path
        for found in re.findall(REFERENCES.get(PurePath(path).suffix, "(?!)"), answer.text):
            # What a script adds to the page is relative to the page.
            base = "/chat/" if found.endswith("_worklet.js") else path
            left.append(urljoin(base, found))
    scripts = {
        "server_engine.js",
        "tab_engine.js",
        "microphone_worklet.js",
        "package/media/browser.js",
    }
    assert {f"/chat/{name}" for name in scripts} | {"/status"} < seen


def test_what_belongs_to_the_tab_alone_is_not_served(live: Live) -> None:
    for name in ("sw.js", "worker.js", "python.js", "locked.html", "index.html", "package/api.js"):
        assert live.http.get(f"/chat/{name}").status_code == 404
    for name in ("../x", "%2e%2e/page.py", "..%2f..%2fapi.py", "//etc/passwd", "api/models"):
        answer = live.http.get(f"/chat/{name}")
        assert answer.status_code in (401, 404), name
        assert "import" not in answer.text


def test_its_folder_leads_nowhere_else(live: Live) -> None:
    for path in (b"/chat/../api/tags", b"/chat/%2e%2e/api/tags", b"/chat//api/tags", b"/chat/."):
        with live.connect() as connection:
            connection.sendall(
                b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            )
            answer = connection.makefile("rb").read()
        assert answer.split()[1] == b"404", path
        assert b"small" not in answer


def test_browsers_keep_it_and_ask_before_each_use(live: Live) -> None:
    for name in ("", "page.js", "style.css", "icon-192.png"):
        first = live.http.get(f"/chat/{name}")
        assert first.headers["cache-control"] == "no-cache"
        again = live.http.get(f"/chat/{name}", headers={"If-None-Match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == first.headers["etag"]
        other = live.http.get(f"/chat/{name}", headers={"If-None-Match": '"another"'})
        assert other.content == first.content
        head = live.http.head(f"/chat/{name}")
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(first.content))


def test_its_policy_allows_its_own_files_alone(live: Live) -> None:
    for name in ("", "page.js", "api/about", "icon.svg"):
        headers = live.http.get(f"/chat/{name}").headers
        rules = (
            rule.strip().split(" ", 1) for rule in headers["content-security-policy"].split(";")
        )
        policy = dict(rules)
        assert policy["default-src"] == "'none'"
        for rule in ("script-src", "style-src", "connect-src"):
            assert policy[rule] == "'self'"
        for rule in ("frame-ancestors", "form-action", "base-uri"):
            assert policy[rule] == "'none'"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
    page = live.http.get("/chat/").text
    assert not re.search(r"<script>|<style|\sstyle=|\son\w+=|https?:", page)


def test_it_needs_no_key_and_everything_else_does(live: Live) -> None:
    assert live.http.get("/chat/api/about").json()["version"] == __version__
    names = [each["name"] for each in live.http.get("/chat/api/settings").json()["settings"]]
    assert names == [name for name, setting in SETTINGS.items() if setting.on_page]
    body = {"model": "small", "messages": [{"role": "user", "content": "hello"}]}
    for path in ("/api/tags", "/status.json", "/v1/models", "/chatter", "/Chat/"):
        assert live.http.get(path).status_code == 401
    assert live.post("/v1/chat/completions", body).status_code == 401
    assert live.post("/chat/", body).status_code == 405


def test_the_root_leads_browsers_to_it_and_programs_nowhere(live: Live) -> None:
    answer = live.http.get("/", headers=HTML)
    assert (answer.status_code, answer.headers["location"]) == (303, "chat/")
    assert live.http.get("/", headers=HTML, follow_redirects=True).url.path == "/chat/"
    assert live.http.get("/chat", follow_redirects=True).url.path == "/chat/"
    for accept in ("*/*", "application/json", ""):
        answer = live.http.get("/", headers={"Accept": accept})
        assert (answer.status_code, answer.text) == (200, "Ollama is running")
        assert answer.headers["vary"] == "Accept"


def test_the_page_of_another_origin_cannot_use_the_server(live: Live) -> None:
    """Its own can, whatever name this machine has in that network."""
    key = {"Authorization": f"Bearer {KEY}"}
    for host in ("pc.example:8080", "192.168.1.5:11434", "Chat.Example.com"):
        for scheme in ("http", "https"):  # the latter by a proxy
            own = {"Host": host, "Origin": f"{scheme}://{host.lower()}"}
            assert live.http.get("/api/tags", headers=own | key).status_code == 200
            assert live.http.get("/api/tags", headers=own).status_code == 401
        for origin in (
            "http://evil.example",
            "null",
            f"http://{host}.evil.example",
            f"ftp://{host}",
        ):
            headers = {"Host": host, "Origin": origin}
            answer = live.http.get("/api/tags", headers=headers | key)
            assert answer.status_code == 403
            assert not [name for name in answer.headers if name.startswith("access-control")]


def test_on_loopback_a_name_that_points_here_has_no_page(tmp_path: Path) -> None:
    with live_server(tiny_model(tmp_path)) as live:
        for name in ("evil.example", "pc.local"):
            host = f"{name}:{live.port}"
            answer = live.http.get("/api/tags", headers={"Host": host, "Origin": f"http://{host}"})
            assert answer.status_code == 403
        assert live.http.get("/chat/", headers={"Host": "evil.example"}).status_code == 403
        own = {"Origin": f"http://localhost:{live.port}"}
        assert live.http.get("/api/tags", headers=own).status_code == 200


def test_it_can_be_turned_off(tmp_path: Path) -> None:
    with live_server(tiny_model(tmp_path), page=False) as live:
        for path in ("/chat", "/chat/", "/chat/page.js"):
            assert live.http.get(path).status_code == 404
        assert live.http.get("/", headers=HTML).text == "Ollama is running"


def test_a_page_of_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "index.html").write_text("<html>")
    monkeypatch.setattr(page, "STATIC", tmp_path)
    with pytest.raises(InputError, match="install webgemma again"):
        page.Page()
