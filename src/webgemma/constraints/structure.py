"""The structure that a caller wants a reply to have: what it is, and which tools it calls."""

from dataclasses import dataclass
from typing import Any

from webgemma.constraints.compiling import Compiler, constrain
from webgemma.constraints.specifications import Specification, specification
from webgemma.constraints.tool_calls import ToolCalls, tool_calls
from webgemma.engine.constraints import Constraint
from webgemma.errors import InputError, MissingPackageError


@dataclass(frozen=True, slots=True)
class Structure:
    """What a reply has to be, and the calls that it may or must make."""

    asked: Specification | None
    calls: ToolCalls | None

    @classmethod
    def of(
        cls,
        *,
        schema: Any = None,
        regex: Any = None,
        grammar: Any = None,
        choices: Any = None,
        tools: object = None,
        tool_choice: object = None,
        parallel: bool = True,
    ) -> "Structure":
        """Return what a caller wants; InputError if that is not possible."""
        asked = specification(schema=schema, regex=regex, grammar=grammar, choices=choices)
        calls = tool_calls(tools, tool_choice, parallel=parallel, lenient=True)
        return cls(asked, None if calls is not None and calls.mode == "none" else calls)

    @property
    def is_free(self) -> bool:
        """Whether a reply may be anything."""
        return self.asked is None and self.calls is None

    @property
    def is_required(self) -> bool:
        """Whether a reply must not do without it: tools that may be called are a help only."""
        return self.asked is not None or (self.calls is not None and self.calls.mode == "required")

    async def constraint(
        self, compiler: Compiler, *, think: bool, in_thought: bool
    ) -> Constraint | None:
        """Return the constraint of one reply; None if it is free, or need not be constrained and
        what constrains it is not installed."""
        if self.is_free:
            return None
        try:
            return await constrain(
                compiler, self.asked, self.calls, think=think, in_thought=in_thought
            )
        except MissingPackageError:
            if self.is_required:
                raise
            return None

    def value(self, text: str) -> Any:
        """Return what a whole reply stands for; None if that is nothing, or it is incomplete."""
        if self.asked is None:
            return None
        try:
            return self.asked.parse(text)
        except InputError:
            return None
