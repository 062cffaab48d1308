"""Structs that the host writes and kernels read, packed by the names of their WGSL fields."""

import math
import re
import struct
from functools import cache

from webgemma.errors import KernelError
from webgemma.kernels.wgsl_file import read_file

_FIELD = re.compile(r"(\w+)\s*:\s*([\w<>]+)\s*,")
_COMMENT = re.compile(r"//[^\n]*")
Value = int | float | tuple[int, int]
MAX_F32 = 3.4028234663852886e38
_TYPES = {"u32": ("I", 1), "f32": ("f", 1), "vec2<u32>": ("2I", 2)}  # struct code, words


class HostStruct:
    """The layout of a struct of u32, f32 and vec2<u32>."""

    def __init__(self, name: str, fields: list[tuple[str, str]]) -> None:
        self.name = name
        self.fields = fields
        self._code, at = "<", 0
        for _, type_ in fields:
            code, words = _TYPES[type_]
            padding = -at % words
            self._code += "4x" * padding + code
            at += padding + words
        self.nbytes = 4 * at + -4 * at % 16

    def pack(self, **values: Value) -> bytes:
        """Return the struct's bytes; KernelError for a missing, unknown or mistyped field."""
        names = [name for name, _ in self.fields]
        for name in {*names} ^ values.keys():
            what = "is missing" if name in names else "is not one of its fields"
            raise KernelError(f"The struct {self.name}: {name} {what}.")
        flat: list[int | float] = []
        for name, type_ in self.fields:
            value = values[name]
            if not _fits(value, type_):
                raise KernelError(f"The struct {self.name}: {name} is {type_}, not {value!r}.")
            flat += value if isinstance(value, tuple) else (value,)
        return struct.pack(self._code, *flat).ljust(self.nbytes, b"\0")


def _fits(value: Value, type_: str) -> bool:
    """Return whether a value is one of a type."""
    if type_ == "f32":
        return type(value) is float and not MAX_F32 < abs(value) < math.inf
    words = value if type(value) is tuple and type_ != "u32" else (value,)
    return len(words) == _TYPES[type_][1] and all(
        type(word) is int and 0 <= word < 1 << 32 for word in words
    )


@cache
def host_struct(path: str, name: str) -> HostStruct:
    """Return the layout of a struct that wgsl/PATH.wgsl declares."""
    for declaration in read_file(path).declarations:
        if declaration.kind == "struct" and declaration.name == name:
            body = _COMMENT.sub("", declaration.text).partition("{")[2]
            return HostStruct(name, _FIELD.findall(body))
    raise KernelError(f"{path}.wgsl declares no struct {name}.")
