"""Linking kernels: wrong arguments raise, slots are filled, and every WGSL file is in use."""

import re
import struct
from collections.abc import Callable, Iterator
from functools import cache
from importlib.resources import files

import pytest

from webgemma.device.null import NullDevice
from webgemma.device.subgroups import ENABLE
from webgemma.errors import KernelError
from webgemma.graph import Recorder, Tensor
from webgemma.kernels import Linker, link, linker, names_in, read_file, unit
from webgemma.kernels.linker import ENABLE_MATRICES, HARDWARE
from webgemma.kernels.wgsl_file import Field, Slot, parse

NO_FEATURES: frozenset[str] = frozenset()
TENSOR = Tensor((4,), 16)

# Valid arguments of two ops: without weights, and with them.
NORM = {
    "x": TENSOR,
    "w": TENSOR,
    "h": TENSOR,
    "width": 4,
    "eps": 1e-6,
    "store": "float",
    "THREADS": 64,
}
EMBED = {
    "batch": TENSOR,
    "ids": TENSOR,
    "x": TENSOR,
    "W": TENSOR,
    "first_row": 0,
    "rows": 1,
    "units": 1,
    "stride": 32,
    "scale": 1.0,
    "row_blocks": 1,
    "plane1": 0,
    "format": "Q8_0",
    "token_ids": "buffer",
}


def call(op: str, arguments: dict[str, object]) -> None:
    Recorder(NullDevice()).call(op, (1,), **arguments)


def assert_named(error: pytest.ExceptionInfo[KernelError], op: str, culprit: str) -> None:
    """Assert that a message names the kernel and what is wrong with its call."""
    message = str(error.value)
    assert re.search(rf"\b{op}\b", message), message
    assert re.search(rf"(?<!\w){re.escape(culprit)}(?!\w)", message), message


# Wrong arguments


def test_valid_arguments() -> None:
    call("norm", NORM)
    call("embed", EMBED)


@pytest.mark.parametrize("name", [name for name in NORM if name != "store"])
def test_a_missing_parameter_binding_or_constant(name: str) -> None:
    with pytest.raises(KernelError) as error:
        call("norm", {key: value for key, value in NORM.items() if key != name})
    assert_named(error, "norm", name)


@pytest.mark.parametrize("name", [name for name in EMBED if name != "format"])
def test_a_missing_parameter_or_binding_that_another_file_declares(name: str) -> None:
    with pytest.raises(KernelError) as error:
        call("embed", {key: value for key, value in EMBED.items() if key != name})
    assert_named(error, "embed", name)


UNKNOWN = {
    "parameter": ("height", 3),
    "float parameter": ("factor", 3.0),
    "binding": ("y", TENSOR),
    "constant": ("LANES", 4),
    "slot": ("kv", "f16"),
    "slot of a file that is not used": ("integer_width", "int16"),
}


@pytest.mark.parametrize(("name", "value"), UNKNOWN.values(), ids=UNKNOWN)
def test_an_unknown_argument(name: str, value: object) -> None:
    with pytest.raises(KernelError) as error:
        call("norm", {**NORM, name: value})
    assert_named(error, "norm", name)


MISTYPED = {
    "int for f32": ("eps", 1),
    "float for u32": ("width", 4.0),
    "bool for u32": ("width", True),
    "bool for f32": ("eps", True),
    "string for a parameter": ("width", "4"),
    "tensor for a parameter": ("width", TENSOR),
    "None for a parameter": ("width", None),
    "negative u32": ("width", -1),
    "u32 of 33 bits": ("width", 1 << 32),
    "f32 that overflows": ("eps", 1e39),
    "number for a binding": ("x", 4),
    "float for a binding": ("x", 4.0),
    "string for a binding": ("x", "x"),
    "None for a binding": ("x", None),
    "float for a u32 constant": ("THREADS", 96.0),
    "bool for a u32 constant": ("THREADS", True),
    "string for a constant": ("THREADS", "64"),
    "tensor for a constant": ("THREADS", TENSOR),
    "None for a constant": ("THREADS", None),
    "negative constant": ("THREADS", -1),
    "constant of 33 bits": ("THREADS", 1 << 32),
    "number for a provider": ("store", 1),
    "tensor for a provider": ("store", TENSOR),
    "unknown provider": ("store", "double"),
    "empty provider": ("store", ""),
    "empty provider of a hardware slot": ("workgroup_sum", ""),
    "unknown provider of a hardware slot": ("workgroup_sum", "double"),
}


