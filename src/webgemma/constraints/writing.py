"""Grammars as text: what EBNF and Lark write alike."""

from abc import ABC, abstractmethod

from webgemma.constraints.grammar import (
    Choice,
    Expression,
    Loop,
    Mark,
    Rule,
    Series,
    Special,
    Text,
)
from webgemma.text.markup import Markup


class Writer(ABC):
    """Writes expressions; texts, punctuation and special tokens are those of one syntax."""

    def __init__(self) -> None:
        self.texts: dict[Text | Mark, str] = {}  # what stands for them

    def expression(self, expression: Expression) -> str:
        """Return an expression as text."""
        match expression:
            case Text():
                if expression not in self.texts:
                    self.texts[expression] = self.text(expression)
                return self.texts[expression]
            case Mark():
                if expression not in self.texts:
                    self.texts[expression] = self.mark(expression)
                return self.texts[expression]
            case Special(token):
                return self.special(token)
            case Series(items):
                return " ".join(map(self.expression, items))
            case Choice(items):
                return f"({' | '.join(map(self.expression, items))})"
            case Loop(item, least, most):
                return f"({self.expression(item)}){bounds(least, most)}"
            case Rule(name):
                return name

    @abstractmethod
    def text(self, text: Text) -> str:
        """Return what stands for a text that was not written before."""

    @abstractmethod
    def mark(self, mark: Mark) -> str:
        """Return punctuation with white space around it, which was not written before."""

    @abstractmethod
    def special(self, token: Markup) -> str:
        """Return a special token."""


def bounds(least: int, most: int | None) -> str:
    """Return how often something may stand, as it is written behind it."""
    if most is None:
        return "*" if least == 0 else "+" if least == 1 else f"{{{least},}}"
    return "?" if (least, most) == (0, 1) else f"{{{least},{most}}}"
