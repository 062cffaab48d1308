"""Step 1: train the vocabulary of 8192 tokens, and check webgemma's tokenizer with it."""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from settings import DATA, DEMO, SEED, VOCABULARY, WORK
from skills import chats
from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Trained
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from vocabulary_file import FIRST, kind, load_tokenizer

# Merges do not cross these boundaries: a word begins with its space, each digit is a token, and
# letters, punctuation and newlines are separate.
CUT = Regex(r"▁?\p{L}+|\d|\n+|▁+|▁?[^▁\p{L}\d\n]+")
SHARES = {  # megabytes of each text
    "tinystories_samples": 8,
    "tatoeba_en": 3,
    "classics_children": 2,
    "gutenberg_fairy": 1,
    "self_dialogue": 3,
    "ms_chitchat": 1,
    "wordnet_defs": 1,
    "african_storybook": 0.5,
    "pratham_books": 0.5,
    "tinyfabulist": 1,
}
CHATS = 120_000


def main() -> None:
    """Train, write and check the vocabulary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "corpus",
        type=Path,
        nargs="?",
        default=WORK / "corpus",
        help="the folder of the unpacked text.tar.xz (demo-work/corpus)",
    )
    corpus = parser.parse_args().corpus
    tokens, merges = train(corpus)
    kinds = [kind(token) for token in tokens]
    file = {"tokens": tokens, "merges": merges, "token_type": kinds}
    (DATA / VOCABULARY).write_text(json.dumps(file, ensure_ascii=False))
    print(f"{len(tokens)} tokens, {len(merges)} merges")
    check(corpus)


def texts(corpus: Path, skip: int = 0) -> Iterator[str]:
    """Yield the training texts; `skip` skips that many megabytes of each source."""
    for name, megabytes in SHARES.items():
        size, first, last = 0, skip * 1e6, (skip + megabytes) * 1e6
        for line in (corpus / f"{name}.jsonl").open():
            entry = json.loads(line)
            for text in [entry["text"]] if "text" in entry else [t for _, t in entry["turns"]]:
                size += len(text)
                if first <= size < last:
                    yield text
    for chat in chats(DATA / "synth_chat.py", CHATS, SEED + skip):
        yield from (text for _, text in chat)


def train(corpus: Path) -> tuple[list[str], list[str]]:
    """Return the tokens and the merges, most frequent first."""
    model = Trained(BPE(unk_token="<unk>", byte_fallback=True))
    model.normalizer = normalizers.Replace(" ", "▁")
    model.pre_tokenizer = pre_tokenizers.Split(CUT, "isolated")
    trainer = BpeTrainer(
        vocab_size=DEMO.vocab,
        special_tokens=FIRST,
        initial_alphabet=[chr(code) for code in range(33, 127)] + ["▁", "\n"],
        limit_alphabet=140,
        show_progress=False,
    )
    model.train_from_iterator(texts(corpus), trainer)
    trained = json.loads(model.to_str())["model"]
    tokens = sorted(trained["vocab"], key=trained["vocab"].__getitem__)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in trained["merges"]]
    assert len(tokens) == DEMO.vocab, len(tokens)
    return tokens, merges


def check(corpus: Path) -> None:
    """Check on held-out texts that both libraries agree on ids and that decoding restores text."""
    ours = load_tokenizer()
    file = json.loads((DATA / VOCABULARY).read_text())
    pairs = [tuple(line.split(" ")) for line in file["merges"]]
    ids = {token: at for at, token in enumerate(file["tokens"])}
    theirs = Trained(BPE(vocab=ids, merges=pairs, unk_token="<unk>", byte_fallback=True))
    theirs.normalizer = normalizers.Replace(" ", "▁")  # without splitting: all merges compete
    held_out = random.Random(SEED).sample(list(texts(corpus, skip=9)), 3000)
    held_out += [
        "",
        " ",
        "   two  spaces",
        "1234567890",
        "tab\there",
        "naïve café, 日本語 🦙!",
        "a\n\n\nb",
    ]
    characters = count = 0
    for text in held_out:
        encoded = ours.encode(text)
        assert encoded == theirs.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(encoded) == text, text
        characters, count = characters + len(text), count + len(encoded)
    print(f"{len(held_out)} held-out texts agree: {characters / count:.2f} characters a token")


if __name__ == "__main__":
    main()
