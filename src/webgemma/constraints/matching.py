"""Constraints of whole replies, over the matchers of the libraries."""

from typing import Protocol

from webgemma.constraints.phases import not_allowed, too_many
from webgemma.constraints.tokens import allows, mask_of, resized
from webgemma.text.tokenizer import Tokenizer


class Matcher(Protocol):
    """What a library finds to be allowed after the tokens of a text."""

    def mask(self) -> bytes:
        """Return the mask of the tokens that may come next; ends where the text is complete."""

    def accept(self, token: int) -> bool:
        """Go on by a token that does not end the text; False if it is not allowed."""

    def forced(self) -> list[int]:
        """Return the tokens that must come next."""

    def rollback(self, count: int) -> None:
        """Forget the last tokens, at most as many as there are."""

    def copy(self) -> "Matcher":
        """Return the same state, independent of this one."""


class MatchedConstraint:
    """What a matcher allows in a reply, which ends where its text is complete."""

    def __init__(self, matcher: Matcher, tokenizer: Tokenizer, vocab: int) -> None:
        self._matcher = matcher  # which does not see the tokens that end a reply
        self._tokenizer = tokenizer
        self._vocab = vocab  # tokens of the model's table
        self._accepted = 0  # by the matcher
        self._ended = 0  # ends that came after it
        self._mask: bytes | None = None  # what may come next, once it was asked

    def mask(self) -> bytes:
        """Return what may come next."""
        if self._mask is None:
            self._mask = (
                self._ends()
                if self._ended
                else resized(self._matcher.mask(), self._tokenizer.size, self._vocab)
            )
        return self._mask

    def accept(self, token: int) -> None:
        """Go on by a token; InputError for one that is not allowed."""
        if token in self._tokenizer.ends:
            if not allows(self.mask(), token):
                raise not_allowed(token)
            self._ended += 1
        elif self._ended or not self._matcher.accept(token):
            raise not_allowed(token)
        else:
            self._accepted += 1
        self._mask = None

    def forced(self) -> list[int]:
        """Return the tokens that must come next."""
        return [] if self._ended else self._matcher.forced()

    def rollback(self, count: int) -> None:
        """Forget the last tokens."""
        if not 0 <= count <= self._accepted + self._ended:
            raise too_many(count, self._accepted + self._ended)
        inside = max(0, count - self._ended)
        self._ended -= count - inside
        if inside:
            self._matcher.rollback(inside)
            self._accepted -= inside
        self._mask = None

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow but the end of the reply."""
        return self.mask() == self._ends()

    def copy(self) -> "MatchedConstraint":
        """Return the same state, independent of this one."""
        copied = MatchedConstraint(self._matcher.copy(), self._tokenizer, self._vocab)
        copied._accepted, copied._ended, copied._mask = self._accepted, self._ended, self._mask
        return copied

    def _ends(self) -> bytes:
        return mask_of(self._tokenizer.ends, self._vocab)
