"""Regular languages: sets of texts, with union, intersection, complement and their automata.

A language is a tree of characters, sequences, unions and repetitions. Its derivative by a character
holds what may follow that character; automata are made of derivatives."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from typing import TypeAlias

from webgemma.errors import InputError
from webgemma.sync import checkpoint

MAX_STATES = 4096  # of an automaton

FIRST_SURROGATE, LAST_SURROGATE, LAST = 0xD800, 0xDFFF, 0x10FFFF

Range: TypeAlias = tuple[int, int]  # of code points, both ends included


def _settle(language: "Language", nullable: bool, parts: object) -> None:
    """Keep what follows from the parts of a language, which never change.

    Trees are compared and looked up again and again: their hash is computed once."""
    object.__setattr__(language, "nullable", nullable)
    object.__setattr__(language, "_hash", hash((type(language), parts)))


def _kept_hash(self: "Language") -> int:
    return self._hash


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set: sorted ranges that neither overlap nor touch; no surrogates."""

    ranges: tuple[Range, ...]
    nullable: bool = field(init=False, compare=False)
    _hash: int = field(init=False, compare=False, repr=False)

    __hash__ = _kept_hash

    def __post_init__(self) -> None:
        _settle(self, False, self.ranges)

    def __contains__(self, character: str) -> bool:
        code = ord(character)
        return any(first <= code <= last for first, last in self.ranges)

    def __and__(self, other: "Chars") -> "Chars":
        return Chars(tuple(_overlaps(self.ranges, other.ranges)))

    def __or__(self, other: "Chars") -> "Chars":
        return chars(*self.ranges, *other.ranges)

    def __sub__(self, other: "Chars") -> "Chars":
        return self & Chars(tuple(_gaps(other.ranges)))


@dataclass(frozen=True, slots=True)
class Concat:
    """Texts of several languages, one after the other; the empty text without any."""

    items: tuple["Language", ...]
    nullable: bool = field(init=False, compare=False)
    _hash: int = field(init=False, compare=False, repr=False)

    __hash__ = _kept_hash

    def __post_init__(self) -> None:
        _settle(self, all(item.nullable for item in self.items), self.items)


@dataclass(frozen=True, slots=True)
class Union:
    """Texts of any of several languages; none without any."""

    items: tuple["Language", ...]
    nullable: bool = field(init=False, compare=False)
    _hash: int = field(init=False, compare=False, repr=False)

    __hash__ = _kept_hash

    def __post_init__(self) -> None:
        _settle(self, any(item.nullable for item in self.items), self.items)


@dataclass(frozen=True, slots=True)
class Intersection:
    """Texts that are in all of several languages."""

    items: tuple["Language", ...]
    nullable: bool = field(init=False, compare=False)
    _hash: int = field(init=False, compare=False, repr=False)

    __hash__ = _kept_hash

    def __post_init__(self) -> None:
        _settle(self, all(item.nullable for item in self.items), self.items)


@dataclass(frozen=True, slots=True)
class Complement:
    """Texts that are not in a language."""

    item: "Language"
    nullable: bool = field(init=False, compare=False)
    _hash: int = field(init=False, compare=False, repr=False)

    __hash__ = _kept_hash

    def __post_init__(self) -> None:
        _settle(self, not self.item.nullable, self.item)


@dataclass(frozen=True, slots=True)
class Repeat:
    """Texts of a language, repeated `least` to `most` times; None: any number of times."""

    item: "Language"
    least: int
    most: int | None
    nullable: bool = field(init=False, compare=False)
    _hash: int = field(init=False, compare=False, repr=False)

    __hash__ = _kept_hash

    def __post_init__(self) -> None:
        parts = (self.item, self.least, self.most)
        _settle(self, self.least == 0 or self.item.nullable, parts)


Language: TypeAlias = Chars | Concat | Union | Intersection | Complement | Repeat

EMPTY = Concat(())  # the language of the empty text alone
NOTHING = Union(())  # the language without texts
ANY_CHAR = Chars(((0, FIRST_SURROGATE - 1), (LAST_SURROGATE + 1, LAST)))
NO_CHAR = Chars(())
ANYTHING = Repeat(ANY_CHAR, 0, None)


def chars(*ranges: Range) -> Chars:
    """Return the set of the characters in any of these ranges."""
    merged: list[Range] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return Chars(tuple(_overlaps(tuple(merged), ANY_CHAR.ranges)))


@lru_cache(1 << 12)
def any_of(characters: str) -> Chars:
    """Return the set of these characters."""
    return chars(*((ord(character), ord(character)) for character in characters))


