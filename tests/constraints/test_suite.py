"""The JSON-Schema-Test-Suite: what is claimed to be supported is right, the rest is refused.

Instances are written with their keys in any order: one of them is the declared one."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice, permutations, product
from typing import Any

from helpers.constrained import accepts, constraint_of, lines, small_tokenizer

from webgemma.constraints.compiling import Compiler
from webgemma.constraints.documents import ROOT, Document
from webgemma.constraints.shapes import Shapes
from webgemma.errors import InputError

GROUPS = list(lines("suite.jsonl"))
MAX_ORDERS = 24  # of the keys of one instance

# Valid instances that are never written: see formats.py and numbers.py.
NOT_WRITTEN = {
    *("1998-12-31T23:59:60Z", "1998-12-31T15:59:60.123-08:00"),
    *("23:59:60Z", "23:59:60+00:00", "01:29:60+01:30", "23:29:60+23:30"),
    *("15:59:60-08:00", "00:29:60-23:30"),
    *('"joe bloggs"@example.com', '"joe..bloggs"@example.com', '"joe@bloggs"@example.com'),
    *("joe.bloggs@[127.0.0.1]", "joe.bloggs@[IPv6:::1]"),
    "xn--4gbwdl.xn--wgbh1c",
    "abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyzabcdefghijk.com",
    "ldap://[2001:db8::7]/c=GB?objectClass?one",
    9007199254740992.0,
}

# How many schemas are refused, by the reason.
REFUSED = {
    "$dynamicRef": 3,
    "$id": 1,
    "$ref": 51,
    "contains": 19,
    "dependentRequired": 4,
    "dependentSchemas": 7,
    "if": 13,
    "multipleOf": 5,
    "not": 11,
    "oneOf": 8,
    "unevaluatedItems": 20,
    "unevaluatedProperties": 34,
    "uniqueItems": 3,
}


def orders(value: Any) -> Iterator[Any]:
    """Yield a value with the keys of its objects in every order."""
    if isinstance(value, list):
        yield from map(list, product(*map(list, map(orders, value))))
    elif isinstance(value, dict):
        for names in permutations(value):
            for items in product(*(list(orders(value[name])) for name in names)):
                yield dict(zip(names, items, strict=True))
    else:
        yield value


def reason(error: InputError) -> str:
    """Return the keyword for which a schema is refused."""
    found = re.search(r" at #\S*: (?:schemas \d+ and \d+ of )?(\S+?):? ", str(error))
    assert found, error
    return found[1]


def is_left_out(value: Any) -> bool:
    """Return whether a valid instance is never written."""
    return isinstance(value, str | float) and value in NOT_WRITTEN


def test_shapes_allow_what_is_valid() -> None:
    """The reference: values themselves, not how they are written."""
    refused: Counter[str] = Counter()
    for group in GROUPS:
        shapes = Shapes(Document(group["schema"]))
        try:
            shapes.of((ROOT,))
            found = [(value, shapes.allows((ROOT,), value)) for value, _ in group["tests"]]
        except InputError as error:
            refused[reason(error)] += 1
            continue
        for (value, is_allowed), (_, is_valid) in zip(found, group["tests"], strict=True):
            is_wanted = is_valid and not (isinstance(value, str) and value in NOT_WRITTEN)
            assert is_allowed == is_wanted, (group["title"], value)
    assert refused == REFUSED


def test_masks_allow_what_is_valid(compiler: Compiler) -> None:
    tokenizer = small_tokenizer()
    checked = 0
    for group in GROUPS:
        try:
            constraint = constraint_of(compiler, schema=group["schema"])
        except InputError:
            continue
        for value, is_valid in group["tests"]:
            texts = (
                json.dumps(each, ensure_ascii=False) for each in islice(orders(value), MAX_ORDERS)
            )
            tokens = (tokenizer.encode(text) for text in texts)
            is_accepted = any(accepts(constraint, each, tokenizer.eos) for each in tokens)
            assert is_accepted == (is_valid and not is_left_out(value)), (group["title"], value)
            checked += 1
    assert checked > 800
