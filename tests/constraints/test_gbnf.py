"""Grammars in GBNF: texts that they have are allowed in any tokens, and no others."""

import random
import re
import time
from contextlib import suppress
from itertools import product

import pytest
from helpers.constrained import Cutter, accepts, constraint_of, small_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from webgemma.constraints.compiling import Compiler, constrain
from webgemma.constraints.gbnf import gbnf, is_gbnf
from webgemma.constraints.native import LlguidanceCompiler
from webgemma.constraints.specifications import Gbnf, Lark, specification
from webgemma.constraints.tool_calls import tool_calls
from webgemma.engine.constraints import Constraint
from webgemma.errors import InputError
from webgemma.sync import run_sync

TOKENIZER = small_tokenizer()
CUTTER = Cutter(TOKENIZER)

JSON = r"""
# JSON, as llama.cpp's own grammars write it
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value  # a pair
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
SUMS = r"""
  root ::= sum
  sum ::= term ws (("+" | "-") ws term)*
  term ::= number | variable | "(" sum ")" | function-call
  number ::= [0-9]+
  variable ::= [a-zA-Z_][a-zA-Z0-9_]*
  function-call ::= variable ws "(" (sum ("," ws sum)*)? ")"
  ws ::= [ \t\n\r]?
"""
CASES: list[tuple[str, list[str], list[str]]] = [
    (JSON, ["{}", '{"a": [1, -2.5, "x\\n\\u00e9"], "b": {"c": null}}\n  '], ["[]", '{"a"}', "{"]),
    (SUMS, ["42", "x + 10", "x1 + y2", "(a + b)- f(c, d)"], ["+", "/ 3", "x + + y", "12b"]),
    (r'root ::= "\x41\u00e9\U0001F600" [\u00e0-\u00ff]', ["Aé😀é"], ["Aé😀a", "A"]),
    (r'root ::= "\t\r\n\"\\\]"', ['\t\r\n"\\]'], ["t"]),
    ("root ::= .+ [x]", ["abx", "a\nx", "xx"], ["x", "ab"]),
    ("root ::= [^\\]a]+ \"]\"", ["b]", "\n]"], ["a]", "]]"]),
    ("root ::= [-a^.&]+ [b-]", ["-a^.&-", "ab"], ["b", "c-"]),
    ("root ::= [a&&b-]+", ["&-a"], ["c"]),
    ('root ::= word "ing"\nword ::= [a-z]+', ["singing", "inging"], ["ing", "sing a"]),
    ('root ::= ws " x"\nws ::= [ ]*', [" x", "   x"], ["x"]),
    ('root ::= "a" "bc" | "ab" "d"', ["abc", "abd"], ["ab", "abcd"]),
    ('root ::= Foo foo foo-bar fooBar start\nFoo ::= "a"\nfoo ::= "b"\nfoo-bar ::= "c"\n'
     'fooBar ::= "d"\nstart ::= "e"', ["abcde"], ["abcd"]),
    ('root ::= "a" |\n "b"\n  | "c" | ', ["a", "b", "c", ""], ["d"]),
    ('root ::= ("a"{2} | "b"{2,} | "c"{1,2})?', ["aa", "bbb", "c", "cc", ""], ["a", "b", "ccc"]),
    ('root ::= ("a" root)? "b"', ["b", "abb", "aabbb"], ["ab", "abbb"]),
    ('root ::= root "x" | "y"', ["y", "yxx"], ["x", ""]),
    ('root ::= ("(" root ")")*', ["", "()", "(()())()"], ["(", ")("]),
]  # fmt: skip


def allowed(constraint: Constraint, text: str, seed: int = 0) -> bool:
    return accepts(constraint, CUTTER.cut(text, random.Random(seed)), TOKENIZER.eos)


@pytest.mark.parametrize(("grammar", "texts", "others"), CASES)
def test_texts_and_others(
    compiler: Compiler, grammar: str, texts: list[str], others: list[str]
) -> None:
    constraint = constraint_of(compiler, grammar=grammar)
    for seed in range(3):
        for text in texts:
            assert allowed(constraint, text, seed), text
        for text in others:
            assert not allowed(constraint, text, seed), text


ITEMS = st.recursive(
    st.sampled_from(['"a"', '"ab"', "[ab]", "[^a]", '""', "one", "two", '"b"']),
    lambda inner: (
        st.tuples(inner, inner).map(" ".join)
        | st.tuples(inner, inner).map(lambda pair: f"({pair[0]} | {pair[1]})")
        | st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{2,}"])).map(
            lambda pair: f"({pair[0]}){pair[1]}"
        )
    ),
    max_leaves=6,
)
TEXTS = ["".join(letters) for length in range(5) for letters in product("ab", repeat=length)]


def as_regex(grammar: str) -> str:
    """Return the same for Python's `re`: its groups, sets and marks are those of GBNF."""
    return re.sub(r'"(\w*)"', r"(?:\1)", grammar).replace(" ", "")


