"""Rules for values: the shapes of a schema, written in a syntax.

Values nest as far as a limit. It ends what a model might write for ever, and replies stay readable
for parsers that have a limit themselves."""

from collections.abc import Mapping, Sequence
from functools import cache
from math import inf
from typing import Any

from webgemma.constraints.documents import OBJECTS, ROOT, Document, Pointer
from webgemma.constraints.grammar import (
    EMPTY,
    Expression,
    Grammar,
    Loop,
    Text,
    characters,
    choice,
    maybe,
    series,
)
from webgemma.constraints.languages import literal
from webgemma.constraints.numbers import exactly
from webgemma.constraints.shapes import (
    Array,
    Fixed,
    Key,
    Number,
    Object,
    Shape,
    Shapes,
    String,
    Word,
)
from webgemma.constraints.syntax import Syntax
from webgemma.errors import InputError

MAX_NESTING = 32  # of arrays and objects

_WORDS: Mapping[bool | None, str] = {None: "null", True: "true", False: "false"}


def add_values(
    grammar: Grammar,
    schema: object,
    syntax: Syntax,
    where: str = "The schema",
    *,
    objects_only: bool = False,
    closed: bool = False,
) -> Expression:
    """Add the rules of the values that a schema allows, and return the expression of all of them.

    InputError for a schema that is not valid or not supported, or that allows nothing."""
    document = Document(schema, where)
    values = Values(Shapes(document, closed=closed), syntax, grammar)
    key = (ROOT, OBJECTS) if objects_only else (ROOT,)
    try:
        expression = values.expression(key)
    except RecursionError:
        raise InputError(f"{where} refers to its parts in too long a row.") from None
    if expression is None:
        empty = values.empty(key)
        if empty is not None:
            raise document.error(empty, "its keywords together allow no value")
        raise InputError(
            f"{where} allows no value, or none that nests at most {MAX_NESTING} levels."
        )
    return expression


class Values:
    """Writes the values of keys as rules of a grammar."""

    def __init__(self, shapes: Shapes, syntax: Syntax, grammar: Grammar) -> None:
        self._shapes = shapes
        self._syntax = syntax
        self._grammar = grammar
        self._found: dict[Key, list[Shape]] = {}
        self._nesting: dict[Key, float] = {}
        self._written: dict[tuple[Key, float], Expression | None] = {}

    def expression(self, key: Key, levels: int = MAX_NESTING) -> Expression | None:
        """Return the values of a key that nest so many levels; None if there are none."""
        # What does not nest deeper anyway is the same at every level.
        index = (key, min(levels, self._nests(key)))
        if index not in self._written:
            written = (self._shape(shape, levels) for shape in self._of(key))
            alternatives = [each for each in written if each is not None]
            expression = choice(*alternatives) if alternatives else None
            if expression is not None and not isinstance(expression, Text):
                expression = self._grammar.add("value", expression)
            self._written[index] = expression
        return self._written[index]

    def empty(self, key: Key) -> Pointer | None:
        """Return the place in a key without values that allows none; None: they nest too deep."""
        seen: list[Key] = []
        while self._of(key):
            seen.append(key)
            needed = (part for shape in self._of(key) for part in _needed(shape))
            empty = (part for part in needed if part not in seen and not self.expression(part))
            key = next(empty, ())
            if not key:
                return seen[-1][0] if self._nests(seen[-1]) <= MAX_NESTING else None
        return key[0]

    def _of(self, key: Key) -> list[Shape]:
        if key not in self._found:
            self._found[key] = self._shapes.of(key)
        return self._found[key]

    def _nests(self, key: Key) -> float:
        """Return how many levels the values of a key nest; infinite if they are recursive."""
        if key not in self._nesting:
            self._nesting[key] = inf
            self._nesting[key] = max(map(self._shape_nests, self._of(key)), default=0)
        return self._nesting[key]

    def _shape_nests(self, shape: Shape) -> float:
        match shape:
            case Array():
                return 1 + max(map(self._nests, (*shape.first, shape.rest)))
            case Object():
                keys = [each.value for each in shape.properties if each.value is not None]
                keys += [key for _, key in shape.others]
                return 1 + max(map(self._nests, keys), default=0)
            case Fixed():
                return _levels(shape.value)
            case _:
                return 0

    def _shape(self, shape: Shape, levels: int) -> Expression | None:
        match shape:
            case Word():
                return characters(_WORDS[shape.value])
            case Number():
                return Text(shape.language)
            case String():
                return self._syntax.string(shape.language)
            case Fixed():
                return self._fixed(shape.value) if _levels(shape.value) <= levels else None
            case Array():
                return self._array(shape, levels - 1) if levels else None
            case Object():
                return self._object(shape, levels - 1) if levels else None

    def _array(self, shape: Array, levels: int) -> Expression | None:
        first = [self.expression(key, levels) for key in shape.first]
        rest = self.expression(shape.rest, levels)
        most = shape.most
        if None in first:
            most = min(most, first.index(None))
        elif rest is None:
            most = min(most, len(first))
        if shape.least > most:
            return None
        brackets = self._syntax.array
        # From the end: what follows so many items.
        count = int(min(len(first), most))
        following = EMPTY if most == count else self._others(rest, count, shape.least, most)
        for at in range(count - 1, -1, -1):
            item = first[at]
            assert item is not None
            following = series(*([brackets.comma] if at else []), item, following)
            if at >= shape.least:
                following = maybe(following)
        return series(brackets.open, following, brackets.close)

    def _others(self, item: Expression | None, count: int, least: int, most: float) -> Expression:
        """Return items after so many, up to the least and most number of them."""
        assert item is not None
        left = None if most == inf else int(most) - count
        if count:
            return Loop(series(self._syntax.array.comma, item), max(0, least - count), left)
        more = Loop(
            series(self._syntax.array.comma, item),
            max(0, least - 1),
            None if left is None else left - 1,
        )
        return series(item, more) if least else maybe(series(item, more))

    def _object(self, shape: Object, levels: int) -> Expression | None:
        members = _Members(self, self._syntax, self._grammar, shape, levels).expression()
        brackets = self._syntax.object
        return None if members is None else series(brackets.open, members, brackets.close)

    def _fixed(self, value: Any) -> Expression | None:
        """Return one value."""
        if isinstance(value, list):
            brackets = self._syntax.array
            parts = [self._fixed(item) for item in value]
        elif isinstance(value, dict):
            brackets = self._syntax.object
            parts = [
                _joined(self._syntax.name(name), self._fixed(value[name]))
                for name in self._syntax.ordered(value)
            ]
        elif isinstance(value, str):
            return self._syntax.string(literal(value))
        elif value is None or isinstance(value, bool):
            return characters(_WORDS[value])
        else:
            return Text(exactly(value))
        if None in parts:
            return None
        items = [item for part in parts if part is not None for item in (brackets.comma, part)]
        return series(brackets.open, *items[1:], brackets.close)


