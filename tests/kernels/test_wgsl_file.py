"""WGSL files, parsed into a summary, slots, parameters and declarations."""

import pytest

from webgemma.kernels.wgsl_file import Field, Slot, parse

EXAMPLE = """\
// y = x + 1, of a summary that
// goes over two lines.
// uses: kv store=float

struct Params {
    count: u32, // values
    step: f32,
}

override THREADS: u32;
override EACH: u32 = 4u; // values of a thread

var<storage, read> x: array<f32>;
// What comes out.
var<storage, read_write> y: array<f32>;
var<uniform> table: Table;
var<workgroup> sums: array<f32, THREADS>;

const_assert EACH > 0u;

// Adds one.
fn added(x: f32) -> f32 {
    return x + params.step;
}
"""


def test_a_parsed_file() -> None:
    file = parse("ops/example", EXAMPLE)
    assert file.summary == "y = x + 1, of a summary that goes over two lines."
    assert file.slots == (Slot("kv", ""), Slot("store", "float"))
    assert file.params == (Field("count", "u32"), Field("step", "f32"))
    found = {declaration.name or declaration.kind: declaration for declaration in file.declarations}
    assert list(found) == ["THREADS", "EACH", "x", "y", "table", "sums", "const_assert", "added"]
    assert found["THREADS"].override == ("u32", "")
    assert found["EACH"].override == ("u32", "4u")
    bindings = {name: found[name].binding for name in ("x", "y", "table", "sums", "added")}
    assert bindings == {"x": "read", "y": "write", "table": "uniform", "sums": "", "added": ""}
    assert found["y"].text.startswith("// What comes out.\n")
    assert "THREADS" in found["sums"].names
    assert found["added"].params == {"step"}
    assert found["added"].text.startswith("// Adds one.\nfn added")


def test_text_that_is_not_a_declaration() -> None:
    with pytest.raises(ValueError, match="'return 1u;"):
        parse("ops/example", "// Broken.\n\nreturn 1u;\n")
