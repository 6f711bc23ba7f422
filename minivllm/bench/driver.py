"""The driver: hands a workload to any engine as its arrival process says, and stamps every
token."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, pairwise
from typing import cast

from minivllm.bench.hardware.clock import Clock, ClockProtocol
from minivllm.bench.metrics.request_trace import COMPLETED, RequestTrace
from minivllm.bench.workloads.arrivals import Arrival, Concurrency
from minivllm.bench.workloads.conversations import Conversations
from minivllm.bench.workloads.stopping import Stopping
from minivllm.bench.workloads.workload import Workload, WorkloadRequest, turned
from minivllm.engine.options import SamplingParams
from minivllm.engines.base import (
    BenchEngine,
    ChatEngine,
    EngineOutput,
    PrimedEngine,
    SeeingEngine,
    SessionEngine,
)
from minivllm.errors import BadInput

PROGRESS_INTERVAL_S = 0.25
PATIENCE_S = 0.5  # longest wait for a remote engine's next tokens
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class DriveProgress:
    """How far a drive has come."""

    done: int
    total: int
    output_tokens: int
    elapsed_s: float


def drive(
    engine: BenchEngine,
    workload: Workload,
    arrival: Arrival,
    params: SamplingParams,
    clock: ClockProtocol,
    on_progress: Callable[[DriveProgress], None] | None = None,
    seed: int = 0,
    stopping: Stopping | None = None,
) -> list[RequestTrace]:
    """Run every request of a workload and trace it. Single-threaded.

    A request's scheduled time is the arrival process's in an open loop, however late the driver
    gets round to submitting it, and the moment its slot became free in a closed loop; a later
    turn's is the end of the answer before it plus think time. All tokens of one `EngineOutput`
    share the time at which `poll` returned them.

    Args:
        engine: answers on the same clock as `clock`.
        workload: gives each request's `max_tokens` and `ignore_eos`.
        arrival: when requests are due.
        params: everything else about decoding. Each request's seed comes from `params.seed` (`seed`
            where that is None) and the request's index.
        clock: source of all times.
        on_progress: called about four times a second and at the end.
        seed: of the arrival process.
        stopping: ends the run before the workload does; None never.

    Returns:
        A trace for each request that was sent, in the workload's order. A request that the engine
        rejects (BadInput) or aborts has the reason in its trace, and so have the later turns of
        its conversation.

    Raises:
        BadInput: `params` cannot be measured, or the arrival process gives no valid schedule.
        RuntimeError: the engine answered for a request that is not in flight.
    """
    return Drive(engine, workload, arrival, params, clock, on_progress, seed, stopping).run()


def warm_up(
    engine: BenchEngine,
    workload: Workload,
    arrival: Arrival,
    params: SamplingParams,
    clock: ClockProtocol,
    num_requests: int | None = None,
    seed: int = 0,
    others: bool = False,
) -> float | None:
    """Run requests of the workload with short outputs, as many at a time as the measurement will.

    The caller resets the engine afterwards: the prompts are those that will be measured, and of
    a conversation the first turn, whose prompt alone is known beforehand.

    Args:
        num_requests: how many; None is one full batch, 0 none.
        others: with other prompts, see `turned`.

    Returns:
        Seconds that it took, or None where nothing was run.
    """
    batch = full_batch(engine.info.max_num_seqs, arrival, workload.num_conversations)
    count = batch if num_requests is None else num_requests
    if count == 0 or not workload.requests:
        return None
    requests = tuple(
        replace(alone(request, f"warmup-{i}"), max_tokens=min(request.max_tokens, WARM_UP_TOKENS))
        for i, request in enumerate(islice(cycle(workload.openings), count))
    )
    if others:
        requests = tuple(turned(request, getattr(engine, "pictures", None)) for request in requests)
    params = replace(
        params, min_tokens=min(params.min_tokens, *(request.max_tokens for request in requests))
    )
    start = clock.now()
    drive(engine, Workload(requests), Concurrency(batch), params, clock, seed=seed)
    return clock.now() - start


def require_priming(engine: BenchEngine, workload: Workload) -> None:
    """Raises BadInput if the workload has a `priming` and the engine empties its caches whenever it
    counts from zero."""
    if workload.priming and not isinstance(engine, PrimedEngine):
        raise BadInput(
            f"workload.random_starts: engine={engine.info.name} cannot begin with the earlier "
            "turns of sessions in its cache; set workload.random_starts=0"
        )


def prime(
    engine: BenchEngine, workload: Workload, arrival: Arrival, params: SamplingParams, seed: int = 0
) -> None:
    """Run a workload's `priming`, one token each, as many at a time as the measurement will run
    sessions; then let the engine count from zero, with its caches as they are.

    Raises:
        BadInput: the engine rejects a request.
    """
    if not workload.priming:
        return
    requests = tuple(replace(request, max_tokens=1) for request in workload.priming)
    batch = full_batch(engine.info.max_num_seqs, arrival, workload.num_conversations)
    params = replace(params, min_tokens=0)
    clock = engine.info.clock or Clock()
    for trace in drive(engine, Workload(requests), Concurrency(batch), params, clock, seed=seed):
        if not trace.completed:
            raise BadInput(trace.error or f"request {trace.request_id} is {trace.status}")
    if isinstance(engine, PrimedEngine):
        engine.recount()


def alone(request: WorkloadRequest, request_id: str) -> WorkloadRequest:
    """A request as one of no session, under another name."""
    return replace(request, request_id=request_id, session=None, after=(), after_s=(), think_s=None)


def full_batch(max_num_seqs: int, arrival: Arrival, num_requests: int) -> int:
    """Most requests that can run at once, of each conversation one turn.

    Args:
        num_requests: `Workload.num_conversations`.
    """
    return min(max_num_seqs, num_requests, arrival.slots or num_requests)


def note_images(engine: BenchEngine, request_id: str, names: Sequence[str]) -> None:
    """Say which images a request has. Raises BadInput if the engine takes none."""
    if not isinstance(engine, SeeingEngine):
        raise BadInput(f"engine={engine.info.name} takes no images, and {request_id} has some")
    engine.note_images(request_id, names)


def prompt_for(engine: BenchEngine, token_ids: Sequence[int]) -> list[int]:
    """The prompt as the engine takes it: a list, but for simulations, which never look at the
    tokens."""
    return list(token_ids) if engine.info.clock is None else cast("list[int]", token_ids)


def request_seed(seed: int, index: int) -> int:
    """A request's own seed, in [0, 2^31): well mixed, and the same everywhere."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{index}".encode()).digest()[:4], "big") >> 1


