"""The tests that `openai` and `anthropic` bring for their own clients, against a live server.

They send every parameter there is, and validate every field of what comes back."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.judges import PARTS, SUITES, run
from helpers.live_server import live_server

from webgemma.models import BUNDLED_PATH

MODEL = re.compile(r"""(?:model=|model_id=|retrieve\(\s*)"([^"]+)\"""")

# Tests by name that cannot hold, with why.
OPENAI_LEFT_OUT = (
    # Asks for a `suffix`: Gemma cannot fill in the middle of a text.
    "test_completions.py::TestCompletions::test_method_create_with_all_params",
    "test_completions.py::TestAsyncCompletions::test_method_create_with_all_params",
    # Names a conversation, an earlier response and a prompt that are stored: nothing is.
    "test_responses.py::TestResponses::test_method_create_with_all_params",
    "test_responses.py::TestAsyncResponses::test_method_create_with_all_params",
)
ANTHROPIC_LEFT_OUT = (
    # Asks for a container, in which no code runs here.
    "test_messages.py::TestMessages::test_method_create_with_all_params",
    "test_messages.py::TestAsyncMessages::test_method_create_with_all_params",
    # Asks for each of a dozen models that Anthropic no longer has, with nothing new in the request.
    "test_messages.py::TestMessages::test_deprecated_model_warning",
    "test_messages.py::TestAsyncMessages::test_deprecated_model_warning",
)


def suite(
    package: str, base: str, files: Sequence[str], wanted: str, left_out: Sequence[str], tmp: Path
) -> int:
    """Return how many tests passed; all of them must, but those that are left out."""
    root = SUITES[package]
    paths = [f"tests/api_resources/{name}" for name in files]
    names = {name for path in paths for name in MODEL.findall((root / path).read_text("utf-8"))}
    for name in names:  # a name from a request is compared with those of files
        (tmp / f"{name}.gguf").symlink_to(BUNDLED_PATH)
    report = tmp / "report.xml"
    with live_server(*sorted(tmp.glob("*.gguf"))) as live:
        run(
            [
                *(PARTS["sdk"], "-m", "pytest", "--override-ini", "addopts="),
                *("-q", "--tb=short", "--show-capture=no", "--junitxml", report, "-k", wanted),
                *(f"--deselect=tests/api_resources/{test}" for test in left_out),
                *paths,
            ],
            environment={"TEST_API_BASE_URL": live.url + base, "PYTHONPATH": str(root)},
            folder=root,
        )
    (counts,) = ET.parse(report).getroot().iter("testsuite")
    assert counts.get("failures") == counts.get("errors") == counts.get("skipped") == "0"
    return int(counts.get("tests", 0))


def test_openai_python(tmp_path: Path) -> None:
    files = (
        "chat/test_completions.py",
        "test_completions.py",
        "test_models.py",
        "test_responses.py",
    )
    wanted = "create or (Models and (retrieve or list))"
    assert suite("openai", "/v1", files, wanted, OPENAI_LEFT_OUT, tmp_path) >= 130


def test_anthropic_python(tmp_path: Path) -> None:
    files = ("test_messages.py", "test_models.py")
    assert suite("anthropic", "", files, "", ANTHROPIC_LEFT_OUT, tmp_path) >= 90


@pytest.mark.parametrize("package", ["openai", "anthropic"])
def test_what_is_left_out_is_there(package: str) -> None:
    """A name that no longer fits would leave out nothing, unseen."""
    left_out = OPENAI_LEFT_OUT if package == "openai" else ANTHROPIC_LEFT_OUT
    for name in left_out:
        file, test = name.split("::", 1)[0], name.rsplit("::", 1)[1]
        source = (PARTS[package] / file).read_text("utf-8")
        assert f"def {test}" in source
