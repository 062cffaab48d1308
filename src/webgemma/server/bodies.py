"""JSON bodies: fields read with the type they must have, and answers written for any client."""

import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from webgemma.errors import InputError
from webgemma.server.protocol import RequestError
from webgemma.settings import SETTINGS
from webgemma.text.inputs import read_messages, read_tools
from webgemma.values import real_number, shown, whole_number

MAX_STOPS = 16
MAX_STOP_LENGTH = 1000  # characters

LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's API writes this, too

# Ends of lines to some clients, though not to JSON: ollama's reads with `splitlines`.
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


class Body:
    """An object of a request. Null counts as missing; a RequestError names what is wrong."""

    def __init__(self, given: object, where: str = "") -> None:
        if not isinstance(given, Mapping):
            what = where or "The body"
            raise RequestError(f"{what} must be a JSON object, not {_kind(given)}.", param=where)
        self.given = given
        self.where = where

    def path(self, name: str) -> str:
        """Return where a field is, such as `options.stop`."""
        return f"{self.where}.{name}" if self.where else name

    def has(self, name: str) -> bool:
        """Return whether a field has a value."""
        return self.given.get(name) is not None

    def wrong(self, name: str, expected: str) -> RequestError:
        """Return the error for a field."""
        path, value = self.path(name), self.given.get(name)
        if value is None:
            return RequestError(f"{path} is missing; it must be {expected}.", param=path)
        return RequestError(f"{path} is {shown(value)}; it must be {expected}.", param=path)

    def refused(self, name: str, why: str) -> RequestError:
        """Return the error for a field that cannot be honoured."""
        path = self.path(name)
        return RequestError(f"{path} is not supported: {why}", param=path)

    def text(self, name: str, default: str = "") -> str:
        """Return a string."""
        value = self.given.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def name(self, name: str) -> str:
        """Return a string that must be there and not be empty."""
        value = self.given.get(name)
        if not isinstance(value, str) or not value:
            raise self.wrong(name, "a string of at least one character")
        return value

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """Return one of some words."""
        value = self.given.get(name)
        if not isinstance(value, str) or value not in choices:
            raise self.wrong(name, f"one of {', '.join(choices)}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self.given.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def whole(self, name: str, low: int, high: float = math.inf) -> int | None:
        """Return a whole number in a range, or None."""
        value = self.given.get(name)
        if value is None:
            return None
        number = whole_number(value)
        if number is None or not low <= number <= high:
            span = f"between {low} and {high}" if high < math.inf else f"of at least {low}"
            raise self.wrong(name, f"a whole number {span}")
        return number

    def items(self, name: str) -> Sequence[Any]:
        """Return a list, empty if it is missing."""
        value = self.given.get(name)
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            raise self.wrong(name, "a list")
        return value

    def objects(self, name: str) -> "Iterator[Body]":
        """Yield the objects of a list."""
        for at, item in enumerate(self.items(name)):
            yield Body(item, f"{self.path(name)}[{at}]")

    def object(self, name: str) -> "Body":
        """Return an object, empty if it is missing."""
        value = self.given.get(name)
        return Body({} if value is None else value, self.path(name))

    def setting(self, name: str, setting: str, *, nearest: bool = False) -> Any:
        """Return the value of a setting, checked; `nearest` moves numbers into its range."""
        declared = SETTINGS[setting]
        value = self.given.get(name)
        path = self.path(name)
        try:
            checked = declared.nearest(value) if nearest else declared.check(value)
            return check_stops(checked, path) if setting == "stop" else checked
        except RequestError:
            raise
        except InputError as error:
            sentence = str(error)
            said = path + sentence.removeprefix(setting) if setting != path else sentence
            raise RequestError(said, param=path) from None

    def media(self, name: str) -> list[bytes]:
        """Return the images or audio of a list."""
        path = self.path(name)
        return [decode_media(item, f"{path}[{at}]") for at, item in enumerate(self.items(name))]


def check_stops(stops: Sequence[str], where: str) -> Sequence[str]:
    """Return the texts that end a reply: each token is compared with all of them."""
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_LENGTH for stop in stops):
        raise RequestError(
            f"{where} holds {len(stops)} texts; there may be up to {MAX_STOPS}, each of up to "
            f"{MAX_STOP_LENGTH} characters.",
            param=where,
        )
    return stops


def decode_media(given: object, where: str) -> bytes:
    """Return the bytes of base64 or of a data: URL; nothing is opened and nothing is fetched."""
    if not isinstance(given, str):
        raise RequestError(f"{where} must be base64 text, not {_kind(given)}.", param=where)
    head = given[:8].lower()
    if head.startswith(("http:", "https:", "file:")):
        raise RequestError(
            f"{where} is an address: images are taken as base64 or data: URLs only, and nothing "
            "is fetched.",
            param=where,
        )
    data = given
    if head.startswith("data:"):
        kind, _, data = given.partition(",")
        if not kind.lower().endswith(";base64"):
            raise RequestError(f"{where} must be a data: URL with ;base64 data.", param=where)
    data = "".join(data.split()).rstrip("=")
    try:
        decoded = base64.b64decode(data + "=" * (-len(data) % 4), validate=True)
    except ValueError:
        raise RequestError(f"{where} is not base64.", param=where) from None
    if not decoded:
        raise RequestError(f"{where} is empty: send an image as base64.", param=where)
    return decoded


def check_conversation(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> None:
    """Raise RequestError for messages and tools that no model can be given."""
    try:
        read_messages(messages)
        read_tools(tools)
    except InputError as error:
        raise RequestError(str(error)) from None


def text_length(value: object) -> int:
    """Return how many characters all texts of a value have together."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(text_length(key) + text_length(item) for key, item in value.items())
    return sum(map(text_length, value)) if isinstance(value, list | tuple) else 0


def json_text(value: object) -> str:
    """Return JSON on one line that every client reads: no NaN, no half characters, no line ends."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:  # a model's file may hold NaN
        text = json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace").decode().translate(_LINE_ENDS)


def finite_logprob(logprob: float) -> float:
    """Return a log-probability that JSON can hold."""
    number = real_number(logprob)
    return LEAST_LOGPROB if number is None else max(number, LEAST_LOGPROB)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _kind(value: object) -> str:
    """Return what JSON calls a value."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    kinds = {str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds.get(type(value), type(value).__name__)
