"""What the tokens of a reply keep to, as an engine sees it."""

from typing import Protocol


class Constraint(Protocol):
    """What the tokens of a reply keep to; the engine asks for a mask before it samples one."""

    def mask(self) -> bytes | None:
        """Return a bit for each token of the model's table that may come next; None: any may.

        The bits are in 32-bit little-endian words: token i is bit i % 32 of word i // 32."""

    def accept(self, token: int) -> None:
        """Go on by a token that the mask allows; InputError for any other."""

    def forced(self) -> list[int]:
        """Return the tokens that must come next, in a row; none where there is a choice."""

    def rollback(self, count: int) -> None:
        """Forget the last tokens that were accepted."""

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow but the end of the reply."""

    def copy(self) -> "Constraint":
        """Return the same state, independent of this one."""


def choices(constraint: Constraint, vocab: int) -> tuple[bytes | None, list[int]]:
    """Return the mask of the tokens that may come next, and the tokens that are forced.

    Where some are, the mask allows only the first: one text has one spelling in tokens then."""
    forced = constraint.forced()
    return (only(forced[0], vocab) if forced else constraint.mask()), forced


def only(token: int, vocab: int) -> bytes:
    """Return the mask that allows one token."""
    mask = bytearray(mask_nbytes(vocab))
    mask[token // 8] = 1 << token % 8
    return bytes(mask)


def mask_nbytes(vocab: int) -> int:
    """Return the length of the masks of so many tokens."""
    return 4 * -(-vocab // 32)
