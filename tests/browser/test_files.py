"""Files in a tab: addresses, chosen files, the private file system; more than Python could hold."""

from collections.abc import Iterator
from typing import Any

import pytest
from browser.chromium import storing
from browser.serving import serving
from browser.test_tab import PYODIDE, Tab, truth, wheel
from helpers.tiny import KINDS, tiny_gguf

GREEDY_COUNT = 8


@pytest.fixture(scope="module")
def tab(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    files = {f"pyodide/{path.name}": path for path in PYODIDE.iterdir() if path.is_file()}
    model = tiny_gguf(KINDS["small"])
    files |= {"small.gguf": model, "whole-small.gguf": model, "webgemma.whl": wheel()}
    profile = tmp_path_factory.mktemp("profile")
    with serving(files) as origin, storing(chromium, profile) as context:
        page = context.new_page()
        page.goto(f"{origin}/python.html")
        yield Tab(page, origin, [])


def test_addresses_and_chosen_files(tab: Tab) -> None:
    ids, wanted = truth("small")
    found = tab.call("inside_files.from_everywhere", "small.gguf", ids, GREEDY_COUNT)
    assert found == [wanted[:GREEDY_COUNT]] * 3


def test_a_stored_model_and_a_table_that_stays_there(tab: Tab) -> None:
    ids, wanted = truth("small")
    found, in_file = tab.call("inside_files.from_storage", "small.gguf", ids, GREEDY_COUNT)
    assert found == [wanted[:GREEDY_COUNT]] * 2
    assert in_file == [False, True]


def test_a_stored_conversation(tab: Tab) -> None:
    ids, wanted = truth("small")
    found = tab.call("inside_files.saved", "small.gguf", ids, GREEDY_COUNT)
    assert found == [wanted[:GREEDY_COUNT]] * 2


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("missing", "ModelNotFoundError: "),
        ("no server", "cannot be reached, or does not allow pages of other sites to read it"),
        ("no model", "GgufError: image.gif is not a GGUF file"),
        ("wrong digest", "GgufError: mine is damaged: its bytes do not match its digest"),
        ("no such file", "InputError: There is no file nothing."),
    ],
)
def test_what_goes_wrong_gets_a_sentence(tab: Tab, kind: str, sentence: str) -> None:
    assert sentence in tab.call("inside_files.mistake", kind, "small.gguf")


def test_a_large_file_does_not_pass_through_python(tab: Tab) -> None:
    nbytes = (2 << 30) + (64 << 20)
    found = tab.call("inside_files.large", nbytes)
    print(found)
    assert found["total"] == nbytes
    assert found["grown"] <= 64 << 20
