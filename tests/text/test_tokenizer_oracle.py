"""The tokenizer compared with references: recorded ids and the `tokenizers` library."""

import json
import lzma
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from conftest import FIXTURES, SHARED, needs_shared
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers

from webgemma.gguf.reader import Gguf
from webgemma.text.tokenizer import Tokenizer

SMALL = json.loads((FIXTURES / "text" / "tokenizer-small.json").read_text())


class Pair:
    """webgemma's tokenizer and the library's, built from the same vocabulary."""

    def __init__(self, gguf: Any) -> None:
        self.ours = Tokenizer.from_gguf(gguf)
        self.theirs = library_tokenizer(gguf.metadata, list(self.ours.special_ids))

    def check(self, text: str, special: bool) -> None:
        """Assert that both return the same ids, and the same text for them."""
        self.theirs.encode_special_tokens = not special
        expected = self.theirs.encode(text, add_special_tokens=False).ids
        assert self.ours.encode(text, special) == expected
        assert self.ours.decode(expected) == self.theirs.decode(expected, skip_special_tokens=False)


def library_tokenizer(metadata: Mapping[str, Any], special: list[str]) -> tokenizers.Tokenizer:
    vocabulary = {token: at for at, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(line.split(" ")) for line in metadata["tokenizer.ggml.merges"]]
    model = models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    return tokenizer


@pytest.fixture(scope="module")
def small() -> Pair:
    return Pair(SimpleNamespace(name="small.gguf", metadata=SMALL))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path: Path = tmp_path_factory.mktemp("vocab") / "gemma4-vocab.gguf"
    path.write_bytes(lzma.decompress((SHARED / "vocab" / "gemma4-vocab.gguf.xz").read_bytes()))
    with Gguf.open(path) as gguf:
        return Pair(gguf)


SCRIPTS = """
The quick brown fox, "said" she; isn't it? don't 3.14159 2024-01-31 e.g. x+=1; return; void* main()
Übermäßig straße naïve coöperate où déjà niño Łódź Привет как дела Ελλάδα հայերեն საქართველო
مرحبا بالعالم שלום עולם नमस्ते दुनिया বাংলা தமிழ் ไทยภาษา ລາວ ខ្មែរ မြန်မာ བོད་
你好世界 こんにちは カタカナ 안녕하세요 😀 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽 🦙 𝔹 ᚠ 𓀀 é e\u0301
</p> <br/> > </ <0x41> <unused7> <table> https://example.org/a?b=c&d=%20
"""
WORDS = SCRIPTS.split()
SPECIAL = SMALL["tokenizer.ggml.tokens"][:24]
PREFIXES = sorted({spelling[:end] for spelling in SPECIAL for end in range(1, len(spelling))})
FRAGMENTS = st.one_of(
    st.sampled_from(WORDS),
    st.sampled_from(WORDS).map(" {}".format),
    st.sampled_from(SPECIAL),
    st.sampled_from(PREFIXES),
    st.builds(str.__mul__, st.sampled_from([*" \n\t\r▁<>|a!-=.0"]), st.integers(1, 40)),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.text(st.characters(max_codepoint=0x7F), max_size=8),
)
TEXTS = st.lists(FRAGMENTS, max_size=12).map("".join)
AWKWARD = ["a", " ", "\n", "\t", "😀", "🦙", "ab", "<", "> ", "> </", "<|tool_", "<|turn>", "中文"]
ALLOW_SLOW = {"suppress_health_check": [HealthCheck.too_slow]}


@settings(max_examples=1000, **ALLOW_SLOW)
@given(text=TEXTS, special=st.booleans())
def test_small_vocabulary_equals_the_library(small: Pair, text: str, special: bool) -> None:
    small.check(text, special)


@needs_shared
@settings(max_examples=600, **ALLOW_SLOW)
@given(text=TEXTS, special=st.booleans())
def test_real_vocabulary_equals_the_library(real: Pair, text: str, special: bool) -> None:
    real.check(text, special)


@needs_shared
@pytest.mark.parametrize("unit", AWKWARD)
def test_long_awkward_text_equals_the_library(real: Pair, unit: str) -> None:
    real.check((unit * 20_000)[:20_000], special=True)


@needs_shared
def test_ids_equal_the_recorded_ones(real: Pair) -> None:
    lines = (SHARED / "text" / "tokenizer.jsonl").read_text().splitlines()
    cases = [json.loads(line) for line in lines]
    assert len(cases) == 249
    for case in cases:
        assert real.ours.encode(case["text"], case["parse_special"]) == case["ids"], case["text"]
        assert real.ours.decode(case["ids"]) == case["decodes_to"]


@needs_shared
def test_ids_equal_those_of_llama_cpp(real: Pair) -> None:
    texts = (SHARED / "vocab" / "cases.inp").read_text().split("\n__ggml_vocab_test__\n")
    lines = (SHARED / "vocab" / "cases.out").read_text().split("\n")
    assert len(texts) == 46
    for text, line in zip(texts, lines, strict=False):
        assert real.ours.encode(text) == [int(token) for token in line.split()], text


@needs_shared
def test_special_ids_of_the_real_file(real: Pair) -> None:
    ours = real.ours
    assert (ours.size, ours.bos, ours.eos, ours.pad, ours.unknown) == (262_144, 2, 1, 0, 3)
    assert ours.ends == {1, 50, 106}
    assert ours.suppressed == ()
    assert len(ours.special_ids) == 24
    assert "</s>" not in ours.special_ids
    # All merges but "> ▁</" stay inside one word, so text is split before nearly every space.
    assert ours._merges.words("a▁b>▁c\n\nd") == ["a", "▁b>▁c", "\n\n", "d"]
