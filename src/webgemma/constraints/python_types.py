"""Python types as JSON Schemas, and JSON values as instances of them."""

import dataclasses
import json
import types
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from webgemma.errors import InputError
from webgemma.values import shown

_PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
}
_LISTS = (list, set, frozenset)


class _MismatchError(Exception):
    """A value does not fit a type."""


def is_pydantic_model(given: object) -> bool:
    """Return whether an object is a class that pydantic made a model of."""
    return isinstance(given, type) and all(
        hasattr(given, name) for name in ("model_json_schema", "model_validate_json")
    )


def type_schema(kind: Any) -> dict[str, Any]:
    """Return the JSON Schema of a dataclass or another type; InputError if it has none."""
    defined: dict[str, dict[str, Any]] = {}
    try:
        return {**_schema(kind, defined, {}), "$defs": defined}
    except TypeError:  # an instance that cannot be compared with types
        raise _no_type(kind) from None


def as_type(kind: Any, value: Any) -> Any:
    """Return a JSON value as an instance of a type; InputError if it does not fit."""
    try:
        return _converted(kind, value)
    except _MismatchError as error:
        raise InputError(f"The reply is no {_name(kind)}: {error}.") from None


def _schema(kind: Any, defined: dict[str, dict[str, Any]], names: dict[Any, str]) -> dict[str, Any]:
    """Return the schema of a type, and add those that it refers to."""
    origin, arguments = get_origin(kind), get_args(kind)

    def inner(each: Any) -> dict[str, Any]:
        return _schema(each, defined, names)

    if kind is Any:
        return {}
    if kind is None or kind in _PLAIN:
        return dict(_PLAIN[type(None) if kind is None else kind])
    if origin is Annotated:
        return inner(arguments[0])
    if origin is Literal:
        return {"enum": [each.value if isinstance(each, Enum) else each for each in arguments]}
    if origin in (Union, types.UnionType):
        return {"anyOf": [inner(each) for each in arguments]}
    if kind in _LISTS or origin in _LISTS:
        return {"type": "array", "items": inner(arguments[0]) if arguments else {}}
    if kind is tuple or origin is tuple:
        return _tuple_schema(arguments, inner)
    if kind is dict or origin is dict:
        if arguments and arguments[0] is not str:
            raise InputError(f"{_name(kind)} cannot be JSON: its keys must be strings.")
        values = inner(arguments[1]) if arguments else {}
        return {"type": "object", "additionalProperties": values}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"enum": [each.value for each in kind]}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if kind not in names:
            names[kind] = f"{kind.__name__}{len(names)}"
            defined[names[kind]] = _dataclass_schema(kind, inner)
        return {"$ref": f"#/$defs/{names[kind]}"}
    if is_pydantic_model(kind):
        if kind not in names:
            names[kind] = f"{kind.__name__}{len(names)}"
            defined |= _model_schemas(kind, names[kind])
        return {"$ref": f"#/$defs/{names[kind]}"}
    raise _no_type(kind)


def _no_type(kind: Any) -> InputError:
    return InputError(
        f"{_name(kind)} cannot be JSON: use str, int, float, bool, None, Any, Literal, Enum, list, "
        "tuple, set, dict, a union of these, a dataclass or a pydantic model."
    )


def _model_schemas(kind: Any, name: str) -> dict[str, dict[str, Any]]:
    """Return the schema of a pydantic model and those that it refers to, by names of their own."""
    schema = kind.model_json_schema(ref_template=f"#/$defs/{name}.{{model}}")
    others = schema.pop("$defs", {})
    return {name: schema, **{f"{name}.{other}": each for other, each in others.items()}}


