"""What docs/clients.md tells users to run in Python, run against a live server."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.judges import PARTS, run
from helpers.live_server import Live, live_server

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "clients.md").read_text("utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server("-") as server:
        yield server


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda text: re.findall(r"\w+", text)[1])
def test_programs_of_the_page(live: Live, program: str) -> None:
    python = PARTS["litellm" if "litellm" in program else "sdk"]
    address = "http://localhost:11434"
    assert address in program
    adapted = program.replace(address, live.url).replace("gemma4:e2b", "demo")
    said = run([python, "-c", adapted], environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True"})
    assert len(said) > 20
    assert "Traceback" not in said


def test_the_page_has_them_all() -> None:
    assert len(PROGRAMS) == 6
    (settings,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    provider = tomllib.loads(settings)["model_providers"]["webgemma"]
    assert (provider["wire_api"], provider["base_url"][-3:]) == ("responses", "/v1")
