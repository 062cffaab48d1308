"""A tiny model and examples for it, as files."""

import json
from pathlib import Path

import pytest
from helpers.tiny import SMALL, tiny_gguf


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf(SMALL))
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{"prompt": f"the {x}", "completion": f"{x} in the {x}"} for x in "abcd"]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path
