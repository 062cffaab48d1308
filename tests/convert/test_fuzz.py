"""Any JSON in the files of a model to convert: it is converted, or a sentence says why not."""

import json
import math
import struct
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from convert.test_convert import config_of, write_folder
from helpers.tiny import DIFFUSION, MERGES, vocabulary
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from webgemma.convert import convert
from webgemma.errors import GgufError, WebgemmaError
from webgemma.gemma.config import Config
from webgemma.gguf.reader import Gguf

QUICK = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**31, 2**63, 2**64, 10**400, -1, 0])
    | st.floats()
    | st.text(max_size=4)
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
VALID: dict[str, Any] = {
    "config.json": config_of(DIFFUSION) | {"eos_token_id": [1]},
    "generation_config.json": {
        "sampler_config": {"entropy_bound": 0.1},
        "max_denoising_steps": 8,
        "t_min": 0.4,
        "t_max": 0.8,
        "stability_threshold": 1,
        "confidence_threshold": 0.01,
        "eos_token_id": [1],
    },
    "tokenizer.json": {
        "model": {
            "vocab": {token: at for at, token in enumerate(vocabulary(DIFFUSION.vocab))},
            "merges": MERGES,
        },
        "added_tokens": [{"id": 1, "content": "<eos>", "special": True}],
    },
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of everything in a JSON value; of a long list or object, of the first."""
    inside: Any = ()
    if isinstance(value, dict | list):
        inside = value.items() if isinstance(value, dict) else enumerate(value)
    return [path, *(p for key, item in list(inside)[:8] for p in places(item, (*path, key)))]


PLACES = [(name, path) for name in VALID for path in places(VALID[name])]


def with_value(name: str, path: tuple[Any, ...], value: Any) -> Any:
    """Return the content of a file with one value replaced."""
    if not path:
        return value
    content = deepcopy(VALID[name])
    inside = content
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return content


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("convert") / "tiny", DIFFUSION)


def assert_converted_or_refused(folder: Path) -> None:
    """Assert that a conversion writes a file that opens, or raises a WebgemmaError and none."""
    out = folder / "out.gguf"
    out.unlink(missing_ok=True)
    try:
        convert(folder, out)
    except WebgemmaError:
        assert not out.exists()
        return
    with Gguf.open(out) as gguf:
        assert Config.from_gguf(gguf).layers


@QUICK
@given(st.sampled_from(PLACES), JSON)
def test_any_value_anywhere_is_converted_or_refused(
    folder: Path, place: tuple[str, tuple[Any, ...]], value: Any
) -> None:
    for name, content in VALID.items():
        replaced = with_value(name, place[1], value) if name == place[0] else content
        (folder / name).write_text(json.dumps(replaced))
    assert_converted_or_refused(folder)


@QUICK
@given(st.sampled_from(["dtype", "shape", "data_offsets", "", "__metadata__"]), JSON)
def test_any_header_of_safetensors_is_read_or_refused(
    folder: Path, tmp_path: Path, key: str, value: Any
) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (nbytes,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + nbytes])
    if key.startswith("_"):
        header[key] = value
    else:
        name = next(iter(header))
        header[name] = header[name] | {key: value} if key else value
    encoded = json.dumps(header).encode()
    changed = struct.pack("<Q", len(encoded)) + encoded + data[8 + nbytes :]
    (tmp_path / "model.safetensors").write_bytes(changed)
    (tmp_path / "config.json").write_text(json.dumps(VALID["config.json"]))
    assert_converted_or_refused(tmp_path)


@pytest.mark.parametrize(
    ("name", "path", "value", "message"),
    [
        ("config.json", ("model_type",), [1], r"model_type \[1\]; only Gemma 4"),
        ("config.json", ("text_config", "sliding_window"), 10**400, "sliding_window 1000"),
        ("config.json", ("text_config", "rms_norm_eps"), math.inf, "rms_norm_eps inf"),
        ("config.json", ("text_config", "layer_types"), [[1]], "no valid list layer_types"),
        ("config.json", ("canvas_length",), 2**40, "canvas_length 1099511627776"),
        ("generation_config.json", ("stability_threshold",), math.nan, "stability_threshold nan"),
        ("generation_config.json", ("max_denoising_steps",), 1.5, "max_denoising_steps 1.5"),
        ("generation_config.json", ("t_min",), -1, "t_min -1; it must be a number above zero"),
    ],
)
def test_wrong_values_get_a_sentence(
    folder: Path, name: str, path: tuple[str, ...], value: Any, message: str
) -> None:
    for each, content in VALID.items():
        replaced = with_value(each, path, value) if each == name else content
        (folder / each).write_text(json.dumps(replaced))
    with pytest.raises(GgufError, match=message):
        convert(folder, folder / "out.gguf")
