"""From what a caller asks for to the constraint of a reply, natively and in a browser."""

from typing import Protocol

from webgemma.constraints.grammar import ROOT, Grammar, choice
from webgemma.constraints.phases import Masked, MayBegin, Until
from webgemma.constraints.specifications import Json, Lark, Specification
from webgemma.constraints.syntax import CALL
from webgemma.constraints.tokens import mask_without, special_token, with_token
from webgemma.constraints.tool_calls import ToolCalls
from webgemma.constraints.values import add_values
from webgemma.engine.constraints import Constraint
from webgemma.errors import InputError
from webgemma.sync import IN_BROWSER
from webgemma.text.markup import CALL_OPEN, CHANNEL_CLOSE, CHANNEL_OPEN
from webgemma.text.tokenizer import Tokenizer

# Of each type one.
COMMON = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "size": {"type": "number"},
        "list": {"type": "array", "items": {"type": ["boolean", "null"]}},
    },
    "required": ["text"],
}


class Compiler(Protocol):
    """What makes constraints of grammars for the replies of one model."""

    tokenizer: Tokenizer
    vocab: int  # tokens of the model's table, which may be more than the tokenizer's

    async def prepare(self) -> None:
        """Build what all constraints share, which may take seconds, unless it is built."""

    async def compile(self, grammar: Grammar | str) -> Constraint:
        """Return the constraint of a grammar, or of one written in llguidance's Lark."""


def open_compiler(tokenizer: Tokenizer, vocab: int) -> Compiler:
    """Return what makes constraints here; it needs llguidance, or web-xgrammar in a browser."""
    if IN_BROWSER:
        from webgemma.constraints.xgrammar import XgrammarCompiler

        return XgrammarCompiler(tokenizer, vocab)
    from webgemma.constraints.native import LlguidanceCompiler

    return LlguidanceCompiler(tokenizer, vocab)


async def prepare(compiler: Compiler) -> None:
    """Build what all constraints share, and compile once what most schemas have in them."""
    await compiler.prepare()
    await compiler.compile(Json(COMMON).grammar())
    add_values(Grammar(), {}, CALL)  # finds which characters names have


async def constrain(
    compiler: Compiler,
    asked: Specification | None = None,
    calls: ToolCalls | None = None,
    *,
    think: bool = False,
    in_thought: bool = False,
) -> Constraint | None:
    """Return the constraint of a reply; None if the reply is free.

    With `think`, the reply may begin with a thought, which is free; `in_thought`: the prompt has
    opened it. With both, the reply is what was asked for or calls tools."""
    constraint = await _after_thought(compiler, asked, calls)
    if constraint is None or not think:
        return constraint
    thought = Until(
        special_token(compiler.tokenizer, CHANNEL_CLOSE),
        _thought_mask(compiler, constraint),
        constraint.copy(),
    )
    if in_thought:
        return thought
    return MayBegin(special_token(compiler.tokenizer, CHANNEL_OPEN), thought, constraint)


async def _after_thought(
    compiler: Compiler, asked: Specification | None, calls: ToolCalls | None
) -> Constraint | None:
    if calls is None:
        return None if asked is None else await compiler.compile(asked.grammar())
    if calls.mode == "required":
        return await compiler.compile(calls.grammar())
    if calls.mode == "none":
        return await _without_calls(compiler, asked)
    if asked is None:
        after = await compiler.compile(calls.grammar(opened=True))
        return Until(special_token(compiler.tokenizer, CALL_OPEN), None, after)
    if isinstance(asked, Lark):
        raise InputError(
            "A grammar of its own and tools cannot be combined: name the one or the other, or use "
            'tool_choice "required" or "none".'
        )
    grammar = asked.grammar()
    grammar.rules[ROOT] = choice(grammar.rules[ROOT], calls.add_to(grammar))
    return await compiler.compile(grammar)


async def _without_calls(compiler: Compiler, asked: Specification | None) -> Constraint:
    if asked is not None:
        return await compiler.compile(asked.grammar())
    call = special_token(compiler.tokenizer, CALL_OPEN)
    return Masked(mask_without([call], compiler.tokenizer.size, compiler.vocab))


def _thought_mask(compiler: Compiler, then: Constraint) -> bytes | None:
    """Return the mask inside a thought: no mask if what follows is free anyway, too.

    Otherwise the reply cannot end before what was asked for."""
    if then.mask() is None:
        return None
    tokenizer = compiler.tokenizer
    text = mask_without(tokenizer.special_ids.values(), tokenizer.size, compiler.vocab)
    return with_token(text, special_token(tokenizer, CHANNEL_CLOSE))
