"""Several replicas as one engine: what they report, and the routing in front of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from minivllm.bench.metrics.speculation import SpeculationReport
from minivllm.engines.base import Adapter, EngineInfo, EngineOutput
from minivllm.extras.speculative.proposer import SpeculationCounters
from minivllm.processes.handover import Handovers, Rest, Routing

Liveness = dict[str, dict[str, float | str]]
# Counters that are no amount of work: the sum over replicas would mean nothing.
GREATEST = frozenset(("block_size", "kv_bytes_per_token", "largest_batch", "layers_quantised"))


def merged_info(infos: Sequence[EngineInfo], load_s: float, device: str) -> EngineInfo:
    """Sums of memory and of the requests that can run at once.

    The roofline's costs are left out: the steps of replicas overlap, and share the limits of one
    machine.

    Args:
        infos: one a replica.
        load_s: seconds until all of them were built, compiling included.
        device: of all of them.
    """
    first = infos[0]
    times = [info.compile_s for info in infos if info.compile_s is not None]
    compile_s = max(times, default=None)  # they compile at the same time
    names = dict.fromkeys(name for info in infos for name in info.memory)
    return replace(
        first,
        max_num_seqs=sum(info.max_num_seqs for info in infos),
        load_s=load_s - (compile_s or 0.0),
        compile_s=compile_s,
        memory={name: _total([info.memory.get(name) for info in infos]) for name in names},
        model={"device": device},
        warnings=list(dict.fromkeys(text for info in infos for text in info.warnings)),
    )


def _total(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def merged_liveness(each: Sequence[Liveness], handovers: Handovers | None = None) -> Liveness:
    """Sums of counters; words are those of all replicas, once where they agree.

    Args:
        each: one a replica.
        handovers: where prompts are handed over, which is no hit of the prefix cache: its counters
            are those of the replicas that compute prompts.
    """
    merged: Liveness = {}
    for group in dict.fromkeys(name for one in each for name in one):
        counters = [one.get(group, {}) for one in each]
        names = dict.fromkeys(name for one in counters for name in one)
        merged[group] = {
            name: _merged(name, [one.get(name, 0.0) for one in counters]) for name in names
        }
    if handovers is not None:
        prompts = merged_liveness(each[: handovers.num_prefill]).get("cache", {})
        merged["cache"] |= {name: v for name, v in prompts.items() if name.startswith("prefix_")}
    return merged


def _merged(name: str, values: Sequence[float | str]) -> float | str:
    if any(isinstance(value, str) for value in values):
        return " | ".join(dict.fromkeys(map(str, values)))
    numbers = [float(value) for value in values]
    return max(numbers) if name in GREATEST else sum(numbers)


def merged_steps(each: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The steps of all replicas in the order of their beginning, each with its replica's number."""
    rows = [{**row, "replica": number} for number, steps in enumerate(each) for row in steps]
    return sorted(rows, key=lambda row: (row["start_s"], row["replica"]))


def merged_speculation(each: Sequence[SpeculationReport | None]) -> SpeculationReport | None:
    """Sums of what drafts did; None where replicas do not draft."""
    reports = [one for one in each if one is not None]
    if not reports:
        return None
    total = SpeculationCounters()
    for report in reports:
        for item in fields(total):
            mine, theirs = getattr(total, item.name), getattr(report.counters, item.name)
            if isinstance(mine, Counter):
                mine.update(theirs)
            elif isinstance(mine, dict):
                mine |= theirs
            else:
                setattr(total, item.name, mine + theirs)
    return reports[0]._replace(counters=total)


class RoutedEngine(Adapter):
    """Base of engines that are several. Subclasses set the attributes when they are built."""

    routing: Routing
    _keep_prefixes: bool
    _sessions: dict[str, str]  # of requests that are to come

    def note_session(self, request_id: str, session: str) -> None:
        self._sessions[request_id] = session

    def reset(self) -> None:
        self._end_all("reset")
        if not self._keep_prefixes:
            self.routing.router.forget_prefixes()

    def recount(self) -> None:
        self._end_all("recount")

    def _end_all(self, method: str) -> None:
        """End all requests, call a method of every replica, and count from 0."""
        raise NotImplementedError

    def _count_from_0(self) -> None:
        self._sessions.clear()
        self.routing.recount()

    def _forget(self, request_id: str) -> None:
        """Note that a request has ended."""
        self.routing.end(request_id)

    def _rest(self, output: EngineOutput) -> Rest | None:
        """What another replica has to do of a request whose last output this is; None: nothing, and
        the request is forgotten."""
        handovers, rest = self.routing.handovers, None
        if handovers is not None:
            rest = handovers.rest(output.request_id, output.finish_reason)
        if rest is None:
            self._forget(output.request_id)
        return rest
