"""One .wgsl file as the linker sees it: the slots it uses, its parameters and its declarations.

The files are WGSL with three liberties. `// uses:` in the opening comment names the slots that the
file needs; `slot@copy` is a slot once more for another matrix, with names that end with the copy's
where they depend on the format, which `format_copy` chooses. Bindings have no numbers, and every
file declares in `struct Params` only the parameters that it reads itself; the linker numbers the
bindings and unites the structs. `override` declares a constant that the caller gives; it becomes a
`const`, since array sizes must be one."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import NamedTuple

_USES = re.compile(r"^// uses:(.*)$", re.M)
_COMMENT = re.compile(r"//[^\n]*")
# A name that is neither a member of a struct nor declared here.
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*(?!\w)(?!\s*:[^:])")
_NAMED = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
_PARAM = re.compile(r"(?<![\w.])params\.(\w+)")
_START = re.compile(
    r"(?:@\w+(?:\([^)]*\))?\s*)*"
    r"(?P<kind>struct|alias|const_assert|const|override|var|fn)\b(?:<(?P<space>[^>]*)>)?\s*(?P<name>\w*)"
)
_FIELD = re.compile(r"(\w+)\s*:\s*(\w+)\s*,")
_OVERRIDE = re.compile(r"override\s+\w+\s*:\s*(\w+)\s*(?:=\s*([^;]+?)\s*)?;")


class Field(NamedTuple):
    """A parameter: four bytes of the uniform."""

    name: str
    type: str  # u32 or f32


class Slot(NamedTuple):
    """Something a file needs that one of several files provides."""

    name: str
    pinned: str  # the provider that the file insists on, or ""
    copy: str = ""  # not the slot itself but a copy of it, for another matrix


@dataclass(frozen=True, slots=True)
class Declaration:
    """A declaration of module scope, with the comment above it."""

    kind: str  # struct, alias, const_assert, const, override, var or fn
    name: str
    space: str  # of a var: "storage, read", "workgroup", …
    text: str
    names: frozenset[str]  # that it mentions
    params: frozenset[str]  # that it reads

    @property
    def binding(self) -> str:
        """The access of a bound buffer: read, write or uniform; empty for everything else."""
        accesses = {"storage": "read", "storage, read": "read", "storage, read_write": "write"}
        return accesses.get(self.space, "uniform" if self.space == "uniform" else "")

    def copied(self, copy: str, names: frozenset[str]) -> "Declaration":
        """Return a copy in which these names and all parameters end with that of the copy."""

        def renamed(name: str) -> str:
            return f"{name}_{copy}" if name in names else name

        text = _PARAM.sub(rf"params.\1_{copy}", self.text)
        text = _NAMED.sub(lambda found: renamed(found[0]), text)
        params = frozenset(f"{name}_{copy}" for name in self.params)
        mentioned = frozenset(map(renamed, self.names))
        return replace(self, name=renamed(self.name), text=text, names=mentioned, params=params)

    @property
    def override(self) -> tuple[str, str]:
        """The type and the default ("": none) of an override."""
        found = _OVERRIDE.search(_COMMENT.sub("", self.text))
        assert found is not None, self.text
        return found[1], found[2] or ""


@dataclass(frozen=True, slots=True)
class WgslFile:
    """A parsed file."""

    path: str  # "ops/norm"
    summary: str  # the opening comment, without the slots
    slots: tuple[Slot, ...]
    params: tuple[Field, ...]
    declarations: tuple[Declaration, ...]

    @property
    def own_names(self) -> frozenset[str]:
        """The names that it declares, but for overrides, which all files share."""
        return frozenset(d.name for d in self.declarations if d.name and d.kind != "override")

    def copied(self, copy: str, names: frozenset[str]) -> "WgslFile":
        """Return a copy in which these names and all parameters end with that of the copy."""
        declarations = tuple(d.copied(copy, names) for d in self.declarations)
        params = tuple(Field(f"{name}_{copy}", type_) for name, type_ in self.params)
        return WgslFile(f"{self.path}@{copy}", self.summary, self.slots, params, declarations)


@cache
def read_file(path: str) -> WgslFile:
    """Return wgsl/PATH.wgsl, parsed."""
    return parse(path, _folder().joinpath(f"{path}.wgsl").read_text("utf-8"))


@cache
def names_in(folder: str) -> tuple[str, ...]:
    """Return the files of wgsl/FOLDER without their ending; none if there is no such folder."""
    found = _folder().joinpath(folder)
    if not found.is_dir():
        return ()
    return tuple(sorted(f.name[:-5] for f in found.iterdir() if f.name.endswith(".wgsl")))


def parse(path: str, text: str) -> WgslFile:
    """Split a file into its opening comment, its parameters and its declarations."""
    header, _, body = text.partition("\n\n")
    if not header.startswith("//"):
        header, body = "", text
    slots = [_slot(word) for line in _USES.findall(header) for word in line.split()]
    lines = [line.removeprefix("//").strip() for line in _USES.sub("", header).splitlines()]
    declarations = tuple(_declarations(body))
    params = [d.text for d in declarations if d.kind == "struct" and d.name == "Params"]
    fields = [Field(*pair) for text in params for pair in _FIELD.findall(_COMMENT.sub("", text))]
    kept = tuple(d for d in declarations if d.name != "Params")
    return WgslFile(path, " ".join(filter(None, lines)), tuple(slots), tuple(fields), kept)


def _slot(word: str) -> Slot:
    name, _, pinned = word.partition("=")
    name, _, copy = name.partition("@")
    return Slot(name, pinned, copy)


def _declarations(text: str) -> Iterator[Declaration]:
    at = comment_at = 0
    while at < len(text):
        if text[at].isspace():
            comment_at = at + 1 if text[at : at + 2] == "\n\n" else comment_at
            at += 1
        elif text.startswith("//", at):
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        else:
            start = _START.match(text, at)
            if start is None:
                raise ValueError(f"no declaration begins with {text[at : at + 40]!r}")
            end = _end(text, at, start["kind"] in ("struct", "fn"))
            yield _declaration(start, text[comment_at:end].strip(), text[at:end])
            at = comment_at = end


def _declaration(start: re.Match[str], text: str, code: str) -> Declaration:
    code = _COMMENT.sub("", code)
    name = "" if start["kind"] == "const_assert" else start["name"]
    names = frozenset(_NAME.findall(code)) - {name}
    space = start["space"] or ""
    return Declaration(start["kind"], name, space, text, names, frozenset(_PARAM.findall(code)))


def _end(text: str, at: int, braced: bool) -> int:
    """Return where a declaration ends: after its body or semicolon, and a comment behind that."""
    depth = 0
    while True:
        if text.startswith("//", at):
            at = text.index("\n", at)
        character = text[at]
        depth += (character in "{([") - (character in "})]")
        at += 1
        if depth == 0 and character == ("}" if braced else ";"):
            break
    rest = re.compile(r"[ \t]*//[^\n]*").match(text, at)
    return rest.end() if rest else at


def _folder() -> Traversable:
    return files(__package__).joinpath("wgsl")