def literal(text: str) -> Language:
    """Return the language of one text, which has no surrogates."""
    return concat(*map(any_of, text))


def concat(*items: Language) -> Language:
    """Return the texts of languages one after the other, simplified."""
    flat: list[Language] = []
    for item in items:
        if item == NOTHING:
            return NOTHING
        flat += item.items if isinstance(item, Concat) else (item,)
    return flat[0] if len(flat) == 1 else Concat(tuple(flat))


def union(*items: Language) -> Language:
    """Return the texts of any of the languages, simplified: sets of characters become one."""
    flat = dict.fromkeys(
        part for item in items for part in (item.items if isinstance(item, Union) else (item,))
    )
    if ANYTHING in flat:
        return ANYTHING
    sets = [item for item in flat if isinstance(item, Chars)]
    rest: list[Language] = [item for item in flat if not isinstance(item, Chars)]
    if sets:
        rest.insert(0, chars(*(found for each in sets for found in each.ranges)))
    if EMPTY in flat and any(item.nullable for item in rest if item != EMPTY):
        rest.remove(EMPTY)
    return rest[0] if len(rest) == 1 else Union(tuple(rest))


def intersection(*items: Language) -> Language:
    """Return the texts that are in all of the languages, simplified."""
    flat = dict.fromkeys(
        part
        for item in items
        for part in (item.items if isinstance(item, Intersection) else (item,))
        if part != ANYTHING
    )
    if NOTHING in flat:
        return NOTHING
    sets = [item for item in flat if isinstance(item, Chars)]
    rest: list[Language] = [item for item in flat if not isinstance(item, Chars)]
    if sets:
        common = reduce(Chars.__and__, sets)
        if not common.ranges:
            return NOTHING
        rest.insert(0, common)
    if EMPTY in flat:
        return EMPTY if all(item.nullable for item in rest) else NOTHING
    if not rest:
        return ANYTHING
    return rest[0] if len(rest) == 1 else Intersection(tuple(rest))


def complement(item: Language) -> Language:
    """Return the texts that are not in a language, simplified."""
    if isinstance(item, Complement):
        return item.item
    if item == NOTHING:
        return ANYTHING
    return NOTHING if item == ANYTHING else Complement(item)


def repeat(item: Language, least: int = 0, most: int | None = None) -> Language:
    """Return the texts of a language repeated `least` to `most` times, simplified."""
    if item == EMPTY or most == 0:
        return EMPTY
    if item == NOTHING:
        return NOTHING if least else EMPTY
    if (least, most) == (1, 1):
        return item
    if isinstance(item, Repeat) and (item.least, item.most) == (0, None):
        return item
    return Repeat(item, least, most)


def optional(item: Language) -> Language:
    """Return the texts of a language and the empty one."""
    return item if item.nullable else repeat(item, 0, 1)


def containing(*items: Language) -> Language:
    """Return the texts in which a text of any of the languages occurs."""
    return concat(ANYTHING, union(*items), ANYTHING)


def other_than(*texts: str) -> Language:
    """Return all texts but these: for matchers it is simpler than a complement."""
    if texts == ("",):
        return repeat(ANY_CHAR, 1)
    if not texts:
        return ANYTHING
    by_first: dict[str, list[str]] = {}
    for text in texts:
        by_first.setdefault(text[:1], []).append(text[1:])
    is_listed = bool(by_first.pop("", None))
    others = ANY_CHAR - any_of("".join(by_first))
    return union(
        NOTHING if is_listed else EMPTY,
        concat(others, ANYTHING),
        *(concat(any_of(first), other_than(*rest)) for first, rest in by_first.items()),
    )


def derivative(language: Language, character: str) -> Language:
    """Return what may follow a character in the texts of a language that begin with it."""
    match language:
        case Chars():
            return EMPTY if character in language else NOTHING
        case Concat():
            results = []
            for at, item in enumerate(language.items):
                results.append(concat(derivative(item, character), *language.items[at + 1 :]))
                if not item.nullable:
                    break
            return union(*results)
        case Union():
            return union(*(derivative(item, character) for item in language.items))
        case Intersection():
            return intersection(*(derivative(item, character) for item in language.items))
        case Complement():
            return complement(derivative(language.item, character))
        case Repeat(item, least, most):
            rest = repeat(item, max(0, least - 1), None if most is None else most - 1)
            return concat(derivative(item, character), rest)


def matches(language: Language, text: str) -> bool:
    """Return whether a text is in a language; one with a lone surrogate is in none."""
    for character in text:
        language = derivative(language, character)
        if language == NOTHING:
            return False
    return language.nullable


