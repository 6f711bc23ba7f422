"""Listens to an engine and reports what each step changed, one bundle a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from minivllm.cache.spec import NOTHING
from minivllm.engine.events import StateChanged, StepEnded, StepPlanned, StepTimed
from minivllm.engine.request import Request, RequestState
from minivllm.engine.scheduler import Scheduler
from minivllm.engine.step import Held as HeldRequest
from minivllm.engine.step import ScheduledRequest, StepPlan
from minivllm.extras.observation.bundle import (
    VERSION,
    Admitted,
    Drafted,
    EngineFacts,
    Hold,
    NewRequest,
    PreemptedRequest,
    Scheduled,
    Sized,
    StateChange,
    StepBundle,
    Table,
    Why,
)
from minivllm.extras.observation.kv_events import KVEvents


def seconds(time_s: float) -> float:
    """A time as bundles have it, in whole microseconds: a step's other digits would be half of its
    text."""
    return round(time_s, 6)


@dataclass(slots=True)
class _Reported:
    """What the bundles so far have reported of a request."""

    number: int
    num_tokens: int = 0
    num_computed: int = 0
    num_blocks: int = 0
    version: int = 0  # of its block table
    blocks: list[int] = field(default_factory=list)


class StepObserver:
    """Makes a `StepBundle` of every step, and of what changes between steps.

    The first bundle holds the whole state. While nobody observes, an engine does nothing for it.

    Args:
        scheduler: of the engine.
        sink: gets each bundle as its step ends.
        phases: whether bundles say how long each phase of a step took (`timed`), which is half of
            what observing costs.
    """

    def __init__(
        self, scheduler: Scheduler, sink: Callable[[StepBundle], None], phases: bool = True
    ) -> None:
        self.scheduler, self._cache, self._sink = scheduler, scheduler.cache, sink
        self._kv = KVEvents(scheduler.cache.prefix)
        self._reported: dict[Request, _Reported] = {}
        self._count = self._num_steps = self._latest = 0
        self._bundle: StepBundle = {}
        self._touched: dict[Request, None] = {}
        self._in_step = False
        self._drafted: list[tuple[Request, int]] = []  # in this step
        bus = scheduler.events
        self._unsubscribe = [
            bus.subscribe(self._state_changed, StateChanged),
            bus.subscribe(self._planned, StepPlanned),
            bus.subscribe(self._ended, StepEnded),
        ]
        if phases:
            self._unsubscribe.append(bus.subscribe(self._timed, StepTimed))
        self._cache.prefix.changes = []
        self.tell_all()

    def close(self) -> None:
        """Tell what has changed since the last step, and listen no more."""
        self.flush()
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        self._unsubscribe = []
        self._cache.prefix.changes = None

    def flush(self) -> None:
        """Tell what has changed since the last step, if anything has."""
        self._settle(self._touched)
        self._in_step = False  # a step that failed has no end
        if self._bundle:
            self._bundle["end_s"] = self._bundle["time_s"] = seconds(self.scheduler.now())
            self._send()

    def tell_all(self) -> None:
        """Tell the whole state, in a bundle before which nothing counts."""
        scheduler, reported = self.scheduler, self._reported
        self._reported, self._bundle, self._touched = {}, {}, {}
        assert self._cache.prefix.changes is not None
        self._cache.prefix.changes.clear()
        now = seconds(scheduler.now())
        self._bundle = {"time_s": now, "end_s": now, "engine": self._facts()}
        unfinished = [*scheduler.running, *sorted(scheduler.waiting, key=lambda r: r.rank)]
        for request in unfinished:
            if request in reported:  # keeps its number
                self._reported[request] = _Reported(reported[request].number)
                self._bundle.setdefault("new", []).append(self._described(request))
            self._note_state(now, request)
        if events := self._kv.all():
            self._bundle["kv_events"] = events
        self._settle(unfinished)
        self._send()

    def _facts(self) -> EngineFacts:
        policy = self.scheduler.policy
        return {
            "version": VERSION,
            "block_size": self._cache.layout.block_size,
            "num_blocks": self._cache.pool.num_usable,
            "max_num_seqs": policy.max_num_seqs,
            "max_num_batched_tokens": policy.max_num_batched_tokens,
            "batching": policy.name,
            "preemption": self.scheduler.preemption.name,
        }

    def _state_changed(self, event: StateChanged) -> None:
        request = event.request
        self._note_state(event.time_s, request)
        if event.state is RequestState.PREFILL:
            self._note_admitted(request)
        elif event.state is RequestState.DONE and not self._in_step:
            self.flush()  # a request that was aborted; no step may follow

    def _note_state(self, time_s: float, request: Request) -> None:
        number = self._number(request)
        self._touched[request] = None
        change = StateChange(seconds(time_s), number, request.state.value, request.finish_reason)
        self._bundle.setdefault("states", []).append(change)

    def _number(self, request: Request) -> int:
        reported = self._reported.get(request)
        if reported is None:
            reported = self._reported[request] = _Reported(self._count)
            self._count += 1
            self._bundle.setdefault("new", []).append(self._described(request))
        return reported.number

    def _described(self, request: Request) -> NewRequest:
        group, parent = request.group, None
        if group is not None and group.leader is not request:
            leader = self._reported.get(group.leader)
            parent = None if leader is None else leader.number
        return NewRequest(
            self._reported[request].number,
            request.request_id,
            request.num_prompt_tokens,
            request.max_num_tokens,
            request.params.priority,
            seconds(request.arrival_s),
            parent,
        )

    def _note_admitted(self, request: Request) -> None:
        waiting = self.scheduler.waiting
        place = 0
        if waiting and waiting.peek().rank < request.rank:
            place = sum(rank < request.rank for rank in waiting.requests)
        arrival = request.rank[1]
        overtook = arrival < self._latest and not request.num_preemptions
        self._latest = max(self._latest, arrival)
        admitted = Admitted(self._number(request), place, request.cache.num_reused, overtook)
        self._bundle.setdefault("admitted", []).append(admitted)

    def _planned(self, event: StepPlanned) -> None:
        if self._in_step:  # the step before has failed
            self.flush()
        plan, bundle = event.plan, self._bundle
        self._in_step = True
        bundle["time_s"] = seconds(event.time_s)
        if plan.num_drafts:
            self._drafted = [
                (part.request, part.num_drafts) for part in plan.scheduled if part.num_drafts
            ]
        self._note_scheduled(plan)
        if plan.preempted:
            bundle["preempted"] = [
                PreemptedRequest(
                    self._number(one.request),
                    self._number(one.needed_by),
                    bool(one.request.cache.host_slots),
                )
                for one in plan.preempted
            ]
        if plan.held is not None or self.scheduler.waiting.requests:
            held = self._held(plan)
            if held is not None:
                bundle["held"] = held
        if plan.transfers is not NOTHING:
            moves = plan.transfers
            copied, saved, loaded = list(moves.copies), list(moves.saves), list(moves.loads)
            bundle.update({"copied": copied, "saved": saved, "loaded": loaded})
            bundle.update({"spilled": len(moves.spills), "read": len(moves.reads)})

    def _note_scheduled(self, plan: StepPlan) -> None:
        decoded: list[int] = []
        scheduled: list[Scheduled] = []
        for part in plan.scheduled:
            request, start, num_tokens, prefill, num_drafts = part
            reported = self._reported[request]
            if prefill or num_drafts:
                scheduled.append(Scheduled(reported.number, start, num_tokens, self._why(part)))
            else:
                decoded.append(reported.number)
                reported.num_tokens += 1  # what a viewer takes it to have; see _settle
                reported.num_computed += 1
        if decoded:
            self._bundle["decoded"] = decoded
        if scheduled:
            self._bundle["scheduled"] = scheduled

    def _why(self, part: ScheduledRequest) -> Why:
        """What decided the length of a request's part."""
        if part.samples or part.num_drafts:
            return "verify" if part.num_drafts else "prefill"
        budget = self.scheduler.policy.max_num_batched_tokens
        if self._cache.evictor is not None and part.num_tokens < budget:
            return "cache"
        fair = self.scheduler.policy.fair_prefill and part.num_tokens < budget
        return "share" if fair else "budget"

    def _held(self, plan: StepPlan) -> Hold | None:
        """Why the most urgent waiting request waits on."""
        scheduler, held = self.scheduler, plan.held
        if held is not None and held.request in scheduler.waiting:
            needed = self._needed(held) if held.reason == "blocks" else 0
            number = self._number(held.request)
            return Hold(number, held.reason, needed, held.num_free, held.spare)
        if not scheduler.waiting:
            return None
        number = self._number(scheduler.waiting.peek())
        free = self._cache.pool.num_free
        if plan.preempted:
            return Hold(number, "preempted", 0, free, 0)
        if scheduler.num_seqs >= scheduler.policy.max_num_seqs:
            return Hold(number, "seqs", 0, free, 0)
        return Hold(number, "policy", 0, free, 0)

    def _needed(self, held: HeldRequest) -> int:
        """Free blocks that a request needs to compute what a step has tokens for."""
        request, cache = held.request, self._cache
        nodes = cache.reusable_nodes(request.reusable_token_ids)
        done = request.num_computed_tokens or len(nodes) * cache.layout.block_size
        count = min(request.num_tokens - done, held.num_tokens)
        used = sum(cache.pool.ref_counts[node.block] > 0 for node in nodes if node.block)
        return cache.blocks_for(done - request.cache.num_evicted + count) - used

    def _timed(self, event: StepTimed) -> None:
        self._bundle["timed"] = tuple([round(ms, 3) for ms in event[-7:]])

    def _ended(self, event: StepEnded) -> None:
        if self._drafted:
            accepted = {part.request: part.num_drafts for part in event.plan.scheduled}
            self._bundle["drafts"] = [
                Drafted(self._number(request), count, accepted.get(request, 0))
                for request, count in self._drafted
            ]
            self._drafted = []
        running = self.scheduler.running
        self._settle({**running, **self._touched} if self._touched else running)
        self._in_step = False
        bundle = self._bundle
        # Not one more poll of an engine that waits, in which at most somebody is held.
        if len(bundle) > 1 + ("held" in bundle):
            bundle["step"] = self._num_steps
            bundle["end_s"] = seconds(event.time_s)
            self._num_steps += 1
            self._send()
        else:
            self._bundle = {}

    def _settle(self, requests: Iterable[Request]) -> None:
        """Note the sizes and block tables of requests that differ from what was reported."""
        bundle = self._bundle
        sizes, tables = [], []
        for request in requests:
            reported = self._reported.get(request)
            if reported is None:
                continue
            num_tokens, num_computed = len(request.token_ids), request.num_computed_tokens
            if num_tokens != reported.num_tokens or num_computed != reported.num_computed:
                reported.num_tokens, reported.num_computed = num_tokens, num_computed
                sizes.append(Sized(reported.number, num_tokens, num_computed))
            table = request.cache.block_table
            if len(table.blocks) != reported.num_blocks or table.version != reported.version:
                tables.append(self._changed_table(request, reported))
            if request.state is RequestState.DONE:
                del self._reported[request]
        if self._touched:
            self._touched = {}
        if sizes:
            bundle["sizes"] = sizes
        if tables:
            bundle["tables"] = tables
        changes = self._cache.prefix.changes
        if changes:
            bundle.setdefault("kv_events", []).extend(self._kv.events(changes))
            changes.clear()

    def _changed_table(self, request: Request, reported: _Reported) -> Table:
        table = request.cache.block_table
        kept = 0
        if table.version == reported.version:
            kept = reported.num_blocks
        else:
            pairs: Any = zip(reported.blocks, table.blocks, strict=False)
            kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        reported.blocks = list(table.blocks)
        reported.num_blocks, reported.version = len(table.blocks), table.version
        return Table(reported.number, kept, table.blocks[kept:])

    def _send(self) -> None:
        bundle, self._bundle = self._bundle, {}
        bundle["num_waiting"] = len(self.scheduler.waiting)
        bundle["num_used_blocks"] = self._cache.pool.num_used
        self._sink(bundle)
