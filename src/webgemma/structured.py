"""Structured replies: what a model's replies keep to, compiled when it is needed, and their values.

A reply of `Gemma` that has a structure is driven in three steps: its constraint is compiled aside,
the tokens keep to it, and the last piece gets the value that the text stands for."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from webgemma.constraints.compiling import Compiler, open_compiler
from webgemma.constraints.specifications import specification
from webgemma.constraints.structure import Structure
from webgemma.engine.constraints import Constraint
from webgemma.errors import InputError
from webgemma.gemma.config import Config
from webgemma.replies import Piece
from webgemma.sync import Aside
from webgemma.text.inputs import wrong_type
from webgemma.text.tokenizer import Tokenizer

COMPILE_SECONDS = 30.0  # that a schema or grammar may take on an event loop
EXTRACT = "Extract the data from this text as JSON:"


class Structures:
    """What makes constraints for the replies of one model."""

    def __init__(self, name: str, config: Config, tokenizer: Callable[[], Tokenizer]) -> None:
        """`tokenizer` returns the model's, or raises the error that it has none."""
        self.name, self.config = name, config
        self._tokenizer = tokenizer
        self._compiler: Compiler | None = None

    @property
    def compiler(self) -> Compiler:
        """What compiles; it is opened when it is first needed."""
        if self._compiler is None:
            self._compiler = open_compiler(self._tokenizer(), self.config.vocab)
        return self._compiler

    def compiling(
        self, structure: Structure, *, think: bool = False, in_thought: bool = False
    ) -> "Aside[Constraint | None] | None":
        """Return an item for who drives a stream, whose result is what the reply keeps to.

        None if the reply is free; InputError if it should keep to something and cannot."""
        if self.config.diffusion and structure.is_required:
            raise InputError(
                f"{self.name} denoises whole canvases: it cannot keep to a schema, a pattern or a "
                "tool; ask another Gemma 4."
            )
        if self.config.diffusion or structure.is_free:
            return None
        compiler = self.compiler
        return Aside(
            lambda: structure.constraint(compiler, think=think, in_thought=in_thought),
            COMPILE_SECONDS,
            InputError(
                f"What the reply should keep to takes more than {COMPILE_SECONDS:.0f} seconds to "
                "compile: ask for less."
            ),
        )


async def with_value(
    stream: AsyncGenerator[Any, None], structure: Structure
) -> AsyncGenerator[Any, None]:
    """Yield pieces; the last one of a complete reply has what it stands for."""
    text = ""
    async with aclosing(stream) as pieces:
        async for piece in pieces:
            if structure.asked is not None and isinstance(piece, Piece):
                text += piece.text
                if piece.finish == "stop":
                    yield replace(piece, value=structure.value(text))
                    continue
            yield piece


def extraction(text: str, schema: Any, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the prompt with which data are extracted from a text, and the options of the chat."""
    if not isinstance(text, str):
        raise wrong_type(text, "text", "a string")
    if schema is None:
        raise InputError("schema is missing: give a JSON Schema, or a Python type.")
    return f"{EXTRACT}\n\n{text}", {"temperature": 0.0, "schema": schema, **options}


def extracted(pieces: Sequence[Piece], schema: Any) -> Any:
    """Return what was extracted, from the reply; InputError if that is nothing."""
    if not pieces or pieces[-1].finish != "stop":
        raise InputError("The reply was cut off before it was complete: allow more max_tokens.")
    asked = specification(schema=schema)
    assert asked is not None
    return asked.parse("".join(piece.text for piece in pieces))
