"""Python functions as tools: declared by their type hints and docstrings, called with arguments."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

from webgemma.constraints.python_types import as_type, type_schema
from webgemma.errors import InputError
from webgemma.text.calls import ToolCall
from webgemma.values import shown

# A parameter in a docstring: `name: …` or `name (type): …` under "Args:", or `:param name: …`.
_ARGUMENT = re.compile(r"\s*(?::param\s+)?\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)")
_SECTION = re.compile(r"\s*(Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|Notes?):\s*$")
MAX_DEPTH = 8  # of types within types, which are written out in the declaration


@dataclasses.dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call."""

    name: str
    function: Callable[..., Any]
    kind: type  # a dataclass with a field for each parameter
    declaration: Mapping[str, Any]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Function":
        """Return a function as a tool; InputError if it has parameters that JSON cannot express."""
        name = getattr(function, "__name__", type(function).__name__)
        try:
            parameters = inspect.signature(function).parameters.values()
            routine = function if inspect.isroutine(function) else type(function).__call__
            hints = get_type_hints(routine, include_extras=True)
        except (TypeError, ValueError, NameError, AttributeError) as error:
            raise InputError(f"The function {name} cannot be a tool: {error}.") from None
        fields = []
        for each in parameters:
            if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD, each.POSITIONAL_ONLY):
                raise InputError(
                    f"The function {name} cannot be a tool: its parameter {each} has no name."
                )
            hint = hints.get(each.name, Any)
            default = dataclasses.MISSING if each.default is each.empty else None
            field: Any = dataclasses.field(default=default, kw_only=True)
            fields.append((each.name, hint, field))
        kind = dataclasses.make_dataclass(name, fields)
        description, arguments = _documented(inspect.getdoc(function) or "")
        properties = _inlined(type_schema(kind))
        for argument, text in arguments.items():
            if argument in properties["properties"]:
                properties["properties"][argument]["description"] = text
        declared = {"name": name, "description": description, "parameters": properties}
        return cls(name, function, kind, {"type": "function", "function": declared})

    def arguments(self, call: ToolCall) -> dict[str, Any]:
        """Return the arguments of a call as the function's types; InputError if they do not fit."""
        instance = as_type(self.kind, call.arguments)
        return {name: getattr(instance, name) for name in call.arguments}


def declared_tools(tools: object) -> tuple[object, dict[str, Function]]:
    """Return tools with declarations in place of Python functions, and those functions by name."""
    functions: dict[str, Function] = {}
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        return tools, functions  # which whoever reads them refuses, unless there are none
    declared = []
    for tool in tools:
        if callable(tool):
            function = Function.of(tool)
            if function.name in functions:
                raise InputError(f"Two tools are functions of the name {shown(function.name)}.")
            functions[function.name] = function
            declared.append(function.declaration)
        else:
            declared.append(tool)
    return declared, functions


def _inlined(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with the definitions that it refers to in their places.

    The prompt has types in their places only. What refers to itself stays a reference."""
    definitions = schema["$defs"]

    def inlined(given: Any, depth: int) -> Any:
        if isinstance(given, list):
            return [inlined(item, depth) for item in given]
        if not isinstance(given, Mapping):
            return given
        name = str(given.get("$ref", "")).removeprefix("#/$defs/")
        if name and depth < MAX_DEPTH:
            return inlined(definitions[name], depth + 1)
        return {key: inlined(value, depth) for key, value in given.items()}

    found: dict[str, Any] = inlined(schema["$ref"] and {"$ref": schema["$ref"]}, 0)
    return {**found, "$defs": definitions} if "$ref" in str(found) else found


def _documented(docstring: str) -> tuple[str, dict[str, str]]:
    """Return what a docstring says of a function, and of each of its parameters."""
    before, arguments, section, last = list[str](), dict[str, str](), "", ""
    for line in docstring.splitlines():
        heading = _SECTION.match(line)
        if heading:
            section = heading[1]
            continue
        found = _ARGUMENT.match(line)
        in_arguments = section in ("Args", "Arguments", "Parameters")
        if found and (in_arguments or line.lstrip().startswith(":param")):
            last = found[1]
            arguments[last] = found[2].strip()
            section = section or "Parameters"
        elif line.lstrip().startswith(":"):
            section = section or "Fields"
            last = ""
        elif in_arguments and last and line.strip():
            arguments[last] = f"{arguments[last]} {line.strip()}".strip()
        elif not section:
            before.append(line)
    return "\n".join(before).strip(), arguments
