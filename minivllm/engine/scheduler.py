"""The scheduler: which requests compute how many tokens in each step. Pure Python, no tensors, no
phases."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from operator import attrgetter

from minivllm.cache.manager import CacheManager
from minivllm.engine.batching import BatchingPolicy, WaitingQueue, may_chunk, require_servable
from minivllm.engine.events import EventBus, StateChanged, StepPlanned
from minivllm.engine.preemption import Preemption, Recompute
from minivllm.engine.request import Request, RequestState
from minivllm.engine.step import Held, HeldFor, Preempted, ScheduledRequest, StepPlan

DISK_POLL_S = 0.001  # poll interval while every request waits for the disk
RECOMPUTE = Recompute()


class SchedulingRule:
    """What an extra adds to planning; each method does nothing unless it is overridden."""

    def added(self, request: Request) -> None:
        """A request was added, or starts as a further member of its group."""

    def before_step(self, scheduler: Scheduler, now: float) -> None:
        """A step is about to be planned, at `now` seconds: requests may be shed or preempted."""

    def rejects(self, request: Request, now: float) -> bool:
        """Whether to shed a waiting request whose turn it is."""
        return False

    def limit(self, request: Request, count: int) -> int:
        """How many of `count` tokens a request may compute in this step; those that it does not
        compute keep their place in the cache."""
        return count

    def extend(self, scheduler: Scheduler, step: PlanBuilder) -> None:
        """The step is planned: what is left of its budget may be used."""

    def ended(self, request: Request) -> None:
        """A request has ended in any way."""


class Scheduler:
    """Plans steps without knowing phases, as vLLM v1 does.

    A request has tokens known and tokens computed, and a step closes some of the gap:
    `min(num_tokens - num_computed_tokens, budget)` for each running request, then for waiting ones
    that the policy and the cache admit. The same lines are prefill, chunked prefill, decode and
    resumption after preemption.

    Waiting requests are ordered by when they are due, one `aging_s` later for each step of
    priority: by their deadline or their arrival plus `aging_s`, whichever is sooner. Since that
    never changes while they wait and whoever comes late enough is due later, nothing starves.

    Args:
        policy: who may join, and the token budget of a step.
        cache: gives blocks to growing requests.
        events: bus for state changes and decisions.
        now: clock in seconds, for deadlines and waiting.
        preemption: what becomes of running requests when the cache is full.
        rules: what extras add to planning.
    """

    def __init__(
        self,
        policy: BatchingPolicy,
        cache: CacheManager,
        events: EventBus,
        now: Callable[[], float] = time.monotonic,
        preemption: Preemption = RECOMPUTE,
        rules: Sequence[SchedulingRule] = (),
    ) -> None:
        self.policy = policy
        self.preemption = preemption
        self.rules = rules
        self.cache = cache
        self.events = events
        self.now = now
        self.waiting = WaitingQueue()
        self.running: dict[Request, None] = {}
        self.num_preemptions = 0  # liveness counters
        self.num_chunks = 0  # parts of a prefill that were not its last
        self.num_shed = 0
        self.num_forks = 0
        # Times that a running request got no token because the budget was used up.
        self.num_deferred = 0
        # Times that the most urgent request was not admitted for lack of free blocks.
        self.num_held = 0
        self.num_overtaken = 0  # requests that started after one that arrived later
        self.num_waits = 0  # steps delayed to wait for a fuller batch
        self._latest = 0  # arrival number of the latest request that has started
        self.chunks = may_chunk(policy, cache)
        self._num_added = 0
        self.num_seqs = 0  # running sequences, and the unstarted members of their groups
        self._shed: list[Request] = []  # since the last step
        # When the last step was planned, if it did anything.
        self.worked_at_s: float | None = None

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting.requests or self.running)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            BadInput: it can never run: it does not fit the cache, one step, or the sequences
                allowed.
        """
        require_servable(request, self.policy, self.cache)
        self.preemption.check(request, self.cache)
        self._num_added += 1
        due = min(request.deadline_s, request.arrival_s + self.policy.aging_s)
        request.rank = (due + request.params.priority * self.policy.aging_s, self._num_added)
        self.waiting.push(request)
        self._changed(request, RequestState.WAITING)
        for rule in self.rules:
            rule.added(request)

    def plan(self) -> StepPlan:
        """Decide the next step. An empty plan means that there is nothing to do, or not before
        `next_poll_s`."""
        now = self.now()
        step = PlanBuilder(self.policy.max_num_batched_tokens)
        for rule in self.rules:
            rule.before_step(self, now)
        if self.cache.tiers is not None:
            self.cache.tiers.look_ahead(
                (r.cache, r.reusable_token_ids) for r in self.waiting.front()
            )
        prefilling = [r for r in self.running if r.state is not RequestState.DECODE]
        decoding = [r for r in self.running if not prefilling or r.state is RequestState.DECODE]
        if self.policy.prefill_first:
            self._serve(prefilling, step)
            # Each decoding request may need a block in this step.
            self._admit(step, now, spare=len(decoding))
            self._serve(decoding, step)
        else:
            self._serve(decoding, step)
            self._serve(prefilling, step)
            self._admit(step, now)
        for rule in self.rules:
            rule.extend(self, step)
        self.worked_at_s = now if step.scheduled else None
        wake_at = None if step.scheduled else step.next_poll_s
        if not step.scheduled and self.waiting.requests and wake_at is None:
            wake_at = self.policy.wake_at(self.waiting)
            self.num_waits += wake_at is not None
        plan = StepPlan(
            tuple(step.scheduled),
            tuple(step.preempted),
            tuple(self._shed),
            self.cache.take_transfers(),
            wake_at,
            self.policy.max_num_batched_tokens - step.budget,
            step.num_prefill_tokens,
            step.num_drafts,
            step.held,
        )
        self._shed.clear()
        if self.events.listeners[StepPlanned]:
            self.events.emit(StepPlanned(now, plan))
        return plan

    def _serve(self, requests: list[Request], step: PlanBuilder) -> None:
        """Schedule running requests; if the cache is full, the least urgent ones are preempted."""
        running = self.running
        for index, request in enumerate(requests):
            if step.budget <= 0:
                self.num_deferred += len(requests) - index
                return
            num_tokens = len(request.token_ids)
            gap = num_tokens - request.num_computed_tokens
            count = self._cut(gap, step, len(requests) - index) if gap > 1 else gap
            # The request waits for its group or for its last token to be read, or was preempted for
            # another one.
            if count <= 0 or request not in running or num_tokens >= request.max_num_tokens:
                continue
            while not (placed := self._place(request, count)):
                # The least urgent request that is not scheduled in this step is preempted, which
                # may be the request itself. Joint members are preempted together, and not if one
                # of them is scheduled: then the request waits for the next step.
                served = {part.request for part in step.scheduled}
                others = [
                    r for r in running if r not in served and served.isdisjoint(r.joint_members)
                ]
                if not others:
                    break
                preempted = self.preempt(max(others, key=attrgetter("rank")))
                step.preempted.append(Preempted(preempted, request))
                if request not in running:
                    break
            else:
                self._schedule(request, placed, step)

    def _place(self, request: Request, count: int) -> int:
        """Blocks for `count` more tokens of a running request; how many it may compute, 0 if there
        is no room."""
        sequence, computed = request.cache, request.num_computed_tokens
        # It was admitted when the budget was used up, or the cache retains nothing.
        if not sequence.block_table.blocks:
            return self._join(request, count)
        if (evictor := self.cache.evictor) is not None:
            count = min(count, evictor.room(sequence, computed))
        return count if self.cache.grow(sequence, computed, computed + count) else 0

    def _join(self, request: Request, most: int, spare: int = 0) -> int:
        """Allocate the first blocks of a request while `spare` stay free; see `_place`."""
        count, request.num_computed_tokens = self.cache.admit(
            request.cache,
            request.num_tokens,
            request.num_computed_tokens,
            most,
            spare=spare,
            whole=not self.chunks,
            reusable=request.reusable_token_ids,
        )
        return count

    def _cut(self, gap: int, step: PlanBuilder, sharing: int) -> int:
        """How many of `gap` tokens a prompt may compute in this step, if `sharing` prompts are
        still to be served."""
        if not self.chunks:
            return gap if gap <= step.budget else 0
        if self.policy.fair_prefill:
            newcomers = min(len(self.waiting), self.policy.max_num_seqs - self.num_seqs)
            return min(gap, step.budget, max(1, step.budget // (sharing + max(newcomers, 0))))
        return min(gap, step.budget)

    def _admit(self, step: PlanBuilder, now: float, spare: int = 0) -> None:
        """Admit waiting requests as far as policy, budget and cache allow."""
        policy, cache, tiers = self.policy, self.cache, self.cache.tiers
        if step.preempted or not self.waiting.requests:
            return
        for request in policy.candidates(self.waiting, self.num_seqs, now):
            if any(rule.rejects(request, now) for rule in self.rules):
                self.shed(request)
                continue
            if tiers is not None and tiers.must_wait(request.cache, request.reusable_token_ids):
                step.next_poll_s = now + DISK_POLL_S  # The request keeps its place.
                step.held = Held(request, "disk")
                return
            if not self.preemption.may_admit(request, self.running, cache):
                self.num_held += 1
                step.held = Held(request, "reserve")
                return
            count = most = kept = 0
            if step.budget > 0:
                kept = spare + int(policy.watermark * cache.pool.num_usable) if self.running else 0
                gap = request.num_tokens - request.num_computed_tokens
                most = self._cut(gap, step, 0) if self.chunks else step.budget
                count = self._join(request, most, kept)
            if count == 0 and not (policy.whole_batch and step.budget <= 0):
                self.num_held += step.budget > 0
                reason: HeldFor = "blocks" if step.budget > 0 else "budget"
                step.held = Held(request, reason, most, cache.pool.num_free, kept)
                return
            self.waiting.remove(request)
            self.num_overtaken += request.rank[1] < self._latest and not request.num_preemptions
            self._latest = max(self._latest, request.rank[1])
            self.running[request] = None
            self.num_seqs += 1 + len(request.unstarted)
            if count:
                self._schedule(request, count, step)

    def _schedule(self, request: Request, count: int, step: PlanBuilder) -> None:
        for rule in self.rules:
            count = rule.limit(request, count)
        if not count:
            return
        # The state changes here and not on admission: a whole batch may be admitted before the
        # budget has tokens for all of it.
        if request.state in (RequestState.WAITING, RequestState.PREEMPTED):
            self._changed(request, RequestState.PREFILL)
        prefill = count > 1 or request.state is RequestState.PREFILL
        part = ScheduledRequest(request, request.num_computed_tokens, count, prefill)
        step.scheduled.append(part)
        step.budget -= count
        step.num_prefill_tokens += count * prefill
        if prefill and not part.samples:
            self.num_chunks += 1

    def computed(self, part: ScheduledRequest) -> None:
        """Record that a scheduled part was computed."""
        request = part.request
        if request.state is RequestState.PREFILL and part.samples:
            self._changed(request, RequestState.DECODE)
        request.num_computed_tokens = self.cache.computed(
            request.cache, request.cache_keys, part.end, request.max_num_tokens
        )
        if part.num_drafts:  # The accepted ones are appended again as tokens.
            del request.token_ids[part.start + 1 :]

    def fork(self, parent: Request, child: Request, num_shared: int | None = None) -> None:
        """Let `child` run beside `parent` on the same blocks; if it runs already, its own blocks
        are freed.

        Args:
            parent: runs.
            child: an unstarted member of its group, or a joint one.
            num_shared: how many of their first tokens are the same; None: all that `parent` has
                computed.
        """
        self.num_forks += 1
        if child in self.running:
            self.cache.free(child.cache)
        child.num_computed_tokens = self.cache.fork(
            parent.cache, parent.num_computed_tokens, child.cache, num_shared
        )
        if child in self.running:
            return
        self._num_added += 1
        child.rank = (parent.rank[0], self._num_added)
        self.running[child] = None
        assert child.group is not None
        child.group.unstarted.remove(child)  # its place was counted with the parent's
        self._changed(child, RequestState.DECODE)
        for rule in self.rules:
            rule.added(child)

    def shed(self, request: Request) -> None:
        """End a request that will not be served in time."""
        self.num_shed += 1
        self._shed.append(request)
        self.finish(request, "shed")

    def finish(self, request: Request, reason: str) -> None:
        """End a request in any state and free its blocks. Joint members end together."""
        if request.state is RequestState.DONE:
            return
        for one in request.joint_members:
            self._leave(one)
            self.cache.free(one.cache)
            one.finish_reason = reason
            self._changed(one, RequestState.DONE)
            for rule in self.rules:
                rule.ended(one)

    def _leave(self, request: Request) -> None:
        group = request.group
        if request in self.running:
            del self.running[request]
            self.num_seqs -= 1 + len(request.unstarted)
        elif group is not None and request in group.unstarted:
            group.unstarted.remove(request)
            self.num_seqs -= group.leader in self.running
        else:
            self.waiting.remove(request)

    def preempt(self, request: Request, strategy: Preemption | None = None) -> Request:
        """Free a request's blocks and queue it again in its old place; the request that waits.

        Of joint members the first one waits, and the others start again once it is computed, on
        those of its blocks that hold the same tokens.
        """
        request, *others = [one for one in request.joint_members if one in self.running]
        for one in (request, *others):
            self._leave(one)
        for one in others:
            self.cache.free(one.cache)
            one.num_computed_tokens = 0
            self._changed(one, RequestState.PREEMPTED)
        if request.group is not None and others:
            request.group.leader = request
            request.group.unstarted += others
        # A joint member that waits for its group has computed everything: its last token is
        # computed again.
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        (strategy or self.preemption).preempt(request, self.cache)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push(request)
        self._changed(request, RequestState.PREEMPTED)
        return request

    def _changed(self, request: Request, state: RequestState) -> None:
        request.state = state
        if self.events.listeners[StateChanged]:
            self.events.emit(StateChanged(self.now(), request, state))


class PlanBuilder:
    """A step while it is planned."""

    def __init__(self, budget: int) -> None:
        self.budget = budget  # tokens that it may still compute
        self.num_prefill_tokens = self.num_drafts = 0
        self.scheduled: list[ScheduledRequest] = []
        self.preempted: list[Preempted] = []
        self.held: Held | None = None
        self.next_poll_s: float | None = None  # when the disk may have finished a read
