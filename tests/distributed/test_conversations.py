"""Which replica a request goes to: that of its conversation, else the one with least to do."""

import json
from typing import Any

from webgemma.distributed.conversations import CHUNK, Asked, Homes, read_asked

REPLICAS = ("a", "b")


def asked(*messages: str, **more: Any) -> Asked:
    """A request of a conversation, in which the user and the model take turns."""
    roles = ("user", "assistant")
    turns = [{"role": roles[n % 2], "content": text} for n, text in enumerate(messages)]
    return read_asked(json.dumps({"model": "m", "messages": turns} | more).encode())


def test_a_conversation_stays_where_it_began() -> None:
    homes = Homes()
    first, second = homes.choose(asked("one"), REPLICAS), homes.choose(asked("two"), REPLICAS)
    assert {first, second} == set(REPLICAS)
    for _ in range(3):
        homes.choose(asked("other"), REPLICAS)
    assert homes.choose(asked("one", "yes", "and?"), REPLICAS) == first
    assert homes.choose(asked("two", "no", "why?"), REPLICAS) == second
    assert homes.choose(asked("one", "yes", "and?", "so", "hm"), REPLICAS) == first


def test_what_stands_before_the_messages_is_part_of_the_beginning() -> None:
    whole = asked("one", "two")
    assert len(whole.digests) == 2
    assert whole.digests[0] == asked("one").digests[0]
    for other in (
        asked("one", model="n"),
        asked("one", system="Be brief."),
        asked("one", tools=[{"type": "function"}]),
        asked("One"),
    ):
        assert other.digests[0] != whole.digests[0]


def test_a_system_message_alone_is_no_conversation() -> None:
    """Else all users of one program would be on one replica."""
    system = {"role": "system", "content": "You are kind."}
    body = {"model": "m", "messages": [system, {"role": "user", "content": "hi"}]}
    assert len(read_asked(json.dumps(body).encode()).digests) == 1


def test_texts_are_known_by_their_beginnings() -> None:
    def of(prompt: Any) -> tuple[bytes, ...]:
        return read_asked(json.dumps({"model": "m", "prompt": prompt}).encode()).digests

    text = "".join(chr(97 + n % 26) for n in range(3 * CHUNK))
    assert of(text[:CHUNK]) == of(text)[:1]
    assert len(of(text)) == 3
    assert of("short") == ()


def test_ollamas_context_is_a_conversation() -> None:
    def of(context: Any) -> tuple[bytes, ...]:
        body = {"model": "m", "prompt": "and then?", "context": context}
        return read_asked(json.dumps(body).encode()).digests

    ids = list(range(2 * CHUNK + 9))
    assert len(of(ids)) == 2
    assert of([*ids, 5, 6]) == of(ids) != of([1, *ids])
    for other in ([], None, 7, {"a": 1}, [3]):
        assert of(other) == ()


def test_any_body_can_be_sent_somewhere() -> None:
    for body in (b"", b"nonsense", b"[1]", b'{"messages": 7}', b"\xff", b"[" * 100_000):
        assert read_asked(body).digests == ()
    for messages in (b"[7, null]", b'[{"role": []}]'):
        assert len(read_asked(b'{"model": 5, "messages": ' + messages + b"}").digests) > 0


def test_new_conversations_go_where_least_is_done() -> None:
    homes = Homes()
    busy = [asked(str(n)) for n in range(4)]
    served = [homes.choose(one, REPLICAS) for one in busy]
    assert served.count("a") == served.count("b") == 2
    for one, replica in zip(busy, served, strict=True):
        if replica == "b":
            homes.end(one)
    assert [homes.choose(asked(f"new {n}"), REPLICAS) for n in range(2)] == ["b", "b"]


def test_a_model_that_is_loaded_is_not_replaced_without_need() -> None:
    homes = Homes()
    homes.loaded("a", "one")
    homes.loaded("b", "two")
    at = "a"
    for n in range(4):
        more = asked(str(n), model="one")
        assert homes.choose(more, REPLICAS) == at
        homes.end(more)


def test_a_replica_that_is_gone_is_replaced_for_good() -> None:
    homes = Homes()
    first = homes.choose(asked("one"), REPLICAS)
    left = [replica for replica in REPLICAS if replica != first]
    assert homes.choose(asked("one", "yes", "and?"), left) == left[0]
    assert homes.choose(asked("one", "yes", "and?", "so", "hm"), REPLICAS) == left[0]


def test_only_so_many_beginnings_are_remembered() -> None:
    homes = Homes(most=10)
    for n in range(100):
        homes.choose(asked(str(n)), REPLICAS)
    assert len(homes._homes) == 10