class _Members:
    """The members of an object: those with names in their order, others anywhere between them."""

    def __init__(
        self, values: Values, syntax: Syntax, grammar: Grammar, shape: Object, levels: int
    ) -> None:
        self._comma = syntax.object.comma
        self._grammar = grammar
        self._least, self._most = shape.least, shape.most
        self._named: list[tuple[Expression | None, bool]] = []  # and whether they are required
        by_name = {each.name: each for each in shape.properties}
        for name in syntax.ordered(by_name):
            each = by_name[name]
            value = None if each.value is None else values.expression(each.value, levels)
            member = _joined(syntax.name(name), value)
            if member is not None or each.required:
                self._named.append((member, each.required))
        others = [
            _joined(syntax.names(language), values.expression(key, levels))
            for language, key in shape.others
        ]
        found = [each for each in others if each is not None]
        self._other = grammar.add("other", choice(*found)) if found else None

    def expression(self) -> Expression | None:
        """Return all members; None if they cannot be."""
        required = sum(required for _, required in self._named)
        if any(member is None for member, _ in self._named) or required > self._most:
            return None
        possible = inf if self._other else len(self._named)
        if self._least > max(1, required) or self._most < possible:
            return self._counted()
        return self._uncounted()

    def _uncounted(self) -> Expression | None:
        """Return members that need not be counted, but perhaps there must be one."""
        tail: Expression = EMPTY  # what may follow a member
        starts: list[Expression] = []  # what may come first, the last one first
        for member, required in reversed(self._named):
            assert member is not None
            start = self._followed(member)
            starts = [series(start, tail)] if required else [*starts, series(start, tail)]
            following = series(self._comma, start)
            tail = series(following if required else maybe(following), tail)
            if len(self._named) > 1:  # several expressions end in it
                tail = self._grammar.add("tail", tail)
        if self._other is not None:
            starts.append(series(self._followed(self._other), tail))
        if not starts:
            return None if self._least else EMPTY
        start = choice(*reversed(starts))
        is_needed = self._least or any(required for _, required in self._named)
        return start if is_needed else maybe(start)

    def _followed(self, member: Expression) -> Expression:
        """Return a member with any number of others after it."""
        if self._other is None:
            return member
        return series(member, Loop(series(self._comma, self._other), 0, None))

    def _counted(self) -> Expression | None:
        """Return members of which there are a least or a most number."""
        # Above the least number they are counted only if there is a most number.
        last = max(1, self._least) if self._most == inf else int(self._most)

        def member(expression: Expression, count: int) -> Expression:
            return series(*([self._comma] if count else []), expression)

        @cache
        def with_others(at: int, count: int) -> Expression | None:
            """Return what follows a member: others, and named ones from one on."""
            rest = named(at, count)
            if self._other is None or count == self._most:
                return rest
            if count == last:
                loop = Loop(series(self._comma, self._other), 0, None)
                return None if rest is None else series(loop, rest)
            more = with_others(at, count + 1)
            options = [] if more is None else [series(member(self._other, count), more)]
            return self._rule(options if rest is None else [*options, rest])

        @cache
        def named(at: int, count: int) -> Expression | None:
            """Return the named ones from one on, if so many members were written."""
            if at == len(self._named):
                return EMPTY if count >= self._least else None
            expression, required = self._named[at]
            assert expression is not None
            following = with_others(at + 1, min(count + 1, last)) if count < self._most else None
            options = [] if following is None else [series(member(expression, count), following)]
            skipped = None if required else named(at + 1, count)
            return self._rule(options if skipped is None else [*options, skipped])

        return with_others(0, 0)

    def _rule(self, options: list[Expression]) -> Expression | None:
        if not options:
            return None
        expression = choice(*options)
        return expression if expression == EMPTY else self._grammar.add("members", expression)


def _joined(*items: Expression | None) -> Expression | None:
    """Return expressions one after the other; None if one of them cannot be written."""
    present = [item for item in items if item is not None]
    return series(*present) if len(present) == len(items) else None


def _needed(shape: Shape) -> Sequence[Key]:
    """Return the keys of the parts without which there is no value of a shape."""
    match shape:
        case Array():
            return (*shape.first[: shape.least], shape.rest)
        case Object():
            named = [each.value for each in shape.properties if each.required]
            return [key for key in named if key is not None]
        case _:
            return ()


def _levels(value: Any) -> int:
    """Return how many levels a value nests."""
    if isinstance(value, list):
        return 1 + max(map(_levels, value), default=0)
    if isinstance(value, dict):
        return 1 + max(map(_levels, value.values()), default=0)
    return 0
