"""The columns of traces: those of published formats, and of others by their names."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.bench.workloads.from_file import row_lengths
from minivllm.bench.workloads.from_file.tables import short_name
from minivllm.errors import BadInput
from minivllm.platform.given import whole
from minivllm.platform.times import moment

# Usual names of the time, as `row_lengths.plain` writes them.
TIMES = frozenset(
    (
        *("timestamp", "time", "ts", "arrivaltime", "arrivedat", "arrival", "arrivaltimestamp"),
        *("starttime", "requesttime", "requesttimestamp", "sendtime", "senttime", "createdat"),
    )
)
NAMES = {"timestamp": TIMES, "input_len": row_lengths.INPUT, "output_len": row_lengths.OUTPUT}
UNITS = {"s": 1, "ms": 1000, "us": 10**6, "ns": 10**9}  # in a second
HASHES = 2**64
LONGEST = 2**31 - 1
KIND_LENGTH = 20  # most characters of a request's type


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace. `line` is the number of its line or row, from 1."""

    line: int
    time_s: float  # after the trace's first request
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()  # of the prompt's blocks, where the trace has them
    block_tokens: int = 512  # that a hash id stands for
    kind: str = "text"  # what its prompt was, where the trace says so
    chat: object = None  # its name, in traces of conversations
    parent: object = None  # the name of the turn before

    @property
    def later_turn(self) -> bool:
        """Whether it is a later turn of a conversation."""
        return self.parent is not None


@dataclass(frozen=True)
class TraceFormat:
    """Which columns of a trace are the time of a request, its lengths, and what else there is.

    Args:
        timestamp: the request's time, in `unit`; None: a date in ISO 8601.
        input_len, output_len: tokens of the prompt and of the answer.
        hash_ids: names of the prompt's blocks, of `block_tokens` each.
        kind: what the prompt was.
        images: how many images the prompt had.
        chat, parent: names of the request and of the turn before.
        marks: columns of which a trace has at least one, where others have the same three.
    """

    timestamp: str
    input_len: str
    output_len: str
    unit: str | None = None
    hash_ids: str | None = None
    block_tokens: int = 512
    kind: str | None = None
    images: str | None = None
    chat: str | None = None
    parent: str | None = None
    marks: tuple[str, ...] = ()

    @property
    def needed(self) -> tuple[str, str, str]:
        """Columns that every request has."""
        return self.timestamp, self.input_len, self.output_len

    def fits(self, names: Sequence[str]) -> bool:
        """Whether columns of these names are those of the format."""
        marked = not self.marks or any(name in names for name in self.marks)
        return marked and set(self.needed) <= set(names)

    @classmethod
    def by_names(
        cls, names: Sequence[str], given: Mapping[str, str], unit: str | None, where: str
    ) -> TraceFormat:
        """The columns by their usual names, or by those given.

        Args:
            names: all columns.
            given: `workload.columns`.
            unit: `workload.time_unit`.
            where: file and line, which begin the message.

        Raises:
            BadInput: a column is missing, or several may be meant.
        """
        found: dict[str, Any] = {"hash_ids": given.get("hash_ids", "hash_ids")}
        there = ", ".join(map(short_name, names[:12])) or "none"
        for known, usual in NAMES.items():
            fitting = [name for name in names if row_lengths.plain(name) in usual]
            if known in given:
                fitting = [name for name in names if name == given[known]]
                if not fitting:
                    raise BadInput(
                        f"{where}: there is no column {short_name(given[known])}, which "
                        f"workload.columns names as the {known}; the columns are {there}"
                    )
            if len(fitting) != 1:
                what = f"{' and '.join(map(short_name, fitting))} may be it" if fitting else "none"
                raise BadInput(
                    f"{where}: which column is the {known} of a request? {what} of the columns "
                    f"{there}; name it with workload.columns={{{known}: NAME}}"
                )
            found[known] = fitting[0]
        return cls(**found, unit=unit)

    def row(self, line: int, values: Mapping[str | None, Any], where: str) -> TraceRow:
        """One request.

        Raises:
            BadInput: starting with `where`: a value is none of its column.
            KeyError: a column is missing.
        """
        time = values[self.timestamp]
        prompt, answer = values[self.input_len], values[self.output_len]
        kind, parent = values.get(self.kind), values.get(self.parent)
        if self.images and values.get(self.images) not in (None, "", "0", 0):
            kind = "image"
        return TraceRow(
            line,
            self._time(time, where),
            _length(prompt, where, self.input_len),
            _length(answer, where, self.output_len),
            hash_ids(values.get(self.hash_ids), where),
            self.block_tokens,
            sys.intern(kind[:KIND_LENGTH]) if isinstance(kind, str) else "text",
            values.get(self.chat),
            None if parent in (-1, "-1") else parent,  # a first turn
        )

    def _time(self, value: Any, where: str) -> float:
        name = self.timestamp
        if self.unit is not None:
            time = _finite(_number, value, where, name, f"a time in {self.unit}")
            return time / UNITS[self.unit]
        if _is_number(value):
            raise BadInput(
                f"{where}: {short_name(name)}={value!r:.60}: the unit of times that are no dates "
                f"is not known: set workload.time_unit to one of {', '.join(UNITS)}"
            )
        return _finite(_date, value, where, name, "a date, or a number")


_MOONCAKE = ("timestamp", "input_length", "output_length")  # the names of Bailian, too
FORMATS = {
    "azure": TraceFormat("TIMESTAMP", "ContextTokens", "GeneratedTokens", images="NumImages"),
    "burstgpt": TraceFormat("Timestamp", "Request tokens", "Response tokens", "s"),
    "bailian": TraceFormat(
        *(*_MOONCAKE, "s", "hash_ids", 16),
        kind="type",
        chat="chat_id",
        parent="parent_chat_id",
        marks=("chat_id", "parent_chat_id"),
    ),
    "mooncake": TraceFormat(*(*_MOONCAKE, "ms", "hash_ids", 512), kind="type", marks=("hash_ids",)),
}


def _finite(parse: Callable[[Any], float], value: Any, where: str, name: str, kind: str) -> float:
    """A finite number in the column `name`. Raises BadInput for a value that is not `kind`."""
    try:
        result = parse(value)
    except (ValueError, TypeError, OverflowError):
        result = math.nan
    if not math.isfinite(result):
        raise BadInput(f"{where}: {short_name(name)}={value!r:.60} is not {kind}")
    return result


def _date(value: Any) -> float:
    return moment(str(value))


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError("true is no number")
    return float(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, str) and ":" in value:  # as in most dates; an exception a row is slow
        return False
    try:
        _number(value)
    except (ValueError, TypeError, OverflowError):
        return False
    return True


def _length(value: Any, where: str, name: str) -> int:
    tokens = whole(_finite(_number, value, where, name, "a number of tokens"))
    if not isinstance(tokens, int) or not 0 <= tokens <= LONGEST:
        raise BadInput(f"{where}: {short_name(name)}={value!r:.60} is not a number of tokens")
    return tokens


def hash_ids(value: Any, where: str, end: float = HASHES) -> tuple[int, ...]:
    """Names of a prompt's blocks, each below `end`; none where there are none. Raises BadInput,
    starting with `where`."""
    if value is None:
        return ()
    if not isinstance(value, list) or any(type(i) is not int or not 0 <= i < end for i in value):
        numbers = "in [0, 2^64)" if end == HASHES else "of at least 0"
        raise BadInput(f"{where}: hash_ids must be a list of whole numbers {numbers}")
    return tuple(value)
