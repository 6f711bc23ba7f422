"""Columns of a table from Python's values without pandas, which pyarrow's own conversion imports: a
quarter of a second and 50 MB in a process that measures."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow


def column(values: Sequence[Any]) -> pyarrow.Array:
    """The array that `pyarrow.array` makes of values, as int64, double, bool, string or a list of
    these; of other values by `pyarrow.array` itself."""
    import pyarrow

    kinds = {type(value) for value in values if value is not None}
    kinds = {list if kind is tuple else kind for kind in kinds}
    if not kinds:
        return pyarrow.nulls(len(values))
    if len(kinds) > 1 or (kind := kinds.pop()) not in (int, float, bool, str, list):
        return pyarrow.array(values)
    valid = _bits([value is not None for value in values]) if None in values else None
    if kind in (str, list):
        return _of_several(kind, values, valid)
    whole = [kind() if value is None else value for value in values]
    if kind is bool:
        return _array(pyarrow.bool_(), whole, [valid, _bits(whole)])
    arrow, numbers = (pyarrow.int64(), np.int64) if kind is int else (pyarrow.float64(), np.float64)
    return _array(arrow, whole, [valid, pyarrow.py_buffer(np.array(whole, numbers))])


def _of_several(kind: type, values: Sequence[Any], valid: Any) -> pyarrow.Array:
    """Texts or lists, which lie behind one another with their ends beside them."""
    import pyarrow

    parts = [kind() if value is None else value for value in values]
    if kind is str:
        parts = [part.encode() for part in parts]
    ends = np.cumsum([0, *map(len, parts)]).astype(np.int32)
    buffers = [valid, pyarrow.py_buffer(ends)]
    if kind is str:
        return _array(pyarrow.string(), parts, [*buffers, pyarrow.py_buffer(b"".join(parts))])
    items = column(list(chain.from_iterable(parts)))
    return _array(pyarrow.list_(items.type), parts, buffers, [items])


def _array(
    kind: pyarrow.DataType, values: Sequence[Any], buffers: list[Any], children: Any = None
) -> pyarrow.Array:
    import pyarrow

    return pyarrow.Array.from_buffers(kind, len(values), buffers, children=children)


def _bits(flags: Sequence[bool]) -> Any:
    """Flags as pyarrow packs them, the first one in the lowest bit."""
    import pyarrow

    return pyarrow.py_buffer(np.packbits(np.array(flags, bool), bitorder="little"))
