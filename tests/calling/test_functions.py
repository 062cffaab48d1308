"""Python functions as tools: what is declared of them, and the arguments they get."""

from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import pytest

from webgemma.calling.functions import Function, declared_tools
from webgemma.errors import InputError
from webgemma.text.calls import ToolCall


class Unit(Enum):
    METRE = "m"
    FOOT = "ft"


@dataclass
class Place:
    city: str
    country: str = "Italy"


def height(
    place: Place, unit: Unit = Unit.METRE, digits: int = 0, mode: Literal["a", "b"] = "a"
) -> float:
    """Tell how high a place is.

    It is above the sea.

    Args:
        place (Place): where that is,
            which may be any
        unit: of the result
        unknown: not a parameter

    Returns:
        The height.
    """
    return len((place, unit, digits, mode))


def other(x: float, tags: list[str] | None = None):  # type: ignore[no-untyped-def]
    """Do something.

    :param x: a number
    :returns: nothing
    """
    return x, tags


def bare(anything, more=3):  # type: ignore[no-untyped-def]
    return anything, more


def test_what_is_declared() -> None:
    declared = Function.of(height).declaration["function"]
    assert declared["name"] == "height"
    assert declared["description"] == "Tell how high a place is.\n\nIt is above the sea."
    parameters = declared["parameters"]
    assert parameters["required"] == ["place"]
    place = parameters["properties"]["place"]
    assert place["description"] == "where that is, which may be any"
    assert place["properties"]["city"] == {"type": "string"}
    assert parameters["properties"]["unit"] == {"enum": ["m", "ft"], "description": "of the result"}
    assert parameters["properties"]["mode"] == {"enum": ["a", "b"]}
    assert "$ref" not in str(parameters)


def test_another_kind_of_docstring_and_none() -> None:
    declared = Function.of(other).declaration["function"]
    assert declared["description"] == "Do something."
    assert declared["parameters"]["properties"]["x"]["description"] == "a number"
    declared = Function.of(bare).declaration["function"]
    assert declared["description"] == ""
    assert declared["parameters"]["required"] == ["anything"]


def test_arguments_become_the_types_of_the_function() -> None:
    function = Function.of(height)
    call = ToolCall("height", {"place": {"city": "Rome"}, "unit": "ft"})
    assert function.arguments(call) == {"place": Place("Rome"), "unit": Unit.FOOT}
    with pytest.raises(InputError, match="without 'place'"):
        function.arguments(ToolCall("height", {}))
    with pytest.raises(InputError, match="'colour'"):
        function.arguments(ToolCall("height", {"place": {"city": "Rome"}, "colour": 1}))
    assert Function.of(bare).arguments(ToolCall("bare", {"anything": [1]})) == {"anything": [1]}


@dataclass
class Tree:
    value: int
    below: "list[Tree] | None" = None


def count(tree: Tree) -> int:
    """Count."""
    return tree.value


def test_a_type_that_refers_to_itself() -> None:
    parameters = Function.of(count).declaration["function"]["parameters"]
    assert "$ref" in str(parameters)
    assert parameters["$defs"]
    call = ToolCall("count", {"tree": {"value": 1, "below": [{"value": 2}]}})
    assert Function.of(count).arguments(call) == {"tree": Tree(1, [Tree(2)])}


class Methods:
    def double(self, n: int) -> int:
        """Double it."""
        return 2 * n

    def __call__(self, n: int) -> int:
        return n


def test_methods_and_objects() -> None:
    made = Function.of(Methods().double)
    assert made.declaration["function"]["parameters"]["required"] == ["n"]
    assert made.function(n=4) == 8
    assert Function.of(Methods()).name == "Methods"


def many(*numbers: int) -> None: ...
def named(**numbers: int) -> None: ...
def places(n: int, /) -> None: ...
def strange(n: complex) -> None: ...
def unknown(n: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize("function", [many, named, places, strange, unknown, dict.get])
def test_functions_that_cannot_be_tools(function: Any) -> None:
    with pytest.raises(InputError, match=r"tool|JSON"):
        Function.of(function)


def test_functions_among_declarations() -> None:
    plain = {"name": "clock"}
    declared, functions = declared_tools([plain, height])
    assert declared == [plain, Function.of(height).declaration]
    assert list(functions) == ["height"]
    assert declared_tools(None) == (None, {})
    assert declared_tools("clock") == ("clock", {})
    with pytest.raises(InputError, match="'height'"):
        declared_tools([height, height])
