"""The vocabulary of the teacher, stories15M: pieces with scores, the best pair merged first."""

import struct
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

HEADER_NBYTES, WEIGHTS = 28, (60_816_028 - 28) // 4
BOS, EOS = 1, 2
FIRST_BYTE = 3  # the piece of byte 0


class TeacherVocabulary:
    """Text to ids and back."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            head = file.read(HEADER_NBYTES)
            file.seek(HEADER_NBYTES + 2 * WEIGHTS)
            data = file.read()
        count, at = abs(struct.unpack("<7i", head)[5]), 4
        self.pieces: list[bytes] = []
        self.scores: list[float] = []
        for _ in range(count):
            score, size = struct.unpack_from("<fi", data, at)
            self.pieces.append(data[at + 8 : at + 8 + size])
            self.scores.append(score)
            at += 8 + size
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}
        self._text = [self._plain(piece) for piece in self.pieces]
        self.word = lru_cache(1 << 16)(self._word)

    def encode(self, text: str) -> list[int]:
        """With the mark of the beginning; no piece reaches across a space."""
        return [BOS, *(token for word in text.split(" ") for token in self.word(word))]

    def decode(self, ids: list[int]) -> str:
        """Without the marks of beginning and end."""
        data = b"".join(self._text[token] for token in ids if token not in (BOS, EOS))
        return data.decode(errors="replace").strip()

    def _word(self, word: str) -> list[int]:
        ids = [self.ids[b" "]]
        for character in word:
            piece = character.encode()
            ids += [self.ids[piece]] if piece in self.ids else [FIRST_BYTE + b for b in piece]
        while True:
            pairs = [
                (self.scores[joined], -at, joined)
                for at, (a, b) in enumerate(pairwise(ids))
                if (joined := self.ids.get(self.pieces[a] + self.pieces[b])) is not None
            ]
            if not pairs:
                return ids
            _, at, joined = max(pairs)
            ids[-at : -at + 2] = [joined]

    @staticmethod
    def _plain(piece: bytes) -> bytes:
        if piece.startswith(b"<0x") and len(piece) == 6:
            return bytes([int(piece[3:5], 16)])
        return piece
