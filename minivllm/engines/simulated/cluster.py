"""engine=simulated with several replicas: simulated engines behind a router, on one virtual
clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any

from minivllm.bench.hardware.clock import VirtualClock
from minivllm.bench.metrics.speculation import SpeculationReport
from minivllm.config.groups import Config
from minivllm.engine.options import SamplingParams
from minivllm.engines.base import EngineOutput, KvTransfer
from minivllm.engines.replicas.merging import (
    Liveness,
    RoutedEngine,
    merged_liveness,
    merged_speculation,
    merged_steps,
)
from minivllm.engines.simulated.engine import IDLE_S, SimulatedEngine
from minivllm.engines.simulated.options import SimulatedOptions
from minivllm.engines.simulated.request import SimulatedTokens
from minivllm.processes.handover import Routing
from minivllm.processes.router import CacheShape, RoutedRequest

Event = Callable[[], list[EngineOutput]]


def is_simulated_cluster(config: Mapping[str, Any]) -> bool:
    """Whether a configuration asks for several simulated replicas."""
    view = Config.of(config)
    return view.parallel.replicas > 1 and isinstance(view.engine, SimulatedOptions)


class SimulatedCluster(RoutedEngine):
    """Replicas of a simulated engine, each of which plans its own steps.

    A discrete-event simulation: a step's plan is made when the step begins and its tokens come out
    when it ends, in the order of time over all replicas. With `parallel.disaggregated` the first
    `parallel.prefill_replicas` compute prompts and one token of each answer; keys and values then
    cross a link, and another replica goes on.

    Args:
        config: the resolved configuration of the whole.

    Raises:
        BadInput: see SimulatedEngine.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        view = Config.of(config)
        parallel, options = view.parallel, view.engine
        assert isinstance(options, SimulatedOptions)
        rows = max(2, options.step_rows // parallel.replicas)
        first = SimulatedEngine(config, replace(options, step_rows=rows))
        self.engines = [first, *(first.another() for _ in range(1, parallel.replicas))]
        self.clock = VirtualClock()
        for engine in self.engines:
            engine.submission_clock = self.clock
        self._keep_prefixes = view.measure.prefix_cache == "warm"
        self._link_ms_per_token, self._kv_bytes_per_token = 0.0, first.kv_bytes_per_token
        if options.link_gb_s is not None:
            self._link_ms_per_token = first.kv_bytes_per_token / options.link_gb_s / 1e6
        self._link_ms = options.link_us / 1e3
        self.tokenizer = first.tokenizer
        self.info = replace(
            first.info,
            max_num_seqs=first.info.max_num_seqs * parallel.replicas,
            clock=self.clock,
        )
        cache = CacheShape(first.cache.layout.block_size, first.cache.pool.num_usable)
        prefixes = cache if first.caches_prefixes else None
        self.routing = Routing(parallel)
        self.routing.begin(prefixes)
        self._sessions: dict[str, str] = {}  # of requests that are to come
        self._begin()

    def _begin(self) -> None:
        self._events: list[tuple[float, int, Event]] = []
        self._order = count()  # of events at the same time
        self._at_rest = set(range(len(self.engines)))  # replicas that are in no step
        self._startable: set[int] = set()  # those of them that have requests
        self._at: dict[str, int] = {}  # the replica of each unfinished request

    # ---- requests

    def submit(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        wanted = self.tokens_wanted(request_id, prompt_token_ids, params, self._at)
        tokens = SimulatedTokens(prompt_token_ids, request_id)
        session = self._sessions.pop(request_id, None)
        if (handovers := self.routing.handovers) is not None:
            params = handovers.split(request_id, tokens, params, wanted)
        number = self.routing.router.route(RoutedRequest(request_id, tokens, wanted, session))
        try:
            self.engines[number].submit(request_id, prompt_token_ids, params)
        except BaseException:
            self._forget(request_id)
            raise
        self._has_work(request_id, number)

    def _forget(self, request_id: str) -> None:
        self._at.pop(request_id, None)
        super()._forget(request_id)

    def _has_work(self, request_id: str, number: int) -> None:
        self._at[request_id] = number
        if number in self._at_rest:
            self._startable.add(number)

    def abort(self, request_id: str) -> None:
        """End a request early; unknown and finished ones are ignored."""
        number = self._at.get(request_id)
        if number is not None:
            self.engines[number].abort(request_id)
            self._forget(request_id)

    # ---- time

    def poll(self, timeout_s: float | None = None) -> list[EngineOutput]:
        """Let time pass until something happens, or for `timeout_s`; see BenchEngine."""
        for number in sorted(self._startable):
            engine = self.engines[number]
            engine.clock.time = self.clock.time
            outputs = engine.poll()
            self._at_rest.discard(number)
            self._after(engine.clock.time, partial(self._step_ended, number, outputs))
        self._startable.clear()
        limit = self.clock.time + max(0.0, IDLE_S if timeout_s is None else timeout_s)
        if not self._events or self._events[0][0] > limit:
            self.clock.time = limit
            return []
        self.clock.time, _, event = heappop(self._events)
        return event()

    def _after(self, time_s: float, event: Event) -> None:
        heappush(self._events, (time_s, next(self._order), event))

    def _step_ended(self, number: int, outputs: list[EngineOutput]) -> list[EngineOutput]:
        self._at_rest.add(number)
        if self.engines[number].num_unfinished:
            self._startable.add(number)
        return [
            output if output.finish_reason is None else self._ended(output)
            for output in outputs
            if output.request_id in self._at  # not aborted while the step went on
        ]

    def _ended(self, output: EngineOutput) -> EngineOutput:
        """A replica is done with a request: its last output, or the handover."""
        request_id, rest = output.request_id, self._rest(output)
        if rest is None:
            return output
        tokens: Any = rest.prompt  # SimulatedTokens
        tokens.extend(output.token_ids)
        number = self.routing.continues_at(request_id, tokens, rest.params)
        self._at[request_id] = number
        milliseconds = self._link_ms + len(tokens) * self._link_ms_per_token
        arrival = self.clock.time + milliseconds / 1e3
        self._after(arrival, partial(self._take_over, request_id, number, tokens, rest.params))
        transfer = KvTransfer(round(len(tokens) * self._kv_bytes_per_token), milliseconds)
        return replace(output, finish_reason=None, kv_transfer=transfer)

    def _take_over(
        self, request_id: str, number: int, tokens: SimulatedTokens, params: SamplingParams
    ) -> list[EngineOutput]:
        if self._at.get(request_id) == number:  # not aborted on the way
            self.engines[number].take_over(tokens, request_id, params)
            self._has_work(request_id, number)
        return []

    # ---- calls

    def _end_all(self, method: str) -> None:
        for request_id in list(self._at):
            self.abort(request_id)
        for engine in self.engines:
            getattr(engine, method)()
        self._count_from_0()
        self.clock.time = 0.0
        self._begin()

    def steps(self) -> list[dict[str, Any]]:
        """See BenchEngine; each row has the number of its `replica` besides."""
        return merged_steps([engine.steps() for engine in self.engines])

    def speculation(self) -> SpeculationReport | None:
        return merged_speculation([engine.speculation() for engine in self.engines])

    def liveness(self) -> Liveness:
        """See BenchEngine. The group `parallel` has what the router did; the prefix cache counts
        where prompts are computed."""
        each = [engine.liveness() for engine in self.engines]
        merged = merged_liveness(each, self.routing.handovers)
        merged["parallel"] = self.routing.report()
        return merged

    def close(self) -> None:
        self.reset()
