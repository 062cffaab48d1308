"""A constraint without a grammar: some tokens may come at each place, after the last the end."""

from collections.abc import Collection, Sequence

from webgemma.engine.constraints import mask_nbytes
from webgemma.errors import InputError


class Pattern:
    """Lets one of some tokens come at each place; a place with one token is forced.

    None lets any token come. After the last place, the tokens `ends` may."""

    def __init__(
        self,
        places: Sequence[Collection[int] | None],
        vocab: int,
        ends: Collection[int] = (1,),
        *,
        forces: bool = True,
    ) -> None:
        self.places = places
        self.vocab = vocab
        self.ends = ends
        self.forces = forces
        self.accepted: list[int] = []

    def _allowed(self, at: int) -> Collection[int] | None:
        return self.places[at] if at < len(self.places) else self.ends

    def mask(self) -> bytes | None:
        allowed = self._allowed(len(self.accepted))
        if allowed is None:
            return None
        bits = bytearray(mask_nbytes(self.vocab))
        for token in allowed:
            bits[token // 8] |= 1 << token % 8
        return bytes(bits)

    def accept(self, token: int) -> None:
        allowed = self._allowed(len(self.accepted))
        if allowed is not None and token not in allowed:
            raise InputError(f"{token} may not come at place {len(self.accepted)}.")
        self.accepted.append(token)

    def forced(self) -> list[int]:
        tokens: list[int] = []
        while self.forces and len(self.accepted) + len(tokens) < len(self.places):
            allowed = self._allowed(len(self.accepted) + len(tokens))
            if allowed is None or len(allowed) > 1:
                break
            tokens += allowed
        return tokens

    def rollback(self, count: int) -> None:
        del self.accepted[len(self.accepted) - count :]

    @property
    def is_over(self) -> bool:
        return len(self.accepted) >= len(self.places)

    def copy(self) -> "Pattern":
        other = Pattern(self.places, self.vocab, self.ends, forces=self.forces)
        other.accepted = list(self.accepted)
        return other
