"""Forms with files: what clients send is read, and what is no form is refused in a sentence."""

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from webgemma.server import forms
from webgemma.server.forms import parse_form
from webgemma.server.protocol import RequestError

TYPE = "multipart/form-data; boundary=b"


def part(head: str, content: bytes = b"x") -> bytes:
    return b"--b\r\n" + head.encode() + b"\r\n\r\n" + content + b"\r\n"


def field(name: str, content: bytes = b"x") -> bytes:
    return part(f'Content-Disposition: form-data; name="{name}"', content)


END = b"--b--\r\n"


@given(
    st.dictionaries(st.text("abc[]_", min_size=1, max_size=8), st.text(max_size=40), max_size=4),
    st.binary(min_size=1, max_size=200),
    st.text(max_size=20),
)
@example({"a": "--"}, b"\r\n--", '"; name="a')
def test_what_a_client_sends_is_read(texts: dict[str, str], data: bytes, filename: str) -> None:
    """httpx writes the form, as the openai package does."""
    sent = httpx.Request(
        "POST", "http://127.0.0.1", data=texts, files={"file": (filename or "x", data)}
    )
    form = parse_form(sent.read(), sent.headers["content-type"])
    assert form.data("file") == data
    assert {name: form.values[name] for name in texts} == {
        name: [text.encode("utf-8", "surrogatepass")] for name, text in texts.items()
    }


@given(st.binary(max_size=300), st.text(max_size=60))
@example(b"--b", TYPE)
@example(b"--b\r\n\r\n\r\n\r\n--b--", TYPE)
@example(b"--b" + b" " * 1000, TYPE)
def test_any_body_is_read_or_refused(data: bytes, kind: str) -> None:
    for content_type in (kind, TYPE):
        sentence = "It is a form."
        try:
            parse_form(data, content_type)
        except RequestError as error:
            sentence = str(error)
        assert sentence.endswith(".")


@pytest.mark.parametrize(
    "content_type",
    ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=b"]
    + [f"multipart/form-data; boundary={wrong}" for wrong in ("", "é", "x" * 71, '"a b "')],
)
def test_what_is_no_form(content_type: str) -> None:
    with pytest.raises(RequestError, match="multipart/form-data with a boundary"):
        parse_form(field("a") + END, content_type)


def test_ways_to_write_a_form() -> None:
    body = b"before\r\n" + field("a", b"1\r\n--c\r\n") + field("a", b"") + END + b"after"
    for kind in ('Multipart/Form-Data; charset=x; boundary="b"', TYPE):
        assert parse_form(body, kind).values == {"a": [b"1\r\n--c\r\n", b""]}
    bare = part("content-disposition:form-data;filename=y; name=n; name=other") + END
    assert parse_form(bare, TYPE).values == {"n": [b"x"]}
    # A file's name may look like anything, and is not used.
    sly = part('Content-Disposition: form-data; filename="; name=evil"; name="n"') + END
    assert parse_form(sly, TYPE).values == {"n": [b"x"]}
    spaced = b"--b  \t\r\n" + field("a")[5:] + END
    assert parse_form(spaced, TYPE).values == {"a": [b"x"]}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "does not end"),
        (field("a"), "does not end"),
        (b"--b\r\n" + END, "does not end"),
        (part("Content-Type: text/plain") + END, "no name"),
        (part('Content-Disposition: attachment; name="a"') + END, "no name"),
        (part("Content-Disposition: form-data") + END, "no name"),
        (part("X: " + "x" * 5000) + END, "does not end"),
        (field("a") * 65 + END, "more than 64"),
        (
            part('Content-Disposition: form-data; name="a"\r\nContent-Transfer-Encoding: base64')
            + END,
            "is encoded",
        ),
    ],
)
def test_forms_that_are_refused(body: bytes, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        parse_form(body, TYPE)
    assert len(parse_form(field("a") * 64 + END, TYPE).values["a"]) == 64


def test_fields_have_types() -> None:
    long = b"x" * (forms.MAX_TEXT_NBYTES + 1)
    body = field("two") * 2 + field("long", long) + field("bytes", b"\xff") + field("e", b"")
    body += field("list[]", b"1") + field("n", b"1e3") + field("yes", b"True") + END
    form = parse_form(body, TYPE)
    assert form.texts("list") == ["1"]
    assert (form.number("n"), form.number("list"), form.number("none")) == (1000, 1, None)
    assert (form.flag("yes"), form.flag("none")) == (True, False)
    assert form.text("none", "default") == "default"
    for wrong in (
        lambda: form.text("two"),
        lambda: form.data("two"),
        lambda: form.data("e"),
        lambda: form.data("none"),
        lambda: form.text("long"),
        lambda: form.text("bytes"),
        lambda: form.number("yes"),
        lambda: form.flag("n"),
        lambda: form.choice("n", ("a", "b")),
    ):
        with pytest.raises(RequestError) as error:
            wrong()
        assert str(error.value).startswith(str(error.value.param))
