"""Which replica a conversation belongs to: the one whose cache holds its beginning.

A conversation is known by digests of its beginnings: up to the first message that is not the
system's, up to the next, and so on. Each request brings a longer beginning of the same one."""

import hashlib
import json
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_HOMES = 1 << 16  # beginnings that are remembered, the last used ones
CHUNK = 256  # characters of a plain text, or ids, by which its beginnings differ
MAX_CHUNKS = 64
NBYTES = 16  # of a digest

# What stands before all messages, in any of the APIs.
BEFORE = ("model", "system", "instructions", "tools", "chat_template_kwargs")
SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Asked:
    """What there is to know of a request to choose its replica."""

    model: str = ""
    digests: tuple[bytes, ...] = ()  # of its beginnings, the shortest first
    id: str = field(default_factory=lambda: secrets.token_hex(8))


def read_asked(body: bytes) -> Asked:
    """Return what a body asks for; any replica may say what is wrong with one that is no JSON."""
    try:
        given = json.loads(body)
        digests = tuple(_digests(given)) if isinstance(given, dict) else ()
    except (ValueError, RecursionError):
        return Asked()
    model = given.get("model") if digests else ""
    return Asked(model if isinstance(model, str) else "", digests)


def _digests(given: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the digests of all beginnings."""
    chain = _link(b"", {name: given.get(name) for name in BEFORE})
    names = ("messages", "input", "context", "prompt")  # Ollama's context comes before its prompt
    name = next((name for name in names if given.get(name)), "")
    items = given.get(name)
    if isinstance(items, str) or (name == "context" and isinstance(items, list)):
        whole = range(CHUNK, min(len(items), CHUNK * MAX_CHUNKS) + 1, CHUNK)
        items = [items[end - CHUNK : end] for end in whole]
    begun = False
    for item in items if isinstance(items, list) else ():
        chain = _link(chain, item)
        role = item.get("role") if isinstance(item, dict) else None
        begun = begun or role not in SYSTEM_ROLES
        if begun:
            yield chain


def _link(chain: bytes, item: Any) -> bytes:
    text = json.dumps(item, sort_keys=True)
    return hashlib.blake2b(chain + text.encode(), digest_size=NBYTES).digest()


class Homes:
    """The replicas of conversations, and what each of them serves now."""

    def __init__(self, most: int = MAX_HOMES) -> None:
        self._most = most
        self._homes: OrderedDict[bytes, str] = OrderedDict()
        self._serving: dict[str, str] = {}  # requests and their replicas
        self._models: dict[str, str] = {}  # what each replica has in memory
        self._used: dict[str, int] = {}  # when each replica was last given a new conversation
        self._clock = 0

    def choose(self, asked: Asked, replicas: Sequence[str]) -> str:
        """Return the replica for a request: its conversation's, else the one that has least to do.

        Of those that have as little, it is one that need not load another model, then the one
        that waits the longest for a new conversation."""
        known = (self._homes.get(digest) for digest in reversed(asked.digests))
        home = next((replica for replica in known if replica in replicas), None)
        if home is None:
            self._serving.pop(asked.id, None)
            home = min(replicas, key=lambda replica: self._cost(replica, asked.model))
            if asked.digests:
                self._clock += 1
                self._used[home] = self._clock
        self._serving[asked.id] = home
        if asked.digests:
            self._homes[asked.digests[-1]] = home
            self._homes.move_to_end(asked.digests[-1])
            if len(self._homes) > self._most:
                self._homes.popitem(last=False)
        return home

    def loaded(self, replica: str, model: str) -> None:
        """Note the model that a replica has in memory, since it answered with it."""
        if model:
            self._models[replica] = model

    def end(self, asked: Asked) -> None:
        """Note that a request is no longer served."""
        self._serving.pop(asked.id, None)

    def _cost(self, replica: str, model: str) -> tuple[int, int]:
        serving = sum(one == replica for one in self._serving.values())
        swaps = bool(model) and self._models.get(replica, model) != model
        return serving + swaps, self._used.get(replica, 0)


_NAMED: dict[str, Homes] = {}  # of this process


def homes_of(application: str) -> Homes:
    """Return the homes of an application; its router and its ingress share them."""
    return _NAMED.setdefault(application, Homes())


def forget_homes(application: str) -> None:
    """Forget an application that has ended."""
    _NAMED.pop(application, None)
