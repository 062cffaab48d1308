"""Tool calls under a constraint: they parse, fit their schemas, and all that fit may be written."""

from helpers.constrained import SEEDS, Walker, accepts, small_tokenizer
from helpers.random_tools import RandomTools
from jsonschema import Draft202012Validator

from webgemma.constraints.compiling import Compiler, constrain
from webgemma.constraints.native import LlguidanceCompiler
from webgemma.constraints.tool_calls import tool_calls
from webgemma.constraints.xgrammar import XgrammarCompiler
from webgemma.engine.constraints import Constraint
from webgemma.errors import InputError
from webgemma.sync import run_sync
from webgemma.text.chat import encode_parts
from webgemma.text.inputs import Call
from webgemma.text.parser import parse_reply
from webgemma.text.tools import call_parts

TOKENIZER = small_tokenizer()
# With WEBGEMMA_SEEDS=20, more than 10 000 calls.
SETS = {"LlguidanceCompiler": 250 * (SEEDS or 1), "XgrammarCompiler": 40 * (SEEDS or 1)}
CALLS = 3  # of each set of tools


def calling(
    compiler: Compiler, tools: object, choice: str = "required", **options: bool
) -> Constraint:
    calls = tool_calls(tools, choice, **options)
    constraint = run_sync(constrain(compiler, None, calls))
    assert constraint is not None
    return constraint


def check_random_tools(compiler: Compiler, seed: int) -> int:
    """Check calls of random tools in both directions; return how many the model finished."""
    made = RandomTools(seed)
    tools, makers = made.tools()
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    checkers = {
        name: Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
        for name, schema in schemas.items()
    }
    constraint, refusal = None, ""
    try:
        constraint = calling(compiler, tools)
    except InputError as error:
        refusal = str(error)
    if constraint is None:
        assert isinstance(compiler, XgrammarCompiler)
        assert "takes too long to compile in a browser" in refusal
        return 0
    for name, make in makers.items():
        arguments = make()
        assert checkers[name].is_valid(arguments), (schemas[name], arguments)
        tokens = encode_parts(TOKENIZER, call_parts(Call("", name, arguments), "here"))
        [read] = parse_reply(TOKENIZER.decode(tokens), tools=tools).tool_calls
        assert read.arguments == arguments
        # A browser writes strings whose length is limited without <.
        if isinstance(compiler, LlguidanceCompiler) or "<" not in str(arguments):
            assert accepts(constraint, tokens, TOKENIZER.eos), (schemas[name], arguments)
    finished = 0
    for walk in range(CALLS):
        walked = Walker(TOKENIZER, 1000 * seed + walk, to_end=0.4).walk(constraint.copy())
        if walked is None:
            continue
        finished += 1
        text = TOKENIZER.decode(walked)
        reply = parse_reply(text, tools=tools)
        assert len(reply.tool_calls) == text.count("<|tool_call>") > 0, text
        assert not reply.content
        for call in reply.tool_calls:
            problems = [each.message for each in checkers[call.name].iter_errors(call.arguments)]
            assert not problems, (text, schemas[call.name])
    return finished


def test_calls_of_random_tools(compiler: Compiler) -> None:
    seeds = range(SETS[type(compiler).__name__])
    assert sum(check_random_tools(compiler, seed) for seed in seeds) > len(seeds)
