"""Sixty JSON Schemas as people write them: for extraction, forms, interfaces and tools."""

from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}


def closed(required: str = "", **properties: Schema) -> Schema:
    """Return an object without other properties; all are required if it is not said which."""
    names = required.split() if required else list(properties)
    return {**opened(**properties), "required": names, "additionalProperties": False}


def opened(**properties: Schema) -> Schema:
    """Return an object whose properties are optional, and which may have others."""
    return {"type": "object", "properties": properties}


def items(schema: Schema, **bounds: Any) -> Schema:
    """Return an array."""
    return {"type": "array", "items": schema, **bounds}


def text(**keywords: Any) -> Schema:
    """Return a string."""
    return {"type": "string", **keywords}


ADDRESS = closed("street city", street=STRING, city=STRING, zip=text(pattern="^[0-9]{5}$"))
POINT = closed(x=NUMBER, y=NUMBER)
MONEY = closed(amount={"type": "integer", "minimum": 0}, currency={"enum": ["EUR", "USD"]})

SCHEMAS: dict[str, Schema] = {
    # Plain values
    "any": {},
    "any object": {"type": "object"},
    "sentiment": {"enum": ["positive", "negative", "neutral"]},
    "yes or no": BOOLEAN,
    "rating": {"type": "integer", "minimum": 1, "maximum": 5},
    "probability": {"type": "number", "minimum": 0, "maximum": 1},
    "temperature": {"type": "number", "exclusiveMinimum": -273.15, "maximum": 1e6},
    "year": {"type": "integer", "exclusiveMinimum": 1899, "exclusiveMaximum": 2100},
    "even": {"type": "integer", "multipleOf": 2, "minimum": -100, "maximum": 100},
    "hundreds": {"type": "integer", "multipleOf": 100},
    "small multiples": {"type": "number", "multipleOf": 7, "minimum": 0, "maximum": 70},
    "nothing or text": {"type": ["string", "null"], "maxLength": 8},
    "mixed enum": {"enum": [0, 1.5, "none", None, False, [1, "a"], {"k": [None]}]},
    "constant": {"const": {"version": 2, "tags": ["ä", "b"]}},
    # Strings
    "short text": text(minLength=3, maxLength=12),
    "plate": text(pattern="^[A-Z]{1,3}-[A-Z]{1,2} [1-9][0-9]{0,3}$"),
    "slug": text(pattern="^[a-z0-9]+(?:-[a-z0-9]+)*$", maxLength=20),
    "contains digit": text(pattern="[0-9]"),
    "not space": text(pattern=r"^\S+$", minLength=1, maxLength=6),
    "hex colour": text(pattern="^#(?:[0-9a-fA-F]{3}){1,2}$"),
    "version": text(pattern=r"^\d+\.\d+\.\d+(-[\w.]+)?$"),
    "no vowels": text(pattern="^[^aeiouAEIOU]*$", maxLength=10),
    "starts or ends": text(pattern="^pre|post$", maxLength=10),
    "date": text(format="date"),
    "moment": text(format="date-time"),
    "clock": text(format="time"),
    "span": text(format="duration"),
    "mail": text(format="email"),
    "web": text(format="uri", maxLength=40),
    "host": text(format="hostname"),
    "address 4": text(format="ipv4"),
    "address 6": text(format="ipv6"),
    "identifier": text(format="uuid"),
    "pointer": text(format="json-pointer", maxLength=12),
    # Arrays
    "tags": items(text(minLength=1, maxLength=10), minItems=1, maxItems=4),
    "matrix": items(items(NUMBER, minItems=2, maxItems=2), minItems=2, maxItems=2),
    "tuple": {"type": "array", "prefixItems": [STRING, INTEGER], "items": False},
    "pair and rest": {
        "type": "array",
        "prefixItems": [BOOLEAN, {}],
        "items": STRING,
        "minItems": 2,
    },
    "booleans": items(BOOLEAN, maxItems=10),
    "empty": {"type": "array", "maxItems": 0},
    # Objects
    "person": closed("name", name=STRING, age={"type": "integer", "minimum": 0}, nick=STRING),
    "open person": {**opened(name=STRING, age=INTEGER), "required": ["name"]},
    "all optional": closed(" ", a=INTEGER, b=INTEGER, c=INTEGER),
    "unicode keys": closed("größe 名前", größe=INTEGER, 名前=STRING, **{'"q"\\': BOOLEAN}),
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "names": {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z]{1,5}$"},
        "additionalProperties": BOOLEAN,
        "maxProperties": 3,
    },
    "patterns": {
        "type": "object",
        "properties": {"id": INTEGER},
        "patternProperties": {"^x-": STRING, "_at$": text(format="date")},
        "additionalProperties": False,
    },
    "one of three": {**closed(" ", a=INTEGER, b=INTEGER, c=INTEGER), "minProperties": 1},
    "two of three": {
        **closed(" ", a=INTEGER, b=INTEGER, c=INTEGER),
        "minProperties": 2,
        "maxProperties": 2,
    },
    "nested": closed(user=closed(address=ADDRESS, phones=items(STRING, maxItems=2))),
    "invoice": closed(
        "number lines",
        number=text(pattern="^20[0-9]{2}-[0-9]{4}$"),
        date=text(format="date"),
        lines=items(closed(sku=text(maxLength=8), price=MONEY), minItems=1, maxItems=3),
    ),
    # References and combinations
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {"node": closed("value", value=INTEGER, children=items({"$ref": "#/$defs/node"}))},
    },
    "linked list": {
        "$defs": {"cell": closed("head", head=NUMBER, tail={"$ref": "#"})},
        "anyOf": [{"$ref": "#/$defs/cell"}, {"type": "null"}],
    },
    "shape": {
        "oneOf": [
            closed(kind={"const": "circle"}, centre=POINT, radius=NUMBER),
            closed(kind={"const": "line"}, points=items(POINT, minItems=2, maxItems=3)),
        ]
    },
    "number or text": {"oneOf": [INTEGER, STRING, {"type": "null"}]},
    "base and more": {
        "allOf": [
            {**opened(id={"type": "integer", "minimum": 1}), "required": ["id"]},
            {**opened(name=text(maxLength=5), id={"maximum": 99}), "required": ["name"]},
        ],
        "maxProperties": 3,
    },
    "any of objects": {"anyOf": [closed(a=STRING), closed(a=INTEGER, b=INTEGER), ADDRESS]},
    "narrowed": {
        "$ref": "#/$defs/size",
        "maximum": 10,
        "$defs": {"size": {**INTEGER, "minimum": 3}},
    },
    "filter": {
        "$defs": {
            "filter": {
                "anyOf": [
                    closed(field=STRING, equals={"type": ["string", "number", "boolean"]}),
                    closed(all=items({"$ref": "#/$defs/filter"}, minItems=1, maxItems=2)),
                ]
            }
        },
        "$ref": "#/$defs/filter",
    },
    "false branch": {"anyOf": [False, closed(ok={"const": True})]},
}
