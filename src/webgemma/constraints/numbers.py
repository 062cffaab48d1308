"""Numbers within bounds, as languages of how they are written.

What is written has to be within the bounds also after it was rounded to a float. Rounding keeps the
order of numbers but makes different ones equal: next to a bound that is excluded stands a float."""

from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from functools import cache
from math import ceil, floor, inf, lcm, nextafter

from webgemma.constraints.languages import (
    EMPTY,
    NOTHING,
    Language,
    any_of,
    chars,
    concat,
    intersection,
    literal,
    optional,
    repeat,
    union,
)
from webgemma.errors import InputError

MAX_DIGITS = 64  # before or after the point
FLOAT_DIGITS = 15  # any two numbers with so many digits are different floats
MAX_EXPONENT = 307  # of numbers within bounds
MAX_CHOICES = 1000  # multiples that are listed

_BEYOND = Decimal(10**MAX_DIGITS)  # more than any number has without an exponent
_EXACT = Context(prec=4 * MAX_DIGITS)
_DIGIT = chars((48, 57))
_DIGITS = repeat(_DIGIT)
_MINUS = optional(literal("-"))
_WHOLE = union(literal("0"), concat(chars((49, 57)), repeat(_DIGIT, 0, MAX_DIGITS - 1)))
_FRACTION = concat(literal("."), repeat(_DIGIT, 1, MAX_DIGITS))
_ZEROS = concat(literal("."), repeat(literal("0"), 1, FLOAT_DIGITS))
_REST = optional(concat(literal("."), _DIGITS))
_UNSIGNED = concat(_DIGITS, _REST)
_E = any_of("eE")
_PLAIN = concat(_MINUS, _WHOLE, optional(_FRACTION))
_INTEGER = union(
    concat(_MINUS, _WHOLE),
    # As a float it is exact only if it is short.
    concat(
        _MINUS,
        union(literal("0"), concat(chars((49, 57)), repeat(_DIGIT, 0, FLOAT_DIGITS - 1))),
        _ZEROS,
    ),
)


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers between bounds, all or the whole ones, perhaps multiples of one."""

    whole: bool = False
    low: Decimal | None = None
    high: Decimal | None = None
    above: bool = False  # whether `low` itself is excluded
    below: bool = False  # whether `high` itself is excluded
    multiple: int | None = None

    def __and__(self, other: "Numbers") -> "Numbers":
        low, above = max(
            ((each.low, each.above) for each in (self, other) if each.low is not None),
            default=(None, False),
        )
        high, negated = min(
            ((each.high, not each.below) for each in (self, other) if each.high is not None),
            default=(None, True),
        )
        multiples = [each.multiple for each in (self, other) if each.multiple]
        return Numbers(
            self.whole or other.whole,
            low,
            high,
            above,
            not negated,
            lcm(*multiples) if multiples else None,
        )

    def __contains__(self, value: float) -> bool:
        number = decimal(value)
        return (
            (not self.whole or number == number.to_integral_value())
            and (self.low is None or number > self.low or (number == self.low and not self.above))
            and (
                self.high is None or number < self.high or (number == self.high and not self.below)
            )
            and (self.multiple is None or number % self.multiple == 0)
        )

    @property
    def is_range(self) -> bool:
        """Whether there are numbers between the bounds, perhaps none that can be written."""
        if self.whole or self.multiple:
            return False
        low, high = self.low, self.high
        is_excluded = self.above or self.below
        return low is None or high is None or (low < high or (low == high and not is_excluded))

    def language(self) -> Language:
        """Return how these numbers are written; InputError for multiples that are not supported."""
        if self.whole or self.multiple:
            return self._whole_language()
        if self.low is None and self.high is None:
            return any_number()
        low = None if self.low is None else _float_bound(self.low, self.above, inf)
        high = None if self.high is None else _float_bound(self.high, self.below, -inf)
        return union(
            _within(_PLAIN, low, high),
            _scientific(low, high),
            concat(
                literal("-"),
                _scientific(None if high is None else -high, None if low is None else -low),
            ),
        )

    def _whole_language(self) -> Language:
        low, high = self.low, self.high
        least = None if low is None else floor(low) + 1 if self.above else ceil(low)
        most = None if high is None else ceil(high) - 1 if self.below else floor(high)
        numbers: Language = _INTEGER
        if self.multiple and self.multiple > 1:
            numbers = intersection(numbers, _multiples(self.multiple, least, most))
        bounds = (None if each is None else Decimal(each) for each in (least, most))
        return _within(numbers, *bounds)


def decimal(value: float) -> Decimal:
    """Return a number as it is written; a large float exactly, for it is a whole number."""
    if isinstance(value, int) or abs(value) >= 2**53:
        return Decimal(value)
    return Decimal(repr(value))


@cache
def any_number() -> Language:
    """Return how finite numbers are written: all that fit into a float."""
    small = concat(_PLAIN, optional(concat(_E, union(_signed("-", 3), _signed("+", 2)))))
    digit = concat(_MINUS, chars((49, 57)), optional(_FRACTION), _E)
    hundreds = concat(any_of("12"), _DIGIT, _DIGIT)
    large = union(hundreds, concat(literal("30"), chars((48, 55))))
    largest = intersection(
        concat(literal("1"), optional(_FRACTION)), _unsigned_at_most(Decimal("1.7976931348623157"))
    )
    return union(
        small,
        concat(digit, optional(literal("+")), large),
        concat(_MINUS, largest, _E, optional(literal("+")), literal("308")),
    )


def exactly(value: float) -> Language:
    """Return how one number is written."""
    number = decimal(value)
    sign = literal("-") if number < 0 else EMPTY
    magnitude = abs(number)
    plain = f"{magnitude:f}"
    languages = []
    if len(plain) <= MAX_DIGITS:
        whole, _, fraction = plain.partition(".")
        fraction = fraction.rstrip("0")
        zeros = repeat(literal("0"), 0, FLOAT_DIGITS)
        if fraction:
            languages.append(concat(literal(f"{whole}.{fraction}"), zeros))
        elif len(whole) <= FLOAT_DIGITS:
            languages.append(concat(literal(whole), optional(_ZEROS)))
        else:
            languages.append(literal(whole))
    mantissa, _, exponent = (repr(value) if isinstance(value, float) else "").partition("e")
    if exponent:
        languages.append(
            concat(literal(mantissa.lstrip("-")), _E, _exponents(int(exponent), int(exponent)))
        )
    return concat(sign, union(*languages))


def _power(exponent: int) -> Decimal:
    return Decimal(1).scaleb(exponent)


def _scientific(low: Decimal | None, high: Decimal | None) -> Language:
    """Return the numbers above zero between bounds that are written with an exponent."""
    mantissa = concat(chars((49, 57)), optional(_FRACTION))
    languages = []
    whole: list[int] = []  # exponents of powers of ten that are within the bounds, a row of them
    for exponent in range(-MAX_EXPONENT, MAX_EXPONENT):
        first, end = _power(exponent), _power(exponent + 1)
        if (low is None or low <= first) and (high is None or end <= high):
            whole.append(exponent)
        elif (low is None or low < end) and (high is None or first <= high):
            part = [mantissa]
            if low is not None and low > first:
                part.append(_unsigned_at_least(low.scaleb(-exponent, _EXACT)))
            if high is not None and high < end:
                part.append(_unsigned_at_most(high.scaleb(-exponent, _EXACT)))
            languages.append(concat(intersection(*part), _E, _exponents(exponent, exponent)))
    if whole:
        languages.append(concat(mantissa, _E, _exponents(whole[0], whole[-1])))
    return union(*languages)


def _exponents(first: int, last: int) -> Language:
    """Return the exponents from one to another."""

    def digits(least: int, most: int) -> Language:
        zeros = repeat(literal("0"), 0, 2)
        bounds = _unsigned_at_least(Decimal(least)), _unsigned_at_most(Decimal(most))
        return concat(zeros, intersection(repeat(_DIGIT, 1, 3), *bounds))

    languages = []
    if last >= 0:
        languages.append(concat(optional(literal("+")), digits(max(0, first), last)))
    if first < 0:
        languages.append(concat(literal("-"), digits(max(1, -last), -first)))
    return union(*languages)


def _signed(sign: str, digits: int) -> Language:
    prefix = literal(sign) if sign == "-" else optional(literal(sign))
    return concat(prefix, repeat(_DIGIT, 1, digits))


def _float_bound(bound: Decimal, strict: bool, inwards: float) -> Decimal:
    """Return the next number, also as a float, that is within a bound."""
    rounded = float(bound)
    if abs(rounded) < 2**53:
        # It was read as this float, or is a whole number, which is the same as a float.
        written = decimal(nextafter(rounded, inwards) if strict else rounded)
        rounding = ROUND_CEILING if inwards > 0 else ROUND_FLOOR
        return written.quantize(_power(-MAX_DIGITS), rounding, _EXACT)
    # Whole numbers are read exactly, and larger floats are not what they are written as.
    outside = rounded < bound if inwards > 0 else rounded > bound
    if outside or (strict and rounded == bound):
        rounded = nextafter(rounded, inwards)
    candidates = (Decimal(repr(rounded)), Decimal(rounded))
    return max(candidates) if inwards > 0 else min(candidates)


def _within(numbers: Language, low: Decimal | None, high: Decimal | None) -> Language:
    """Return those of some plain numbers that are within bounds."""
    if (low is not None and low >= _BEYOND) or (high is not None and high <= -_BEYOND):
        return NOTHING
    bounds = [numbers]
    if low is not None and low > -_BEYOND:
        bounds.append(_at_least(low))
    if high is not None and high < _BEYOND:
        bounds.append(_at_most(high))
    return intersection(*bounds)


def _at_least(bound: Decimal) -> Language:
    """Return the plain numbers from a bound on."""
    if bound < 0:
        return union(_UNSIGNED, concat(literal("-"), _unsigned_at_most(-bound)))
    return _unsigned_at_least(bound)


def _at_most(bound: Decimal) -> Language:
    """Return the plain numbers up to a bound."""
    if bound < 0:
        return concat(literal("-"), _unsigned_at_least(-bound))
    return union(concat(literal("-"), _UNSIGNED), _unsigned_at_most(bound))


def _unsigned_at_least(bound: Decimal) -> Language:
    whole, fraction = _split(bound)
    longer = concat(chars((49, 57)), repeat(_DIGIT, len(whole)))
    greater = [
        concat(literal(whole[:at]), _digits(int(digit) + 1, 9), _exact(len(whole) - at - 1))
        for at, digit in enumerate(whole)
    ]
    fractions = [
        concat(literal(fraction[:at]), _digits(int(digit) + 1, 9), _DIGITS)
        for at, digit in enumerate(fraction)
    ]
    equal = concat(literal("."), union(*fractions, concat(literal(fraction), _DIGITS)))
    return union(
        concat(union(longer, *greater), _REST),
        concat(literal(whole), equal if fraction else _REST),
    )


def _unsigned_at_most(bound: Decimal) -> Language:
    whole, fraction = _split(bound)
    less = [
        concat(
            literal(whole[:at]),
            _digits(1 if at == 0 and len(whole) > 1 else 0, int(digit) - 1),
            _exact(len(whole) - at - 1),
        )
        for at, digit in enumerate(whole)
    ]
    if len(whole) > 1:
        less += [literal("0"), concat(chars((49, 57)), repeat(_DIGIT, 0, len(whole) - 2))]
    fractions = [
        concat(literal(fraction[:at]), _digits(0, int(digit) - 1), _DIGITS)
        for at, digit in enumerate(fraction)
    ]
    fractions += [literal(fraction[:at]) for at in range(1, len(fraction))]
    zeros = repeat(literal("0"), 0 if fraction else 1)
    equal = concat(literal("."), union(*fractions, concat(literal(fraction), zeros)))
    return union(concat(union(*less), _REST), concat(literal(whole), optional(equal)))


def _multiples(multiple: int, least: int | None, most: int | None) -> Language:
    """Return the multiples of a number, which ends in one of few ways or has few multiples."""
    for length in range(1, 5):
        step = 10**length
        if step % multiple == 0 and step // multiple <= MAX_CHOICES:
            endings = [f"{ending:0{length}d}" for ending in range(0, step, multiple)]
            small = [literal(str(int(ending))) for ending in endings]
            long = concat(chars((49, 57)), _DIGITS, union(*map(literal, endings)))
            return concat(_MINUS, union(*small, long), optional(_ZEROS))
    if least is not None and most is not None:
        first = -(-least // multiple) * multiple
        if (most - first) // multiple < MAX_CHOICES:
            return union(*map(exactly, range(first, most + 1, multiple)))
    raise InputError(
        f"multipleOf {multiple} is supported only where the numbers end in one of few ways, as "
        f"multiples of 2, 5 or 100 do, or where minimum and maximum leave at most {MAX_CHOICES}"
    )


def _split(bound: Decimal) -> tuple[str, str]:
    """Return the digits before and after the point."""
    whole, _, fraction = f"{abs(bound):f}".partition(".")
    return whole, fraction.rstrip("0")


def _digits(first: int, last: int) -> Language:
    return chars((48 + first, 48 + last)) if first <= last else NOTHING


def _exact(count: int) -> Language:
    return repeat(_DIGIT, count, count)
