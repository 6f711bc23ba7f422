"""A session of an agent, and its replay as requests of a workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np

from minivllm.bench.workloads.agents.text import MARKER_LEN, Runs, marked, scaled
from minivllm.bench.workloads.lazy_prompt import LazyPrompt
from minivllm.bench.workloads.workload import WorkloadRequest
from minivllm.models.load.reserved_ids import UNNAMED, Reserved

LONGEST_S = 1e10  # a recorded time at most; those since 1970 are below


@dataclass(frozen=True, slots=True)
class AgentCall:
    """One request of a session.

    Args:
        runs: its prompt, see `LazyPrompt`.
        output_len: tokens of its answer.
        start_s: when it was sent, seconds after the session began.
        end_s: when its answer had ended.
        agent: whose call it is; "" is the main agent.
        after: places of earlier calls of the session whose answers it waits for.
        waits_s: how long after the end of each of them it is sent; None: as long as it was after
            the end of the last of them, by `start_s` and `end_s`.
        shared_len: tokens at its beginning that replays of the session share.
    """

    runs: Runs
    output_len: int
    start_s: float
    end_s: float
    agent: str = ""
    after: tuple[int, ...] = ()
    waits_s: tuple[float, ...] | None = None
    shared_len: int = 0

    @property
    def prompt_len(self) -> int:
        """Tokens of its prompt."""
        return sum(map(len, self.runs))


@dataclass(frozen=True)
class AgentSession:
    """What one agent did for one job: its calls in the order of their starts, and those of its
    sub-agents among them. `where` names it in messages."""

    where: str
    calls: tuple[AgentCall, ...]
    notes: tuple[str, ...] = field(default=(), compare=False)  # words that follow a count

    @property
    def longest(self) -> AgentCall:
        """The call with the most tokens."""
        return max(self.calls, key=lambda call: call.prompt_len + call.output_len)


@dataclass(frozen=True)
class SessionReplay:
    """How sessions are replayed.

    Args:
        vocab_size, seed: see `LazyPrompt`.
        ignore_eos: of every request.
        cache_bust: whether a replay has a marker of its own.
        reserved: see `LazyPrompt`.
    """

    vocab_size: int
    seed: int
    ignore_eos: bool = True
    cache_bust: bool = True
    reserved: Reserved = UNNAMED

    def requests(
        self, session: AgentSession, number: int, start_s: float | None = None
    ) -> tuple[list[WorkloadRequest], list[WorkloadRequest]]:
        """The requests of one replay, and those that prime the cache for it.

        Args:
            session: what is replayed.
            number: of the replay, which names it and gives it its marker.
            start_s: begin at this instant of the session; None begins at its beginning.
        """
        calls = session.calls
        left = [i for i, call in enumerate(calls) if start_s is None or call.start_s > start_s]
        kept = set(left)
        places = _marker_places(calls)
        requests = []
        for i in left:
            waits = [
                (f"s{number}.{j}", wait_s)
                for j, wait_s in zip(calls[i].after, _waits(calls, i), strict=True)
                if j in kept
            ]
            begin_s = None if waits else calls[i].start_s - (start_s or 0.0)
            requests.append(
                replace(
                    self._request(calls[i], places[calls[i].agent], number, f"s{number}.{i}"),
                    think_s=begin_s,
                    after=tuple(name for name, _ in waits),
                    after_s=tuple(wait_s for _, wait_s in waits),
                )
            )
        last = {call.agent: i for i, call in enumerate(calls) if i not in kept}
        going_on = {calls[i].agent for i in left}
        primers = sorted(i for agent, i in last.items() if agent in going_on)
        return requests, [
            self._request(calls[i], places[calls[i].agent], number, f"p{number}.{i}")
            for i in primers
        ]

    def _request(self, call: AgentCall, at: int, number: int, request_id: str) -> WorkloadRequest:
        runs = marked(call.runs, at, number) if self.cache_bust else call.runs
        prompt = LazyPrompt(runs, self.vocab_size, self.seed, self.reserved)
        return WorkloadRequest(
            request_id, prompt, call.output_len, self.ignore_eos, session=f"s{number}"
        )


def in_order(calls: Sequence[AgentCall]) -> tuple[AgentCall, ...]:
    """Calls by their starts; those of one moment keep their order."""
    order = sorted(range(len(calls)), key=lambda i: calls[i].start_s)
    place = {old: new for new, old in enumerate(order)}
    return tuple(
        replace(calls[old], after=tuple(place[i] for i in calls[old].after)) for old in order
    )


def _marker_places(calls: Sequence[AgentCall]) -> dict[str, int]:
    """Where the marker of a replay stands in the prompts of each agent: behind what replays share,
    or in front where a prompt is too short for that."""
    room: dict[str, int] = {}
    shared: dict[str, int] = {}
    for call in calls:
        room[call.agent] = min(room.get(call.agent, call.prompt_len), call.prompt_len)
        shared[call.agent] = min(shared.get(call.agent, call.shared_len), call.shared_len)
    return {
        agent: shared[agent] if shared[agent] + MARKER_LEN <= room[agent] else 0 for agent in room
    }


def _waits(calls: Sequence[AgentCall], index: int) -> tuple[float, ...]:
    """How long after the end of each call that it waits for a call is sent."""
    call = calls[index]
    if call.waits_s is not None:
        return call.waits_s
    ended = max((calls[i].end_s for i in call.after), default=0.0)
    return (max(0.0, call.start_s - ended),) * len(call.after)


def without_long_gaps(session: AgentSession, max_idle_s: float) -> AgentSession:
    """The session with all gaps between the starts of its calls at most so long: what comes after a
    longer one is moved to an earlier time, so that calls which overlap go on to do so."""
    calls, moved_s, before_s = [], 0.0, 0.0
    for call in session.calls:
        moved_s += max(0.0, call.start_s - before_s - max_idle_s)
        before_s = call.start_s
        waits = call.waits_s and tuple(min(wait_s, max_idle_s) for wait_s in call.waits_s)
        start_s, end_s = call.start_s - moved_s, call.end_s - moved_s
        calls.append(replace(call, start_s=start_s, end_s=end_s, waits_s=waits))
    return replace(session, calls=tuple(calls))


def at_length(session: AgentSession, factor: Fraction) -> AgentSession:
    """The session with prompts and answers so many times as long."""
    if factor == 1:
        return session
    calls = [
        replace(
            call,
            runs=scaled(call.runs, factor),
            output_len=max(1, round(call.output_len * factor)),
            shared_len=call.shared_len * factor.numerator // factor.denominator,
        )
        for call in session.calls
    ]
    return replace(session, calls=tuple(calls))


def random_start(session: AgentSession, rng: np.random.Generator) -> float | None:
    """An instant of the session, after its first call was sent and before its last one is; None
    where it has none."""
    last_s = session.calls[-1].start_s
    return float(rng.uniform(session.calls[0].start_s, last_s)) if last_s > 0 else None
