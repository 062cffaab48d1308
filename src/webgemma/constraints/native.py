"""Constraints by llguidance: a tokenizer of its own for a model, a matcher for each reply."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from webgemma.constraints.grammar import Grammar
from webgemma.constraints.lark import lark
from webgemma.constraints.matching import MatchedConstraint
from webgemma.errors import InputError, MissingPackageError
from webgemma.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MISSING = (
    'Structured output needs one package more: run `pip install "webgemma[json]"`, which brings '
    "llguidance."
)
MAX_COMPILED = 64  # grammars that are kept
MAX_ITEMS = 1 << 15  # that may come next: each property takes four
STACK_NBYTES = 256 << 20  # of a thread that compiles; only what it uses of that is taken

T = TypeVar("T")

_NO_FORCING = '%llguidance {"no_forcing": true}\n'


class LlguidanceCompiler:
    """Makes constraints for the replies of one model.

    Its tokenizer is built when it is first needed, which takes up to a few seconds for a large
    vocabulary: `prepare` does it ahead. Any number of threads may use it."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self.tokenizer = tokenizer
        self.vocab = vocab  # tokens of the model's table, which may be more than the tokenizer's
        self._lock = threading.Lock()  # of what is compiled
        self._preparing = threading.Lock()
        self._prepared: LLTokenizer | None = None
        self._compiled: OrderedDict[str, _LlguidanceMatcher] = OrderedDict()

    async def prepare(self) -> None:
        """Build what all constraints share, unless it is built."""
        with self._preparing:
            self._tokenizer()

    async def compile(self, grammar: Grammar | str) -> MatchedConstraint:
        """Return the constraint of a grammar, or of one written in llguidance's Lark."""
        text = grammar if isinstance(grammar, str) else lark(grammar, self.tokenizer)
        copied = self._copied(text)
        if copied is None:
            matcher = self._matcher(text)  # others need not wait for it
            with self._lock:
                self._compiled[text] = matcher
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
                copied = matcher.copy()
        return MatchedConstraint(copied, self.tokenizer, self.vocab)

    def _copied(self, text: str) -> _LlguidanceMatcher | None:
        """Return a copy of what a grammar was compiled to, if that is kept."""
        with self._lock:
            if text not in self._compiled:
                return None
            self._compiled.move_to_end(text)
            return self._compiled[text].copy()

    def _tokenizer(self) -> LLTokenizer:
        if self._prepared is None:
            check_installed()
            from llguidance import LLTokenizer, TokenizerWrapper

            self._prepared = LLTokenizer(
                TokenizerWrapper(_Vocabulary(self.tokenizer)), eos_token=sorted(self.tokenizer.ends)
            )
        return self._prepared

    def _matcher(self, text: str) -> _LlguidanceMatcher:
        with self._preparing:
            tokenizer = self._tokenizer()
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_items_in_row=MAX_ITEMS)

        def built(options: str) -> LLMatcher:
            grammar = LLMatcher.grammar_from_lark(options + text)
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
            if matcher.is_error():
                raise _not_usable(matcher.get_error())
            return matcher

        # The one without a line before the grammar is first: its errors count lines right.
        forcing, free = _with_deep_stacks(lambda: built(""), lambda: built(_NO_FORCING))
        return _LlguidanceMatcher(free, forcing)


def check_installed() -> None:
    """Raise MissingPackageError, which says what to install, where there is no llguidance."""
    try:
        import llguidance  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(MISSING) from error


def check_lark(text: str) -> None:
    """Raise InputError for a grammar that llguidance cannot read, whichever the vocabulary is."""
    check_installed()
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_lark(text)
    [problem] = _with_deep_stacks(lambda: LLMatcher.validate_grammar(grammar))
    if problem:
        raise _not_usable(problem)


_starting = threading.Lock()


def _with_deep_stacks(*functions: Callable[[], T]) -> list[T]:
    """Return what functions return, each in a thread of its own with a large stack, side by side.

    llguidance follows rules to each other by recursion, and a full stack would end the process."""
    threads, outcomes = list[threading.Thread](), list[Future[T]]()
    for function in functions:
        outcomes.append(Future())
        run = partial(_settle, outcomes[-1], function)
        threads.append(threading.Thread(target=run, name="webgemma-compile"))
    with _starting:
        before = threading.stack_size(STACK_NBYTES)
        try:
            for thread in threads:
                thread.start()
        finally:
            threading.stack_size(before)
    for thread in threads:
        thread.join()
    return [outcome.result() for outcome in outcomes]


def _settle(outcome: Future[T], function: Callable[[], T]) -> None:
    try:
        outcome.set_result(function())
    except BaseException as error:
        outcome.set_exception(error)


class _Vocabulary:
    """A tokenizer as llguidance takes it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos
        self.bos_token_id = tokenizer.bos
        self.special_token_ids = sorted(tokenizer.special_ids.values())
        special = set(self.special_token_ids)
        self.tokens = [
            (tokenizer.piece(token).encode() if token in special else tokenizer.token_bytes(token))
            for token in range(tokenizer.size)
        ]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace"))


class _LlguidanceMatcher:
    """Two matchers of llguidance, which do not work any more after an error.

    The masks of one that forces tokens have, wherever the text must go on in one way, only the
    token that llguidance would choose for it. So another one makes the masks."""

    def __init__(self, matcher: LLMatcher, forcing: LLMatcher) -> None:
        self._matcher = matcher
        self._forcing = forcing

    def mask(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        self._check(self._matcher)
        return mask

    def accept(self, token: int) -> bool:
        if self._matcher.validate_tokens([token]) == 0:
            self._check(self._matcher)
            return False
        for matcher in (self._matcher, self._forcing):
            if not matcher.consume_token(token):
                self._check(matcher)
                return False
        return True

    def forced(self) -> list[int]:
        return self._forcing.compute_ff_tokens()

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)
        self._forcing.rollback(count)

    def _check(self, matcher: LLMatcher) -> None:
        """Raise InputError if no text can follow, or a limit of llguidance was reached."""
        if matcher.is_error():
            problem = _first_lines(matcher.get_error())
            if problem.startswith("NoExtension"):
                problem = "no text of it begins like this"
            raise InputError(f"The grammar cannot be followed: {problem}.")

    def copy(self) -> _LlguidanceMatcher:
        return _LlguidanceMatcher(self._matcher.deep_copy(), self._forcing.deep_copy())


def _not_usable(message: str) -> InputError:
    return InputError(f"The grammar cannot be used: {_first_lines(message)}.")


def _first_lines(message: str) -> str:
    """Return an error of llguidance in one line, without what it prints of its state."""
    return " ".join(message.partition("<state>")[0].split())[:500]
