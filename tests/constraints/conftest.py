"""The compilers of constraints: llguidance, and web-xgrammar in Node, for a small vocabulary."""

import os
from collections.abc import Iterator

import pytest
from helpers.constrained import small_tokenizer
from helpers.xgrammar_node import IS_INSTALLED, Node

from webgemma.constraints.compiling import Compiler
from webgemma.constraints.native import LlguidanceCompiler
from webgemma.constraints.xgrammar import XgrammarCompiler


@pytest.fixture(scope="session")
def node() -> Iterator[Node]:
    """A process with web-xgrammar."""
    if not IS_INSTALLED:
        if os.environ.get("CI"):
            pytest.fail("needs node and npm ci")
        pytest.skip("needs node and npm ci")
    process = Node()
    yield process
    process.close()


@pytest.fixture(scope="session")
def native() -> LlguidanceCompiler:
    """The native compiler; the model's table is longer than the vocabulary."""
    tokenizer = small_tokenizer()
    return LlguidanceCompiler(tokenizer, tokenizer.size + 70)


@pytest.fixture(scope="session")
def xgrammar(node: Node) -> XgrammarCompiler:
    """The browser's compiler."""
    tokenizer = small_tokenizer()
    return XgrammarCompiler(tokenizer, tokenizer.size + 70, script=node.open)


@pytest.fixture(scope="session", params=["llguidance", "xgrammar"])
def compiler(request: pytest.FixtureRequest) -> Compiler:
    """Both of them."""
    name = "native" if request.param == "llguidance" else "xgrammar"
    found: Compiler = request.getfixturevalue(name)
    return found
