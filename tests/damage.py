"""Files as they come damaged: cut, with other bytes, or JSON with other values in some places."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-4, 64)
    | st.integers(-(10**40), 10**40)
    | st.floats()
    | st.text(max_size=5)
)


def json_values(keys: st.SearchStrategy[str] | None = None) -> st.SearchStrategy[Any]:
    """Whatever JSON may hold, NaN and infinities included, as Python writes them."""
    names = st.text(max_size=5) if keys is None else keys | st.text(max_size=3)
    return st.recursive(
        LEAVES,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
        max_leaves=5,
    )


def places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Where something in a JSON document can be replaced, from the outside in."""
    found = [path] if path else []
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in items:
        found += places(item, (*path, key))
    return found


def changed(document: Any) -> st.SearchStrategy[Any]:
    """The document with one to four of its values replaced, by anything or by another of its own,
    or gone."""
    where = places(document)
    values = [value for path in where if not isinstance(value := _at(document, path), dict)]
    new = json_values(
        st.sampled_from(sorted({key for path in where for key in path if isinstance(key, str)}))
    )
    one = st.tuples(st.sampled_from(where), new | st.sampled_from(values), st.integers(0, 4))
    return st.lists(one, min_size=1, max_size=4).map(lambda damage: _replaced(document, damage))


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """A file's bytes: cut, some of them replaced by others, or, of JSON, another document."""
    index = st.integers(0, len(content))
    spliced = st.builds(
        lambda at, length, new: content[:at] + new + content[at + length :],
        index,
        st.integers(0, 8),
        st.binary(max_size=8) | st.text(max_size=4).map(str.encode),
    )
    kinds = index.map(lambda at: content[:at]) | spliced
    try:
        document = json.loads(content)
    except ValueError:
        return kinds
    return changed(document).map(lambda value: json.dumps(value).encode()) | kinds


def _at(document: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


def _replaced(document: Any, damage: list[tuple[tuple[str | int, ...], Any, int]]) -> Any:
    made = copy.deepcopy(document)
    for path, value, keep in damage:
        try:
            node = _at(made, path[:-1])
            if keep:
                node[path[-1]] = copy.deepcopy(value)
            else:
                del node[path[-1]]
        except (KeyError, IndexError, TypeError):  # an earlier change has taken it away
            continue
    return made