@given(ITEMS, ITEMS, ITEMS)
def test_what_is_not_recursive_is_as_python_matches_it(one: str, two: str, root: str) -> None:
    one = one.replace("one", '"b"').replace("two", '"a"')
    two = two.replace("two", '"bb"')
    compiler = LlguidanceCompiler(TOKENIZER, TOKENIZER.size)
    compiler._prepared = PREPARED._tokenizer()
    grammar = f"root ::= {root}\none ::= {one}\ntwo ::= {two}"
    within = two.replace("one", f"({one})")
    whole = re.compile(as_regex(root.replace("one", f"({one})").replace("two", f"({within})")))
    constraint = constraint_of(compiler, grammar=grammar)
    for text in TEXTS:
        assert allowed(constraint, text) == bool(whole.fullmatch(text)), (grammar, text)


PREPARED = LlguidanceCompiler(TOKENIZER, TOKENIZER.size)


def test_it_is_told_from_lark() -> None:
    assert is_gbnf(JSON)
    assert is_gbnf(" root ::= start\nstart ::= item")
    assert not is_gbnf('start: "a ::= b"')
    assert not is_gbnf('start: name " ::= " name\nname: /[a-z]+/')
    assert isinstance(specification(grammar=JSON), Gbnf)
    assert isinstance(specification(grammar='start: "a"'), Lark)


def test_it_can_be_beside_calls(native: LlguidanceCompiler) -> None:
    calls = tool_calls([{"name": "clock"}])
    for grammar in ('root ::= "a"', 'root ::= "(" root ")" | "a"'):
        constraint = run_sync(constrain(native, specification(grammar=grammar), calls))
        assert constraint is not None
        assert allowed(constraint, "a")
        call = TOKENIZER.encode("<|tool_call>call:clock{}<tool_call|>", special=True)
        assert accepts(constraint, call, TOKENIZER.eos)
        inside = TOKENIZER.encode("(<|tool_call>call:clock{}<tool_call|>)", special=True)
        assert not accepts(constraint, inside, TOKENIZER.eos)


@pytest.mark.parametrize(
    ("grammar", "sentence"),
    [
        ("word ::= [a-z]", "no rule 'root'"),
        ("root ::= word", "no rule 'word', to which 'root' refers"),
        ('root ::= "a"\nroot ::= "b"', "two rules 'root'"),
        ('root ::= "a', 'ends before "'),
        ("root ::= [a", "ends before ]"),
        ("root ::= [z-a]", "begins after its end"),
        ("root ::= [^\\x00-\\U0010FFFF]", "is empty"),
        ('root ::= ("a"', r"a \( has no \)"),
        ('root ::= "a")', "cannot stand here"),
        ('root ::= "a"\n  "b"', "line 2, there must be the name"),
        ('root ::= "a"**', "follows a repetition"),
        ('root ::= "a"{', "must begin {m}"),
        ('root ::= "a"{3,2}', "cannot be used"),
        (f'root ::= "a"{{{"9" * 5000}}}', "cannot be used"),
        ('root ::= "\\q"', "stands for nothing"),
        ('root ::= "\\u12"', "digits of a character"),
        ('root ::= "\\ud800"', "digits of a character"),
        ("root ::= <[10]> !<think>", "tokens"),
        ("root ::= " + "(" * 100, "levels deep"),
        ("root ::= a\nb", "::= must follow"),
        ("root ::= é", "cannot stand here"),
        ('root ::= "a" x | root\nx ::= ("b" root)+', "'root' stands for no text"),
    ],
)
def test_what_cannot_be_used_gets_a_sentence(grammar: str, sentence: str) -> None:
    with pytest.raises(InputError, match=f"^grammar cannot be used: .*{sentence}.*[.]$"):
        gbnf(grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(2000)) + '\nr2000 ::= "a"',
        "\n".join(f'r{n} ::= (r{n + 1} "a")*' for n in range(2000)) + '\nr2000 ::= "a"',
        "r0 ::= " + '"a" ' * 15_000,
        "r0 ::= " + "|" * 60_000,
        "r0 ::= " + '("a")*' * 10_000,
        'r0 ::= "' + "a" * 60_000 + '"',
        'r0 ::= (((("a"{9999}){9999}){9999}){9999})',
        "r0 ::= r0 " * 10 + "\n" * 60_000,
    ],
    ids=range(8),
)
def test_large_ones_are_read_soon(grammar: str) -> None:
    """A stranger's grammar may be as long as it likes up to a limit."""
    began = time.monotonic()
    with suppress(InputError):
        run_sync(constrain(PREPARED, specification(grammar=f"root ::= r0\n{grammar}")))
    assert time.monotonic() - began < 10
