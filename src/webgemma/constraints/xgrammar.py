"""Constraints by web-xgrammar, in a browser: xgrammar.js calls it."""

import json
import re
from collections import OrderedDict
from typing import Any

from webgemma.constraints.ebnf import FIRST_PRIVATE, ebnf, private_spellings
from webgemma.constraints.grammar import Grammar
from webgemma.constraints.matching import MatchedConstraint
from webgemma.errors import InputError, MissingPackageError
from webgemma.text.tokenizer import Tokenizer

MISSING = (
    "Structured output needs web-xgrammar in a browser, a package of npm: serve its lib/index.js "
    "and set js.webgemmaXgrammarUrl to its address."
)
NO_LARK = (
    "Grammars in Lark need llguidance, which no browser has: write GBNF there, or use schema, "
    "regex or choices."
)
MAX_COMPILED = 16  # grammars that are kept

_PRIVATE = re.compile(f"([{chr(FIRST_PRIVATE)}-\U0010ffff])")


class XgrammarCompiler:
    """Makes constraints for the replies of one model.

    `address` is where web-xgrammar's lib/index.js can be had, unless the page has loaded it or
    says so: see xgrammar.js.
    `prepare` builds its vocabulary ahead, which takes about a second."""

    def __init__(
        self, tokenizer: Tokenizer, vocab: int, address: str | None = None, script: Any = None
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab = vocab
        self._address = address
        self._open = script  # the function of xgrammar.js; None: that of this page
        self._opening: Any = None  # a promise of the vocabulary
        self._vocabulary: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    async def prepare(self) -> None:
        """Build what all constraints share, unless it is built."""
        if self._vocabulary is None:
            try:
                if self._opening is None:  # replies side by side share it
                    tokens, ends = json.dumps(self._tokens()), sorted(self.tokenizer.ends)
                    self._opening = (self._open or _script())(
                        self._address, tokens, self.tokenizer.size, json.dumps(ends)
                    )
                self._vocabulary = await self._opening
            except Exception as error:  # any JavaScript error
                self._opening = None
                raise MissingPackageError(
                    f"{MISSING} ({getattr(error, 'message', error)})"
                ) from error

    async def compile(self, grammar: Grammar | str) -> MatchedConstraint:
        """Return the constraint of a grammar; InputError for one in Lark."""
        if isinstance(grammar, str):
            raise InputError(NO_LARK)
        await self.prepare()
        text = ebnf(grammar, self.tokenizer)
        matcher = self._compiled.get(text)
        if matcher is None:
            try:
                matcher = await self._vocabulary.compile(text)
            except Exception as error:  # any JavaScript error
                reason = getattr(error, "message", error)
                raise InputError(f"web-xgrammar cannot use this grammar: {reason}") from error
        self._compiled[text] = matcher
        self._compiled.move_to_end(text)
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        copied = _XgrammarMatcher(matcher.copy(), self.tokenizer)
        return MatchedConstraint(copied, self.tokenizer, self.vocab)

    def _tokens(self) -> list[str]:
        """Return the text of each token, which web-xgrammar reads as the vocabulary spells it.

        What could spell a special token otherwise becomes nothing, which is never allowed: the byte
        that private characters begin with, and text with such a character."""
        private = private_spellings(self.tokenizer)
        pieces = [self.tokenizer.piece(token) for token in range(self.tokenizer.size)]
        first_byte = f"<0x{chr(FIRST_PRIVATE).encode()[0]:02X}>"
        texts = ["" if piece == first_byte or _PRIVATE.search(piece) else piece for piece in pieces]
        for token, spelling in private.items():
            texts[token] = spelling
        return texts


class _XgrammarMatcher:
    """A matcher of xgrammar.js."""

    def __init__(self, matcher: Any, tokenizer: Tokenizer) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer

    def mask(self) -> bytes:
        mask: bytes = self._matcher.mask().to_bytes()
        return mask

    def accept(self, token: int) -> bool:
        return bool(self._matcher.accept(token))

    def forced(self) -> list[int]:
        """Return the tokens of the text that must come next.

        What follows may become one token with the last of them, so that one is not forced."""
        tokens_of = {text: token for token, text in private_spellings(self._tokenizer).items()}
        *whole, last = _PRIVATE.split(self._matcher.forced())
        tokens: list[int] = []
        for text in whole:
            tokens += [tokens_of[text]] if text in tokens_of else self._tokenizer.encode(text)
        return self._allowed([*tokens, *self._tokenizer.encode(last)[:-1]])

    def _allowed(self, tokens: list[int]) -> list[int]:
        """Return the tokens up to the first that is not allowed."""
        count = 0
        while count < len(tokens) and self._matcher.accept(tokens[count]):
            count += 1
        if count:
            self._matcher.rollback(count)
        return tokens[:count]

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    def copy(self) -> "_XgrammarMatcher":
        return _XgrammarMatcher(self._matcher.copy(), self._tokenizer)


def _script() -> Any:
    """Return the function of xgrammar.js that opens a vocabulary."""
    from webgemma.javascript import script  # cannot be imported outside a browser

    return script(__package__, "xgrammar.js", "openWebgemmaXgrammar")
