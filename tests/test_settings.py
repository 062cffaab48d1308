"""Generation settings: declared once, and everything that derives from the declaration."""

import inspect
import json
import math
from contextlib import suppress
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, get_type_hints

import numpy as np
import pytest
from helpers.anything import ANYTHING, ODD
from helpers.command import webgemma
from hypothesis import given, settings
from hypothesis import strategies as st

from webgemma import Gemma
from webgemma.cli.run import run
from webgemma.errors import GgufError, InputError
from webgemma.kernels import host_struct
from webgemma.models import FoundModel
from webgemma.settings import SETTINGS, Settings, applicable, resolve
from webgemma.values import shown
from webgemma.web.site import page_settings


def test_every_setting_is_declared_with_a_help_and_a_default_in_its_range() -> None:
    assert SETTINGS.keys() == get_type_hints(Settings).keys()
    for name, setting in SETTINGS.items():
        assert setting.name == name
        assert setting.help.endswith(".")
        if setting.default is None:
            assert setting.optional
        setting.check(setting.default)


def test_everything_is_resolved_from_given_values_defaults_and_gemmas_own() -> None:
    resolved = resolve({"top_k": 5}, {"top_k": 6, "temperature": 0.5, "steps": 3})
    assert (resolved["top_k"], resolved["temperature"], resolved["top_p"]) == (5, 0.5, 0.95)
    assert resolved.keys() == applicable(diffusion=False).keys()
    assert resolve({"steps": 3}, diffusion=True).keys() == applicable(diffusion=True).keys()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("top_p", 1.5, "top_p is 1.5; it must be a number between 0 and 1"),
        ("top_p", math.nan, "top_p is nan"),
        ("top_k", 1.0, "top_k is 1.0; it must be a whole number between 0 and"),
        ("top_k", True, "top_k is True"),
        ("typical_p", -0.1, "typical_p is -0.1"),
        ("temperature", "hot", "temperature is 'hot'"),
        ("temperature", None, "temperature is None"),
        ("seed", -1, "seed is -1"),
        ("max_tokens", -1, "max_tokens is -1; it must be a whole number of at least 0"),
        ("logit_bias", [3], "logit_bias is [3]; it must map token ids to numbers"),
        ("logit_bias", {-1: 1.0}, "logit_bias token is -1"),
        ("logit_bias", {3: "much"}, "logit_bias of 3 is 'much'"),
        ("max_tokens", 1.5, "max_tokens is 1.5; it must be a whole number"),
        ("recent", 10**31, "recent is 1000"),
        ("recent", 10**400, "recent is 1000"),
        ("top_k", 10**5000, "top_k is a value of type int; it must be a whole number"),
        ("temperature", 10**400, "temperature is 1000"),
        ("temperature", np.float32("nan"), "temperature is np.float32(nan)"),
        ("seed", np.array([1, 2]), "seed is array([1, 2])"),
        ("logit_bias", {3: 10**400}, "logit_bias of 3 is 1000"),
        ("logit_bias", None, "logit_bias is None"),
        ("stop", 5, "stop is 5; a stop string must be text"),
        ("stop", None, "stop is None"),
        ("stop", ["a", ""], "stop is ['a', '']"),
        ("steps", 3, "steps does not apply to a model that samples tokens"),
        ("warmth", 1, "There is no setting 'warmth'; there are: max_tokens"),
    ],
    ids=shown,
)
def test_a_wrong_value_gets_a_sentence(name: str, value: Any, message: str) -> None:
    with pytest.raises(InputError) as error:
        resolve({name: value})  # type: ignore[misc]
    assert message in str(error.value)
    assert len(str(error.value)) < 300


def test_numbers_of_other_types_become_plain_ones() -> None:
    given: Any = {
        "top_k": np.int64(5),
        "seed": np.uint64(2**64 - 1),
        "temperature": np.float32(0.5),
        "top_p": Fraction(1, 2),
        "logit_bias": {np.int32(3): np.float16(1)},
        "stop": np.str_("end"),
        "max_tokens": 10**30,
    }
    resolved = resolve(given)
    expected = {
        "top_k": 5,
        "seed": 2**64 - 1,
        "temperature": 0.5,
        "top_p": 0.5,
        "logit_bias": {3: 1.0},
        "stop": ("end",),
        "max_tokens": 10**30,
    }
    for name, value in expected.items():
        assert resolved[name] == value  # type: ignore[literal-required]
        assert type(resolved[name]) is type(value)  # type: ignore[literal-required]


