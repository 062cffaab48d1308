"""Chunks: nothing is lost, cuts are where a reader would cut, and everything is bounded."""

import random

import pytest

from webgemma.search.chunks import MAX_NBYTES, OVERLAP, SIZE, cut

WORDS = ("river", "a", "über", "日本語", "x" * 300, "end.", "so!", "\n", "\n\n", "\t", "🙂" * 40)


@pytest.mark.parametrize("seed", range(30))
def test_any_text_is_covered_in_order(seed: int) -> None:
    draw = random.Random(seed)
    words = ["river", *draw.sample(WORDS, draw.randrange(1, len(WORDS)))]
    text = "".join(draw.choice(words) + draw.choice(["", " "]) for _ in range(2000))
    spans = list(cut(text))
    covered = set()
    for (begin, end), (following, _) in zip(spans, [*spans[1:], (len(text), 0)], strict=True):
        chunk = text[begin:end]
        assert chunk == chunk.strip() != ""
        assert len(chunk) <= SIZE
        assert len(chunk.encode()) <= MAX_NBYTES
        assert begin < following
        assert end - following <= OVERLAP
        covered |= set(range(begin, end))
    assert all(text[at].isspace() for at in range(len(text)) if at not in covered)


def test_cuts_are_at_paragraphs_then_sentences_then_words() -> None:
    sentence = "The river is wide. "
    paragraphs = (sentence * 40 + "\n\n") * 3
    assert [paragraphs[b:e].endswith("wide.") for b, e in cut(paragraphs)] == [True] * 3
    long = sentence * 200
    assert all(long[b:e].startswith("The") and long[b:e].endswith("wide.") for b, e in cut(long))
    words = "river " * 1000
    assert all(
        words[b:e].startswith("river") and words[e - 5 : e] == "river" for b, e in cut(words)
    )
    assert [e - b for b, e in cut("x" * 3000)] == [SIZE, SIZE, 600]


def test_nothing_is_cut_from_nothing() -> None:
    assert list(cut("")) == list(cut(" \n\t ")) == []
    assert list(cut("  word ")) == [(2, 6)]
