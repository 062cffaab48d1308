"""The tokenizer on a small vocabulary: words, bytes, special tokens, streams, invalid files."""

import json
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
from conftest import FIXTURES
from hypothesis import example, given, settings
from hypothesis import strategies as st

from webgemma.errors import GgufError, InputError
from webgemma.text.bpe import Merges
from webgemma.text.tokenizer import CACHED_CHARACTERS, CACHED_WORDS, Tokenizer

METADATA = json.loads((FIXTURES / "text" / "tokenizer-small.json").read_text())
SMALL = Tokenizer.from_gguf(SimpleNamespace(name="small.gguf", metadata=METADATA))
TOKENS = METADATA["tokenizer.ggml.tokens"]


def ids(*spellings: str) -> list[int]:
    """Return the ids of tokens given by their spellings."""
    return [TOKENS.index(spelling) for spelling in spellings]


def pieces(text: str, special: bool = False) -> list[str]:
    """Return the pieces of a text as the vocabulary spells them."""
    return [SMALL.piece(token) for token in SMALL.encode(text, special)]


def merged_by_definition(text: str, merges: list[str]) -> list[str]:
    """Apply the merge rule literally to the whole text: quadratic, but obviously correct."""
    ranks = {line: rank for rank, line in enumerate(merges)}
    parts = list(text)
    while True:
        pairs = [f"{left} {right}" for left, right in pairwise(parts)]
        best = min((line for line in pairs if line in ranks), key=ranks.__getitem__, default=None)
        if best is None:
            return parts
        at = pairs.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


# Words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("the fox", ["the", "▁fox"]),
        (" the  the", ["▁the", "▁▁", "the"]),
        ("\n\n\nthe\n", ["\n\n\n", "the", "\n"]),
        ("> </", [">▁</"]),
        ("x > </ </", ["x", "▁", ">▁</", "▁</"]),
        ("2024", ["2", "0", "2", "4"]),
        ("aaaaaaa", ["aaaa", "aa", "a"]),
        ("🦙", ["<0xF0>", "<0x9F>", "<0xA6>", "<0x99>"]),
    ],
)
def test_text_is_split_into_pieces(text: str, expected: list[str]) -> None:
    assert pieces(text) == expected
    assert SMALL.decode(SMALL.encode(text)) == text


@pytest.mark.parametrize("text", ["the fox", "🦙 the", "> </\n"])
def test_the_bytes_of_tokens_are_those_of_the_text(text: str) -> None:
    assert b"".join(map(SMALL.token_bytes, SMALL.encode(text))) == text.encode()


def test_special_tokens_have_no_bytes() -> None:
    assert {SMALL.token_bytes(token) for token in SMALL.special_ids.values()} == {b""}
    with pytest.raises(InputError, match="outside the vocabulary"):
        SMALL.token_bytes(SMALL.size)


@pytest.mark.parametrize(
    ("merges", "expected"),
    [
        (["▁ b"], ["a", "▁b", "\n", "\n", "▁b"]),
        (["▁ b", "a ▁b"], ["a▁b", "\n", "\n", "▁b"]),
        (["a ▁", "a▁ b"], ["a▁b", "\n", "\n", "▁", "b"]),
        (["\n \n", "\n\n ▁"], ["a", "▁", "b", "\n\n▁", "b"]),
        (["b \n"], ["a", "▁", "b\n", "\n", "▁", "b"]),
        (["b \n", "b\n \n", "b\n\n ▁"], ["a", "▁", "b\n\n▁", "b"]),
    ],
)
def test_words_are_not_split_where_a_merge_joins_them(
    merges: list[str], expected: list[str]
) -> None:
    bpe = Merges.from_lines(merges)
    words = bpe.words("a▁b\n\n▁b")
    assert [piece for word in words for piece in bpe.pieces(word)] == expected


@st.composite
def merge_lists(draw: st.DrawFn) -> list[str]:
    """Return merges that build on each other, in any order of rank."""
    parts = list("ab>▁\n")
    lines: set[str] = set()
    for _ in range(draw(st.integers(0, 25))):
        left, right = draw(st.sampled_from(parts)), draw(st.sampled_from(parts))
        parts.append(left + right)
        lines.add(f"{left} {right}")
    return draw(st.permutations(sorted(lines)))


@settings(max_examples=500)
@given(merge_lists(), st.text("ab>▁\n"))
@example(["a a", "aa a"], "aaaaa")
@example(["a ▁"], "a▁▁a")
@example(["b >", "a b", "b> ▁", "a b>"], "ab>▁")
def test_words_and_heap_equal_the_definition(merges: list[str], text: str) -> None:
    bpe = Merges.from_lines(merges)
    words = bpe.words(text)
    assert "".join(words) == text
    parts = [piece for word in words for piece in bpe.pieces(word)]
    assert parts == merged_by_definition(text, merges)


