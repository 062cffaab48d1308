"""Linking kernels: an op, its weight format and the providers of its slots become one program."""

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TypeVar

from webgemma.device import Kernel
from webgemma.device.subgroups import ENABLE
from webgemma.errors import KernelError
from webgemma.kernels.wgsl_file import Declaration, Field, Slot, WgslFile, names_in, read_file

# Slots whose provider the device decides: the first whose feature it has, else "memory".
TEAMS = ("32", "16", "8", "4")
HARDWARE = {
    "workgroup_sum": tuple(("shuffle", f"shuffle{size}") for size in TEAMS),
    "workgroup_max": tuple(("shuffle", f"shuffle{size}") for size in TEAMS),
    "team": tuple((size, f"shuffle{size}") for size in TEAMS),
    "lane_sum": (("shuffle", "shuffle{LANES}"),),
    "eight_lanes": (("shuffle", "shuffle8"),),
}

# The first lines of a program that uses matrix units. Its matrices are the same for a whole
# subgroup, which the compiler cannot prove: it only knows what is the same for a workgroup.
ENABLE_MATRICES = """enable f16;
enable chromium_experimental_subgroup_matrix;
diagnostic(off, chromium.subgroup_matrix_uniformity);
"""

EXAMPLE_FORMAT = "Q4_K"

Constant = int | float | bool
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Program:
    """A linked kernel and its signature: the parameters and bindings that a call has to give."""

    kernel: Kernel
    params: tuple[Field, ...]
    bindings: tuple[str, ...]  # in the order of the kernel's bindings, after the parameters

    def pack(self, given: Mapping[str, int | float]) -> bytes:
        """Return the uniform's bytes; KernelError for a missing, unknown or mistyped parameter."""
        self._check(given, [field.name for field in self.params], "parameter")
        for field in self.params:
            value = given[field.name]
            if type(value) is not (int if field.type == "u32" else float):
                raise KernelError(
                    f"{self.kernel.name}: the parameter {field.name} is {field.type}, and "
                    f"{value!r} is of type {type(value).__name__}."
                )
        codes = "".join("I" if field.type == "u32" else "f" for field in self.params)
        try:
            return struct.pack("<" + codes, *(given[field.name] for field in self.params))
        except (struct.error, OverflowError) as error:
            raise KernelError(f"{self.kernel.name}: {error} ({dict(given)}).") from error

    def order(self, given: Mapping[str, T]) -> tuple[T, ...]:
        """Return tensors in the order of the bindings; KernelError for missing or unknown ones."""
        self._check(given, self.bindings, "binding")
        return tuple(given[name] for name in self.bindings)

    def _check(self, given: Mapping[str, object], wanted: Iterable[str], kind: str) -> None:
        wanted = list(wanted)
        known = f"it takes {', '.join(wanted) or 'none'}"
        for name in given:
            if name not in wanted:
                raise KernelError(f"{self.kernel.name} has no {kind} {name}; {known}.")
        for name in wanted:
            if name not in given:
                raise KernelError(f"{self.kernel.name} is called without its {kind} {name}.")


def link(
    op: str,
    features: frozenset[str],
    *,
    constants: Mapping[str, Constant] | None = None,
    providers: Mapping[str, str] | None = None,
) -> Program:
    """Return the program of an op for a device with these features.

    `providers` says which file fills each of its slots (that of `format`: a weight format), and
    `constants` are the values of its overrides."""
    return _link(
        op,
        features,
        tuple((name, type(value), value) for name, value in sorted((constants or {}).items())),
        tuple(sorted((providers or {}).items())),
    )


@lru_cache(maxsize=4096)
def _link(
    op: str,
    features: frozenset[str],
    constants: tuple[tuple[str, type, Constant], ...],  # with types: 1 == 1.0 == True
    providers: tuple[tuple[str, str], ...],
) -> Program:
    linker = Linker(op, features, {name: value for name, _, value in constants}, dict(providers))
    missing = linker.missing_constants()
    if missing:
        raise KernelError(f"{linker.name} is linked without a value for {', '.join(missing)}.")
    return linker.program()


