"""Faces: a public method is declared once, as a private coroutine or asynchronous generator.

Its plain face blocks, its asynchronous face can be awaited; both have its signature, with each key
of its settings, and its documentation."""

import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from functools import update_wrapper
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, get_args, get_type_hints

from webgemma.sync import Worker

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class HasWorker(Protocol):
    """An object whose coroutines one worker drives."""

    worker: Worker


S = TypeVar("S", bound=HasWorker)
W = TypeVar("W", bound=HasWorker)


def plain(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]], *, brief: bool = False
) -> Callable[Concatenate[S, P], T]:
    """Return a coroutine method's plain face; a `brief` one runs between the steps of streams."""

    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.worker.run(method(self, *args, **kwargs), brief=brief)

    return _named(call, method, "")


def asynchronous(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, T]], *, brief: bool = False
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Return a coroutine method's asynchronous face; see `plain`."""

    async def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.worker.arun(method(self, *args, **kwargs), brief=brief)

    return _named(call, method, "a")


def plain_stream(
    method: Callable[Concatenate[S, P], AsyncGenerator[T, None]],
    wrap: Callable[[Iterator[T], object], Iterator[T]] | None = None,
) -> Callable[Concatenate[S, P], Iterator[T]]:
    """Return the plain face of a method that is an asynchronous generator.

    `wrap` may make something else of the iterator and the first argument."""

    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        items = self.worker.iterate(method(self, *args, **kwargs))
        return wrap(items, _first(args, kwargs)) if wrap else items

    face = _named(call, method, "")
    signature = inspect.signature(face)
    item = get_args(signature.return_annotation)[0]
    iterator: Any = Iterator  # a value here, not a type
    face.__dict__["__signature__"] = signature.replace(return_annotation=iterator[item])
    return face


def asynchronous_stream(
    method: Callable[Concatenate[S, P], AsyncGenerator[T, None]],
    wrap: Callable[[AsyncGenerator[T, None], object], AsyncGenerator[T, None]] | None = None,
) -> Callable[Concatenate[S, P], AsyncGenerator[T, None]]:
    """Return the asynchronous face of a method that is an asynchronous generator; `wrap` as in
    `plain_stream`."""

    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[T, None]:
        items = self.worker.aiterate(method(self, *args, **kwargs))
        return wrap(items, _first(args, kwargs)) if wrap else items

    return _named(call, method, "a")


def _first(args: tuple[object, ...], named: Mapping[str, object]) -> object:
    return next(iter((*args, *named.values())), None)


class _Constructor(Generic[P, R]):
    """A face of a class method that constructs an object; it is called on the class."""

    def __init__(self, face: Callable[..., Any], method: Callable[..., Any], prefix: str) -> None:
        self._face = _named(face, method, prefix)

    def __get__(self, instance: object, owner: type) -> Callable[P, R]:
        return MethodType(self._face, owner)


def plain_constructor(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, W]],
) -> _Constructor[P, W]:
    """Return the plain face of a class method whose coroutine constructs an object."""
    construct = method.__func__  # type: ignore[attr-defined]

    def call(cls: type[W], /, *args: P.args, **kwargs: P.kwargs) -> W:
        worker = Worker()
        constructed: W = worker.run(construct(cls, *args, **kwargs))
        constructed.worker = worker
        return constructed

    return _Constructor(call, construct, "")


def asynchronous_constructor(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, W]],
) -> _Constructor[P, Coroutine[Any, Any, W]]:
    """Return the asynchronous face of a class method whose coroutine constructs an object."""
    construct = method.__func__  # type: ignore[attr-defined]

    async def call(cls: type[W], /, *args: P.args, **kwargs: P.kwargs) -> W:
        worker = Worker()
        constructed: W = await worker.arun(construct(cls, *args, **kwargs))
        constructed.worker = worker
        return constructed

    return _Constructor(call, construct, "a")


class _LeftOut:
    """The default of a keyword that may be left out, as help() shows it."""

    def __repr__(self) -> str:
        return "..."


_LEFT_OUT = _LeftOut()


def _named(face: F, method: Callable[..., Any], prefix: str) -> F:
    """Give a face the documentation and signature of its method, and a public name."""
    update_wrapper(face, method)
    name = prefix + method.__name__.lstrip("_")
    face.__qualname__ = face.__qualname__.replace(method.__name__, name)
    face.__name__ = name
    keywords = _keywords(method)
    if keywords is not None:
        signature, documentation = _with_keywords(inspect.signature(method), keywords)
        face.__dict__["__signature__"] = signature
        face.__doc__ = f"{inspect.cleandoc(face.__doc__ or '')}\n\n{documentation}"
    return face


def _keywords(method: Callable[..., Any]) -> type | None:
    """Return the TypedDict of a method's keyword arguments, if it has `**name: Unpack[…]`."""
    last = [*inspect.signature(method).parameters.values()][-1:]
    unpacked = [get_args(p.annotation) for p in last if p.kind is p.VAR_KEYWORD]
    return next((types[0] for types in unpacked if types), None)


def _with_keywords(signature: inspect.Signature, keywords: type) -> tuple[inspect.Signature, str]:
    """Name each key of a TypedDict in a signature; return that, and what the keys mean."""
    *before, last = signature.parameters.values()
    named = [
        inspect.Parameter(name, last.KEYWORD_ONLY, default=_LEFT_OUT, annotation=type_)
        for name, type_ in get_type_hints(keywords).items()
    ]
    meaning = f"{last.name.capitalize()}:\n\n{inspect.cleandoc(keywords.__doc__ or '')}"
    return signature.replace(parameters=[*before, *named]), meaning
