"""Random tools with schemas of every supported kind, and arguments that fit them."""

import random
from collections.abc import Callable
from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any]
Maker: TypeAlias = Callable[[], Any]  # of one value that a schema allows

LETTERS = [*"abcXYZ019 _-.,:;{}[]()'\"\\/<>|\n\täß日本😀", "<|", "|>", '<|"', "call:", "<tool_call"]
PATTERNS = {
    "^[A-Z]{2}[0-9]{3}$": ["AB123", "ZZ000"],
    "^[a-z]+(-[a-z]+)*$": ["a", "ab-cd", "x-y-z"],
    "foo": ["foo", "a foo", "foofoo"],
}
FORMATS = {
    "date": ["2024-02-29", "1999-12-31"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
    "date-time": ["2024-05-06T07:08:09Z"],
    "ipv4": ["10.0.0.1"],
    "email": ["a.b@example.org"],
}
NAMES = [
    *"abcdefgh",
    "city",
    "unit",
    "max_results",
    "größe",
    "userId",
    "x-y",
    "$ref",
    "a.b",
    "名前",
]


class RandomTools:
    """Makes tools, each with a maker of arguments."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def tools(self) -> tuple[list[Schema], dict[str, Maker]]:
        """Return some tools, and makers of their arguments by name."""
        tools, makers = [], {}
        for name in self._rng.sample(["search", "get_weather", "send-mail", "f", "do.it"], 2):
            schema, make = self._object(0)
            function: Schema = {"name": name, "description": "", "parameters": schema}
            tools.append({"type": "function", "function": function})
            makers[name] = make
        return tools, makers

    def _schema(self, depth: int) -> tuple[Schema, Maker]:
        kinds = [self._string, self._string, self._integer, self._number, self._word, self._listed]
        if depth < 3:
            kinds += [self._array, self._object, self._nullable, self._union, self._tagged]
        kind: Callable[[int], tuple[Schema, Maker]] = self._rng.choice(kinds)
        return kind(depth)

    def text(self) -> str:
        """Return a text that spells neither a quote token nor the end of a call."""
        length = self._rng.randrange(8)
        text = "".join(self._rng.choice(LETTERS) for _ in range(length))
        return text.replace('<|"|>', "").replace("<tool_call|>", "")

    def _string(self, _: int) -> tuple[Schema, Maker]:
        kind = self._rng.randrange(4)
        if kind == 0:
            pattern, texts = self._rng.choice(list(PATTERNS.items()))
            return {"type": "string", "pattern": pattern}, lambda: self._rng.choice(texts)
        if kind == 1:
            name, texts = self._rng.choice(list(FORMATS.items()))
            return {"type": "string", "format": name}, lambda: self._rng.choice(texts)
        if kind == 2:
            return {"type": "string", "maxLength": 20}, lambda: self.text()[:20]
        return {"type": "string", "description": "any"}, self.text

    def _integer(self, _: int) -> tuple[Schema, Maker]:
        low, high = sorted(self._rng.sample(range(-1000, 1000), 2))
        schema: Schema = {"type": "integer"}
        if self._rng.random() < 0.6:
            schema |= {"minimum": low, "maximum": high}
        return schema, lambda: self._rng.randint(low, high)

    def _number(self, _: int) -> tuple[Schema, Maker]:
        low, high = sorted(
            self._rng.uniform(-1, 1) * 10.0 ** self._rng.randrange(-8, 8) for _ in "ab"
        )
        schema: Schema = {"type": "number"}
        kind = self._rng.randrange(3)
        if kind == 1:
            schema |= {"minimum": low, "maximum": high}
        if kind == 2:
            schema |= {"exclusiveMinimum": low}
        return schema, lambda: max(low + abs(low) * 1e-9, self._rng.uniform(low, high))

    def _word(self, _: int) -> tuple[Schema, Maker]:
        if self._rng.random() < 0.3:
            return {"type": "null"}, lambda: None
        return {"type": "boolean"}, lambda: self._rng.random() < 0.5

    def _listed(self, _: int) -> tuple[Schema, Maker]:
        values = [self.text() + "x", self.text() + "y", 3, 2.5, None, True, [1, "b"], {"k": False}]
        chosen = self._rng.sample(values, self._rng.randint(1, 4))
        schema = {"const": chosen[0]} if len(chosen) == 1 else {"enum": chosen}
        return schema, lambda: self._rng.choice(chosen)

    def _array(self, depth: int) -> tuple[Schema, Maker]:
        item, make = self._schema(depth + 1)
        least = self._rng.randrange(3)
        schema = {"type": "array", "items": item, "minItems": least, "maxItems": least + 2}
        return schema, lambda: [make() for _ in range(self._rng.randint(least, least + 2))]

    def _nullable(self, depth: int) -> tuple[Schema, Maker]:
        schema, make = self._schema(depth + 1)
        nothing = {"type": "null"}
        return {"anyOf": [schema, nothing]}, lambda: None if self._rng.random() < 0.3 else make()

    def _union(self, depth: int) -> tuple[Schema, Maker]:
        both = [self._schema(depth + 1), self._schema(depth + 1)]
        return {"anyOf": [schema for schema, _ in both]}, lambda: self._rng.choice(both)[1]()

    def _tagged(self, depth: int) -> tuple[Schema, Maker]:
        schemas, makers = [], []
        for tag in ("one", "two"):
            schema, make = self._schema(depth + 1)
            schemas.append(
                {
                    "type": "object",
                    "properties": {"tag": {"const": tag}, "value": schema},
                    "required": ["tag", "value"],
                }
            )
            makers.append((tag, make))

        def tagged() -> Any:
            tag, make = self._rng.choice(makers)
            return {"value": make(), "tag": tag}

        return {"oneOf": schemas}, tagged

    def _object(self, depth: int) -> tuple[Schema, Maker]:
        names = self._rng.sample(NAMES, self._rng.randrange(4))
        parts = {name: self._schema(depth + 1) for name in names}
        required = [name for name in names if self._rng.random() < 0.5]
        others: tuple[Schema, Maker] | None = None
        schema: Schema = {
            "type": "object",
            "properties": {name: part for name, (part, _) in parts.items()},
            "required": required,
        }
        if self._rng.random() < 0.3:
            others = self._schema(depth + 1)
            schema["additionalProperties"] = others[0]

        def make() -> Schema:
            chosen = [name for name in names if name in required or self._rng.random() < 0.5]
            self._rng.shuffle(chosen)
            value = {name: parts[name][1]() for name in chosen}
            if others and self._rng.random() < 0.5:
                value["zzz"] = others[1]()
            return value

        return schema, make