@dataclass(slots=True)
class State:
    """A state of an automaton: whether a text may end here, and where its next characters lead."""

    accepting: bool
    edges: dict[int, Chars]  # sets that have no character in common, by the state they lead to


def automaton(language: Language) -> list[State]:
    """Return the deterministic automaton of a language, which begins in state 0; [] if no text is.

    From each state a text can be completed. InputError if there are too many states."""
    numbers, states = {language: 0}, []
    reached = [language]
    for each in reached:  # which grows
        edges: dict[int, Chars] = {}
        for part, target in _steps(each):
            number = numbers.setdefault(target, len(reached))
            if number == len(reached):
                reached.append(target)
                _check_size(len(reached))
            edges[number] = edges[number] | part if number in edges else part
        states.append(State(each.nullable, edges))
    return _completable(states)


def is_empty(language: Language) -> bool:
    """Return whether no text is in a language; InputError if that takes too long to find out."""
    if not _is_boolean(language):
        return language == NOTHING
    reached = {language: None}
    waiting = [language]
    for each in waiting:  # which grows
        if each.nullable:
            return False
        for _, target in _steps(each):
            if target not in reached:
                reached[target] = None
                waiting.append(target)
                _check_size(len(waiting))
    return True


def _check_size(states: int) -> None:
    if states > MAX_STATES:
        raise InputError(
            f"an automaton of these texts has more than {MAX_STATES} states; use shorter "
            "repetitions"
        )


def _steps(language: Language) -> Iterator[tuple[Chars, Language]]:
    """Yield the derivatives of a language that have texts perhaps, with the characters to them."""
    checkpoint()
    for part in _parts(language):
        target = derivative(language, chr(part.ranges[0][0]))
        if target != NOTHING:
            yield part, target


def _parts(language: Language) -> list[Chars]:
    """Return a partition of all characters: those of a part have the same derivative."""
    return partition(first(language))


def partition(sets: Iterable[Chars]) -> list[Chars]:
    """Return a partition of all characters: those of a part are in the same sets."""
    parts = [ANY_CHAR]
    for each in set(sets):
        split = [piece for part in parts for piece in (part & each, part - each)]
        parts = [piece for piece in split if piece.ranges]
    return parts


def first(language: Language) -> Iterator[Chars]:
    """Yield the sets of characters that decide about the first character."""
    match language:
        case Chars():
            yield language
        case Concat():
            for item in language.items:
                yield from first(item)
                if not item.nullable:
                    return
        case Union() | Intersection():
            for item in language.items:
                yield from first(item)
        case Complement() | Repeat():
            yield from first(language.item)


def _is_boolean(language: Language) -> bool:
    """Return whether there is an intersection or complement in a language."""
    match language:
        case Chars():
            return False
        case Concat() | Union():
            return any(map(_is_boolean, language.items))
        case Repeat():
            return _is_boolean(language.item)
        case Intersection() | Complement():
            return True


def _completable(states: list[State]) -> list[State]:
    """Return the states from which a text can be completed, numbered anew."""
    sources: dict[int, list[int]] = {}
    for number, state in enumerate(states):
        for target in state.edges:
            sources.setdefault(target, []).append(number)
    waiting = [number for number, state in enumerate(states) if state.accepting]
    kept = set(waiting)
    for number in waiting:  # which grows
        new = [source for source in sources.get(number, ()) if source not in kept]
        kept.update(new)
        waiting += new
    if 0 not in kept:
        return []
    renumbered = {number: at for at, number in enumerate(sorted(kept))}
    return [
        State(
            state.accepting,
            {renumbered[to]: part for to, part in state.edges.items() if to in kept},
        )
        for number, state in enumerate(states)
        if number in kept
    ]


def _overlaps(left: tuple[Range, ...], right: tuple[Range, ...]) -> Iterator[Range]:
    """Yield the ranges of the characters in both."""
    at, other = 0, 0
    while at < len(left) and other < len(right):
        first = max(left[at][0], right[other][0])
        last = min(left[at][1], right[other][1])
        if first <= last:
            yield first, last
        if left[at][1] < right[other][1]:
            at += 1
        else:
            other += 1


def _gaps(ranges: Iterable[Range]) -> Iterator[Range]:
    """Yield the ranges of the code points in none of them."""
    begin = 0
    for first, last in ranges:
        if begin < first:
            yield begin, first - 1
        begin = last + 1
    if begin <= LAST:
        yield begin, LAST
