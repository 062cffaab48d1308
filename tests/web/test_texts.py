"""The texts of the page and their translations: every text has a key, every key its translation."""

import json

import pytest
from web import texts

LANGUAGES = sorted(path.stem for path in texts.LANGUAGES.glob("*.json"))


def test_the_keys_of_scripts_pages_and_settings_are_found() -> None:
    script = """
    // t(a comment)
    showNotice(t("It’s \\"{name}\\".", { name }));
    showNotice(plural(rows.length, "{count} row", "{count} rows"));
    """
    assert texts.script_keys(script) == {'It’s "{name}".': False, "{count} rows": True}
    html = """<head><title>x</title></head><body>
    <p title="A hint">One <b translate="no">two</b> three</p>
    <noscript><p>four</p></noscript><input placeholder="five"><i>✕</i></body>"""
    assert texts.html_keys(html) == {"A hint", "One", "three", "five"}
    found = texts.keys()
    for key in (
        "Write a message",
        "No model is loaded.",
        "Top p",
        "0: always the likeliest token.",
    ):
        assert found[key] is False
    assert found["{count} steps"] is True


def test_a_call_without_a_literal_is_found() -> None:
    for script in (
        "t(`Loading ${name}`)",
        "t(name)",
        't("a" + "b")',
        'plural(n, one, "{count} rows")',
    ):
        with pytest.raises(AssertionError, match="not a literal"):
            texts.script_keys(script)


def test_wrong_translations_are_found() -> None:
    complete = {
        key: {"one": key, "other": key} if plural else key for key, plural in texts.keys().items()
    }
    assert list(texts.problems("xx", complete)) == []
    assert list(texts.problems("xx", {})) == []
    wrong = complete | {"stale": "x", "Loading {name}": "Lade", "{count} steps": "Schritte"}
    del wrong["Settings"]
    found = "\n".join(texts.problems("xx", wrong))
    for words in ("'stale', which", "'Lade' for", "without plural forms", "lacks 'Settings'"):
        assert words in found
    assert len(found.splitlines()) == 4


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_language_has_every_text(language: str) -> None:
    translations = json.loads((texts.LANGUAGES / f"{language}.json").read_text("utf-8"))
    assert list(texts.problems(language, translations)) == []
