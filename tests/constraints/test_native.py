"""The native compiler: grammars of any depth, several at once, and one that cannot be read."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from helpers.constrained import accepts, constraint_of, small_tokenizer
from helpers.live_server import wait_until

from webgemma.constraints import native
from webgemma.constraints.compiling import constrain
from webgemma.constraints.native import LlguidanceCompiler, check_lark
from webgemma.constraints.specifications import specification
from webgemma.errors import InputError
from webgemma.sync import drive_aside, run_sync

TOKENIZER = small_tokenizer()
SLOW = {  # each of many patterns takes about a second
    "properties": {f"p{n}": {"pattern": "^(ab|c)*$", "minLength": 2000} for n in range(2000)},
}


def test_depth_does_not_end_the_process() -> None:
    """llguidance follows rules by recursion: in a small stack, these end in a crash."""
    compiler = LlguidanceCompiler(TOKENIZER, TOKENIZER.size)
    wide = {"type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(4000)}}
    chain = "start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(4500)) + '\nr4500: "a"'
    stars = (
        "start: R0\n" + "\n".join(f'R{n}: ("a" R{n + 1})*' for n in range(2500)) + '\nR2500: "a"'
    )
    before = threading.stack_size(512 << 10)  # as macOS's threads have it
    try:
        with ThreadPoolExecutor(1) as pool:
            for asked in ({"schema": wide}, {"grammar": chain}, {"grammar": stars}):
                mask = pool.submit(lambda asked=asked: constraint_of(compiler, **asked).mask())
                assert any(mask.result())
            pool.submit(check_lark, chain).result()
    finally:
        threading.stack_size(before)


def test_a_thousand_properties_are_followed_to_the_end() -> None:
    compiler = LlguidanceCompiler(TOKENIZER, TOKENIZER.size)
    wide = {"type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(1000)}}
    constraint = constraint_of(compiler, schema=wide)
    assert accepts(constraint, TOKENIZER.encode('{"p0":null,"p999":null}'), TOKENIZER.eos)


def test_a_limit_of_the_library_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "MAX_ITEMS", 100)
    compiler = LlguidanceCompiler(TOKENIZER, TOKENIZER.size)
    wide = {"type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(100)}}
    constraint = constraint_of(compiler, schema=wide)
    tokens = TOKENIZER.encode('{"p0":null,"p99":null}')
    with pytest.raises(InputError, match=r"cannot be followed: .* items"):
        list(map(constraint.accept, tokens))


def test_lark_is_checked_without_a_vocabulary() -> None:
    check_lark('start: "a" <[5]>')
    for wrong in ("start: (", "start: other", "start: /(/", 'start: "a" %%'):
        with pytest.raises(InputError, match=r"^The grammar cannot be used: .*[.]$"):
            check_lark(wrong)


def test_errors_of_lark_count_the_lines_of_the_grammar() -> None:
    compiler = LlguidanceCompiler(TOKENIZER, TOKENIZER.size)
    with pytest.raises(InputError, match=r'at 2\(4\): unknown name: "y" 1 \| start: x 2 \|'):
        constraint_of(compiler, grammar="start: x\nx: y")
    with pytest.raises(InputError, match=r"cannot be followed: no text of it begins like this\.$"):
        constraint_of(compiler, grammar="start: x\nx: start").mask()


def test_nobody_waits_for_another_ones_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = LlguidanceCompiler(TOKENIZER, TOKENIZER.size)
    run_sync(compiler.prepare())
    held, deep = threading.Event(), native._with_deep_stacks
    waiting: list[int] = []

    def hold(*functions: Any) -> Any:
        if threading.current_thread().name == "hard":
            waiting.append(1)
            assert held.wait(30)
        return deep(*functions)

    monkeypatch.setattr(native, "_with_deep_stacks", hold)
    hard = threading.Thread(target=lambda: constraint_of(compiler, choices=["hard"]), name="hard")
    hard.start()
    try:
        wait_until(lambda: bool(waiting))
        assert constraint_of(compiler, choices=["easy"]).mask()
    finally:
        held.set()
        hard.join()
    assert len(compiler._compiled) == 2


def test_what_takes_long_can_be_cancelled() -> None:
    compiler = LlguidanceCompiler(TOKENIZER, TOKENIZER.size)

    async def main() -> float:
        slow = asyncio.create_task(drive_aside(constrain(compiler, specification(schema=SLOW))))
        await asyncio.sleep(0.3)
        began = time.monotonic()
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        return time.monotonic() - began

    assert asyncio.run(main()) < 5


def test_it_is_prepared_once() -> None:
    compiler = LlguidanceCompiler(TOKENIZER, TOKENIZER.size)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(lambda: run_sync(compiler.prepare()))
    assert compiler._tokenizer() is compiler._tokenizer()
