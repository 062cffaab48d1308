"""The texts of the page: every key that static/language.js looks up in its translations.

`PYTHONPATH=src:tests python tests/web/texts.py` lists them as JSON to be filled in, `--missing de`
those without a German translation, `--bare` what looks like a sentence outside of t()."""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser

from webgemma.settings import SETTINGS
from webgemma.web.site import STATIC, setting_label

LANGUAGES = STATIC / "languages"
ATTRIBUTES = ("alt", "aria-label", "placeholder", "title")  # as in static/language.js
VOID = ("br", "hr", "img", "input", "link", "meta", "path", "rect")
LITERAL = r'"((?:[^"\\]|\\.)*)"'
CALL = re.compile(r"(?<![\w.$])(t|plural)\(")
TEXT = re.compile(rf"t\(\s*{LITERAL}\s*[,)]")
PLURAL = re.compile(rf"plural\([^\"`']*?,\s*{LITERAL},\s*{LITERAL}\s*[,)]")
# Calls whose text is not written there: the labels and helps of webgemma/settings.py, which are
# keys too (`keys` adds them), and the walk over the document.
COMPUTED = {
    "language.js": ("t(text)", "t(node.getAttribute(name))"),
    "settings.js": ("t(label)", "t(help)"),
}
SENTENCE = re.compile(r"""(["`])([A-Z“][^"`\n]*? [^"`\n]*? [^"`\n]*)\1""")


class _Html(HTMLParser):
    """Collects what `translate` of static/language.js translates in a page's body."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[str] = []
        self._open: list[tuple[str, bool]] = []  # elements, and whether they are translated

    @property
    def _is_translated(self) -> bool:
        return bool(self._open) and self._open[-1][1]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        translated = (tag == "body" or self._is_translated) and given.get("translate") != "no"
        if translated:
            self.keys += [given[name] or "" for name in ATTRIBUTES if name in given]
        if tag not in VOID:
            # The text of noscript is not read as HTML where scripts run.
            self._open.append((tag, translated and tag not in ("noscript", "script")))

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self._open.pop()[0] == tag, f"{tag} is closed at {self.getpos()}, but not open"

    def handle_data(self, data: str) -> None:
        if self._is_translated:
            self.keys.append(data.strip())


def html_keys(html: str) -> set[str]:
    """Return the texts and labels of a page that are translated."""
    parser = _Html()
    parser.feed(html)
    parser.close()
    return {key for key in parser.keys if any(letter.isalpha() for letter in key)}


def script_keys(script: str, computed: tuple[str, ...] = ()) -> dict[str, bool]:
    """Return the keys of a script, and whether each is a plural.

    AssertionError for a call whose text is not a literal."""
    code = re.sub(r"^\s*(//|\*|/\*).*$", "", script, flags=re.MULTILINE)
    keys = {}
    for call in CALL.finditer(code):
        start = call.start()
        if code.startswith(computed, start) or code[:start].endswith(("function ", "const ")):
            continue
        found = (TEXT if call[1] == "t" else PLURAL).match(code, start)
        line = code[start : start + 80].splitlines()[0]
        assert found, f"the text is not a literal in double quotes: {line}"
        keys[json.loads(f'"{found[1 if call[1] == "t" else 2]}"')] = call[1] == "plural"
    return keys


def keys() -> dict[str, bool]:
    """Return every key of the page, and whether it is a plural."""
    found = dict.fromkeys(html_keys((STATIC / "index.html").read_text("utf-8")), False)
    for path in sorted(STATIC.glob("*.js")):
        found |= script_keys(path.read_text("utf-8"), COMPUTED.get(path.name, ()))
    shown = [setting for setting in SETTINGS.values() if setting.on_page]
    found |= {text: False for each in shown for text in (setting_label(each), each.help)}
    return dict(sorted(found.items()))


def placeholders(text: str) -> Counter[str]:
    """Return the values that a text has a place for."""
    return Counter(re.findall(r"\{(\w+)\}", text))


def problems(language: str, translations: dict[str, str | dict[str, str]]) -> Iterator[str]:
    """Yield what is wrong with a language's translations; nothing if there are none yet."""
    if not translations:
        return
    known = keys()
    for key in known.keys() - translations.keys():
        yield f"{language} lacks {key!r}"
    for key in translations.keys() - known.keys():
        yield f"{language} has {key!r}, which the page does not show"
    for key in known.keys() & translations.keys():
        given = translations[key]
        if isinstance(given, dict) is not known[key]:
            yield f"{language} has {key!r} {'without' if known[key] else 'with'} plural forms"
            continue
        forms = given if isinstance(given, dict) else {"": given}
        if known[key] and "other" not in forms:
            yield f"{language} has {key!r} without the form other"
        for form, text in forms.items():
            # A form may leave the number out ("one token"), but nothing else.
            lacking = placeholders(key) - placeholders(text)
            if (
                placeholders(text) - placeholders(key)
                or lacking.keys() - {"count"}
                or (lacking and form in ("", "other"))
            ):
                yield f"{language} has {text!r} for {key!r}, whose {{placeholders}} differ"


def bare() -> Iterator[str]:
    """Yield literals of scripts that look like sentences and are not translated."""
    for path in sorted(STATIC.glob("*.js")):
        code = re.sub(
            r"(^|\s)//.*$|^\s*(\*|/\*).*$", "", path.read_text("utf-8"), flags=re.MULTILINE
        )
        for found in SENTENCE.finditer(code):
            before = code[max(0, found.start() - 12) : found.start()]
            if not re.search(r"\b(t\(\s*|plural\([^\"]*)$|\", $", before):
                yield f"{path.name}: {found[2]}"


def _print() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--missing", metavar="LANGUAGE", help="print the keys that it lacks")
    parser.add_argument("--bare", action="store_true", help="print sentences outside of t()")
    options = parser.parse_args()
    if options.bare:
        print("\n".join(bare()))
        return
    known = keys()
    if options.missing:
        path = LANGUAGES / f"{options.missing}.json"
        translations = json.loads(path.read_text("utf-8"))
        print("\n".join(p for p in problems(options.missing, translations)), file=sys.stderr)
        known = {key: known[key] for key in known if key not in translations}
    empty = {key: {"one": "", "other": ""} if plural else "" for key, plural in known.items()}
    print(json.dumps(empty, ensure_ascii=False, indent=1))


if __name__ == "__main__":
    _print()