@pytest.mark.parametrize(("name", "value"), MISTYPED.values(), ids=MISTYPED)
def test_an_argument_of_a_wrong_type_or_value(name: str, value: object) -> None:
    with pytest.raises(KernelError) as error:
        call("norm", {**NORM, name: value})
    assert_named(error, "norm", name)


BOOL_CONSTANTS = {"SHIFTED": True, "THREADS": 1}


@pytest.mark.parametrize(("name", "value"), [("SHIFTED", 1), ("THREADS", True), ("THREADS", 1.0)])
def test_a_constant_that_only_equals_one_that_was_linked_before(name: str, value: object) -> None:
    link("layer_norm", NO_FEATURES, constants=BOOL_CONSTANTS)
    with pytest.raises(KernelError) as error:
        link("layer_norm", NO_FEATURES, constants={**BOOL_CONSTANTS, name: value})
    assert_named(error, "layer_norm", name)


@pytest.mark.parametrize("value", [1, 0.0])
def test_a_number_for_a_bool_constant(value: object) -> None:
    constants = {"SHIFTED": value, "THREADS": 48}
    with pytest.raises(KernelError) as error:
        link("layer_norm", NO_FEATURES, constants=constants)
    assert_named(error, "layer_norm", "SHIFTED")


def test_several_missing_constants_are_all_named() -> None:
    with pytest.raises(KernelError) as error:
        link("layer_norm", NO_FEATURES)
    assert_named(error, "layer_norm", "THREADS")
    assert_named(error, "layer_norm", "SHIFTED")


def test_a_slot_without_a_provider_names_its_providers() -> None:
    with pytest.raises(KernelError) as error:
        call("norm", {key: value for key, value in NORM.items() if key != "store"})
    assert_named(error, "norm", "store")
    for provider in names_in("lib/store"):
        assert_named(error, "norm", provider)


def test_a_slot_without_a_provider_in_a_file_that_the_op_uses() -> None:
    with pytest.raises(KernelError) as error:
        call("norm", {**NORM, "store": "integer"})
    assert_named(error, "norm", "integer_width")


def test_another_provider_than_the_op_insists_on() -> None:
    with pytest.raises(KernelError) as error:
        call("embed", {**EMBED, "batch": "soft_tokens"})
    assert_named(error, "embed", "batch")
    assert_named(error, "embed", "soft_tokens")


@pytest.mark.parametrize("format", ["", "Q9_9", "batch", "q4_k", 8], ids=str)
def test_an_unknown_format(format: object) -> None:
    with pytest.raises(KernelError) as error:
        link("embed", NO_FEATURES, providers={"format": format, "token_ids": "buffer"})
    assert_named(error, "embed", "format")
    assert_named(error, "embed", str(format))


def test_a_missing_format() -> None:
    with pytest.raises(KernelError) as error:
        call("embed", {key: value for key, value in EMBED.items() if key != "format"})
    assert_named(error, "embed", "format")


def test_a_format_for_an_op_without_weights() -> None:
    with pytest.raises(KernelError) as error:
        call("norm", {**NORM, "format": "Q8_0"})
    assert_named(error, "norm", "format")


@pytest.mark.parametrize("op", ["", "normal", "norm.wgsl", "ops/norm"])
def test_an_unknown_op(op: str) -> None:
    with pytest.raises(KernelError, match="no op") as error:
        call(op, NORM)
    assert repr(op) in str(error.value)


# Linked programs


