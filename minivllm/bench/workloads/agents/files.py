"""Reading recorded sessions, in whichever form they are; also those in traces of single requests,
of which Bailian's name the turn before, and Mooncake's hashes show which prompt continues which."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from minivllm.bench.workloads.agents.session import AgentCall, AgentSession
from minivllm.bench.workloads.agents.tensorrt_llm import EventReader, is_events
from minivllm.bench.workloads.agents.text import TextSpace
from minivllm.bench.workloads.agents.weka import WekaReader, is_weka
from minivllm.bench.workloads.from_file.tables import Row, json_rows
from minivllm.bench.workloads.from_file.trace_file import read_trace
from minivllm.bench.workloads.from_file.trace_format import TraceRow
from minivllm.errors import BadInput
from minivllm.platform import untrusted

NO_ENDS = "calls follow others at recorded distances from start to start: the trace has no ends"
FAILED = "requests of the file were left out, they failed when the trace was taken"


def read_chats(path: Path, format: str, where: str) -> list[AgentSession]:
    """The sessions of a trace, by the times of their first requests.

    Args:
        path: the file.
        format: mooncake, bailian or auto, see `read_trace`.
        where: how messages name the file.

    Raises:
        BadInput: see `read_trace`; or hashes do not fit a prompt.
    """
    rows, failed = read_trace(path, format)
    for row in rows:
        for name in (row.chat, row.parent):
            if isinstance(name, list | dict):
                raise BadInput(f"{where}:{row.line}: {name!r:.40} is no name of a conversation")
    chains = _by_name(rows) if any(row.chat is not None for row in rows) else _by_hash(rows)
    text = TextSpace(0)
    sessions = []
    for chain in chains:
        begin_s, calls = rows[chain[0][0]].time_s, []
        for index, before in chain:
            row = rows[index]
            runs = text.prompt(
                row.hash_ids, row.block_tokens, row.input_tokens, f"{where}:{row.line}"
            )
            start_s = row.time_s - begin_s
            after = () if before is None else (before,)
            calls.append(AgentCall(runs, row.output_tokens, start_s, start_s, after=after))
        later = sum(before is not None for _, before in chain)
        notes = (f"{later} {NO_ENDS}",) * bool(later)
        name = f"{where}:{rows[chain[0][0]].line}"
        sessions.append(AgentSession(name, tuple(calls), notes))
    if failed and sessions:
        first = sessions[0]
        notes = (f"{failed} {FAILED}", *first.notes)
        sessions[0] = AgentSession(first.where, first.calls, notes)
    return sessions


# Of each session its requests, by their places in the trace, and which of its own requests each
# goes on with.
Chain = list[tuple[int, int | None]]


def _by_name(rows: Sequence[TraceRow]) -> list[Chain]:
    chains: list[Chain] = []
    known: dict[object, tuple[Chain, int]] = {}
    for index, row in enumerate(rows):
        chain, before = known.get(row.parent, (None, None)) if row.later_turn else (None, None)
        if chain is None:  # also one whose turn before is not in the file
            chain = []
            chains.append(chain)
        chain.append((index, before))
        known[row.chat] = chain, len(chain) - 1
    return chains


def _by_hash(rows: Sequence[TraceRow]) -> list[Chain]:
    """A request goes on with the longest earlier prompt whose whole blocks it begins with."""
    chains: list[Chain] = []
    # the last whole block of a prompt that nothing goes on with yet; a hash tells all before it
    tails: dict[int, tuple[Chain, int]] = {}
    for index, row in enumerate(rows):
        whole = row.hash_ids[: row.input_tokens // row.block_tokens]
        found = next((one for one in reversed(whole) if one in tails), None)
        chain, before = ([], None) if found is None else tails.pop(found)
        if before is None:
            chains.append(chain)
        chain.append((index, before))
        if whole:
            tails[whole[-1]] = chain, len(chain) - 1
    return chains


FORMATS = {"weka": is_weka, "tensorrt_llm": is_events}
CHATS = ("bailian", "mooncake")
FIELDS = {"weka": "requests and block_size", "tensorrt_llm": "events"}
MOST_FILES = 100_000
LARGEST_FILE = 512 * untrusted.MIB  # of one JSON value
LONGEST_LINE = 64 * untrusted.MIB
DEEPEST = 100  # levels of lists and objects in a session: 50 of agents
HELP = (
    "a session is a JSON object with requests and block_size (weka) or events (tensorrt_llm); "
    "lines with timestamp, input_length and output_length are of a bailian or mooncake trace"
)


def read_sessions(path: Path, format: str, knob: str) -> Iterator[AgentSession]:
    """The sessions of a file or a folder, each read when it is needed.

    Args:
        path: a folder of .json files, each with one session; a file with one, or with one a line;
            or a trace of single requests.
        format: weka (the sessions that AgentX replays), tensorrt_llm (execution traces), bailian,
            mooncake, or auto, which tells by the fields.
        knob: how messages name the path.

    Raises:
        BadInput: naming the file and, where one is to blame, the line; no session is there, or it
            is not of the format.
    """
    if format in CHATS:
        yield from read_chats(path, format, str(path))
        return
    shared, number = TextSpace(0), 0
    for where, _, row, *_ in _rows(path, knob):
        if format == "auto" and isinstance(row, dict) and "timestamp" in row:
            yield from read_chats(path, format, str(path))
            return
        known = [name for name, fits in FORMATS.items() if fits(row)]
        if format != "auto" and format not in known:
            raise BadInput(
                f"{where}: workload.format={format} needs a JSON object with {FIELDS[format]}"
            )
        if not known:
            raise BadInput(f"{where}: not a session of an agent; {HELP}")
        reader = EventReader if known[0] == "tensorrt_llm" else WekaReader
        number += 1
        if _is_deeper(row, DEEPEST):
            raise BadInput(f"{where}: agents or branches are nested too deeply")
        yield reader(row, where, TextSpace(number), shared).read()
    if not number:
        raise BadInput(f"{knob} holds no session; {HELP}")


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects of a JSON value are nested in more levels."""
    level = [value]
    for _ in range(levels):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [one for ones in inner for one in ones if isinstance(one, dict | list)]
        if not level:
            return False
    return True


def _rows(path: Path, knob: str) -> Iterator[Row]:
    """JSON values: one a file, or one a line."""
    if path.is_dir():
        for file in sorted(path.glob("*.json"))[:MOST_FILES]:
            yield _whole_file(file)
        return
    # One value a line, unless the first line is only the beginning of one.
    with untrusted.open_file(path, knob) as opened:
        first = opened.readline(LONGEST_LINE)
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        yield _whole_file(path)
        return
    yield from json_rows(path, knob, longest=LONGEST_LINE)


def _whole_file(path: Path) -> Row:
    name = untrusted.printable(str(path))
    return Row(name, 1, untrusted.read_json(path, name, limit=LARGEST_FILE), name)
