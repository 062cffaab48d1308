"""Gemma 3's tokenizer: merges by score, pieces that are cut out first, bytes, special tokens."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import SHARED, needs_shared
from helpers.tiny import GEMMA3, tiny_metadata
from hypothesis import given
from hypothesis import strategies as st

from webgemma.errors import GgufError
from webgemma.gguf.reader import Gguf
from webgemma.text.bpe import Merges
from webgemma.text.tokenizer import Tokenizer

METADATA = tiny_metadata(GEMMA3)
TOKENS: Any = METADATA["tokenizer.ggml.tokens"]


def opened(**changes: object) -> Tokenizer:
    """Return the tokenizer of the tiny vocabulary with other values of some keys."""
    given = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    kept = {key: value for key, value in (METADATA | given).items() if value is not None}
    return Tokenizer.from_gguf(SimpleNamespace(name="small.gguf", metadata=kept))


SMALL = opened()


def pieces(text: str, special: bool = False) -> list[str]:
    return [SMALL.piece(token) for token in SMALL.encode(text, special)]


def merged_by_definition(text: str, scores: dict[str, float]) -> list[str]:
    """Join the pair of the highest score, the leftmost of several: quadratic, obviously correct."""
    parts = list(text)
    while True:
        joined = [left + right for left, right in pairwise(parts)]
        found = [scores[piece] for piece in joined if piece in scores]
        if not found:
            return parts
        at = next(i for i, piece in enumerate(joined) if scores.get(piece) == max(found))
        parts[at : at + 2] = [joined[at]]


SPELLINGS = st.text("ab▁\n", min_size=2, max_size=5)
SCORES = st.dictionaries(SPELLINGS, st.integers(-4, 0).map(float), max_size=12)


@given(scores=SCORES, text=st.text("ab▁\n", max_size=24))
def test_the_pair_of_the_highest_score_is_joined_first(scores: dict[str, float], text: str) -> None:
    merges = Merges.from_scores(scores)
    found = [piece for word in merges.words(text) for piece in merges.pieces(word)]
    assert found == merged_by_definition(text, scores)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" the", ["▁the"]),
        ("the in", ["the", "▁", "in"]),
        (" there", ["▁", "th", "er", "e"]),
        ("the\n\n\n\nthe", ["the", "\n\n\n", "\n", "the"]),
        ("a  b", ["a", "  ", "b"]),
        ("a      b", ["a", "   ", "   ", "b"]),
        ("x<td>y", ["x", "<td>", "y"]),
        ("[multimodal]", ["[multimodal]"]),
        ("é", ["<0xC3>", "<0xA9>"]),
    ],
)
def test_text_is_split_into_pieces(text: str, expected: list[str]) -> None:
    assert pieces(text) == expected
    assert pieces(text, special=True) == expected
    assert SMALL.decode(SMALL.encode(text)) == text
    assert SMALL.decode(SMALL.encode(text), special=False) == text
    assert b"".join(map(SMALL.token_bytes, SMALL.encode(text))) == text.encode()


def test_only_on_request_does_text_become_markup() -> None:
    text = "<start_of_turn>a<0x41>"
    marked = pieces(text, special=True)
    assert marked[:2] == ["<start_of_turn>", "a"]
    assert "<0x41>" not in marked
    assert not {"<start_of_turn>", "<0x41>"} & set(pieces(text))


@pytest.mark.parametrize("kind", [1, 3, 4])
def test_no_text_becomes_markup_whatever_type_it_has(kind: int) -> None:
    types: Any = METADATA["tokenizer.ggml.token_type"]
    turn = TOKENS.index("<start_of_turn>")
    tokenizer = opened(token_type=[kind if at == turn else x for at, x in enumerate(types)])
    assert turn not in tokenizer.encode("<start_of_turn>")
    assert tokenizer.encode("<start_of_turn>", special=True) == [turn]
    assert tokenizer.decode([turn], special=False) == ""


def test_a_reply_ends_with_the_end_of_a_turn() -> None:
    assert SMALL.ends == {TOKENS.index("<eos>"), TOKENS.index("<end_of_turn>")}


def test_tokens_without_a_row_of_the_table_are_left_out() -> None:
    table = SimpleNamespace(rows=len(TOKENS) - 1)
    gguf = SimpleNamespace(
        name="small.gguf", metadata=METADATA, tensors={"token_embd.weight": table}
    )
    assert Tokenizer.from_gguf(gguf).size == len(TOKENS) - 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "tokenizer.ggml.merges is missing"),
        ({"scores": [0.0]}, "scores has 1 entries for 320 tokens"),
        ({"scores": ["a"] * 320}, "scores must be an array of finite numbers"),
        ({"scores": [float("nan")] * 320}, "scores must be an array of finite numbers"),
    ],
    ids=str,
)
def test_a_vocabulary_that_cannot_be_used(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GgufError, match=message):
        opened(**changes)


@needs_shared
@pytest.mark.parametrize("name", ["plain/plain-Q4_K_M", "scaled/scaled-F16"])
def test_ids_equal_the_recorded_ones(name: str) -> None:
    path = SHARED / "gemma3" / f"{name}.gguf"
    with Gguf.open(path) as gguf:
        tokenizer = Tokenizer.from_gguf(gguf)
    ids = [int(word) for word in (path.parent / "ids.txt").read_text().split()]
    text = (path.parent / "prompt.txt").read_text()
    assert [tokenizer.bos, *tokenizer.encode(text)] == ids
    assert tokenizer.decode(ids[1:]) == text