def test_the_same_kernel_is_linked_once() -> None:
    arguments = {"constants": {"THREADS": 64}, "providers": {"store": "float"}}
    assert link("norm", NO_FEATURES, **arguments) is link("norm", NO_FEATURES, **arguments)


@pytest.mark.parametrize(
    "change",
    [
        {"features": frozenset({"shuffle4", "enable-subgroups"})},
        {"constants": {"THREADS": 32}},
        {"providers": {"store": "integer", "integer_width": "int16"}},
        {"op": "clamp"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_arguments_link_other_kernels(change: dict[str, object]) -> None:
    arguments = {
        "op": "norm",
        "features": NO_FEATURES,
        "constants": {"THREADS": 64},
        "providers": {"store": "float"},
    }
    program, other = link(**arguments), link(**arguments | change)
    assert program.kernel.wgsl != other.kernel.wgsl


def test_parameters_may_be_in_storage() -> None:
    """But only beside fewer than eight other buffers, which is all that every device binds."""
    features = frozenset({"params-in-storage"})
    program = link("norm", features, constants={"THREADS": 64}, providers={"store": "float"})
    assert program.kernel.bindings == ("read", "read", "read", "write")
    assert "@group(0) @binding(0) var<storage, read> params: Params;" in program.kernel.wgsl
    kernels = [Linker(op, features, complete=True).program().kernel for op in names_in("ops")]
    assert all(sum(kind != "uniform" for kind in kernel.bindings) <= 8 for kernel in kernels)


def test_parameters_and_bindings_in_the_order_of_the_kernel() -> None:
    program = link("norm", NO_FEATURES, constants={"THREADS": 64}, providers={"store": "float"})
    assert program.params == (Field("width", "u32"), Field("eps", "f32"))
    assert program.kernel.bindings == ("uniform", "read", "read", "write")
    assert program.pack({"eps": 0.5, "width": 7}) == struct.pack("<If", 7, 0.5)
    assert program.bindings == ("x", "w", "h")
    assert program.order({"h": 3, "w": 2, "x": 1}) == (1, 2, 3)
    wgsl = program.kernel.wgsl
    assert "const THREADS: u32 = 64u;" in wgsl
    assert "@group(0) @binding(0) var<uniform> params: Params;" in wgsl
    assert re.findall(r"@binding\((\d)\) var<storage[^>]*> (\w+)", wgsl) == [
        ("1", "x"),
        ("2", "w"),
        ("3", "h"),
    ]


MATRICES = {"SUBGROUP": 8, "MATRIX_M": 8, "MATRIX_N": 8, "MATRIX_K": 8}
MATVEC = {
    "format": "F32",
    "input": "float",
    "operand": "buffer",
    "live": "counted",
    "epilogue": "none",
    "row_products": "two_units",
}

NAMES = {
    "copy": ("copy", {}, {"THREADS": 64, "EACH": 1}),
    "norm store=float workgroup_sum=memory": ("norm", {"store": "float"}, {"THREADS": 64}),
    "dequantise/Q4_K": ("dequantise", {"format": "Q4_K"}, {}),
    "geglu eight_lanes=memory integer_width=int16 store=integer": (
        "geglu",
        {"store": "integer", "integer_width": "int16"},
        {},
    ),
    # Without those of which nothing is linked: what would make x is not.
    "matvec/Q6_K epilogue=none input=float lane_sum=memory live=counted operand=buffer "
    "row_products=two_units": (
        "matvec",
        MATVEC | {"format": "Q6_K"},
        {"THREADS": 64, "LANES": 4, "EACH": 1},
    ),
    "matvec_two/Q4_K format_second=Q6_K input=float lane_sum=memory operand=buffer "
    "row_products=two_units": (
        "matvec_two",
        {
            "format": "Q4_K",
            "format_second": "Q6_K",
            "input": "float",
            "operand": "buffer",
            "row_products": "two_units",
        },
        {"THREADS": 64, "LANES": 4, "EACH": 1},
    ),
    # Without store, which the op insists on.
    "quantise eight_lanes=memory integer_width=int8": ("quantise", {"integer_width": "int8"}, {}),
    # Without batch, which the mask insists on.
    "attention_prefill key_range=all kv=f16 mask=causal": (
        "attention_prefill",
        {"mask": "causal", "key_range": "all", "kv": "f16"},
        {"THREADS": 256, "QUERIES": 32, "KEYS": 64, "HEAD_DIM": 64},
    ),
    "matmul/Q4_K epilogue=none tiled_product=matrix_units": (
        "matmul",
        {"format": "Q4_K", "epilogue": "none", "tiled_product": "matrix_units"},
        {
            "THREADS": 16,
            "TILE_ROWS": 64,
            "TILE_TOKENS": 16,
            "SUB_ROWS": 32,
            "SUB_TOKENS": 16,
            "SLICE": 64,
            "BUFFERS": 1,
            "SHARES": 1,
            "SPLIT_X": False,
            "SPLIT_W": False,
            "OVER_ROWS": False,
            **MATRICES,
        },
    ),
    "attention_matrix_units mask=causal pair=f32": (
        "attention_matrix_units",
        {"mask": "causal", "pair": "f32"},
        {"THREADS": 64, "QUERIES": 16, "KEYS": 64, "HEAD_DIM": 64, "ROUNDED": False, **MATRICES},
    ),
    # Without rope, which has one provider.
    "qkv_heads kv=f32 place=rows workgroup_sum=memory": (
        "qkv_heads",
        {"kv": "f32", "place": "rows"},
        {"THREADS": 64, "HEAD_DIM": 64},
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_the_name_lists_op_format_and_providers(name: str) -> None:
    op, providers, constants = NAMES[name]
    assert link(op, NO_FEATURES, constants=constants, providers=providers).kernel.name == name


def test_only_what_main_reaches_is_linked() -> None:
    wgsl = link(
        "embed", NO_FEATURES, providers={"format": "Q8_0", "token_ids": "buffer"}
    ).kernel.wgsl
    assert "fn decode(" in wgsl
    assert "integer_unit" in {d.name for d in read_file("formats/q8_0").declarations}
    assert "fn integer_unit(" not in wgsl


# Copies


def test_a_copy_of_a_slot_reads_another_matrix() -> None:
    given = {"format": "Q4_K", "format_second": "Q8_0", "input": "float", "operand": "buffer"}
    given["row_products"] = "two_units"
    constants = {"THREADS": 64, "LANES": 8, "EACH": 1}
    program = link("matvec_two", NO_FEATURES, constants=constants, providers=given)
    assert program.bindings == ("W", "x", "y", "W_second")
    fields = {field.name for field in program.params}
    assert {"rows", "rows_second", "row_blocks", "row_blocks_second", "plane1_second"} <= fields
    assert "plane1" not in fields  # Q4_K is one plane
    # What does not depend on the format is there once.
    assert program.kernel.wgsl.count("fn lane_sum") == program.kernel.wgsl.count("fn finish") == 1
    assert program.kernel.wgsl.count("fn multiply_rows") == 2
    del given["format_second"]
    with pytest.raises(KernelError, match="matvec_two needs a weight format"):
        link("matvec_two", NO_FEATURES, constants=constants, providers=given)


# Hardware slots

LANES = {"THREADS": 64, "LANES": 8, "EACH": 1}
ROUND = {"row_source": "plain"}
HARDWARE_CASES = [
    ("norm", {"store": "float"}, {"THREADS": 64}, "workgroup_sum", set(), "memory"),
    ("norm", {"store": "float"}, {"THREADS": 64}, "workgroup_sum", {"subgroups"}, "memory"),
    ("norm", {"store": "float"}, {"THREADS": 64}, "workgroup_sum", {"shuffle4"}, "shuffle"),
    ("norm", {"store": "float"}, {"THREADS": 64}, "team", {"shuffle4"}, "4"),
    ("norm", {"store": "float"}, {"THREADS": 64}, "team", {"shuffle4", "shuffle8"}, "8"),
    ("round_f16", ROUND, {"THREADS": 64, "SPLIT": False}, "workgroup_max", set(), "memory"),
    ("round_f16", ROUND, {"THREADS": 64, "SPLIT": False}, "workgroup_max", {"shuffle4"}, "shuffle"),
    ("matvec", MATVEC, LANES, "lane_sum", set(), "memory"),
    ("matvec", MATVEC, LANES, "lane_sum", {"subgroups", "shuffle4", "shuffle16"}, "memory"),
    ("matvec", MATVEC, LANES, "lane_sum", {"shuffle8"}, "shuffle"),
    ("matvec", MATVEC, {**LANES, "LANES": 16}, "lane_sum", {"shuffle8"}, "memory"),
    ("quantise", {"integer_width": "int8"}, {}, "eight_lanes", {"shuffle4"}, "memory"),
    ("quantise", {"integer_width": "int8"}, {}, "eight_lanes", {"shuffle8"}, "shuffle"),
]


@pytest.mark.parametrize(
    ("op", "providers", "constants", "slot", "features", "expected"), HARDWARE_CASES
)
def test_features_choose_the_providers_of_hardware_slots(
    op: str,
    providers: dict[str, str],
    constants: dict[str, int],
    slot: str,
    features: set[str],
    expected: str,
) -> None:
    given = frozenset(features)
    program = link(op, given, constants=constants, providers=providers)
    assert f"{slot}={expected}" in program.kernel.name.split()
    assert f"// lib/{slot}/{expected}.wgsl" in program.kernel.wgsl
    other = "memory" if "memory" in names_in(f"lib/{slot}") else "16"
    program = link(op, given, constants=constants, providers={**providers, slot: other})
    assert f"{slot}={other}" in program.kernel.name.split()


def test_every_hardware_slot_can_do_without_features() -> None:
    assert {case[3] for case in HARDWARE_CASES} == set(HARDWARE)
    for slot, choices in HARDWARE.items():
        known = {provider for provider, _ in choices}
        if slot != "team":  # which only shuffles need
            known.add("memory")
        assert set(names_in(f"lib/{slot}")) == known


@pytest.mark.parametrize("provider", names_in("lib/workgroup_sum"))
def test_a_sum_is_added_in_a_fixed_order(provider: str) -> None:
    """Where parts come in the order of their arrival, equal inputs have different sums."""
    given = {"store": "float", "workgroup_sum": provider}
    features = frozenset({"shuffle4"})
    program = link("norm", features, constants={"THREADS": 64}, providers=given)
    assert "atomic" not in program.kernel.wgsl


def test_programs_enable_subgroups_only_where_they_use_them() -> None:
    features = frozenset({"subgroups", "shuffle4", "enable-subgroups"})
    norm = link("norm", features, constants={"THREADS": 64}, providers={"store": "float"})
    copy = link("copy", features, constants={"THREADS": 64, "EACH": 1})
    assert norm.kernel.wgsl.startswith(ENABLE)
    assert ENABLE.strip() not in copy.kernel.wgsl
    without = frozenset({"subgroups"})
    norm = link("norm", without, constants={"THREADS": 64}, providers={"store": "float"})
    assert ENABLE.strip() not in norm.kernel.wgsl


@pytest.mark.parametrize("name", NAMES)
def test_programs_enable_matrices_only_where_they_use_them(name: str) -> None:
    op, providers, constants = NAMES[name]
    wgsl = link(op, NO_FEATURES, constants=constants, providers=providers).kernel.wgsl
    if "matrix_units" in name:
        assert wgsl.startswith(ENABLE_MATRICES)
        assert "subgroupMatrixMultiplyAccumulate(" in wgsl
    else:
        assert "subgroup_matrix" not in wgsl


def test_rounding_to_float16_needs_no_matrix_units() -> None:
    constants = {"THREADS": 128, "SPLIT": True}
    wgsl = link("round_f16", NO_FEATURES, constants=constants, providers=ROUND).kernel.wgsl
    assert "pack2x16float(" in wgsl
    assert "enable " not in wgsl


# All files

LIB = files("webgemma.kernels").joinpath("wgsl", "lib")
SLOTS = sorted(folder.name for folder in LIB.iterdir())
LIB_FILES = [f"lib/{slot}/{name}" for slot in SLOTS for name in names_in(f"lib/{slot}")]
OP_FILES = [f"ops/{op}" for op in names_in("ops")]
FORMAT_FILES = [f"formats/{name}" for name in names_in("formats")]


def providers_of(slot: Slot) -> tuple[str, ...]:
    if slot.name == "format":
        return names_in("formats")
    return (slot.pinned,) if slot.pinned else names_in(f"lib/{slot.name}")


def path_of(slot: str, provider: str) -> str:
    return f"formats/{provider}" if slot == "format" else f"lib/{slot}/{provider}"


def variants(op: str, fixed: dict[str, str]) -> Iterator[Linker]:
    """Yield an op with every combination of the providers of its open slots."""
    linked = Linker(op, NO_FEATURES, providers=fixed, complete=True)
    open_slots = [word.partition("=")[0] for word in linked.name.split()[1:]]
    open_slots = [slot for slot in open_slots if not slot.startswith("format_")]
    slot = next((slot for slot in open_slots if slot not in fixed), "")
    if not slot:
        yield linked
        return
    for provider in names_in(f"lib/{slot}"):
        yield from variants(op, {**fixed, slot: provider})


@cache
def reached_files() -> dict[str, list[set[str]]]:
    """Return for each op the files of which its variants link something."""
    return {
        op: [
            set(re.findall(r"^// (\S+)\.wgsl$", variant.program().kernel.wgsl, re.M))
            for variant in variants(op, {})
        ]
        for op in names_in("ops")
    }


@pytest.mark.parametrize("path", [*OP_FILES, *LIB_FILES, *FORMAT_FILES])
def test_every_file_parses(path: str) -> None:
    file = read_file(path)
    assert file.path == path
    assert file.summary, "a comment says what the file is for"
    assert file.declarations
    assert all(type_ in ("u32", "f32") for _, type_ in file.params)
    for slot in file.slots:
        assert providers_of(slot), f"{slot.name} has no provider"
        assert not slot.pinned or slot.pinned in names_in(f"lib/{slot.name}")
    read = {name for declaration in file.declarations for name in declaration.params}
    assert {name for name, _ in file.params} <= read, "a file declares the parameters it reads"


@pytest.mark.parametrize("op", names_in("ops"))
def test_every_op_has_a_main_and_links_with_all_providers(op: str) -> None:
    assert "main" in {declaration.name for declaration in read_file(f"ops/{op}").declarations}
    for linked in reached_files()[op]:
        assert f"ops/{op}" in linked


@pytest.mark.parametrize("op", names_in("ops"))
def test_every_slot_of_an_op_is_reached(op: str) -> None:
    for slot in read_file(f"ops/{op}").slots:
        paths = {path_of(slot.name, provider) for provider in providers_of(slot)}
        assert any(paths & linked for linked in reached_files()[op]), slot.name


@pytest.mark.parametrize("path", [path for path in LIB_FILES if read_file(path).slots])
def test_every_slot_of_a_lib_file_is_reached(path: str) -> None:
    programs = [linked for op in reached_files().values() for linked in op if path in linked]
    for slot in read_file(path).slots:
        paths = {path_of(slot.name, provider) for provider in providers_of(slot)}
        assert any(paths & linked for linked in programs), slot.name


@pytest.mark.parametrize("path", LIB_FILES)
def test_every_lib_file_provides_a_slot_that_is_used(path: str) -> None:
    _, name, provider = path.split("/")
    users = [
        user
        for user in (*OP_FILES, *LIB_FILES)
        for slot in read_file(user).slots
        if slot.name == name and slot.pinned in ("", provider)
    ]
    assert users


def test_every_hardware_slot_is_a_slot() -> None:
    assert set(HARDWARE) <= set(SLOTS)


@pytest.mark.parametrize("format", names_in("formats"))
def test_every_format_declares_its_unit(format: str) -> None:
    assert unit(format.upper()) % 4 == 0


# Files that contradict each other


@pytest.fixture
def wgsl(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Return a function that replaces all WGSL files."""

    def replace(texts: dict[str, str]) -> None:
        def names(folder: str) -> tuple[str, ...]:
            inside = [path.rpartition("/") for path in texts]
            return tuple(sorted(name for parent, _, name in inside if parent == folder))

        monkeypatch.setattr(linker, "names_in", names)
        monkeypatch.setattr(linker, "read_file", lambda path: parse(path, texts[path]))

    return replace


MAIN = "@compute @workgroup_size(64)\nfn main() {\n    y[0] = value() + params.first;\n}\n"
OUT = "var<storage, read_write> y: array<u32>;\n"
VALUE = "fn value() -> u32 {\n    return params.first;\n}\n"
U32, F32 = "struct Params {\n    first: u32,\n}\n", "struct Params {\n    first: f32,\n}\n"


def test_a_parameter_of_two_files_is_one(wgsl) -> None:
    lib = f"// A value.\n\n{U32}{VALUE}"
    wgsl({"ops/example": f"// Op.\n// uses: value\n\n{U32}{OUT}{MAIN}", "lib/value/one": lib})
    program = Linker("example", NO_FEATURES).program()
    assert program.params == (Field("first", "u32"),)
    assert program.kernel.wgsl.count("struct Params") == 1


def test_an_op_without_parameters_has_no_uniform(wgsl) -> None:
    wgsl({"ops/example": f"// Op.\n\n{OUT}{MAIN.replace('value() + params.first', '1u')}"})
    program = Linker("example", NO_FEATURES).program()
    assert program.kernel.bindings == ("write",)
    assert program.pack({}) == b""
    assert "@binding(0) var<storage, read_write> y" in program.kernel.wgsl
    assert "params" not in program.kernel.wgsl


CONTRADICTIONS = {
    "a parameter of two types": (
        {
            "ops/example": f"// Op.\n// uses: value\n\n{U32}{OUT}{MAIN}",
            "lib/value/one": f"// A value.\n\n{F32}{VALUE}",
        },
        "first",
    ),
    "a parameter that no file declares": (
        {
            "ops/example": f"// Op.\n// uses: value\n\n{OUT}{MAIN}",
            "lib/value/one": f"// A value.\n\n{VALUE}",
        },
        "first",
    ),
    "a name of two files": (
        {
            "ops/example": f"// Op.\n// uses: value\n\n{U32}{OUT}{VALUE}{MAIN}",
            "lib/value/one": f"// A value.\n\n{U32}{VALUE}",
        },
        "value",
    ),
    "a name of a parameter and a binding": (
        {
            "ops/example": f"// Op.\n\n{U32}{OUT}var<storage, read> first: array<u32>;\n"
            + MAIN.replace("value()", "first[0]"),
        },
        "first",
    ),
    "two files that insist on different providers": (
        {
            "ops/example": f"// Op.\n// uses: value batch=tokens\n\n{U32}{OUT}{MAIN}",
            "lib/value/one": f"// A value.\n// uses: batch=soft\n\n{U32}{VALUE}",
            "lib/batch/tokens": "// A batch.\n\nconst TOKENS: u32 = 1u;\n",
            "lib/batch/soft": "// A batch.\n\nconst TOKENS: u32 = 2u;\n",
        },
        "batch",
    ),
    "a slot that no file provides": (
        {"ops/example": f"// Op.\n// uses: value\n\n{U32}{OUT}{MAIN}"},
        "value",
    ),
}


@pytest.mark.parametrize(("texts", "culprit"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_files_that_contradict_each_other(texts: dict[str, str], culprit: str, wgsl) -> None:
    wgsl(texts)
    with pytest.raises(KernelError) as error:
        Linker("example", NO_FEATURES).program()
    assert_named(error, "example", culprit)
