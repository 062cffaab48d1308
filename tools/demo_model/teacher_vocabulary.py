"""Vocabulary of the teacher, stories15M: tokens with scores, the best pair merged first."""

import struct
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

HEADER_NBYTES, WEIGHTS = 28, (60_816_028 - 28) // 4
BOS, EOS = 1, 2
FIRST_BYTE = 3  # the token of byte 0


class TeacherVocabulary:
    """Encodes text as token ids, and decodes ids."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            head = file.read(HEADER_NBYTES)
            file.seek(HEADER_NBYTES + 2 * WEIGHTS)
            data = file.read()
        count, at = abs(struct.unpack("<7i", head)[5]), 4
        self.tokens: list[bytes] = []
        self.scores: list[float] = []
        for _ in range(count):
            score, size = struct.unpack_from("<fi", data, at)
            self.tokens.append(data[at + 8 : at + 8 + size])
            self.scores.append(score)
            at += 8 + size
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        self._text = [self._plain(token) for token in self.tokens]
        self.word = lru_cache(1 << 16)(self._word)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, after BOS; no token reaches across a space."""
        return [BOS, *(token for word in text.split(" ") for token in self.word(word))]

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, without BOS and EOS."""
        data = b"".join(self._text[token] for token in ids if token not in (BOS, EOS))
        return data.decode(errors="replace").strip()

    def _word(self, word: str) -> list[int]:
        ids = [self.ids[b" "]]
        for character in word:
            data = character.encode()
            ids += [self.ids[data]] if data in self.ids else [FIRST_BYTE + byte for byte in data]
        while True:
            pairs = [
                (self.scores[joined], -at, joined)
                for at, (a, b) in enumerate(pairwise(ids))
                if (joined := self.ids.get(self.tokens[a] + self.tokens[b])) is not None
            ]
            if not pairs:
                return ids
            _, at, joined = max(pairs)
            ids[-at : -at + 2] = [joined]

    @staticmethod
    def _plain(token: bytes) -> bytes:
        if token.startswith(b"<0x") and len(token) == 6:
            return bytes([int(token[3:5], 16)])
        return token