def test_prose_is_split_into_words() -> None:
    words = SMALL._merges.words("The▁fox,\n▁▁the▁hen▁>▁</")
    assert words == ["The", "▁fox,", "\n", "▁▁the", "▁hen", "▁>▁</"]


def test_the_cache_is_bounded() -> None:
    cache = SMALL._cached_word
    cache.cache_clear()
    SMALL.encode("the the the " + "x" * (CACHED_CHARACTERS + 1))
    assert cache.cache_info().currsize == 2  # "the", " the"
    assert cache.cache_info().maxsize == CACHED_WORDS


# Cost

AWKWARD = [
    "a",
    " ",
    "\n",
    "\t",
    "😀",
    "🦙",
    "ab",
    "<",
    "> ",
    "<|tool_",
    "<|turn>",
    "<|tool_call",
    "中",
]


@pytest.mark.parametrize("unit", AWKWARD)
def test_rank_lookups_are_linear(unit: str) -> None:
    class Counted(dict[str, int]):
        lookups = 0

        def get(self, key: str, default: int) -> int:  # type: ignore[override]
            self.lookups += 1
            return super().get(key, default)

    bpe = Merges.from_lines(METADATA["tokenizer.ggml.merges"])
    bpe.ranks = Counted(bpe.ranks)
    word = (unit * 2000)[:2000].replace(" ", "▁")
    assert "".join(bpe.pieces(word)) == word
    assert bpe.ranks.lookups <= 3 * len(word)


@pytest.mark.parametrize("unit", AWKWARD)
def test_time_is_linear_in_the_text(unit: str) -> None:
    def seconds(size: int) -> float:
        text = (unit * size)[:size]
        start = time.process_time()
        SMALL.encode(text, special=True)
        return time.process_time() - start

    short = max(min(seconds(8_000) for _ in range(3)), 1e-3)
    assert seconds(16 * 8_000) < 16 * 4 * short  # a quadratic method needs 16 * 16


# Special tokens

TURN = "<bos><|turn>user\nthe fox<turn|>\n<|tool_call>x<tool_call|>"


def test_special_tokens_are_parsed_only_on_request() -> None:
    assert pieces(TURN, special=True) == [
        *["<bos>", "<|turn>", *pieces("user"), "\n", "the", "▁fox", "<turn|>", "\n"],
        *["<|tool_call>", "x", "<tool_call|>"],
    ]
    assert not set(SMALL.encode(TURN)) & set(SMALL.special_ids.values())
    assert SMALL.decode(SMALL.encode(TURN)) == TURN


def test_the_longest_special_token_is_preferred() -> None:
    tokens = ["<a>", "<a><b>", "<", ">", "a", "b", "<b>", "<a"]
    tokenizer = Tokenizer(tokens, ["< a"], [3, 4, 1, 1, 1, 1, 3, 1], bos=0, eos=0)
    assert tokenizer.encode("<a><b><a><a<b>", special=True) == [1, 0, 7, 6]


@pytest.mark.parametrize(("spelling", "kind"), [("<e>", 3), ("<e>", 4), ("<0x65>", 1)])
def test_merges_cannot_form_a_special_or_a_byte_token(spelling: str, kind: int) -> None:
    tokens = ["<unk>", spelling]
    merges = [f"{spelling[:end]} {spelling[end]}" for end in range(1, len(spelling))]
    tokenizer = Tokenizer(tokens, merges, [2, kind], bos=0, eos=0, unknown=0)
    assert tokenizer._merges.pieces(spelling) == [spelling]
    assert tokenizer.encode(spelling) == [0]


def test_decode_can_omit_special_tokens() -> None:
    tokens = SMALL.encode(TURN, special=True)
    assert SMALL.decode(tokens) == TURN
    assert SMALL.decode(tokens, special=False) == "user\nthe fox\nx"


def test_special_ids_are_read_from_the_file() -> None:
    assert SMALL.size == len(TOKENS)
    assert [SMALL.bos, SMALL.eos, SMALL.pad, SMALL.unknown] == ids(
        "<bos>", "<eos>", "<pad>", "<unk>"
    )
    assert SMALL.ends == frozenset(ids("<eos>", "<turn|>", "<|tool_response>"))
    assert SMALL.suppressed == tuple(ids("<image|>", "<audio|>"))
    assert SMALL.special_ids["<|turn>"] == ids("<|turn>")[0]
    assert len(SMALL.special_ids) == 24
    assert SMALL.piece(SMALL.eos) == "<eos>"


