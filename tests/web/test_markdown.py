"""The page's Markdown in Chromium: correct nodes, and no script from hostile text."""

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from browser.chromium import CHROMIUM, launched
from web.page import give_access, serving_page

from webgemma.server.page import HEADERS

pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")

STRICT = {name.lower(): value for name, value in HEADERS.items()}
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
    """The page under the policy of `webgemma serve`, the stricter one; it may log no error."""
    folder = tmp_path_factory.mktemp("site")
    errors: list[str] = []

    def strictly(route: Any) -> None:
        response = route.fetch()
        route.fulfill(response=response, headers={**response.headers, **STRICT})

    with serving_page(folder) as url, launched() as browser:
        page = browser.new_page()
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        give_access(page.context, url)
        page.route(url, strictly)
        page.goto(url)
        yield page
    assert [error for error in errors if "Content Security" in error or "rror:" in error] == []


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
         '<p>see <a class="bare" href="https://a.example/x_y_z">https://a.example/x_y_z</a>. '
         '(<a class="bare" href="http://b.example/">http://b.example</a>)</p>'),
        ("<https://a.example>", '<p><a class="bare" href="https://a.example/">https://a.example</a></p>'),
        ("![a cat](https://a.example/cat.png)",
         '<p><a href="https://a.example/cat.png">a cat</a></p>'),
        ("<b>x</b> &amp; &lt;", "<p>&lt;b&gt;x&lt;/b&gt; &amp; &lt;</p>"),
        ("&copy; &#x3b1; &nope;", "<p>© α &amp;nope;</p>"),
        ("H<sub>2</sub>O x<SUP>**2**</SUP> a<br/>b the <sub> tag </sup>",
         "<p>H<sub>2</sub>O x<sup><strong>2</strong></sup> a<br>b the &lt;sub&gt; tag "
         "&lt;/sup&gt;</p>"),
        ("x^2+y^2=z^2, ~5~ and 2^[n]", "<p>x^2+y^2=z^2, ~5~ and 2^[n]</p>"),
        ("One\n===\nTwo\n---\ntext", "<h3>One</h3><h4>Two</h4><p>text</p>"),
        ("a\n\n    b\n      c", "<p>a</p>" + code("b\n  c")),
        ("- [ ] a\n- [x] **b**\n- [y] c",
         '<ul><li class="task"><input type="checkbox" disabled="">a</li><li class="task">'
         '<input type="checkbox" disabled="" checked=""><strong>b</strong></li>'
         "<li>[y] c</li></ul>"),
        ("[a][1] and [b]\n\n[1]: https://a.example\n[B]: <https://b.example> 'title'",
         '<p><a href="https://a.example/">a</a> and <a href="https://b.example/">b</a></p>'),
        ("a  \nb\\\nc", "<p>a<br>b<br>c</p>"),
        ("[![x](https://a.example/i.png)](https://b.example)",
         '<p><a href="https://b.example/">x</a></p>'),
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
    "<br onclick=attacked()><sub onclick=attacked()>x</sub onclick=attacked()><sup/id=messages>",
    "x<sub><script>attacked()</script></sub>",
    "&lt;img src=x onerror=attacked()&gt; &#60;script&#62;attacked()&#60;/script&#62;",
    "[x][1] [y]\n\n[1]: javascript:attacked()\n[y]: data:text/html,x",
    "[^prompt] [^__proto__]\n\n[^prompt]: <img src=x onerror=attacked()>\n[^__proto__]: x",
    "- [ ] <img src=x onerror=attacked()>\n- [x] [x](javascript:attacked())",
    "$\\href{javascript:attacked()}{x}$ \\(\\url{javascript:attacked()}\\)",
    "$$\\text{<img src=x onerror=attacked()>}</math><script>attacked()</script>$$",
    "$\\class{visually-hidden}{x} \\id{prompt}{x} \\style{color:red}{x} \\data{x=y}{x}$",
    "$\\id{prompt}{x}$ $\\class{a}{x}$ $\\style{background:url(//evil.example)}{x}$",
    "$$\\includegraphics[height=1em]{https://evil.example/pixel.png}$$",
    "$$\\begin{equation}x\\label{prompt}\\end{equation}$$ $\\ref{prompt}$",
    "$\\color{red;background:url(https://evil.example)}x$ $\\colorbox{url(//evil.example)}{x}$",
    "```html\n<script>attacked()</script><img src=x onerror=attacked()>\n```",
    "```markdown\n[x](javascript:attacked()) </span><img src=x onerror=attacked()>\n```",
    "```constructor\n1\n```\n```__proto__\n2\n```",
    "```../../sw\n1\n```\n```//evil.example/x\n1\n```",
]
INSPECT = """async (text) => {
  const { showMarkdown } = await import("/markdown.js");
  window.attacked = () => { window.wasAttacked = true; };
  const box = document.createElement("div");
  document.body.append(box);
  const { allDone } = await import("/later.js");
  showMarkdown(box, text);
  await allDone();
  box.querySelectorAll("summary, b, li, sub").forEach((node) => node.click());
  await new Promise((resolve) => setTimeout(resolve, 20));
  const nodes = [...box.querySelectorAll("*")];
  const found = {
    tags: nodes.map((node) => node.tagName.toLowerCase()),
    attributes: nodes.flatMap((node) => node.getAttributeNames()),
    names: nodes.flatMap(({ id }) => id || []),
    notes: [...box.querySelectorAll('a[href^="#"]')]
      .filter((a) => !box.querySelector(a.hash)).length,
    links: [...box.querySelectorAll('a:not([href^="#"])')]
      .map((a) => [a.protocol, a.rel, a.target]),
    attacked: window.wasAttacked === true,
  };
  box.remove();
  return found;
}"""
TAGS = {
    *("a", "blockquote", "br", "button", "code", "del", "div", "em", "figcaption", "figure"),
    *("h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "span", "strong"),
    *("table", "tbody", "td", "th", "thead", "tr", "ul", "section", "sub", "sup", "input"),
    *("math", "mfrac", "mi", "mn", "mo", "mover", "mpadded", "mphantom", "mroot", "mrow", "mspace"),
    *("msqrt", "mstyle", "msub", "msubsup", "msup", "mtable", "mtd", "mtext", "mtr", "munder"),
}
ATTRIBUTES = {
    *("href", "title", "rel", "target", "class", "type", "data-copy", "tabindex"),
    *("aria-label", "aria-level", "role", "start", "dir", "id", "disabled", "checked"),
    *("columnspacing", "form", "fence", "display", "displaystyle", "height", "linethickness"),
    *("lspace", "rspace"),
    *("mathcolor", "mathvariant", "rowspacing", "scriptlevel", "stretchy", "style", "width"),
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
    assert all(re.fullmatch(r"(note|reference)-\d+-\d+(-\d+)?", name) for name in found["names"])
    assert found["notes"] == 0
    assert not found["attacked"]
    assert [url for url in requests if urlsplit(url).hostname != "localhost"] == []
    assert [url for url in requests if "/lib/" not in url] == []


@pytest.mark.parametrize(
    "text",
    [
        *("*a " * 30000, "*a **b " * 15000, "a* " * 30000, "`" * 60000, "[" * 60000),
        *("`a ``b " * 10000, "[a](" * 20000, "![a](b " * 10000, "> " * 20000, "- " * 20000),
        *("<https://" * 10000, "_a" * 40000, "***" * 20000, "| " * 30000, "~~a" * 20000),
        *("a|b\n" * 15000, "|a|\n|-|\n" * 5000, "- a\n" * 15000, "  - a\n\n" * 10000, "\n" * 90000),
        *("a|\n" + "-" * 60000 + "x", "```" + " " * 60000 + "`", " `" + " x" * 30000 + "`"),
        *("`a` " * 40000, "# " * 30000, "".join("  " * (i % 90) + "- a\n" for i in range(3000))),
        *("$" * 100_000, "$a" * 50_000, "$a$ " * 20_000, "$$" + "a\n" * 20_000, "$$\n" * 30_000),
        *("\\(" * 40_000, "\\(a\\)" * 10_000, "\\[\n" * 30_000, "\\begin{align}\n" * 5000),
        *("<sub>" * 20_000, "<sub>" * 9000 + "</sub>" * 9000, "[^a]: " * 15_000, "&" * 100_000),
        *("[^a]" * 8000 + "\n\n[^a]: b", "[^a][^b]\n\n[^b]: [^a]\n\n[^a]: [^b]", "<" * 100_000),
        "".join(f"[^{i}]" for i in range(4000)) + "\n\n[^1]: a\n" * 4000,
        *("[a]: b\n" * 15_000, "- [ ] a\n" * 10_000, "a\n=\n" * 15_000, "*a" * 9000 + "a*" * 9000),
        *("```js\n" + "`${" * 9000, "```\na\n```\n" * 3000, ">" * 100_000, "*" * 100_000),
        *("https://a.example/" + ")" * 50000, "[a](" + "(" * 50000, "\\" * 60000, "- -\n" * 9000),
    ],
    ids=lambda text: text[:12].encode("unicode_escape").decode(),
)
def test_no_text_takes_long(page: Any, text: str) -> None:
    assert page.evaluate(RENDER, text)["seconds"] < 4  # the machine may be busy


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


FORMULAS = """async (text) => {
  const { showMarkdown } = await import("/markdown.js");
  const { allDone } = await import("/later.js");
  const box = document.createElement("div");
  document.body.append(box);
  showMarkdown(box, text);
  await allDone();
  const found = [...box.querySelectorAll("math")].map(
    (node) => [node.getAttribute("display") ?? "inline", node.textContent.replace(/\\s/g, "")]);
  for (const node of box.querySelectorAll("math")) node.replaceWith("∎");
  const rest = box.textContent;
  box.remove();
  return [found, rest];
}"""


@pytest.mark.parametrize(
    ("text", "formulas", "rest"),
    [
        (r"a \(x+1\) b", [["inline", "x+1"]], "a ∎ b"),
        (r"a \[x+1\] b $$y$$", [["block", "x+1"], ["block", "y"]], "a ∎ b ∎"),
        ("the $n$th, ($a_1 * b_2$) and $x*y*z$.", [["inline", "n"], ["inline", "a1∗b2"],
         ["inline", "x∗y∗z"]], "the ∎th, (∎) and ∎."),
        ("$$\nx\n=\n- y\n$$\nafter", [["block", "x=−y"]], "∎after"),
        ("- item\n  $$\n  x\n  $$\n- other", [["block", "x"]], "item∎other"),
        ("\\begin{align*}\na &= b \\\\\nc &= d\n\\end{align*}", [["block", "a=bc=d"]], "∎"),
        ("| $x$ |\n|---|\n| \\(y\\) |", [["inline", "x"], ["inline", "y"]], "∎∎"),
        ("$5 and $10, $ 5$, 5$ and 6$, $5 and 6$, US$5 to US$9", [],
         "$5 and $10, $ 5$, 5$ and 6$, $5 and 6$, US$5 to US$9"),
        ("$5–$10, or US$6 and 7$. \"$3.50\" or 5$, $a $x$ $\\$5$",
         [["inline", "x"], ["inline", "$5"]], '$5–$10, or US$6 and 7$. "$3.50" or 5$, $a ∎ ∎'),
        ("$HOME/$USER and $a,$b", [], "$HOME/$USER and $a,$b"),
        ("`$x$ \\(y\\)` \\$x\\$ $x `a$`", [], "$x$ \\(y\\) $x$ $x a$"),
        ("```\n$x$\n$$y$$\n```", [], "codeCopy code$x$\n$$y$$"),
        (r"a $\nonsense{x$ and $\frac{1}{$ b", [], r"a $\nonsense{x$ and $\frac{1}{$ b"),
        (r"$\def\a{x}\a$ $\gdef\b{\b\b}\b$", [], r"$\def\a{x}\a$ $\gdef\b{\b\b}\b$"),
        ("$$\nnot closed\n\n$$ x", [], "$$not closed$$ x"),
        (r"\\(x\\) \(\)", [], r"\(x\) ()"),
        ("$" + "{" * 2400 + "}" * 2400 + "$", [], "$" + "{" * 2400 + "}" * 2400 + "$"),
    ],
)  # fmt: skip
def test_formulas_become_mathml(page: Any, text: str, formulas: list[list[str]], rest: str) -> None:
    assert page.evaluate(FORMULAS, text) == [formulas, rest]


GROW = """async ([text, step]) => {
  const { showMarkdown } = await import("/markdown.js");
  const { allDone } = await import("/later.js");
  const grown = document.createElement("div");
  document.body.append(grown);
  const start = performance.now();
  for (let end = 0; end < text.length; end += step) {
    showMarkdown(grown, text.slice(0, end), { isGrowing: true });
  }
  showMarkdown(grown, text, { isGrowing: false });
  const seconds = (performance.now() - start) / 1000;
  await allDone();
  const complete = document.createElement("div");
  showMarkdown(complete, text);
  await allDone();
  grown.remove();
  const plain = ({ innerHTML }) => innerHTML.replace(/(note|reference)-\\d+-/g, "$1-");
  return [seconds, plain(grown) === plain(complete)];
}"""
RICH = (
    "# T\n\na **b** `c` $x$\nline\n---\n\n- x\n  - y\n- [ ] z\n\n1. o\n\n   p\n\n```py\nx = 1\n"
    "\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n$$\nx\n= y\n$$\n\n> q\n> - r\n\n    code\n\n"
)


@pytest.mark.parametrize(
    ("text", "step"),
    [
        (RICH, 1),
        (RICH + "See[^1].\n\n[^1]: Note.\n\nEnd [l].\n\n[l]: https://a.example\n", 1),
        (RICH * 500, 50),  # 100 kB
        ("```py\n" + "print('a')\n" * 9000, 50),
        ("- a b c d\n" * 5000, 50),
        ("word " * 20_000, 50),
    ],
    ids=["short", "notes", "long", "code", "list", "paragraph"],
)
def test_a_growing_text_takes_linear_time_and_ends_as_the_complete_one(
    page: Any, text: str, step: int
) -> None:
    seconds, is_same = page.evaluate(GROW, [text, step])
    assert is_same
    assert seconds < 10


KEEP = """async () => {
  const { showMarkdown } = await import("/markdown.js");
  const { allDone } = await import("/later.js");
  const box = document.createElement("div");
  document.body.append(box);
  const text = "One **two** $x$.\\n\\n```dart\\nvar x = 1;\\n```\\n\\n- a\\n";
  showMarkdown(box, text, { isGrowing: true });
  await allDone();
  const [first, code] = box.children;
  const coloured = code.querySelector(".hljs-number")?.textContent;
  getSelection().selectAllChildren(first);
  for (const more of ["- b", "- b\\n\\nc", "- b\\n\\nc $$\\ny$$ [^n]\\n\\n[^n]: d"]) {
    showMarkdown(box, text + more, { isGrowing: true });
  }
  const kept = box.children[0] === first && box.children[1] === code
    && getSelection().anchorNode === first;
  showMarkdown(box, "Other");
  const other = box.textContent;
  box.remove();
  return [kept, coloured, other];
}"""


def test_complete_blocks_keep_their_nodes_and_the_selection(page: Any) -> None:
    assert page.evaluate(KEEP) == [True, "1", "Other"]


COLOURS = """async (cases) => {
  const { showMarkdown } = await import("/markdown.js");
  const { allDone } = await import("/later.js");
  const box = document.createElement("div");
  document.body.append(box);
  const block = ([language, code]) => `~~~${language}\\n${code}\\n~~~`;
  showMarkdown(box, cases.map(block).join("\\n\\n"));
  await allDone();
  const found = [...box.querySelectorAll("code")].map(
    (code) => [code.textContent, code.querySelector('span[class^="hljs-"]') !== null]);
  box.remove();
  return found;
}"""


def test_code_has_colours_and_stays_as_it_is(page: Any) -> None:
    cases = [
        ("python", 'def f(x: int) -> str:\n    return f"<b>{x}</b>"  # &amp;', True),
        ("JS", "const a = `x${1}`;", True),
        ("html", "\n<p class='a'>\n  &lt;\n</p>", True),
        ("wgsl", "fn f() { return; }", True),
        ("hs", "main = putStrLn \"a\"", True),
        ("text", "def f(): pass", False),
        ("no-such-language", "def f(): pass", False),
        ("js", "x" * 30_001, False),
    ]  # fmt: skip
    found = page.evaluate(COLOURS, [[language, code] for language, code, _ in cases])
    assert found == [[code, has] for _, code, has in cases]


DIRECTIONS = """async (text) => {
  const { showMarkdown } = await import("/markdown.js");
  const box = document.createElement("div");
  box.className = "body";
  document.body.append(box);
  showMarkdown(box, text);
  const found = [...box.querySelectorAll("p, ul, pre, table, h4, p code, .math")].map(
    (node) => `${node.localName} ${getComputedStyle(node).direction}`);
  box.remove();
  return found;
}"""


def test_blocks_have_the_direction_of_their_text(page: Any) -> None:
    text = (
        "## عنوان\n\n`f(x)` دالة $x$\n\nEnglish عربي\n\n- عنصر\n  - one\n\n```\nعربي\n```\n\n"
        "| عمود |\n|---|\n| a |"
    )
    assert page.evaluate(DIRECTIONS, text) == [
        *("h4 rtl", "p rtl", "code ltr", "span ltr", "p ltr", "ul rtl", "ul rtl", "pre ltr"),
        "table rtl",
    ]
