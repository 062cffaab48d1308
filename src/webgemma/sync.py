"""Plain code over coroutines that never suspend: natively every wait blocks, without a loop."""

from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, at once; also inside a running event loop (Jupyter)."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise RuntimeError("This has to be awaited here: use the method whose name begins with 'a'.")


def iterate_sync(stream: AsyncGenerator[T, None]) -> Iterator[T]:
    """The items of an asynchronous generator, one by one; closing this closes it."""
    try:
        while True:
            try:
                yield run_sync(_next(stream))
            except StopAsyncIteration:
                return
    finally:
        run_sync(_close(stream))


async def _next(stream: AsyncGenerator[T, None]) -> T:
    return await anext(stream)


async def _close(stream: AsyncGenerator[Any, None]) -> None:
    await stream.aclose()