def _tuple_schema(
    arguments: tuple[Any, ...], inner: Callable[[Any], dict[str, Any]]
) -> dict[str, Any]:
    if not arguments:
        return {"type": "array"}
    if arguments[-1] is Ellipsis:
        return {"type": "array", "items": inner(arguments[0])}
    items = [inner(each) for each in arguments]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _dataclass_schema(kind: type, inner: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    hints = _hints(kind)
    fields = [each for each in dataclasses.fields(kind) if each.init]
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {each.name: inner(hints[each.name]) for each in fields},
        "additionalProperties": False,
    }
    required = [each.name for each in fields if not _has_default(each)]
    return {**schema, "required": required}


def _has_default(field: "dataclasses.Field[Any]") -> bool:
    missing = dataclasses.MISSING
    return field.default is not missing or field.default_factory is not missing


def _hints(kind: type) -> dict[str, Any]:
    try:
        return get_type_hints(kind, include_extras=True)
    except Exception as error:  # whatever evaluating an annotation raises
        raise InputError(
            f"The types of {_name(kind)} cannot be found ({error}): define them at the top of a "
            "module."
        ) from None


def _converted(kind: Any, value: Any) -> Any:
    """Return a value as an instance of a type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if kind in _PLAIN or kind is None:
        return _plain(type(None) if kind is None else kind, value)
    if origin is Annotated:
        return _converted(arguments[0], value)
    if origin is Literal:
        return _member(arguments, value)
    if origin in (Union, types.UnionType):
        return _first_fit(arguments, value)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _instance(kind, value)
    if is_pydantic_model(kind):
        return _checked(kind, lambda: kind.model_validate_json(json.dumps(value)))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _member(tuple(kind), value)
    base = origin or kind
    if base is dict:
        values = arguments[1] if arguments else Any
        return {name: _converted(values, item) for name, item in _expect(dict, value).items()}
    items = _expect(list, value)
    if base is tuple and arguments and arguments[-1] is not Ellipsis:
        if len(items) != len(arguments):
            raise _MismatchError(f"{shown(value)} has not {len(arguments)} items")
        return tuple(map(_converted, arguments, items))
    converted = [_converted(arguments[0] if arguments else Any, item) for item in items]
    return _checked(base, lambda: base(converted))  # a set takes no lists


def _plain(kind: type, value: Any) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if kind is int and type(value) is float and value.is_integer():
        return int(value)
    return _expect(kind, value)


def _expect(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise _MismatchError(f"{shown(value)} is not of type {kind.__name__}")
    return value


def _member(members: tuple[Any, ...], value: Any) -> Any:
    """Return the member of an Enum or Literal with a value."""
    for member in members:
        given = member.value if isinstance(member, Enum) else member
        if given == value and isinstance(given, bool) == isinstance(value, bool):
            return member
    raise _MismatchError(f"{shown(value)} is none of {shown(members)}")


def _first_fit(kinds: tuple[Any, ...], value: Any) -> Any:
    problems = []
    for kind in kinds:
        try:
            return _converted(kind, value)
        except _MismatchError as error:
            problems.append(str(error))
    raise _MismatchError("; ".join(problems))


def _instance(kind: type, value: Any) -> Any:
    hints = _hints(kind)
    fields = {each.name: each for each in dataclasses.fields(kind) if each.init}
    given = _expect(dict, value)
    missing = [
        name for name, each in fields.items() if name not in given and not _has_default(each)
    ]
    unknown = [name for name in given if name not in fields]
    if missing or unknown:
        problem = f"without {missing[0]!r}" if missing else f"with {unknown[0]!r}"
        raise _MismatchError(f"an object {problem} is no {kind.__name__}")
    found = {name: _converted(hints[name], item) for name, item in given.items()}
    return _checked(kind, lambda: kind(**found))


def _checked(kind: type, make: Callable[[], Any]) -> Any:
    """Return an instance that is made; it may check its values."""
    try:
        return make()
    except (ValueError, TypeError) as error:
        problem = " ".join(str(error).split())
        raise _MismatchError(f"{kind.__name__} refuses it: {problem}") from None


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)[:100]