def test_ends_come_from_the_file_and_from_spellings() -> None:
    metadata = METADATA | {"tokenizer.ggml.eos_token_ids": [5, 6], "tokenizer.ggml.eot_token_id": 7}
    ends = Tokenizer.from_gguf(SimpleNamespace(name="x", metadata=metadata)).ends
    assert ends == SMALL.ends | {5, 6, 7}


# Incomplete characters


@pytest.mark.parametrize(
    ("text", "same_as"),
    [
        ("a\ud800b", "a\ufffdb"),
        ("\udc00", "\ufffd"),
        ("\ud83d\ude00", "😀"),
        ("\ud83d 😀\ude00", "\ufffd 😀\ufffd"),
    ],
)
def test_surrogates_are_replaced(text: str, same_as: str) -> None:
    assert SMALL.encode(text) == SMALL.encode(same_as)
    assert SMALL.encode(text, special=True) == SMALL.encode(same_as)


def test_a_stream_buffers_an_incomplete_character() -> None:
    stream = SMALL.stream()
    fed = [stream.feed(token) for token in ids("<0xF0>", "<0x9F>", "<0xA6>", "<0x99>", "▁fox")]
    assert fed == ["", "", "", "🦙", " fox"]
    assert stream.finish() == ""


@pytest.mark.parametrize(
    ("spellings", "text"),
    [
        (["<0xF0>", "<0x9F>"], "\ufffd"),
        (["<0xF0>", "<0x9F>", "the"], "\ufffdthe"),
        (["<0xFF>", "<0x61>"], "\ufffda"),
        (["<0xE2>", "<turn|>", "<0x96>"], "\ufffd<turn|>\ufffd"),
        (["<0xE2>", "<0x96>", "<0x81>", "▁"], "▁ "),
    ],
)
def test_invalid_bytes_are_replaced(spellings: list[str], text: str) -> None:
    assert SMALL.decode(ids(*spellings)) == text


@given(st.lists(st.integers(0, SMALL.size - 1)), st.booleans())
def test_stream_equals_decode(tokens: list[int], special: bool) -> None:
    stream = SMALL.stream(special)
    fed = "".join(stream.feed(token) for token in tokens)
    assert fed + stream.finish() == SMALL.decode(tokens, special)


@given(st.text())
def test_round_trip(text: str) -> None:
    assert SMALL.decode(SMALL.encode(text)) == text.replace("▁", " ")
    assert SMALL.decode(SMALL.encode(text, special=True)) == text.replace("▁", " ")


def test_a_vocabulary_without_bytes_needs_an_unknown_token() -> None:
    tokens, kinds = ["<eos>", "<unk>", "a"], [3, 2, 1]
    assert Tokenizer(tokens, [], kinds, bos=0, eos=0, unknown=1).encode("abéa") == [2, 1, 1, 2]
    with pytest.raises(InputError, match="no token for 'b'"):
        Tokenizer(tokens, [], kinds, bos=0, eos=0).encode("ab")


@pytest.mark.parametrize("token", [-1, SMALL.size, 1 << 40])
def test_an_id_outside_the_vocabulary_is_rejected(token: int) -> None:
    for use in (SMALL.piece, SMALL.stream().feed, lambda bad: SMALL.decode([bad])):
        with pytest.raises(InputError, match=f"Token id {token} is outside the vocabulary"):
            use(token)


# Invalid files


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("tokens", None, "is missing"),
        ("tokens", 7, "must be an array"),
        ("tokens", "abc", "must be an array"),
        ("tokens", [1, 2, 3], "must be an array of strings"),
        ("merges", None, "is missing"),
        ("merges", [b"a b"], "must be an array of strings"),
        ("token_type", None, "is missing"),
        ("token_type", [1, 1], f"has 2 entries for {SMALL.size} tokens"),
        ("token_type", ["1"] * SMALL.size, "must be an array of integers"),
        ("bos_token_id", None, "is missing"),
        ("eos_token_id", SMALL.size, f"has the id {SMALL.size}, but ids are 0 to"),
        ("eos_token_id", "1", "has the id '1'"),
        ("padding_token_id", -1, "has the id -1"),
        ("unknown_token_id", True, "has the id True"),
        ("eot_token_id", 1 << 31, "has the id 2147483648"),
        ("eos_token_ids", [1, -2], "has the id -2"),
        ("eos_token_ids", 1, "must be an array"),
        ("suppress_tokens", [SMALL.size], "has the id"),
    ],
)
def test_an_invalid_file_is_rejected(key: str, value: object, problem: str) -> None:
    metadata = METADATA | {f"tokenizer.ggml.{key}": value}
    metadata = {name: given for name, given in metadata.items() if given is not None}
    with pytest.raises(GgufError, match=rf"^broken\.gguf: tokenizer\.ggml\.{key} {problem}"):
        Tokenizer.from_gguf(SimpleNamespace(name="broken.gguf", metadata=metadata))
