"""Fixtures: a Chromium and a served page per test file, a profile and a visitor per test."""

from collections.abc import Iterator
from typing import Any

import pytest
from browser.chromium import launched
from web.page import serving_page
from web.sender import Sender, sending


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


@pytest.fixture
def context(browser: Any) -> Iterator[Any]:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    yield context
    context.close()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page's address; its Ollama store has no models."""
    with serving_page(tmp_path_factory.mktemp("site")) as url:
        yield url


@pytest.fixture
def visitor(context: Any, url: str) -> Iterator[Sender]:
    with sending(context, url) as visitor:
        yield visitor
