"""Any value anywhere in the configuration of a Gemma 3: it is converted, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from convert.test_convert_gemma3 import NEW, OLD, write_folder
from convert.test_fuzz import JSON, QUICK, assert_converted_or_refused, places
from hypothesis import given
from hypothesis import strategies as st

CONFIGS = {"new": NEW, "old": OLD}
COMMON = {"sliding_window": 8, "max_position_embeddings": 512, "rms_norm_eps": 1e-6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("gemma3") / "hf", NEW)


def changed(given: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of a JSON value, one place of which has another value."""
    if not path:
        return value
    copied = given.copy()
    copied[path[0]] = changed(given[path[0]], path[1:], value)
    return copied


WHOLE = {kind: {"model_type": "gemma3_text", **COMMON, **text} for kind, text in CONFIGS.items()}
PLACES = [(kind, path) for kind, config in WHOLE.items() for path in places(config) if path]


@QUICK
@given(st.sampled_from(PLACES), JSON | st.sampled_from([1, 2, 7, 6.0, 1e6, "linear", "default"]))
def test_any_value_anywhere(folder: Path, place: tuple[str, tuple[Any, ...]], value: Any) -> None:
    kind, path = place
    (folder / "config.json").write_text(json.dumps(changed(WHOLE[kind], path, value)))
    assert_converted_or_refused(folder)
