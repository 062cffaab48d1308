"""The table of formats, compared with the gguf package."""

import gguf
import pytest

from webgemma.gguf.formats import FORMAT_BY_ID, FORMATS

# The gguf package has 40 for Q8_1; ggml's block is two float16 and 32 bytes.
KNOWN_TO_DIFFER = {"Q8_1": (32, 36)}


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_numbers_and_sizes_match(fmt):
    kind = gguf.GGMLQuantizationType[fmt.name]
    sizes = KNOWN_TO_DIFFER.get(fmt.name, gguf.GGML_QUANT_SIZES[kind])
    assert (fmt.id, fmt.block, fmt.nbytes) == (int(kind), *sizes)


def test_every_format_is_found_by_its_number():
    assert len(FORMAT_BY_ID) == len(FORMATS)
    assert all(FORMAT_BY_ID[fmt.id] is fmt for fmt in FORMATS.values())


def test_row_size_and_name():
    assert FORMATS["Q6_K"].row_nbytes(1536) == 6 * 210
    assert FORMATS["F32"].row_nbytes(0) == 0
    assert str(FORMATS["MXFP4"]) == "MXFP4"
