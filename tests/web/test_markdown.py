"""The page's Markdown in Chromium: correct nodes, and no script from hostile text."""

from collections.abc import Iterator
from typing import Any

import pytest
from browser.chromium import CHROMIUM, launched
from web.page import give_access, serving_page

pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")

RENDER = """async (text) => {
  const { showMarkdown } = await import("/markdown.js");
  const box = document.createElement("div");
  document.body.append(box);
  const start = performance.now();
  showMarkdown(box, text);
  const seconds = (performance.now() - start) / 1000;
  for (const button of box.querySelectorAll("figcaption, [aria-label]")) {
    if (button.tagName === "FIGCAPTION") button.lastChild.remove();
    for (const name of ["aria-label", "role", "tabindex"]) button.removeAttribute(name);
  }
  for (const node of box.querySelectorAll("*")) {
    for (const name of ["dir", "rel", "target", "title"]) node.removeAttribute(name);
  }
  const html = box.innerHTML;
  box.remove();
  return { html, seconds };
}"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("site")
    with serving_page(folder) as url, launched() as browser:
        page = browser.new_page()
        give_access(page.context, url)
        page.goto(url)
        yield page


def code(text: str, language: str = "code") -> str:
    caption = f"<figcaption><span>{language}</span></figcaption>"
    return f'<figure class="code">{caption}<pre><code>{text}</code></pre></figure>'


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("", ""),
        ("plain\ntext\n\nmore", "<p>plain<br>text</p><p>more</p>"),
        ("# One\n### Three ##\n#none", "<h3>One</h3><h5 aria-level=\"4\">Three</h5><p>#none</p>"),
        ("*a* **b** _c_ __d__ ~~e~~", "<p><em>a</em> <strong>b</strong> <em>c</em> "
         "<strong>d</strong> <del>e</del></p>"),
        ("***both*** **a *b* c**", "<p><em><strong>both</strong></em> "
         "<strong>a <em>b</em> c</strong></p>"),
        ("2 * 3 * 4, snake_case_name, *open", "<p>2 * 3 * 4, snake_case_name, *open</p>"),
        (r"\*not\* \# \\", r"<p>*not* # \</p>"),
        ("`a*b*` ``c`d`` `open", "<p><code>a*b*</code> <code>c`d</code> `open</p>"),
        ("```py\nx = 1 < 2\n\ny\n```\nafter", code("x = 1 &lt; 2\n\ny", "py") + "<p>after</p>"),
        ("~~~\n```\n~~~", code("```")),
        ("```\nstill coming", code("still coming")),
        ("- a\n- b\n  - c\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"),
        ("* a\n    * b\n\n* c", "<ul><li><p>a</p><ul><li>b</li></ul></li><li><p>c</p></li></ul>"),
        ("3. a\n4. b\n\ntext", '<ol start="3"><li>a</li><li>b</li></ol><p>text</p>'),
        ("1. a\n   ```\n   x\n   ```\n2. b", f'<ol><li>a{code("x")}</li><li>b</li></ol>'),
        ("> a\n> - b", "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>"),
        ("a\n\n---\n***", "<p>a</p><hr><hr>"),
        ("| a | b |\n|:-:|--:|\n| `c` | d\\|e |\n| f |",
         '<div class="table"><table><thead><tr><th class="middle">a</th><th class="end">b</th></tr>'
         '</thead><tbody><tr><td class="middle"><code>c</code></td><td class="end">d|e</td></tr>'
         '<tr><td class="middle">f</td><td class="end"></td></tr></tbody></table></div>'),
        ("a | b\nno table", "<p>a | b<br>no table</p>"),
        ("[x *y*](https://a.example/b_(c)) [m](mailto:a@b.example)",
         '<p><a href="https://a.example/b_(c)">x <em>y</em></a> '
         '<a href="mailto:a@b.example">m</a></p>'),
        ("see https://a.example/x_y_z. (http://b.example)",
         '<p>see <a href="https://a.example/x_y_z">https://a.example/x_y_z</a>. '
         '(<a href="http://b.example/">http://b.example</a>)</p>'),
        ("<https://a.example>", '<p><a href="https://a.example/">https://a.example</a></p>'),
        ("![a cat](https://a.example/cat.png)",
         '<p><a href="https://a.example/cat.png">a cat</a></p>'),
        ("<b>x</b> &amp; &lt;", "<p>&lt;b&gt;x&lt;/b&gt; &amp; &lt;</p>"),
    ],
)  # fmt: skip
def test_markdown_becomes_nodes(page: Any, text: str, html: str) -> None:
    assert page.evaluate(RENDER, text)["html"] == html


HOSTILE = [
    "<script>attacked()</script>",
    "<img src=x onerror=attacked()>",
    "<svg onload=attacked()><style onload=attacked()>",
    "<iframe srcdoc='<script>parent.attacked()</script>'></iframe>",
    "<a href='javascript:attacked()'>x</a>",
    "<details open ontoggle=attacked()><form action=javascript:attacked()>",
    "<base href='https://evil.example/'><meta http-equiv=refresh content='0;url=//evil.example'>",
    "<link rel=stylesheet href='//evil.example/x.css'><style>@import '//evil.example'</style>",
    "</p></div></li><script>attacked()</script>",
    "<math><mtext></p><img src=x onerror=attacked()></mtext></math>",
    "<!--><img src=x onerror=attacked()>-->",
    "[x](javascript:attacked())",
    "[x](JaVaScRiPt:attacked())",
    "[x](java\tscript:attacked())",
    "[x](\x01javascript:attacked())",
    "[x](&#106;avascript:attacked())",
    "[x](javascript&colon;attacked())",
    "[x](javascript://a.example/%0aattacked())",
    "[x](data:text/html,<script>attacked()</script>)",
    "[x](vbscript:attacked)",
    "[x](blob:https://a.example/1)",
    "[x](file:///etc/passwd)",
    "[x](//evil.example) [x](/relative) [x](#hash)",
    "[x](<javascript:attacked()>)",
    "<javascript:attacked()> javascript:attacked()",
    "![x](javascript:attacked())",
    "![x](https://evil.example/pixel.png)",
    '[x](https://a.example/"onclick="attacked())',
    "[<img src=x onerror=attacked()>](https://a.example)",
    "[x](https://a.example 'a' onclick='attacked()')",
    "[[x](javascript:attacked())](https://a.example)",
    "[x]: javascript:attacked()\n\n[x]",
    "https://a.example/<script>attacked()</script>",
    "`<script>attacked()</script>`",
    '```"><script>attacked()</script>\n<script>attacked()</script>\n```',
    '``` onclick=attacked() class="x\n</code></pre><script>attacked()</script>',
    "| <script>attacked()</script> | b |\n|---|---|\n| <img src=x onerror=attacked()> | d |",
    "# <img src=x onerror=attacked()>\n> <img src=x onerror=attacked()>",
    "- <img src=x onerror=attacked()>\n1. <svg/onload=attacked()>",
    "**<img src=x onerror=attacked()>**",
    "{{constructor.constructor('attacked()')()}} ${attacked()}",
    "__proto__ constructor [__proto__](https://a.example)",
    "\u202e\u2066javascript:attacked()\u2069",
]
INSPECT = """async (text) => {
  const { showMarkdown } = await import("/markdown.js");
  window.attacked = () => { window.wasAttacked = true; };
  const box = document.createElement("div");
  document.body.append(box);
  showMarkdown(box, text);
  box.querySelectorAll("summary, b").forEach((node) => node.click());
  await new Promise((resolve) => setTimeout(resolve, 20));
  const nodes = [...box.querySelectorAll("*")];
  const found = {
    tags: nodes.map((node) => node.tagName.toLowerCase()),
    attributes: nodes.flatMap((node) => node.getAttributeNames()),
    links: [...box.querySelectorAll("a")].map((a) => [a.protocol, a.rel, a.target]),
    attacked: window.wasAttacked === true,
  };
  box.remove();
  return found;
}"""
TAGS = {
    *("a", "blockquote", "br", "button", "code", "del", "div", "em", "figcaption", "figure"),
    *("h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "span", "strong"),
    *("table", "tbody", "td", "th", "thead", "tr", "ul"),
}
ATTRIBUTES = {
    *("href", "title", "rel", "target", "class", "type", "data-copy", "tabindex"),
    *("aria-label", "role", "start", "dir"),
}


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(page: Any, text: str) -> None:
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    found = page.evaluate(INSPECT, text)
    assert set(found["tags"]) <= TAGS
    assert set(found["attributes"]) <= ATTRIBUTES
    for protocol, rel, target in found["links"]:
        assert protocol in ("http:", "https:", "mailto:")
        assert (rel, target) == ("noopener noreferrer", "_blank")
    assert not found["attacked"]
    assert [url for url in requests if "localhost" not in url] == []


@pytest.mark.parametrize(
    "text",
    [
        *("*a " * 30000, "*a **b " * 15000, "a* " * 30000, "`" * 60000, "[" * 60000),
        *("`a ``b " * 10000, "[a](" * 20000, "![a](b " * 10000, "> " * 20000, "- " * 20000),
        *("<https://" * 10000, "_a" * 40000, "***" * 20000, "| " * 30000, "~~a" * 20000),
        *("a|b\n" * 15000, "|a|\n|-|\n" * 5000, "- a\n" * 15000, "  - a\n\n" * 10000, "\n" * 90000),
        *("a|\n" + "-" * 60000 + "x", "```" + " " * 60000 + "`", " `" + " x" * 30000 + "`"),
        *("`a` " * 40000, "# " * 30000, "".join("  " * (i % 90) + "- a\n" for i in range(3000))),
        *("https://a.example/" + ")" * 50000, "[a](" + "(" * 50000, "\\" * 60000, "- -\n" * 9000),
    ],
    ids=lambda text: text[:12].encode("unicode_escape").decode(),
)
def test_no_text_takes_long(page: Any, text: str) -> None:
    assert page.evaluate(RENDER, text)["seconds"] < 2


STREAM = """async (text) => {
  const { showMarkdown } = await import("/markdown.js");
  const grown = document.createElement("div");
  for (let end = 0; end <= text.length; end += 1) showMarkdown(grown, text.slice(0, end));
  const complete = document.createElement("div");
  showMarkdown(complete, text);
  const first = complete.firstChild;
  showMarkdown(complete, text + "\\n\\nmore");
  return [grown.innerHTML, complete.innerHTML, first === complete.firstChild];
}"""


def test_a_growing_text_ends_as_the_complete_one_and_keeps_its_nodes(page: Any) -> None:
    text = "# T\n\na **b** `c`\n\n- x\n  - y\n\n```py\ncode\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |"
    grown, complete, is_same_node = page.evaluate(STREAM, text)
    assert grown + '<p dir="auto">more</p>' == complete
    assert is_same_node
