"""Shapes: the values that a JSON Schema allows, as alternatives of one type each.

Schemas that hold together (`allOf`, `$ref` beside other keywords, a property that several of them
declare) are one key: their pointers. A shape has the keys of its parts, so that recursion ends:
there are only so many keys."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from itertools import combinations
from math import inf
from typing import Any, TypeAlias

from webgemma.constraints.documents import ROOT, TYPES, UNREACHABLE, Document, Pointer, child
from webgemma.constraints.formats import format_language
from webgemma.constraints.languages import (
    ANY_CHAR,
    ANYTHING,
    Language,
    complement,
    intersection,
    is_empty,
    literal,
    matches,
    other_than,
    repeat,
    union,
)
from webgemma.constraints.numbers import Numbers, decimal, exactly
from webgemma.constraints.patterns import search
from webgemma.errors import InputError
from webgemma.sync import checkpoint

MAX_KEYS = 4096
MAX_BRANCHES = 512  # of anyOf and oneOf that hold together
MAX_PATTERNS = 4  # of names of properties that hold together

_TOGETHER = frozenset({"allOf", "anyOf", "oneOf"})  # schemas about the same value
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})

Key: TypeAlias = tuple[
    Pointer, ...
]  # schemas that hold together; without one, any value is allowed
ANY: Key = ()


@dataclass(frozen=True, slots=True)
class Word:
    """One of null, true and false."""

    value: bool | None


@dataclass(frozen=True, slots=True)
class Number:
    """Numbers, and how they are written."""

    numbers: Numbers
    language: Language


@dataclass(frozen=True, slots=True)
class String:
    """Strings of a language."""

    language: Language


@dataclass(frozen=True, slots=True)
class Array:
    """Arrays: items of their own first, then any number of others."""

    first: tuple[Key, ...]
    rest: Key
    least: int
    most: float


@dataclass(frozen=True, slots=True)
class Property:
    """A property by its name. Without a value it must not be there."""

    name: str
    value: Key | None
    required: bool


@dataclass(frozen=True, slots=True)
class Object:
    """Objects: properties in their order, and others whose names are of a language."""

    properties: tuple[Property, ...]
    others: tuple[tuple[Language, Key], ...]
    least: int
    most: float


@dataclass(frozen=True, slots=True)
class Fixed:
    """One array or object, from an enum or const."""

    value: Any


Shape: TypeAlias = Word | Number | String | Array | Object | Fixed
Held: TypeAlias = list[tuple[Pointer, dict[str, Any]]]  # schemas without their references


@dataclass(frozen=True, slots=True)
class Branch:
    """One of the ways in which the schemas of a key can hold."""

    shapes: list[Shape]
    listed: list[Any] | None  # all values of an enum or const, some of which have no such shape


class Shapes:
    """The shapes of a document's keys, found when they are asked for.

    If it is `closed`, objects whose properties are declared have no others, unless
    `additionalProperties` says so: in JSON Schema they may have."""

    def __init__(self, document: Document, *, closed: bool = False) -> None:
        self._document = document
        self._closed = closed
        self._branches: dict[Key, list[Branch]] = {}
        self._open: set[Key] = set()  # whose branches are being found
        self._ending: set[Pointer] = set()  # schemas that do not lead back to themselves

    def of(self, key: Key) -> list[Shape]:
        """Return the shapes of the values that the schemas of a key allow, if any are."""
        shapes: list[Shape] = []
        for branch in self._found(key):
            if branch.listed is None:
                shapes += branch.shapes
            else:
                shapes += (
                    _listed(value)
                    for value in branch.listed
                    if any(self._has(shape, value) for shape in branch.shapes)
                )
        return _merged(shapes)

    def allows(self, key: Key, value: Any) -> bool:
        """Return whether the schemas of a key allow a value."""
        if key in self._open:
            return True  # not known yet
        return any(
            (branch.listed is None or any(_is_same(value, each) for each in branch.listed))
            and any(self._has(shape, value) for shape in branch.shapes)
            for branch in self._found(key)
        )

    def _found(self, key: Key) -> list[Branch]:
        if key not in self._branches:
            if len(self._branches) == MAX_KEYS:
                raise self._document.error(ROOT, f"it has more than {MAX_KEYS} different parts")
            self._open.add(key)
            branches = [self._branch(held) for held in self._ways(key, [], [])]
            self._open.discard(key)
            self._branches[key] = branches
        return self._branches[key]

    def _ways(
        self, pointers: Sequence[Pointer], held: Held, choices: list[tuple[Pointer, str]]
    ) -> Iterator[Held]:
        """Yield the schemas that hold in each way to choose from every anyOf and oneOf.

        The pointers are added to what is held, and to the choices that are still to be made."""
        held, choices = list(held), list(choices)
        if not self._collect(pointers, held, choices):
            return
        if not choices:
            yield held
            return
        (pointer, keyword), *rest = choices
        schema = self._document.at(pointer)
        assert isinstance(schema, dict)
        branches = [child(pointer, keyword, at) for at in range(len(schema[keyword]))]
        if len(branches) > MAX_BRANCHES:
            raise self._document.error(pointer, f"{keyword} has more than {MAX_BRANCHES} schemas")
        if keyword == "oneOf":
            self._check_disjoint(pointer, branches, held, rest)
        count = 0
        for branch in branches:
            for way in self._ways([branch], held, rest):
                yield way
                count += 1
                if count > MAX_BRANCHES:
                    raise self._document.error(
                        pointer,
                        f"with what holds beside it, {keyword} can hold in more than "
                        f"{MAX_BRANCHES} ways",
                    )

    def _collect(
        self, pointers: Sequence[Pointer], held: Held, choices: list[tuple[Pointer, str]]
    ) -> bool:
        """Add schemas and all they refer to, in the order of their keywords; False if one is false.

        So properties come in the order in which they are read."""
        seen = {pointer for pointer, _ in held}
        waiting: list[tuple[Pointer, bool]] = [(pointer, False) for pointer in reversed(pointers)]
        while waiting:
            pointer, is_read = waiting.pop()
            schema = self._document.at(pointer)
            if isinstance(schema, bool):
                if not schema:
                    return False
                continue
            if is_read:
                held.append((pointer, schema))
                continue
            if pointer in seen:
                continue
            seen.add(pointer)
            following: list[tuple[Pointer, bool]] = []
            for keyword in schema:
                if keyword == "$ref":
                    self._check_end(pointer, ())
                    following.append((self._document.target(schema["$ref"], pointer), False))
                elif keyword == "allOf":
                    count = len(schema["allOf"])
                    following += ((child(pointer, "allOf", at), False) for at in range(count))
                elif keyword in ("anyOf", "oneOf"):
                    choices.append((pointer, keyword))
                elif keyword == "properties":
                    following.append((pointer, True))
            if "properties" not in schema:
                following.append((pointer, True))
            waiting += reversed(following)
        return True

    def _check_end(self, pointer: Pointer, before: tuple[Pointer, ...]) -> None:
        """Raise InputError for a schema that is, after these, about the same value as itself."""
        if pointer in self._ending:
            return
        if pointer in before:
            raise self._document.error(pointer, "it refers to itself, without a part in between")
        schema = self._document.at(pointer)
        if isinstance(schema, dict):
            row = (*before, pointer)
            if "$ref" in schema:
                self._check_end(self._document.target(schema["$ref"], pointer), row)
            for keyword in _TOGETHER & schema.keys():
                for at in range(len(schema[keyword])):
                    self._check_end(child(pointer, keyword, at), row)
        self._ending.add(pointer)

    def _check_disjoint(
        self,
        pointer: Pointer,
        branches: list[Pointer],
        held: Held,
        choices: list[tuple[Pointer, str]],
    ) -> None:
        """Raise InputError unless no value can be in two branches of a oneOf."""
        for (at, left), (other, right) in combinations(enumerate(branches), 2):
            for way in self._ways([left, right], held, choices):
                branch = self._branch(way)
                if branch.listed is None:
                    both = any(self._is_possible(shape) for shape in branch.shapes)
                else:
                    both = any(
                        self._has(shape, value)
                        for value in branch.listed
                        for shape in branch.shapes
                    )
                if both:
                    raise self._document.error(
                        pointer,
                        f"schemas {at} and {other} of oneOf may hold at once: let them exclude "
                        "each other, as by a required property with another const in each, or use "
                        "anyOf",
                    )

    def _is_possible(self, shape: Shape) -> bool:
        """Return whether there may be a value of a shape; in doubt there is."""
        if isinstance(shape, Array):
            items = [*shape.first[: shape.least], *[shape.rest] * (shape.least > len(shape.first))]
            return shape.least <= shape.most and all(map(self._allows_any, items))
        if isinstance(shape, Object):
            required = [each.value for each in shape.properties if each.required]
            return len(required) <= shape.most and all(
                value is not None and self._allows_any(value) for value in required
            )
        return True

    def _allows_any(self, key: Key) -> bool:
        """Return whether the schemas of a key may allow a value; in doubt they do."""
        if key in self._open:
            return True  # not known yet
        shapes = self.of(key)
        self._open.add(key)
        possible = any(map(self._is_possible, shapes))
        self._open.discard(key)
        return possible

    def _has(self, shape: Shape, value: Any) -> bool:
        """Return whether a value has a shape."""
        match shape:
            case Word():
                return value is shape.value
            case Number():
                return _is_number(value) and value in shape.numbers
            case String():
                return isinstance(value, str) and matches(shape.language, value)
            case Array():
                if not isinstance(value, list) or not shape.least <= len(value) <= shape.most:
                    return False
                keys = [*shape.first, *[shape.rest] * (len(value) - len(shape.first))]
                return all(map(self.allows, keys, value))
            case Object():
                return isinstance(value, dict) and self._has_members(shape, value)
            case Fixed():
                return _is_same(shape.value, value)

    def _has_members(self, shape: Object, value: dict[str, Any]) -> bool:
        keys = {each.name: each.value for each in shape.properties}
        required = {each.name for each in shape.properties if each.required}
        if not required <= set(value) or not shape.least <= len(value) <= shape.most:
            return False
        for name, item in value.items():
            others = (key for language, key in shape.others if matches(language, name))
            key = keys[name] if name in keys else next(others, None)
            if key is None or not self.allows(key, item):
                return False
        return True

    def _branch(self, held: Held) -> Branch:
        """Return the shapes of values for which all these schemas hold."""
        checkpoint()
        shapes: list[Shape] = []
        for kind in TYPES:
            names = [_names(schema["type"]) for _, schema in held if "type" in schema]
            is_whole = kind == "number" and any("number" not in each for each in names)
            if any(not {kind, *["integer"] * (kind == "number")} & each for each in names):
                continue
            for pointer, schema in held:
                self._document.refuse(schema, pointer, kind)
            match kind:
                case "null":
                    shapes.append(Word(None))
                case "boolean":
                    shapes += (Word(True), Word(False))
                case "number":
                    shapes += self._numbers(held, is_whole)
                case "string":
                    shapes += self._strings(held)
                case "array":
                    shapes += self._arrays(held)
                case "object":
                    shapes += self._objects(held)
        lists = [
            schema[keyword] if keyword == "enum" else [schema[keyword]]
            for _, schema in held
            for keyword in ("enum", "const")
            if keyword in schema
        ]
        if not lists:
            return Branch(shapes, None)
        common = [
            value
            for value in lists[0]
            if all(any(_is_same(value, each) for each in others) for others in lists[1:])
        ]
        return Branch(shapes, common)

    def _numbers(self, held: Held, is_whole: bool) -> Iterator[Number]:
        numbers = Numbers(is_whole)
        for pointer, schema in held:
            for keyword in _BOUNDS & schema.keys():
                numbers &= _bound(keyword, decimal(schema[keyword]))
            multiple = schema.get("multipleOf")
            if multiple is not None:
                if multiple != int(multiple):
                    raise self._document.error(
                        pointer,
                        f"multipleOf {multiple} is not supported, for floats are rarely multiples "
                        "of a fraction: count in smaller units, by whole numbers",
                    )
                numbers &= Numbers(multiple=int(multiple))
        with self._placed(held):
            language = numbers.language()
            if not is_empty(language):
                yield Number(numbers, language)
            elif numbers.is_range:
                raise InputError(
                    "no number within its bounds can be written: they are too close together, too "
                    "small or too large"
                )

    def _strings(self, held: Held) -> Iterator[String]:
        languages: list[Language] = []
        for pointer, schema in held:
            if "pattern" in schema:
                with self._placed([(pointer, schema)]):
                    languages.append(search(schema["pattern"]))
            if "format" in schema:
                language = format_language(schema["format"])
                if language is None:
                    raise self._document.error(
                        pointer, f"format {schema['format']!r} is not supported: use pattern"
                    )
                languages.append(language)
        least, most = _bounds(held, "Length")
        if least or most < inf:
            languages.append(repeat(ANY_CHAR, least, None if most == inf else int(most)))
        language = intersection(*languages)
        with self._placed(held):
            if least <= most and not is_empty(language):
                yield String(language)

    def _arrays(self, held: Held) -> Iterator[Array]:
        least, most = _bounds(held, "Items")
        count = max((len(schema.get("prefixItems", ())) for _, schema in held), default=0)

        def item(at: int) -> Key:
            """Return the key of an item by its place."""
            return tuple(
                child(pointer, "prefixItems", at)
                if at < len(schema.get("prefixItems", ()))
                else child(pointer, "items")
                for pointer, schema in held
                if at < len(schema.get("prefixItems", ())) or "items" in schema
            )

        if least <= most:
            yield Array(tuple(map(item, range(count))), item(count), least, most)

    def _objects(self, held: Held) -> Iterator[Object]:
        least, most = _bounds(held, "Properties")
        required = dict.fromkeys(name for _, schema in held for name in schema.get("required", ()))
        declared = dict.fromkeys(
            name for _, schema in held for name in schema.get("properties", {})
        )
        names = self._name_language(held)
        patterns = list(self._patterns(held))
        properties = []
        for name in declared | required:
            found = [pointer for pointer, _, wide in patterns if matches(wide, name)]
            key = _member(held, name, found) if matches(names, name) else None
            properties.append(Property(name, key, name in required))
        if any(each.required and each.value is None for each in properties):
            return
        others = tuple(self._others(held, names, [each.name for each in properties], patterns))
        if others and least > len(required) + 1:
            raise self._document.error(
                next(pointer for pointer, schema in held if "minProperties" in schema),
                f"minProperties {least} is not supported beside properties of any name, which "
                "might be there twice: name them in required",
            )
        if least <= most:
            yield Object(tuple(properties), others, least, most)

    def _name_language(self, held: Held) -> Language:
        """Return the names that properties may have."""
        key = tuple(
            child(pointer, "propertyNames") for pointer, schema in held if "propertyNames" in schema
        )
        if not key:
            return ANYTHING
        return union(*(shape.language for shape in self.of(key) if isinstance(shape, String)))

    def _patterns(self, held: Held) -> Iterator[tuple[Pointer, Language, Language]]:
        """Yield the patterns of names: where, what they match surely and what perhaps."""
        for pointer, schema in held:
            for pattern in schema.get("patternProperties", {}):
                place = child(pointer, "patternProperties", pattern)
                with self._placed([(place, schema)]):
                    yield place, search(pattern), search(pattern, wide=True)

    def _others(
        self,
        held: Held,
        names: Language,
        declared: list[str],
        patterns: list[tuple[Pointer, Language, Language]],
    ) -> Iterator[tuple[Language, Key]]:
        """Yield the languages of other names, by the patterns that they match, with their keys."""
        if len(patterns) > MAX_PATTERNS:
            raise self._document.error(
                patterns[0][0], f"more than {MAX_PATTERNS} patternProperties are not supported"
            )
        unknown = other_than(*declared)
        is_closed = self._closed and any("properties" in schema for _, schema in held)
        is_closed &= not any("additionalProperties" in schema for _, schema in held)
        for count in range(is_closed, len(patterns) + 1):
            for chosen in combinations(patterns, count):
                found = [pointer for pointer, _, _ in chosen]
                key = _member(held, None, found)
                if any(self._document.at(pointer) is False for pointer in key):
                    continue
                language = intersection(
                    names,
                    unknown,
                    *(narrow for _, narrow, _ in chosen),
                    *(complement(wide) for each, _, wide in patterns if each not in found),
                )
                with self._placed(held):
                    if not is_empty(language):
                        yield language, key

    @contextmanager
    def _placed(self, held: Held) -> Iterator[None]:
        """Say in errors about a language where it comes from."""
        try:
            yield
        except InputError as error:
            raise self._document.error(held[-1][0] if held else ROOT, error) from None


def _member(held: Held, name: str | None, found: list[Pointer]) -> Key:
    """Return the key of a property, by its name and the patterns that match the name."""
    key: list[Pointer] = []
    for pointer, schema in held:
        own = [place for place in found if place.startswith(f"{pointer}/patternProperties/")]
        if name in schema.get("properties", {}):
            own.insert(0, child(pointer, "properties", str(name)))
        if not own and "additionalProperties" in schema:
            own = [child(pointer, "additionalProperties")]
        key += own
    return tuple(key)


def _bound(keyword: str, value: Decimal) -> Numbers:
    """Return the numbers within one bound."""
    strict = keyword.startswith("exclusive")
    if keyword.lower().endswith("minimum"):
        return Numbers(low=value, above=strict)
    return Numbers(high=value, below=strict)


def _bounds(held: Held, what: str) -> tuple[int, float]:
    """Return the least and the most number of characters, items or properties."""
    least = max((schema.get(f"min{what}", 0) for _, schema in held), default=0)
    most = min((schema.get(f"max{what}", inf) for _, schema in held), default=inf)
    return int(least), inf if most >= UNREACHABLE else int(most)


def _names(kind: str | list[str]) -> set[str]:
    return {kind} if isinstance(kind, str) else set(kind)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_same(left: Any, right: Any) -> bool:
    """Return whether two JSON values are equal: 1 is 1.0, but not true."""
    if _is_number(left) and _is_number(right):
        return bool(left == right)
    if type(left) is not type(right):
        return False
    if isinstance(left, list):
        return len(left) == len(right) and all(map(_is_same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(
            _is_same(left[name], right[name]) for name in left
        )
    return bool(left == right)


def _listed(value: Any) -> Shape:
    """Return the shape of one value."""
    if value is None or isinstance(value, bool):
        return Word(value)
    if isinstance(value, str):
        return String(literal(value))
    return Number(Numbers(), exactly(value)) if _is_number(value) else Fixed(value)


def _merged(shapes: list[Shape]) -> list[Shape]:
    """Return the shapes with all strings in one, and all numbers, which differ as texts."""
    strings = [shape.language for shape in shapes if isinstance(shape, String)]
    numbers = [shape.language for shape in shapes if isinstance(shape, Number)]
    all_strings, all_numbers = String(union(*strings)), Number(Numbers(), union(*numbers))
    merged: list[Shape] = []
    for shape in shapes:
        if isinstance(shape, String):
            shape = all_strings
        elif isinstance(shape, Number):
            shape = all_numbers
        if shape not in merged:
            merged.append(shape)
    return merged
