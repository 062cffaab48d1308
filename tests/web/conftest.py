"""A Chromium for the tests of one file, and a fresh profile in it for each test."""

from collections.abc import Iterator
from typing import Any

import pytest
from browser.chromium import launched


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


@pytest.fixture
def context(browser: Any) -> Iterator[Any]:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    yield context
    context.close()
