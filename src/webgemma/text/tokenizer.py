"""Gemma 4's tokenizer: text to token ids and back, built from the vocabulary of a GGUF file."""

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Protocol, cast

from webgemma.errors import GgufError, InputError
from webgemma.text.bpe import SPACE, Merges

SPECIAL_KINDS = frozenset({2, 3, 4})  # of token_type: unknown, control, user-defined
END_SPELLINGS = ("<eos>", "<turn|>", "<|tool_response>")  # what ends the model's turn
BYTE_SPELLINGS = [f"<0x{byte:02X}>" for byte in range(256)]

PREFIX = "tokenizer.ggml."

CACHED_WORDS = 1 << 15
CACHED_CHARACTERS = 32  # a longer word is hardly met twice


class HasMetadata(Protocol):
    """What the tokenizer needs of a GGUF file."""

    @property
    def name(self) -> str: ...
    @property
    def metadata(self) -> Mapping[str, object]: ...


class Tokenizer:
    """Text to token ids and back.

    A token is special if its kind is control, user-defined or unknown: `<bos>`, `<|turn>`, …
    `ends` are the ids that end the model's turn, `suppressed` those it must never give.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        merges: Sequence[str],
        kinds: Sequence[int],
        *,
        bos: int,
        eos: int,
        pad: int | None = None,
        unknown: int | None = None,
        ends: Iterable[int] = (),
        suppressed: Iterable[int] = (),
    ) -> None:
        self.bos, self.eos, self.pad, self.unknown = bos, eos, pad, unknown
        self.size = len(tokens)
        self.suppressed = tuple(suppressed)
        self._tokens = tokens
        self._merges = Merges(merges)
        self._ids = dict(zip(tokens, range(len(tokens)), strict=True))
        spelled = {self._ids[spelling] for spelling in END_SPELLINGS if spelling in self._ids}
        self.ends = frozenset({eos, *ends, *spelled})
        self._special = frozenset(at for at, kind in enumerate(kinds) if kind in SPECIAL_KINDS)
        self.special_ids: Mapping[str, int] = {
            tokens[at]: at for at in sorted(self._special) if tokens[at]
        }
        # Taken out of the map, special and byte tokens are beyond the reach of merges: whatever a
        # text spells, and whatever merges a file has, plain text cannot become one of them.
        for spelling in self.special_ids:
            del self._ids[spelling]
        self._byte_ids = [self._ids.pop(spelling, None) for spelling in BYTE_SPELLINGS]
        self._bytes = {
            at: bytes([byte]) for byte, at in enumerate(self._byte_ids) if at is not None
        }
        longest_first = sorted(self.special_ids, key=len, reverse=True)
        self._special_pattern = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._cached_word = lru_cache(CACHED_WORDS)(self._word)

    @classmethod
    def from_gguf(cls, gguf: HasMetadata) -> "Tokenizer":
        """The tokenizer of a GGUF file; GgufError if its vocabulary is missing or unsound."""
        keys = _Keys(gguf)
        tokens = keys.strings("tokens")
        keys.size = len(tokens)
        eot = keys.id("eot_token_id")
        return cls(
            tokens,
            keys.strings("merges"),
            keys.kinds("token_type"),
            bos=keys.needed_id("bos_token_id"),
            eos=keys.needed_id("eos_token_id"),
            pad=keys.id("padding_token_id"),
            unknown=keys.id("unknown_token_id"),
            ends=keys.ids("eos_token_ids") + ([] if eot is None else [eot]),
            suppressed=keys.ids("suppress_tokens"),
        )

    def encode(self, text: str, special: bool = False) -> list[int]:
        """The ids of a text; no `<bos>` is added.

        Without `special`, no spelling in the text becomes a special token, so what a user types
        cannot forge a turn. Lone surrogates are read as U+FFFD, paired ones as their character.
        """
        text = _without_surrogates(text)
        if not special:
            return self._plain(text)
        ids: list[int] = []
        for part in self._special_pattern.split(text):
            if part in self.special_ids:
                ids.append(self.special_ids[part])
            else:
                ids += self._plain(part)
        return ids

    def decode(self, ids: Iterable[int], special: bool = True) -> str:
        """The text of the ids; special tokens are spelled out, or left out without `special`."""
        stream = self.stream(special)
        return "".join([stream.feed(token) for token in ids]) + stream.finish()

    def stream(self, special: bool = True) -> "TokenStream":
        """A decoder that takes one id at a time."""
        return TokenStream(self, special)

    def piece(self, token: int) -> str:
        """The token's spelling in the vocabulary: ▁ for a space, <0xXX> for a byte."""
        if not 0 <= token < self.size:
            raise InputError(
                f"Token id {token} is outside the vocabulary, which has ids 0 to {self.size - 1}; "
                "it comes from another model or a damaged list."
            )
        return self._tokens[token]

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in self._merges.words(text.replace(" ", SPACE)):
            ids += self._cached_word(word) if len(word) <= CACHED_CHARACTERS else self._word(word)
        return ids

    def _word(self, word: str) -> tuple[int, ...]:
        ids: list[int] = []
        for piece in self._merges.pieces(word):
            token = self._ids.get(piece)
            if token is None:
                ids += self._spelled(piece)
            else:
                ids.append(token)
        return tuple(ids)

    def _spelled(self, piece: str) -> list[int]:
        """A piece the vocabulary lacks: its bytes, or the unknown token where bytes lack too."""
        ids = [self._byte_ids[byte] for byte in piece.encode()]
        if None not in ids:
            return cast(list[int], ids)
        if self.unknown is None:
            raise InputError(
                f"The vocabulary has no token for {piece!r}, for its bytes, or for the unknown; "
                "leave it out of the text or use a complete model file."
            )
        return [self.unknown]


