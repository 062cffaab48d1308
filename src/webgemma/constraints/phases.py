"""Constraints that begin later: after a thought, or when the model calls a tool."""

from webgemma.constraints.tokens import allows, with_token
from webgemma.engine.constraints import Constraint
from webgemma.errors import InputError


def not_allowed(token: int) -> InputError:
    """Return the error for a token that a constraint does not allow."""
    return InputError(f"Token {token} is not allowed here by the constraint of this reply.")


class Masked:
    """The same mask for every token; it never ends a reply by itself."""

    def __init__(self, mask: bytes) -> None:
        self._mask = mask

    def mask(self) -> bytes:
        """Return the mask: the same object every time."""
        return self._mask

    def accept(self, token: int) -> None:
        """Take note of a token; InputError for one that is not allowed."""
        if not allows(self._mask, token):
            raise not_allowed(token)

    def forced(self) -> list[int]:
        """Return nothing: there is always a choice."""
        return []

    def rollback(self, count: int) -> None:
        """Forget tokens, which change nothing."""

    @property
    def is_over(self) -> bool:
        """False: the model ends its reply."""
        return False

    def copy(self) -> "Masked":
        """Return the constraint itself, which has no state."""
        return self


class Until:
    """One mask up to a token, and another constraint after it."""

    def __init__(self, token: int, mask: bytes | None, then: Constraint) -> None:
        self._token = token
        self._mask = mask  # which allows the token
        self._then = then
        self._before = 0  # tokens up to that one
        self._after: int | None = None  # tokens after it, once it came

    def mask(self) -> bytes | None:
        """Return what may come next."""
        return self._mask if self._after is None else self._then.mask()

    def accept(self, token: int) -> None:
        """Go on by a token; InputError for one that is not allowed."""
        if self._after is not None:
            self._then.accept(token)
            self._after += 1
            return
        if self._mask is not None and not allows(self._mask, token):
            raise not_allowed(token)
        self._before += 1
        if token == self._token:
            self._after = 0

    def forced(self) -> list[int]:
        """Return the tokens that must come next."""
        return [] if self._after is None else self._then.forced()

    def rollback(self, count: int) -> None:
        """Forget the last tokens."""
        after = self._after or 0
        inside = min(count, after)
        if count - inside > self._before:
            raise too_many(count, self._before + after)
        if inside:
            self._then.rollback(inside)
        self._before -= count - inside
        if self._after is not None:
            self._after = after - inside if count == inside else None

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow but the end of the reply."""
        return self._after is not None and self._then.is_over

    def copy(self) -> "Until":
        """Return the same state, independent of this one."""
        copied = Until(self._token, self._mask, self._then.copy())
        copied._before, copied._after = self._before, self._after
        return copied


class MayBegin:
    """A constraint, or another one if a token comes first, as a thought does."""

    def __init__(self, token: int, other: Constraint, otherwise: Constraint) -> None:
        self._token = token
        self._other = other
        self._otherwise = otherwise
        self._chosen: Constraint | None = None
        self._accepted = 0  # by the one that was chosen

    def mask(self) -> bytes | None:
        """Return what may come next."""
        mask = (self._chosen or self._otherwise).mask()
        return mask if self._chosen or mask is None else with_token(mask, self._token)

    def accept(self, token: int) -> None:
        """Go on by a token; InputError for one that is not allowed."""
        if self._chosen is None and token == self._token:
            self._chosen = self._other
            return
        chosen = self._chosen or self._otherwise
        chosen.accept(token)
        self._chosen = chosen
        self._accepted += 1

    def forced(self) -> list[int]:
        """Return the tokens that must come next."""
        return self._chosen.forced() if self._chosen else []

    def rollback(self, count: int) -> None:
        """Forget the last tokens."""
        accepted = self._accepted + (self._chosen is self._other)
        if count > accepted:
            raise too_many(count, accepted)
        inside = min(count, self._accepted)
        if self._chosen and inside:
            self._chosen.rollback(inside)
        self._accepted -= inside
        if count == accepted:
            self._chosen = None

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow but the end of the reply."""
        return self._chosen is not None and self._chosen.is_over

    def copy(self) -> "MayBegin":
        """Return the same state, independent of this one."""
        other, otherwise = self._other.copy(), self._otherwise.copy()
        copied = MayBegin(self._token, other, otherwise)
        if self._chosen:
            copied._chosen = other if self._chosen is self._other else otherwise
        copied._accepted = self._accepted
        return copied


def too_many(count: int, accepted: int) -> InputError:
    """Return the error for forgetting more tokens than there are."""
    return InputError(f"{count} tokens cannot be forgotten: {accepted} were accepted.")
