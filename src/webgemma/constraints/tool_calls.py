"""Tool calls as a grammar: the names of the tools, and arguments of their schemas."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from webgemma.constraints.documents import has_surrogates
from webgemma.constraints.grammar import (
    ROOT,
    Expression,
    Grammar,
    Loop,
    Special,
    characters,
    choice,
    series,
)
from webgemma.constraints.syntax import CALL
from webgemma.constraints.values import add_values
from webgemma.errors import InputError
from webgemma.text.calls import PREFIX
from webgemma.text.inputs import Tool, read_tools
from webgemma.text.markup import CALL_CLOSE, CALL_OPEN
from webgemma.values import shown

MODES = ("auto", "none", "required")
NO_PARAMETERS: Mapping[str, Any] = {"properties": {}}


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """The calls that a reply may or must make."""

    tools: Sequence[Tool]
    mode: str  # one of MODES
    parallel: bool  # whether there may be several
    lenient: bool  # whether a tool that is not strict takes any arguments if its schema is refused

    def add_to(self, grammar: Grammar, *, opened: bool = False) -> Expression:
        """Add the rules of the calls and return all of them; `opened`: after the first token."""
        call = series(grammar.add("call", choice(*self._calls(grammar))), Special(CALL_CLOSE))
        opening = Special(CALL_OPEN)
        more = [Loop(series(opening, call), 0, None)] if self.parallel else []
        return series(*([] if opened else [opening]), call, *more)

    def grammar(self, *, opened: bool = False) -> Grammar:
        """Return the grammar of replies that are calls; `opened`: after their first token."""
        grammar = Grammar()
        grammar.rules[ROOT] = self.add_to(grammar, opened=opened)
        return grammar

    def _calls(self, grammar: Grammar) -> list[Expression]:
        calls = []
        for tool in self.tools:
            where = f"{tool.where}.parameters"
            schema = tool.function.get("parameters") or NO_PARAMETERS
            try:
                arguments = add_values(grammar, schema, CALL, where, objects_only=True, closed=True)
            except InputError:
                if not self.lenient or tool.function.get("strict") is True:
                    raise
                arguments = add_values(grammar, {}, CALL, where, objects_only=True)
            calls.append(series(characters(f"{PREFIX}{tool.name}"), arguments))
        return calls


def tool_calls(
    tools: object, tool_choice: object = None, *, parallel: bool = True, lenient: bool = False
) -> ToolCalls | None:
    """Return the calls that a reply may or must make; None without tools.

    `tool_choice` is "auto" (the default), "none", "required" or the name of a tool. Arguments that
    a tool's schema does not declare are not written, unless its additionalProperties allow them.
    InputError for tools that cannot be called, and unless `lenient` for schemas that are not
    supported."""
    different: dict[str, Tool] = {}
    for tool in read_tools(tools):
        different.setdefault(tool.name, tool)  # of two with one name, the first
    chosen = "auto" if tool_choice is None else tool_choice
    if not isinstance(chosen, str):
        raise InputError(
            f"tool_choice is {shown(chosen)}; it must be {', '.join(MODES)} or a tool's name."
        )
    if not different:
        if chosen in ("auto", "none"):
            return None
        raise InputError(f"tool_choice is {shown(chosen)}, but there are no tools.")
    if chosen not in MODES:
        if chosen not in different:
            raise InputError(
                f"tool_choice is {shown(chosen)}; it must be {', '.join(MODES)} or one of the "
                f"tools: {shown(', '.join(different))}."
            )
        different, chosen = {chosen: different[chosen]}, "required"
    for tool in different.values():
        if _is_unreadable(tool.name):
            raise InputError(
                f"{tool.where}.name is {shown(tool.name)}, which cannot be read in a call: use "
                "letters, digits, _ and -."
            )
    return ToolCalls(list(different.values()), chosen, parallel, lenient)


def _is_unreadable(name: str) -> bool:
    """Return whether the reply parser would read another name."""
    return "{" in name or name != name.strip() or CALL_CLOSE in name or has_surrogates(name)
