"""Grammars in llguidance's dialect of Lark: texts are terminals, the rest are rules."""

from functools import lru_cache

from webgemma.constraints.escapes import escaped_text
from webgemma.constraints.grammar import (
    MAX_BLANKS,
    MAX_INDENTATION,
    ROOT,
    Escapes,
    Grammar,
    Mark,
    Text,
)
from webgemma.constraints.languages import (
    EMPTY,
    Chars,
    Complement,
    Concat,
    Intersection,
    Language,
    Repeat,
    Union,
    concat,
    literal,
)
from webgemma.constraints.tokens import special_token
from webgemma.constraints.writing import Writer, bounds
from webgemma.text.markup import Markup
from webgemma.text.tokenizer import Tokenizer

_BLANKS = rf"[ \t]{{1,{MAX_BLANKS}}}"
_SPACE = rf"({_BLANKS}|\r?\n[ \t]{{0,{MAX_INDENTATION}}})"  # never empty


def lark(grammar: Grammar, tokenizer: Tokenizer) -> str:
    """Return a grammar as Lark, for one vocabulary."""
    writer = _LarkWriter(tokenizer)
    rules = [f"{name}: {writer.expression(each)}" for name, each in grammar.rules.items()]
    terminals = [f"{name}: {each}" for each, name in writer.terminals.items()]
    return "\n".join((f"start: {ROOT}", *rules, *terminals, ""))


def terminal(language: Language) -> str:
    """Return the expression of a terminal: one regular expression, or several joined."""
    pattern = _regex(language)
    if pattern is not None:
        return f"/{pattern}/" if pattern else '""'
    match language:
        case Concat():
            return f"({' '.join(_joined(language.items))})"
        case Union():
            return f"({' | '.join(map(terminal, language.items))})"
        case Intersection():
            return f"({' & '.join(map(terminal, language.items))})"
        case Complement():
            return f"(/(?s:.)*/ & ~{terminal(language.item)})"
        case Repeat(item, least, most):
            return f"{terminal(item)}{bounds(least, most)}"
        case Chars():
            raise AssertionError("a set of characters is a regular expression")


class _LarkWriter(Writer):
    """Writes expressions, and collects the terminals that they use."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self.terminals: dict[str, str] = {}  # names by what they stand for

    def text(self, text: Text) -> str:
        """Return a terminal, between special tokens if these are its ends."""
        language = text.language
        if text.escapes is not Escapes.NONE:
            language = escaped_text(language, text.escapes)
        before, after = text.before, text.after
        whole = concat(
            literal("" if isinstance(before, Markup) else before),
            language,
            literal("" if isinstance(after, Markup) else after),
        )
        parts = [self.special(before)] if isinstance(before, Markup) else []
        if whole != EMPTY:
            parts.append(self._terminal(terminal(whole)) + "?" * whole.nullable)
        if isinstance(after, Markup):
            parts.append(self.special(after))
        return " ".join(parts) or '""'

    def mark(self, mark: Mark) -> str:
        """Return punctuation with white space around it."""
        space = f"{_SPACE}?"
        pattern = _regex(literal(mark.text))
        return self._terminal(f"/{space * mark.space_before}{pattern}{space * mark.space_after}/")

    def special(self, token: Markup) -> str:
        """Return a special token, by its id."""
        return f"<[{special_token(self._tokenizer, token)}]>"

    def _terminal(self, expression: str) -> str:
        return self.terminals.setdefault(expression, f"T{len(self.terminals)}")


def _joined(items: tuple[Language, ...]) -> list[str]:
    """Return the parts of a sequence, those that are regular expressions in one."""
    parts: list[str] = []
    run: list[Language] = []
    for item in items:
        if _regex(item) is not None:
            run.append(item)
            continue
        if run:
            parts.append(terminal(concat(*run)))
            run = []
        parts.append(terminal(item))
    return [*parts, terminal(concat(*run))] if run else parts


@lru_cache(1 << 12)
def _regex(language: Language) -> str | None:
    """Return a regular expression; None for what has an intersection or complement in it."""
    match language:
        case Chars(ranges):
            if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
                return _character(ranges[0][0])
            spans = (
                _character(first) + (f"-{_character(last)}" if last > first else "")
                for first, last in ranges
            )
            return f"[{''.join(spans)}]"
        case Concat(items):
            parts = [_regex(item) for item in items]
            return None if None in parts else "".join(filter(None, parts))
        case Union(items):
            parts = [_regex(item) for item in items if item != EMPTY]
            if None in parts:
                return None
            joined = f"(?:{'|'.join(filter(None, parts))})"
            return f"(?:{joined}?)" if EMPTY in items else joined
        case Repeat(item, least, most):
            part = _regex(item)
            if part is None:
                return None
            group = part if isinstance(item, Chars) else f"(?:{part})"
            return f"(?:{group}{bounds(least, most)})"
        case Intersection() | Complement():
            return None


def _character(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\x{{{code:x}}}"
