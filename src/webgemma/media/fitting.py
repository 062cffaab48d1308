"""Fits a conversation into the context: the oldest turns are left out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from webgemma.media.prompt import Turn
from webgemma.text.sizes import SYSTEM_ROLES


def fit_turns(turns: Sequence[Turn], context: int, room: int) -> list[Turn]:
    """Return the turns without the oldest ones, so that `room` positions remain for the reply.

    A user's turn goes together with the replies to it, and the last one stays, as do the system's.
    When there is too little room, enough is left out to halve the conversation: the turns after
    that continue from what the cache holds, instead of beginning elsewhere each time. For the same
    reason the choice follows the conversation from its beginning: it does not depend on what comes
    later."""
    lead = next((turn for turn in turns if turn.lead), None)
    kept = [turn for turn in turns if not _may_go(turn)]
    head = sum(len(turn.ids) for turn in kept) + (_stays(lead) if lead else 0)
    exchanges: list[list[Turn]] = []
    for turn in filter(_may_go, turns):
        if turn.role == "user" or not exchanges:
            exchanges.append([])
        exchanges[-1].append(turn)
    sizes = [sum(len(turn.ids) - _stays(turn) for turn in exchange) for exchange in exchanges]
    first, length = 0, head
    for last, size in enumerate(sizes):
        length += size
        if length + room > context:
            while first < last and length > context // 2:
                length -= sizes[first]
                first += 1
    left_out = {id(turn) for exchange in exchanges[:first] for turn in exchange}
    remaining = [turn for turn in turns if id(turn) not in left_out]
    return _led(remaining, lead) if lead and id(lead) in left_out else remaining


def _stays(turn: Turn) -> int:
    """Return how many ids of a turn stay, in another one, if it is left out."""
    return len(turn.lead) - turn.usual_lead if turn.lead else 0


def _led(turns: Sequence[Turn], lead: Turn) -> list[Turn]:
    """Return the turns, the user's first of which begins as the one that was left out did."""
    at = next(at for at, turn in enumerate(turns) if turn.role == lead.role)
    ids = [*turns[at].ids[:1], *lead.lead, *turns[at].ids[1 + lead.usual_lead :]]
    return [*turns[:at], replace(turns[at], ids=ids), *turns[at + 1 :]]


def count_left_out(
    kept: Sequence[Turn], messages: Sequence[Mapping[str, Any]], opening: int
) -> int:
    """Return how many messages, from `opening` on, are not among the kept turns.

    System messages are not counted."""
    users = [at for at, message in enumerate(messages) if message["role"] == "user"]
    kept_users = sum(turn.role == "user" for turn in kept)
    first = users[max(0, len(users) - kept_users)] if users else len(messages)
    return sum(message["role"] not in SYSTEM_ROLES for message in messages[opening:first])


def _may_go(turn: Turn) -> bool:
    return turn.role not in ("", *SYSTEM_ROLES)
