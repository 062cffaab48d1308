"""The tokenizer of Gemma 4 and Gemma 3: encodes text as ids and decodes ids, from a GGUF file."""

import codecs
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Protocol, cast

from webgemma.errors import GgufError, InputError
from webgemma.text.bpe import SPACE, Merges

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # values of token_type
# Tokens that end the model's turn.
END_SPELLINGS = ("<eos>", "<turn|>", "<|tool_response>", "<end_of_turn>")
# Gemma 3's markup, special whatever type a converter gives it: no text may forge a turn.
GEMMA3_MARKUP = ("<bos>", "<eos>", "<pad>", "<unk>", "<start_of_turn>", "<end_of_turn>")
BYTE_SPELLINGS = [f"<0x{byte:02X}>" for byte in range(256)]

PREFIX = "tokenizer.ggml."

CACHED_WORDS = 1 << 15
CACHED_CHARACTERS = 32  # longer words rarely occur twice


class HasMetadata(Protocol):
    """The part of a GGUF file that the tokenizer needs."""

    @property
    def name(self) -> str: ...
    @property
    def metadata(self) -> Mapping[str, object]: ...


class Tokenizer:
    """Encoder and decoder of token ids.

    A token is special if its type is control, user-defined or unknown: `<bos>`, `<|turn>`, …
    `ends` are the ids that end the model's turn, `suppressed` those it must never generate.

    Gemma 3's vocabulary has `scores` instead of merges. Its user-defined tokens, such as runs of
    line breaks and `<table>`, are text: wherever they are spelled, they are cut out first.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        merges: Sequence[str],
        token_types: Sequence[int],
        *,
        bos: int,
        eos: int,
        pad: int | None = None,
        unknown: int | None = None,
        ends: Iterable[int] = (),
        suppressed: Iterable[int] = (),
        scores: Sequence[float] | None = None,
    ) -> None:
        self.bos, self.eos, self.pad, self.unknown = bos, eos, pad, unknown
        self.size = len(tokens)
        self.suppressed = tuple(suppressed)
        self._tokens = tokens
        self._ids = dict(zip(tokens, range(len(tokens)), strict=True))
        spelled = {self._ids[spelling] for spelling in END_SPELLINGS if spelling in self._ids}
        self.ends = frozenset({eos, *ends, *spelled})
        kinds = (UNKNOWN, CONTROL) if scores else (UNKNOWN, CONTROL, USER_DEFINED)
        special = {at for at, token_type in enumerate(token_types) if token_type in kinds}
        if scores:
            special |= {self._ids[spelling] for spelling in GEMMA3_MARKUP if spelling in self._ids}
        self._special = frozenset(special)
        self.special_ids: Mapping[str, int] = {
            tokens[at]: at for at in sorted(self._special) if tokens[at]
        }
        # Special and byte tokens are removed from the map, so that plain text cannot become one of
        # them, whatever it spells and whatever merges the file has.
        for spelling in self.special_ids:
            del self._ids[spelling]
        self._byte_ids = [self._ids.pop(spelling, None) for spelling in BYTE_SPELLINGS]
        self._bytes = {
            at: bytes([byte]) for byte, at in enumerate(self._byte_ids) if at is not None
        }
        self._cut: dict[str, int] = {}  # what is cut out of a text first
        if scores:
            typed = list(zip(tokens, token_types, scores, strict=True))
            defined = {text for text, kind, _ in typed if text and kind == USER_DEFINED}
            self._cut = {text: self._ids.pop(text) for text in defined & self._ids.keys()}
            plain = {text: score for text, kind, score in typed if kind == NORMAL}
            self._merges = Merges.from_scores({x: plain[x] for x in self._ids.keys() & plain})
        else:
            self._merges = Merges.from_lines(merges)
        self._cut_pattern = _any_of(self._cut)
        self._special_pattern = _any_of({*self.special_ids, *self._cut})
        self._cached_word = lru_cache(CACHED_WORDS)(self._word)

    @classmethod
    def from_gguf(cls, gguf: HasMetadata) -> "Tokenizer":
        """Return the tokenizer of a GGUF file; GgufError if its vocabulary is not valid.

        Tokens beyond the rows of the embedding table, which Ollama's files of Gemma 3 have, are
        left out."""
        keys = _Keys(gguf)
        tokens = keys.strings("tokens")
        keys.size = len(tokens)
        token_types = keys.token_types("token_type")
        scored = not keys.has("merges") and keys.has("scores")
        scores = keys.scores("scores") if scored else None
        table = getattr(gguf, "tensors", {}).get("token_embd.weight")
        if table is not None and table.rows < len(tokens):
            keys.size = table.rows
            tokens, token_types = tokens[: keys.size], token_types[: keys.size]
            scores = scores and scores[: keys.size]
        eot = keys.id("eot_token_id")
        return cls(
            tokens,
            () if scored else keys.strings("merges"),
            token_types,
            bos=keys.required_id("bos_token_id"),
            eos=keys.required_id("eos_token_id"),
            pad=keys.id("padding_token_id"),
            unknown=keys.id("unknown_token_id"),
            ends=keys.ids("eos_token_ids") + ([] if eot is None else [eot]),
            suppressed=keys.ids("suppress_tokens"),
            scores=scores,
        )

    @cached_property
    def token_length(self) -> int:
        """The most characters of one token."""
        return max(1, self._merges.longest, max(map(len, self._tokens), default=1))

    def exceeds(self, text: str, most: int) -> bool:
        """Return whether a text takes more ids than `most`, judging by its length alone."""
        return len(text) > 2 * most * self.token_length  # two surrogates may be one character

    def encode(self, text: str, special: bool = False, most: int | None = None) -> list[int]:
        """Return the ids of a text; no `<bos>` is added.

        Without `special`, no spelling in the text becomes a special token, so that a user's text
        cannot forge a turn. Lone surrogates count as U+FFFD, paired ones as their character. With
        `most`, the end of a text that takes more ids than that may be left out.
        """
        if most is not None and self.exceeds(text, most):
            text = text[: 2 * (most + 1) * self.token_length]
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

    def _plain(self, text: str) -> list[int]:
        if not self._cut:
            return self._merged(text)
        ids: list[int] = []
        for part in self._cut_pattern.split(text):
            if part in self._cut:
                ids.append(self._cut[part])
            else:
                ids += self._merged(part)
        return ids

    def decode(self, ids: Iterable[int], special: bool = True) -> str:
        """Return the text of the ids; special tokens are spelled out only with `special`."""
        stream = self.stream(special)
        return "".join([stream.feed(token) for token in ids]) + stream.finish()

    def stream(self, special: bool = True) -> "TokenStream":
        """Return a decoder that takes one id at a time."""
        return TokenStream(self, special)

    def piece(self, token: int) -> str:
        """Return the token's spelling in the vocabulary: ▁ for a space, <0xXX> for a byte."""
        if not 0 <= token < self.size:
            raise InputError(
                f"Token id {token} is outside the vocabulary, which has ids 0 to {self.size - 1}; "
                "it comes from another model or a damaged list."
            )
        return self._tokens[token]

    def token_bytes(self, token: int) -> bytes:
        """Return a token's text as UTF-8, of which it may be a part; nothing for a special one."""
        byte = self._bytes.get(token)
        if byte is not None:
            return byte
        piece = self.piece(token)
        return b"" if token in self._special else piece.replace(SPACE, " ").encode()

    def _merged(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in self._merges.words(text.replace(" ", SPACE)):
            ids += self._cached_word(word) if len(word) <= CACHED_CHARACTERS else self._word(word)
        return ids

    def _word(self, word: str) -> tuple[int, ...]:
        ids: list[int] = []
        for piece in self._merges.pieces(word):
            token = self._ids.get(piece)
            if token is None:
                ids += self._byte_tokens(piece)
            else:
                ids.append(token)
        return tuple(ids)

    def _byte_tokens(self, piece: str) -> list[int]:
        """Return the byte tokens of a piece without a token, or the unknown token."""
        ids = [self._byte_ids[byte] for byte in piece.encode()]
        if None not in ids:
            return cast(list[int], ids)
        if self.unknown is None:
            raise InputError(
                f"The vocabulary has no token for {piece!r} or its bytes, and no unknown token; "
                "remove it from the text or use a complete model file."
            )
        return [self.unknown]


class TokenStream:
    """Decoder of one id at a time; bytes are buffered until they form a character."""

    def __init__(self, tokenizer: Tokenizer, special: bool) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """Return the text that this id completes."""
        tokenizer = self._tokenizer
        byte = tokenizer._bytes.get(token)
        if byte is not None:
            return self._utf8.decode(byte)
        piece = tokenizer.piece(token)
        if token not in tokenizer._special:
            return self.finish() + piece.replace(SPACE, " ")
        return self.finish() + piece if self._special else ""

    def finish(self) -> str:
        """Return U+FFFD for buffered bytes of an incomplete character, or an empty string."""
        return self._utf8.decode(b"", final=True)


class _Keys:
    """Validated access to the `tokenizer.ggml.` keys of a file."""

    def __init__(self, gguf: HasMetadata) -> None:
        self.gguf = gguf
        self.size = 0  # of the vocabulary; set after its tokens are read

    def strings(self, key: str) -> list[str]:
        values = self._array(key)
        if set(map(type, values)) - {str}:
            raise self._error(key, "must be an array of strings")
        return cast(list[str], values)

    def token_types(self, key: str) -> Sequence[int]:
        values = self._array(key)
        if len(values) != self.size:
            raise self._error(key, f"has {len(values)} entries for {self.size} tokens")
        if set(map(type, values)) - {int}:
            raise self._error(key, "must be an array of integers")
        return cast(Sequence[int], values)

    def has(self, key: str) -> bool:
        return PREFIX + key in self.gguf.metadata

    def scores(self, key: str) -> Sequence[float]:
        values = self._array(key)
        if len(values) != self.size:
            raise self._error(key, f"has {len(values)} entries for {self.size} tokens")
        scores = cast(Sequence[float], values)
        if set(map(type, values)) - {float, int} or not all(map(math.isfinite, scores)):
            raise self._error(key, "must be an array of finite numbers")
        return scores

    def ids(self, key: str) -> list[int]:
        """Return the ids of an optional key, or []."""
        if PREFIX + key not in self.gguf.metadata:
            return []
        return [self._checked(key, value) for value in self._array(key)]

    def id(self, key: str) -> int | None:
        """Return the id of an optional key, or None."""
        value = self.gguf.metadata.get(PREFIX + key)
        return None if value is None else self._checked(key, value)

    def required_id(self, key: str) -> int:
        return self._checked(key, self._required(key))

    def _checked(self, key: str, value: object) -> int:
        if type(value) is not int or not 0 <= value < self.size:
            raise self._error(key, f"has the id {value!r}, but ids are 0 to {self.size - 1}")
        return value

    def _array(self, key: str) -> Sequence[object]:
        values = self._required(key)
        if isinstance(values, str | bytes) or not isinstance(values, Sequence):
            raise self._error(key, "must be an array")
        return values

    def _required(self, key: str) -> object:
        value = self.gguf.metadata.get(PREFIX + key)
        if value is None:
            raise self._error(key, "is missing")
        return value

    def _error(self, key: str, problem: str) -> GgufError:
        return GgufError(
            f"{self.gguf.name}: {PREFIX}{key} {problem}, so the file has no usable tokenizer; "
            "download or convert the model again."
        )


def _any_of(spellings: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds these spellings, the longest of several, with a group."""
    longest_first = sorted(spellings, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def _without_surrogates(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