def check_taken_or_refused(name: str, value: Any) -> None:
    diffusion = SETTINGS[name].applies == "diffusion"
    with suppress(InputError):
        resolved = resolve({name: value}, diffusion=diffusion)  # type: ignore[misc]
        assert resolve(resolved, diffusion=diffusion) == resolved


@pytest.mark.parametrize("name", SETTINGS)
def test_odd_values_are_taken_or_refused(name: str) -> None:
    for value in ODD:
        check_taken_or_refused(name, value)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(SETTINGS)), ANYTHING)
def test_any_value_is_taken_or_refused(name: str, value: Any) -> None:
    check_taken_or_refused(name, value)


def test_the_api_takes_every_setting_as_a_keyword() -> None:
    for method in (Gemma.chat, Gemma.achat, Gemma.generate, Gemma.agenerate):
        parameters = inspect.signature(method).parameters
        types = {name: parameters[name].annotation for name in SETTINGS}
        assert types == get_type_hints(Settings)


def test_the_command_line_has_an_option_for_every_setting() -> None:
    options = inspect.signature(run).parameters
    assert SETTINGS.keys() - options.keys() == {"logit_bias"}  # a table, not one value
    text = webgemma("run", "--help").output
    for name in SETTINGS.keys() - {"logit_bias"}:
        assert f"--{name.replace('_', '-')}" in text


def test_the_page_offers_settings_with_their_ranges() -> None:
    listed = {entry["name"]: entry for entry in page_settings()}
    assert list(listed) == [name for name, setting in SETTINGS.items() if setting.on_page]
    assert (listed["typical_p"]["min"], listed["typical_p"]["max"]) == (0, 1)
    assert listed["top_k"]["integer"]
    json.dumps(page_settings(), allow_nan=False)


def test_the_gpus_table_holds_settings_by_their_names() -> None:
    """Only those that kernels read in another form have another name there."""
    names = {name for name, _ in host_struct("lib/sampling_settings/table", "Settings").fields}
    assert names - SETTINGS.keys() == {"min_p_log", "bias_count"}


def test_ollamas_parameters_become_settings() -> None:
    params = {"typical_p": 0.5, "repeat_penalty": 1.1, "num_predict": -1, "mirostat": 2}
    ollama: Any = SimpleNamespace(params=params, system="", messages=())
    found = FoundModel("a model", None, ollama=ollama)
    expected = {"typical_p": 0.5, "repetition_penalty": 1.1, "max_tokens": None}
    assert found.defaults().settings == expected


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"stop": None, "seed": None}, {}),
        ({"stop": "end"}, {"stop": ("end",)}),
        ({"num_predict": 1.5, "top_k": 40.0}, {"max_tokens": 1, "top_k": 40}),
        ({"num_predict": -2, "seed": -1.0}, {"max_tokens": None, "seed": None}),
        ({"repeat_last_n": 10**31, "top_k": -1}, {"recent": 2**31, "top_k": 0}),
        ({"top_p": 1.5, "temperature": -1}, {"top_p": 1, "temperature": 0}),
    ],
    ids=str,
)
def test_ollamas_parameters_mean_what_they_mean_to_ollama(
    params: dict[str, object], expected: dict[str, object]
) -> None:
    ollama: Any = SimpleNamespace(params=params, system="", messages=())
    defaults = FoundModel("a model", None, ollama=ollama).defaults().settings
    assert defaults == expected
    resolve({}, defaults)


@pytest.mark.parametrize(
    ("name", "value"), [("stop", 5), ("stop", [5]), ("num_predict", "x"), ("top_k", True)]
)
def test_ollamas_damaged_parameters_are_refused_when_loading(name: str, value: object) -> None:
    ollama: Any = SimpleNamespace(params={name: value}, system="", messages=())
    with pytest.raises(GgufError, match=f"The params file of a model has a wrong {name}"):
        FoundModel("a model", None, ollama=ollama).defaults()
