"""Sessions in traces of single requests: Bailian's name the turn before, and of Mooncake's the
hashes tell which prompt goes on with which."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from minivllm.bench.workloads.agents.session import AgentCall, AgentSession
from minivllm.bench.workloads.agents.text import TextSpace
from minivllm.bench.workloads.from_file.trace_file import read_trace
from minivllm.bench.workloads.from_file.trace_format import TraceRow
from minivllm.errors import BadInput

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
