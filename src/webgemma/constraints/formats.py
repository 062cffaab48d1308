"""Formats of strings in JSON Schema, as languages: their texts are valid, and nearly vice versa.

What they leave out: leap seconds, and fractions of a second with more than nine digits; emails with
quotes or with an address as their domain; hosts with more than 63 characters or with `--`; URIs
with an address in brackets as their host."""

from collections.abc import Callable
from functools import cache

from webgemma.constraints.languages import (
    ANY_CHAR,
    ANYTHING,
    Language,
    any_of,
    chars,
    complement,
    concat,
    intersection,
    literal,
    repeat,
    union,
)
from webgemma.constraints.patterns import full_match

_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)"
_OCTET = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"({_OCTET}\.){{3}}{_OCTET}"
_FOURTH = r"(0[48]|[2468][048]|[13579][26])"  # two digits that a number divisible by four ends in
_LOCAL = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*"
_NAMED = r"[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2}"
_PATH = rf"({_NAMED}|[:@])"
_URI = (
    r"[A-Za-z][A-Za-z0-9+.-]*:"
    rf"(//(({_NAMED}|:)*@)?({_NAMED})*(:\d{{0,5}})?(/{_PATH}*)*|/?{_PATH}+(/{_PATH}*)*|/?)"
    rf"(\?({_PATH}|[/?])*)?(#({_PATH}|[/?])*)?"
)
_DURATION_TIME = r"T(\d{1,9}H(\d{1,9}M(\d{1,9}S)?)?|\d{1,9}M(\d{1,9}S)?|\d{1,9}S)"
_DURATION_DATE = r"(\d{1,9}D|\d{1,9}M(\d{1,9}D)?|\d{1,9}Y(\d{1,9}M(\d{1,9}D)?)?)"


def format_language(name: str) -> Language | None:
    """Return the texts of a format; None if it is not supported."""
    make = _FORMATS.get(name)
    return make() if make else None


@cache
def _date() -> Language:
    """Return the days of the years 1 to 9999."""
    year = intersection(full_match(r"\d{4}"), complement(literal("0000")))
    days = full_match(
        r"-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)"
        r"|02-(0[1-9]|1\d|2[0-8]))"
    )
    leap = intersection(full_match(rf"\d\d{_FOURTH}|{_FOURTH}00"), year)
    return union(concat(year, days), concat(leap, literal("-02-29")))


@cache
def _hostname() -> Language:
    """Return hosts that are short enough for their labels; `--` is reserved for other scripts."""
    label = r"[A-Za-z0-9]+(-[A-Za-z0-9]+)*"
    return intersection(full_match(rf"{label}(\.{label})*"), repeat(ANY_CHAR, 1, 63))


@cache
def _ipv6() -> Language:
    group = repeat(chars((48, 57), (65, 70), (97, 102)), 1, 4)
    colon = literal(":")
    last = [group, full_match(_IPV4)]  # the second one counts as two groups

    def groups(count: int) -> list[Language]:
        """Return so many groups, which may end in an address of version 4."""
        rows = [concat(*[group, colon] * (count - 1), last[0])]
        if count >= 2:
            rows.append(concat(*[group, colon] * (count - 2), last[1]))
        return rows

    compressed = [
        concat(
            *[group, colon] * (before - 1),
            *[group] * bool(before),
            literal("::"),
            union(*groups(after)) if after else literal(""),
        )
        for before in range(8)
        for after in range(8 - before)
    ]
    return union(*groups(8), *compressed)


_FORMATS: dict[str, Callable[[], Language]] = {
    "date": _date,
    "time": cache(lambda: full_match(_TIME)),
    "date-time": cache(lambda: concat(_date(), any_of("Tt"), full_match(_TIME))),
    "duration": cache(
        lambda: full_match(rf"P({_DURATION_DATE}({_DURATION_TIME})?|{_DURATION_TIME}|\d{{1,9}}W)")
    ),
    "email": cache(lambda: concat(full_match(_LOCAL), literal("@"), _hostname())),
    "hostname": _hostname,
    "ipv4": cache(lambda: full_match(_IPV4)),
    "ipv6": _ipv6,
    "json-pointer": cache(lambda: full_match(r"(/([^~/]|~[01])*)*")),
    "uri": cache(lambda: full_match(_URI)),
    "uuid": cache(lambda: full_match(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")),
    # A hint for forms.
    "password": lambda: ANYTHING,
}