class TokenStream:
    """Decodes ids one at a time and holds back bytes until they make a whole character."""

    def __init__(self, tokenizer: Tokenizer, special: bool) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The text that this id completes."""
        tokenizer = self._tokenizer
        byte = tokenizer._bytes.get(token)
        if byte is not None:
            return self._utf8.decode(byte)
        piece = tokenizer.piece(token)
        if token not in tokenizer._special:
            return self.finish() + piece.replace(SPACE, " ")
        return self.finish() + piece if self._special else ""

    def finish(self) -> str:
        """What was held back: a broken character, as U+FFFD."""
        return self._utf8.decode(b"", final=True)


class _Keys:
    """Checked access to the `tokenizer.ggml.` keys of a file."""

    def __init__(self, gguf: HasMetadata) -> None:
        self.gguf = gguf
        self.size = 0  # of the vocabulary, once it is known

    def strings(self, key: str) -> list[str]:
        values = self._array(key)
        if set(map(type, values)) - {str}:
            raise self._wrong(key, "must be an array of strings")
        return cast(list[str], values)

    def kinds(self, key: str) -> Sequence[int]:
        values = self._array(key)
        if len(values) != self.size:
            raise self._wrong(key, f"has {len(values)} entries for {self.size} tokens")
        if set(map(type, values)) - {int}:
            raise self._wrong(key, "must be an array of whole numbers")
        return cast(Sequence[int], values)

    def ids(self, key: str) -> list[int]:
        """The ids under a key that a file may lack."""
        if PREFIX + key not in self.gguf.metadata:
            return []
        return [self._checked(key, value) for value in self._array(key)]

    def id(self, key: str) -> int | None:
        """The id under a key that a file may lack."""
        value = self.gguf.metadata.get(PREFIX + key)
        return None if value is None else self._checked(key, value)

    def needed_id(self, key: str) -> int:
        return self._checked(key, self._needed(key))

    def _checked(self, key: str, value: object) -> int:
        if type(value) is not int or not 0 <= value < self.size:
            raise self._wrong(key, f"names token {value!r}, but ids run from 0 to {self.size - 1}")
        return value

    def _array(self, key: str) -> Sequence[object]:
        values = self._needed(key)
        if isinstance(values, str | bytes) or not isinstance(values, Sequence):
            raise self._wrong(key, "must be an array")
        return values

    def _needed(self, key: str) -> object:
        value = self.gguf.metadata.get(PREFIX + key)
        if value is None:
            raise self._wrong(key, "is missing")
        return value

    def _wrong(self, key: str, what: str) -> GgufError:
        return GgufError(
            f"{self.gguf.name}: {PREFIX}{key} {what}, so the file has no usable tokenizer; "
            "download or convert the model again."
        )


def _without_surrogates(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
