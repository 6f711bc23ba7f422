"""Sessions in the form of weka's kv-cache-tester, which AgentX replays: one JSON object each, with
`requests`, their times, lengths and block hashes, and sub-agents among them."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeVar

from minivllm.bench.workloads.agents.session import (
    LONGEST_S,
    AgentCall,
    AgentSession,
    in_order,
)
from minivllm.bench.workloads.agents.text import Runs, TextSpace
from minivllm.bench.workloads.from_file.trace_format import LONGEST, hash_ids
from minivllm.errors import BadInput
from minivllm.platform.values import REQUIRED, Values

CALLS = ("n", "s")  # types of a request: normal and streaming
SUBAGENT = "subagent"
BACKGROUND = "async_launched"  # status of a sub-agent that nobody waits for
# Seconds by which a call may be sent before the one that it follows has ended; times are rounded.
ROUNDING_S = 1.0
OTHER_MODELS = "calls were of another model than the first: one engine serves them all"
NO_HASHES = "calls have no hash_ids: their prompts share nothing"
FAILED = "calls have no prompt or no answer and were left out"
EMPTY = "sub-agents have no calls and were left out"

T = TypeVar("T")


@dataclass
class _Entry:
    """One call as it is read, in the order of the file."""

    runs: Runs
    output_len: int
    start_s: float
    end_s: float | None  # None: not recorded
    think_s: float | None
    agent: str
    shared_len: int
    after: list[int]

    def postpone(self, time_s: float) -> float:
        """Let it be sent at this time if that is later; returns the seconds by which it is."""
        late_s = max(0.0, time_s - self.start_s)
        self.start_s += late_s
        self.end_s = None if self.end_s is None else self.end_s + late_s
        return late_s


@dataclass
class WekaReader:
    """Reads one session.

    Args:
        row: the JSON object.
        where: names it in messages.
        text: of this session alone.
        shared: of all sessions, for hashes of global scope.
    """

    row: dict[str, Any]
    where: str
    text: TextSpace
    shared: TextSpace
    entries: list[_Entry] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    model: str | None = None

    def read(self) -> AgentSession:
        """The session.

        Raises:
            BadInput: a field is missing or of the wrong type, or hashes do not fit a prompt.
        """
        scope = self.row.get("hash_id_scope", "local")
        if scope not in ("local", "global"):
            raise BadInput(f"{self.where}: hash_id_scope={scope!r:.40} must be local or global")
        self._space = self.shared if scope == "global" else self.text
        self._block = Values(self.row, self.where).integer("block_size", REQUIRED, high=LONGEST)
        self._agent(self.row, "", 0.0, [])
        if not self.entries:
            raise BadInput(f"{self.where}: requests holds no call with a prompt and an answer")
        begin_s = min(entry.start_s for entry in self.entries)
        calls = in_order([self._call(entry, begin_s) for entry in self.entries])
        notes = tuple(f"{count} {words}" for words, count in self.counts.items())
        return AgentSession(self.where, calls, notes)

    def _call(self, entry: _Entry, begin_s: float) -> AgentCall:
        waits = None
        if entry.think_s is not None and any(
            self.entries[i].end_s is None for i in entry.after
        ):  # nothing else says how long after an end it was sent
            waits = (entry.think_s,) * len(entry.after)
        start_s = entry.start_s - begin_s
        end_s = start_s if entry.end_s is None else entry.end_s - begin_s
        return AgentCall(
            *(entry.runs, entry.output_len, start_s, end_s, entry.agent, tuple(entry.after), waits),
            entry.shared_len,
        )

    def _agent(
        self, row: dict[str, Any], agent: str, base_s: float, spawned_by: list[int]
    ) -> list[int]:
        """Read an agent's calls, and those of its sub-agents. Returns the calls that whoever waits
        for the agent waits for.

        Args:
            row: the session, or a sub-agent's entry.
            agent: its name.
            base_s: when its times begin.
            spawned_by: calls that its first call waits for.
        """
        where = f"{self.where}: {agent}" if agent else self.where
        values, requests = Values(row, where), row.get("requests")
        if not isinstance(requests, list):
            raise BadInput(f"{where}: requests must be a list")
        shared_len = sum(
            values.integer(key, REQUIRED, low=0, high=LONGEST)
            for key in ("tool_tokens", "system_tokens")
            if key in row
        )
        open_calls = list(spawned_by)  # whose answers no later call of this agent has waited for
        latest_s = base_s
        joins: list[int] = []  # last calls of sub-agents that the next call waits for
        for number, request in enumerate(requests):
            at = f"{where}: requests[{number}]"
            if not isinstance(request, dict):
                raise BadInput(f"{at} must be an object")
            kind = request.get("type")
            if kind == SUBAGENT:
                joins += self._subagent(request, at, agent, number, base_s, open_calls)
                continue
            if kind not in CALLS:
                raise BadInput(f"{at}: type={kind!r:.40} must be n, s or {SUBAGENT}")
            entry = self._entry(request, at, agent, base_s, shared_len)
            if entry is None:
                continue
            ended = [i for i in open_calls if self._has_ended(i, entry.start_s)]
            if not ended and open_calls:  # sent while the ones before it were under way
                entry.after = sorted({j for i in open_calls for j in self.entries[i].after})
            else:
                entry.after = sorted({*ended, *joins})
                # An agent waits for its sub-agents, whatever the times say: the rest comes later.
                done_s = max((self._end_s(i) for i in joins), default=entry.start_s)
                base_s += entry.postpone(done_s)
                open_calls = [i for i in open_calls if i not in ended]
                joins = []
            base_s += entry.postpone(latest_s)
            latest_s = entry.start_s
            open_calls.append(len(self.entries))
            self.entries.append(entry)
        return sorted({*open_calls, *joins} - set(spawned_by))

    def _has_ended(self, index: int, start_s: float) -> bool:
        return self._end_s(index) <= start_s + ROUNDING_S

    def _end_s(self, index: int) -> float:
        entry = self.entries[index]
        return entry.start_s if entry.end_s is None else entry.end_s

    def _subagent(
        self,
        entry: dict[str, Any],
        at: str,
        parent: str,
        number: int,
        base_s: float,
        open_calls: list[int],
    ) -> list[int]:
        """Read a sub-agent; returns what its parent waits for."""
        t = _seconds(Values(entry, at), "t", REQUIRED)
        inner = entry.get("requests")
        if not isinstance(inner, list) or not inner:
            self._count(EMPTY)
            return []
        first = inner[0].get("t") if isinstance(inner[0], dict) else None
        # Two conventions are in use: times within the session, and times within the sub-agent.
        within = isinstance(first, int | float) and first < t
        name = f"{parent}/{number}" if parent else f"subagent {number}"
        last = self._agent(entry, name, base_s + t if within else base_s, list(open_calls))
        return [] if entry.get("status") == BACKGROUND else last

    def _entry(
        self, request: dict[str, Any], at: str, agent: str, base_s: float, shared_len: int
    ) -> _Entry | None:
        values = Values(request, at)
        prompt_len, output_len = (
            values.integer(key, REQUIRED, low=0, high=LONGEST) for key in ("in", "out")
        )
        if not prompt_len or not output_len:
            self._count(FAILED)
            return None
        ids = hash_ids(request.get("hash_ids"), at, end=inf)
        if not ids:
            self._count(NO_HASHES)
        model = str(request.get("model"))
        self.model = model if self.model is None else self.model
        if model != self.model:
            self._count(OTHER_MODELS)
        start_s = base_s + _seconds(values, "t", REQUIRED)
        took_s = _seconds(values, "api_time", None)
        return _Entry(
            self._space.prompt(ids, self._block, prompt_len, at),
            output_len,
            start_s,
            None if took_s is None else start_s + took_s,
            _seconds(values, "think_time", None),
            agent,
            shared_len,
            [],
        )

    def _count(self, words: str) -> None:
        self.counts[words] = self.counts.get(words, 0) + 1


def _seconds(values: Values, key: str, default: T) -> float | T:
    return values.number(key, default, least=0.0, high=LONGEST_S)


def is_weka(row: Any) -> bool:
    """Whether a JSON value looks like a session in this form."""
    return isinstance(row, dict) and "requests" in row and "block_size" in row