@cache
def unit(format: str) -> int:
    """Return how many weights one call of a format's decode returns."""
    found = next(d for d in read_file(f"formats/{format.lower()}").declarations if d.name == "UNIT")
    return int(found.text.partition("=")[2].split("u")[0])


class Linker:
    """The files of one program, and what of them the op's main reaches.

    With `complete`, slots that are left open get their first provider, and weights EXAMPLE_FORMAT,
    for a program to read rather than to run."""

    def __init__(
        self,
        op: str,
        features: frozenset[str],
        constants: Mapping[str, Constant] | None = None,
        providers: Mapping[str, str] | None = None,
        *,
        complete: bool = False,
    ) -> None:
        if op not in names_in("ops"):
            raise KernelError(f"There is no op {op!r}", "`webgemma kernels` lists them")
        self.op = op
        self.features = features
        self.constants = dict(constants or {})
        self.chosen: dict[str, str] = {}  # the provider of each slot
        self._pinned: dict[str, str] = {}  # those that files insist on
        self._complete = complete
        slots = dict(providers or {})
        for slot, provider in slots.items():
            if type(provider) is not str or not provider:
                raise KernelError(f"{op}: the provider of {slot} cannot be {provider!r}.")
        self.format = slots.pop("format", "")
        self.copied_formats: dict[str, str] = {}  # of each copy
        self._files = self._collect(slots)
        self._reached = self._reach()
        self._check_constants()

    @property
    def name(self) -> str:
        """The op, the format, and the provider of every slot that is linked and leaves a choice."""
        reached = set(map(id, self._reached))
        linked = {f.path for f in self._files if any(id(d) in reached for d in f.declarations)}
        free = {
            slot: provider
            for slot, provider in self.chosen.items()
            if slot not in self._pinned
            and len(names_in(f"lib/{slot}")) > 1
            and f"lib/{slot}/{provider}" in linked
        }
        free |= {f"format_{copy}": format for copy, format in self.copied_formats.items()}
        stem = f"{self.op}/{self.format}" if self.format else self.op
        return " ".join([stem, *(f"{slot}={free[slot]}" for slot in sorted(free))])

    def missing_constants(self) -> list[str]:
        """Return the overrides that have neither a value nor a default."""
        return [n for n, d in self._overrides().items() if n not in self.constants and not d[1]]

    def program(self) -> Program:
        """Return the linked program; overrides without a value stay what they are."""
        bindings = [d for d in self._reached if d.binding]
        params = self._params()
        # Every device binds eight storage buffers.
        in_storage = "params-in-storage" in self.features and len(bindings) < 8
        kinds = (["read" if in_storage else "uniform"] if params else []) + [
            d.binding for d in bindings
        ]
        numbers = {d.name: i + bool(params) for i, d in enumerate(bindings)}
        space = "storage, read" if in_storage else "uniform"
        wgsl = "\n".join([*self._head(params, space), *self._body(numbers)])
        if "enable-subgroups" in self.features and "subgroup" in wgsl:
            wgsl = ENABLE + wgsl
        if "subgroup_matrix" in wgsl:
            wgsl = ENABLE_MATRICES + wgsl
        names = tuple(d.name for d in bindings)
        taken = {field.name for field in params} & set(names)
        if taken:
            raise KernelError(f"{self.name}: {min(taken)} is both a parameter and a binding.")
        return Program(Kernel(self.name, wgsl + "\n", tuple(kinds)), params, names)

    def _head(self, params: tuple[Field, ...], space: str) -> Iterator[str]:
        for name, (type_, default) in self._overrides().items():
            if name in self.constants:
                default = self._literal(name, type_)
            yield f"const {name}: {type_} = {default};" if default else f"override {name}: {type_};"
        if params:
            fields = "".join(f"    {field.name}: {field.type},\n" for field in params)
            yield f"\nstruct Params {{\n{fields}}}\n"
            yield f"@group(0) @binding(0) var<{space}> params: Params;"

    def _body(self, numbers: Mapping[str, int]) -> Iterator[str]:
        """Yield the reached declarations, under the names of their files."""
        reached = set(map(id, self._reached))
        for file in self._files:
            declarations = [d for d in file.declarations if id(d) in reached]
            if declarations:
                yield f"\n// {file.path}.wgsl"
            for declaration in declarations:
                text = declaration.text
                if declaration.name in numbers:
                    number = numbers[declaration.name]
                    text = text.replace("var<", f"@group(0) @binding({number}) var<", 1)
                yield f"\n{text}" if declaration.kind in ("fn", "struct") else text

    # Files

    def _collect(self, providers: dict[str, str]) -> list[WgslFile]:
        """Return the op's file and all that it uses, those it uses first; fill `chosen`."""
        op = read_file(f"ops/{self.op}")
        copies = [slot for slot in op.slots if slot.copy]
        formats = {slot.copy: providers.pop(f"format_{slot.copy}", "") for slot in copies}
        self._find_pinned(op, providers)
        files: dict[str, WgslFile] = {}

        def add(file: WgslFile) -> None:
            for slot in file.slots:
                path = self._path(slot.name, providers)
                if path not in files and path != file.path:
                    add(read_file(path))
            files.setdefault(file.path, file)

        add(op)
        for copy in copies:
            self._copy(copy, formats[copy.copy], files, providers)
        for slot in providers:
            if slot not in self.chosen:
                raise KernelError(f"{self.op} has no slot {slot}; it has {', '.join(self.chosen)}.")
        if self.format and not any(path.startswith("formats/") for path in files):
            raise KernelError(f"{self.op} reads no weights: it is linked without a format.")
        return list(files.values())

    def _copy(
        self, slot: Slot, format: str, files: dict[str, WgslFile], providers: Mapping[str, str]
    ) -> None:
        """Add copies of those files of a slot that depend on the format, for another format."""
        copied: dict[str, WgslFile] = {}

        def depends(path: str) -> bool:
            file = files[path]
            found = [depends(self._path(s.name, providers)) for s in file.slots]
            if any(found) or path.startswith("formats/"):
                copied[path] = file
            return path in copied

        depends(self._path(slot.name, providers))
        own = self._format_path(format)
        self.copied_formats[slot.copy] = own.removeprefix("formats/").upper()
        sources = [read_file(own) if p.startswith("formats/") else f for p, f in copied.items()]
        names = frozenset(name for file in sources for name in file.own_names)
        op = files.pop(f"ops/{self.op}")
        for file in sources:
            copy = file.copied(slot.copy, names)
            files.setdefault(copy.path, copy)
        files[op.path] = op

    def _find_pinned(self, op: WgslFile, providers: Mapping[str, str]) -> None:
        """Note the providers that files insist on, whichever file comes first."""
        pinned = self._pinned
        todo, seen = [op], set[str]()
        while todo:
            file = todo.pop()
            seen.add(file.path)
            for slot in file.slots:
                if slot.pinned and pinned.setdefault(slot.name, slot.pinned) != slot.pinned:
                    raise KernelError(
                        f"{self.op}: {file.path} needs {slot.name}={slot.pinned}, "
                        f"another file {slot.name}={pinned[slot.name]}."
                    )
                provider = slot.pinned or providers.get(slot.name, "")
                known = names_in(f"lib/{slot.name}")
                provider = provider or self._default(slot.name, known)
                path = f"lib/{slot.name}/{provider}"
                if provider in known and path not in seen:
                    todo.append(read_file(path))

    def _path(self, slot: str, providers: Mapping[str, str]) -> str:
        if slot == "format":
            self.format = self.format or EXAMPLE_FORMAT * self._complete
            return self._format_path(self.format)
        known = names_in(f"lib/{slot}")
        provider = self._pinned.get(slot) or providers.get(slot) or self._default(slot, known)
        if slot in self._pinned and providers.get(slot, provider) != provider:
            raise KernelError(f"{self.op} needs {slot}={provider}, not {providers[slot]}.")
        if provider not in known:
            raise KernelError(
                f"{self.op}: the slot {slot} needs a provider, {' or '.join(known) or 'of none'}"
                + (f", not {provider!r}." if provider else ".")
            )
        self.chosen[slot] = provider
        return f"lib/{slot}/{provider}"

    def _format_path(self, format: str) -> str:
        format = format or EXAMPLE_FORMAT * self._complete
        if not format.isupper() or format.lower() not in names_in("formats"):
            what = f"the format {format!r}" if format else "a weight format"
            raise KernelError(f"{self.op} needs {what}; there is no such file in formats/.")
        return f"formats/{format.lower()}"

    def _default(self, slot: str, known: tuple[str, ...]) -> str:
        for provider, feature in HARDWARE.get(slot, ()):
            if feature.format_map(_Lenient(self.constants)) in self.features:
                return provider
        if slot in HARDWARE and "memory" in known:
            return "memory"
        return known[0] if len(known) == 1 or (known and self._complete) else ""

    # Declarations

    def _reach(self) -> list[Declaration]:
        """Return what main needs, directly or not, in the order of the files."""
        declared = {d.name: d for file in self._files for d in file.declarations if d.name}
        reached, todo = set[str](), ["main"]
        while todo:
            name = todo.pop()
            if name in declared and name not in reached:
                reached.add(name)
                todo += declared[name].names
        found = []
        for declaration in (d for file in self._files for d in file.declarations):
            if declaration.kind == "const_assert":
                if all(name in reached for name in declaration.names if name in declared):
                    found.append(declaration)
            elif declaration.kind != "override" and declaration.name in reached:
                if declared[declaration.name] is not declaration:
                    raise KernelError(f"{self.op}: {declaration.name} is declared by two files.")
                found.append(declaration)
        self._mentioned = reached | {name for d in found for name in d.names}
        return found

    def _params(self) -> tuple[Field, ...]:
        """Return the parameters that are read, each once."""
        read = {name for declaration in self._reached for name in declaration.params}
        fields: dict[str, Field] = {}
        own_first = sorted(self._files, key=lambda file: not file.path.startswith("formats/"))
        for field in (field for file in own_first for field in file.params):
            if field.name in read and fields.setdefault(field.name, field) != field:
                raise KernelError(f"{self.op}: the parameter {field.name} has two types.")
        undeclared = sorted(read - fields.keys())
        if undeclared:
            raise KernelError(f"{self.op}: no file declares the parameter {undeclared[0]}.")
        return tuple(fields.values())

    def _overrides(self) -> dict[str, tuple[str, str]]:
        """Return type and default of the overrides that are mentioned; the op's default wins."""
        found: dict[str, tuple[str, str]] = {}
        for file in self._files:
            for declaration in file.declarations:
                if declaration.kind == "override" and declaration.name in self._mentioned:
                    before = found.get(declaration.name, ("", ""))
                    type_, default = declaration.override
                    found[declaration.name] = (type_, default or before[1])
        return found

    def _literal(self, name: str, type_: str) -> str:
        value = self.constants[name]
        if type(value) is not {"u32": int, "f32": float, "bool": bool}[type_]:
            raise KernelError(
                f"{self.name}: the constant {name} is {type_}, and {value!r} is of type "
                f"{type(value).__name__}."
            )
        if type_ == "u32" and not 0 <= value < 1 << 32:
            raise KernelError(f"{self.name}: the constant {name} is u32, and {value} is not.")
        return {"u32": f"{value}u", "f32": f"{value!r}f", "bool": str(value).lower()}[type_]

    def _check_constants(self) -> None:
        declarations = (d for file in self._files for d in file.declarations)
        declared = {d.name for d in declarations if d.kind == "override"}
        for name in self.constants:
            if name not in declared:
                raise KernelError(
                    f"{self.name} has no constant {name}; it has {', '.join(sorted(declared))}."
                )


class _Lenient(dict[str, Constant]):
    """The constants in the name of a feature; a missing one makes a feature that no device has."""

    def __missing__(self, name: str) -> str:
        return "?"
