"""Bodies of requests that nobody expects: any JSON, and objects with fields of any JSON."""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from webgemma.server.protocol import Request, RequestError

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def fields(names: str, values: st.SearchStrategy[Any] = JSON) -> st.SearchStrategy[dict[str, Any]]:
    """Return objects with some of these fields."""
    return st.dictionaries(st.sampled_from(names.split()), values, max_size=6)


def outcome(parse: Callable[[Any], Request], body: Any) -> Request | str:
    """Return the request, or the sentence that refuses it; anything else is raised."""
    try:
        return parse(body)
    except RequestError as error:
        return str(error)