def request_params(
    params: SamplingParams, requests: Sequence[WorkloadRequest], seed: int
) -> list[SamplingParams]:
    """Each request's own; see `drive`."""
    base = seed if params.seed is None else params.seed
    return [
        replace(
            params,
            **{
                "max_tokens": r.max_tokens,
                "ignore_eos": r.ignore_eos,
                "seed": request_seed(base, i),
                **(r.sampling or {}),
            },
        )
        for i, r in enumerate(requests)
    ]


def require_one_completion(params: SamplingParams) -> None:
    """Raises BadInput if a request would have several."""
    if params.n != 1:
        raise BadInput(
            f"decoding.n={params.n}: a measurement takes one completion a request; set decoding.n=1"
        )


class Drive:
    """One run of the loop (see `drive`); everything that can be made beforehand is made before the
    clock starts."""

    def __init__(
        self,
        engine: BenchEngine,
        workload: Workload,
        arrival: Arrival,
        params: SamplingParams,
        clock: ClockProtocol,
        on_progress: Callable[[DriveProgress], None] | None,
        seed: int,
        stopping: Stopping | None = None,
    ) -> None:
        require_one_completion(params)
        requests = workload.requests
        self.engine, self.clock, self.on_progress = engine, clock, on_progress
        self.requests = requests
        self.chat = engine if engine.info.takes_chat and isinstance(engine, ChatEngine) else None
        self.sessions = engine if isinstance(engine, SessionEngine) else None
        self.index = {request.request_id: i for i, request in enumerate(requests)}
        self.params = request_params(params, requests, seed)
        self.conversations = Conversations(
            requests, engine.info.clock is not None, engine.info.tells_ids
        )
        self.prompts = {
            i: prompt_for(engine, self.conversations.prompt(i)) for i in self.conversations.openings
        }
        self.slots, self.closed = arrival.slots, arrival.concurrency is not None
        self.stopping = stopping or Stopping()
        openings = [requests[i] for i in self.conversations.openings]
        self.due = _checked(arrival.due(openings, seed), len(openings))
        self.begun = 0  # conversations
        self.free_slots: deque[float] = deque()  # when each free slot became free
        self.traces: dict[int, RequestTrace] = {}  # by the request's place in the workload
        self.open: dict[str, RequestTrace] = {}
        self.output_tokens = 0

    def run(self) -> list[RequestTrace]:
        clock, poll = self.clock, self.engine.poll
        start = now = clock.now()
        self.due = [start + offset for offset in self.due]
        self.stopping.start_s = start
        self.free_slots.extend([start] * (self.slots or 0))
        next_report = start if self.on_progress else math.inf
        while not self.stopping.failing:
            self.submit_due(now)
            next_due = min(self.opening_due(), self.turn_due())
            if self.open:
                outputs = poll(min(next_due - now, PATIENCE_S))
                now = clock.now()
                if outputs:
                    self.take(outputs, now)
            elif next_due < math.inf:
                clock.sleep(next_due - now)
                now = clock.now()
            else:
                break
            if now >= next_report:
                self.report(now - start)
                next_report = now + PROGRESS_INTERVAL_S
        self.report(now - start)
        return [self.traces[i] for i in sorted(self.traces)]

    def opening_due(self) -> float:
        """When the next conversation is due; infinite if none is, or if it waits for a slot."""
        if self.begun == len(self.due) or (self.slots is not None and not self.free_slots):
            return math.inf
        return self.stopping.in_time(self.free_slots[0] if self.closed else self.due[self.begun])

    def turn_due(self) -> float:
        """When the next turn is due of a conversation that goes on; infinite if none is."""
        return self.stopping.in_time(self.conversations.next_due())

    def submit_due(self, now: float) -> None:
        """Submit whatever is due by `now`, in the order of the times at which it was."""
        conversations = self.conversations
        while (opening := self.opening_due()) <= now or self.turn_due() <= now:
            if self.turn_due() <= opening:
                scheduled_s, index = conversations.pop()
                prompt = self.prompts.pop(index, None)
                if prompt is None:
                    prompt = prompt_for(self.engine, conversations.prompt(index))
                self.submit(index, prompt, scheduled_s)
                continue
            if self.slots is not None:
                self.free_slots.popleft()
            conversations.begin(conversations.openings[self.begun], opening)
            self.begun += 1

    def submit(self, index: int, prompt: list[int], scheduled_s: float) -> None:
        request_id = self.requests[index].request_id
        trace = RequestTrace(request_id, len(prompt), scheduled_s, submitted_s=self.clock.now())
        self.traces[index] = trace
        if self.sessions is not None and (session := self.requests[index].session) is not None:
            self.sessions.note_session(request_id, session)
        if images := self.requests[index].images:
            note_images(self.engine, request_id, images)
        try:
            if self.chat is None:
                self.engine.submit(request_id, prompt, self.params[index])
            else:
                chat = self.requests[index].chat
                self.chat.submit_chat(request_id, chat, prompt, self.params[index])
        except BadInput as error:
            trace.error = str(error)
            self.finish(trace, "refused", self.clock.now())
        else:
            self.open[request_id] = trace

    def take(self, outputs: list[EngineOutput], now: float) -> None:
        """Stamp what one poll returned. The hot path: appends to lists and nothing else."""
        for output in outputs:
            try:
                trace = self.open[output.request_id]
            except KeyError:
                raise RuntimeError(
                    f"the engine answered for {output.request_id}, which is not in flight"
                ) from None
            token_ids = output.token_ids
            if output.counts is not None:
                self.output_tokens += sum(output.counts) - len(trace.token_ids)
                trace.recount(output.counts)
            if len(token_ids) == 1:
                trace.token_ids.append(token_ids[0])
                trace.token_times.append(now)
            else:
                trace.token_ids.extend(token_ids)
                trace.token_times.extend([now] * len(token_ids))
            self.output_tokens += len(token_ids)
            if trace.started_s is None:
                trace.started_s = output.started_s
            if output.begins_answer:
                trace.answer_s = now
            if output.reasoning_tokens:
                trace.reasoning_tokens = output.reasoning_tokens
            if trace.cached_tokens is None:
                trace.cached_tokens = output.cached_tokens
            if output.kv_transfer is not None:
                trace.add_transfer(output.kv_transfer)
            if output.finish_reason is not None:
                del self.open[output.request_id]
                if output.finish_reason not in COMPLETED:
                    why = output.error or output.finish_reason
                    trace.error = f"the engine ended it after {len(trace.token_ids)} tokens: {why}"
                self.finish(trace, output.finish_reason, now)

    def finish(self, trace: RequestTrace, reason: str, now: float) -> None:
        """Take note of an end that is learned of now; a server may say so some time after the last
        token."""
        trace.finish_reason = reason
        trace.finished_s = trace.token_times[-1] if trace.completed else now
        index = self.index[trace.request_id]
        self.stopping.note_end(failed=reason not in (*COMPLETED, "shed"))
        if reason in COMPLETED:
            self.conversations.answered(index, trace.token_ids, trace.finished_s)
        else:
            for turn in self.conversations.broken_off(index):
                error = f"never sent, since {trace.request_id} was not answered: {trace.error}"
                request = self.requests[turn]
                never = RequestTrace(request.request_id, len(request.stand_in), now, error=error)
                never.finish_reason, never.finished_s = reason, now
                self.traces[turn] = never
        if self.slots is not None and self.conversations.is_over(index):
            self.free_slots.append(now)

    def report(self, elapsed_s: float) -> None:
        if self.on_progress:
            done = len(self.traces) - len(self.open)
            self.on_progress(DriveProgress(done, len(self.requests), self.output_tokens, elapsed_s))


def _checked(schedule: list[float], n: int) -> list[float]:
    ascending = all(a <= b for a, b in pairwise(schedule))
    if len(schedule) != n or not ascending or not all(0 <= time < math.inf for time in schedule):
        raise BadInput(
            f"the arrival process must give {n} ascending times of 0 s or more; it gave "
            f"{schedule[:8]}..."
        )
    return schedule
