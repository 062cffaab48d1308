"""Small PDF files, made here: a line of text on each page."""

import io
from collections.abc import Sequence

from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject


def pdf_of(pages: Sequence[str], title: str = "") -> bytes:
    """Return a PDF with one line of text on each page."""
    writer = PdfWriter()
    if title:
        writer.add_metadata({"/Title": title})
    kinds = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
    font = DictionaryObject({NameObject(k): NameObject(v) for k, v in kinds.items()})
    fonts = DictionaryObject({NameObject("/F1"): writer._add_object(font)})
    for text in pages:
        page = writer.add_blank_page(width=200, height=200)
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        stream = DecodedStreamObject()
        stream.set_data(f"BT /F1 12 Tf 10 100 Td ({text}) Tj ET".encode("latin-1"))
        page[NameObject("/Contents")] = writer._add_object(stream)
    data = io.BytesIO()
    writer.write(data)
    return data.getvalue()
