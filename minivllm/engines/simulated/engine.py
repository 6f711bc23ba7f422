"""engine=simulated: the real scheduler, block pool and policies under a virtual clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from minivllm.bench.hardware.clock import VirtualClock
from minivllm.bench.metrics.speculation import SpeculationReport
from minivllm.cache.manager import CacheManager
from minivllm.cache.spec import CacheDemand
from minivllm.config.compose import build
from minivllm.config.groups import Config
from minivllm.engine.events import StepEnded
from minivllm.engine.options import SamplingParams
from minivllm.engine.scheduler import Scheduler
from minivllm.engine.step import StepPlan
from minivllm.engines.base import Adapter, EngineInfo, EngineOutput
from minivllm.engines.minivllm.liveness import (
    Counters,
    draft_counters,
    scheduling_counters,
    since,
)
from minivllm.engines.simulated.model import (
    free_memory,
    require_no_scores,
    simulated_model,
    windowed_reads,
)
from minivllm.engines.simulated.options import SimulatedOptions
from minivllm.engines.simulated.request import (
    TOKEN,
    SimulatedRequest,
    SimulatedTokens,
)
from minivllm.engines.simulated.speculation import simulated_speculation
from minivllm.engines.simulated.steady_decoding import SteadyDecoding
from minivllm.engines.simulated.step_times import Communication, RooflineTimes
from minivllm.extras.cached_blocks import insert_prefix, wasted_slots
from minivllm.extras.observation.bundle import StepBundle
from minivllm.extras.observation.observer import StepObserver
from minivllm.extras.scheduling.scheduler import make_preemption, make_scheduler
from minivllm.extras.speculative.speculation import Speculator
from minivllm.models.load.tokenizer import Tokenizer

IDLE_S = 1e-3  # how far time advances in a step without work and without a deadline
ROW = (
    *("start_s", "num_requests", "num_tokens", "num_prefill_tokens", "num_drafts"),
    *("context_tokens", "waiting", "kv_blocks_used", "kv_blocks_total", "kv_slots_wasted"),
    *("kv_slots_allocated", "draft_ms", "forward_ms"),
)


class SimulatedEngine(Adapter):
    """Plans steps with the real scheduler, but for those whose plan is known (SteadyDecoding), then
    lets the time pass that the step would have taken.

    No weights are loaded and torch is not imported. Answers go on to `max_tokens`.

    Args:
        config: the resolved configuration; the model's architecture, `quant`, `batching` and
            `cache` count.
        options: the knobs of `engine`.

    Raises:
        BadInput: neither records nor a roofline are given, or they do not fit the configuration; or
            `cache.eviction` goes by attention scores.
    """

    def __init__(self, config: Mapping[str, Any], options: SimulatedOptions) -> None:
        view = Config.of(config)
        cache = build(config["cache"])
        model, source, costs, weight_bytes, self.step_times = simulated_model(
            config, options, cache.kv_dtype
        )
        self._communication: Communication | None = None  # fitted times do not tell it
        if isinstance(self.step_times, RooflineTimes):
            self._communication = self.step_times.communication
        # Records do not say what was near: what is fitted to them goes by the whole context.
        self._windowed = costs if options.steps is None and costs["window"] is not None else None
        self.clock = self.submission_clock = VirtualClock()
        self._speculation = simulated_speculation(view, options, model, self.clock)
        kv_bytes = costs["kv_bytes_per_token"]
        if self._speculation is not None:
            weight_bytes += self._speculation.weight_bytes
            kv_bytes += self._speculation.kv_bytes_per_token
        self._policy = policy = build(config["batching"])
        longest = view.model.max_model_len or model.max_position_embeddings
        free = free_memory(options, weight_bytes)
        layout = cache.layout(CacheDemand(kv_bytes, free, longest, policy.max_num_seqs))
        self._preemption = make_preemption(policy.preemption)
        layout = self._preemption.fit(layout)
        if layout.eviction is not None:
            require_no_scores(layout.eviction)
            layout.eviction.check(model.windows)
        self._layout = layout
        block_bytes = layout.block_size * costs["kv_bytes_per_token"]
        self._kv = {
            "kv_dtype": costs["dtype"] if cache.kv_dtype == "auto" else cache.kv_dtype,
            "kv_bytes_per_token": float(costs["kv_bytes_per_token"]),
        }
        host_gb_s = math.inf if options.host_gb_s is None else options.host_gb_s
        self._host_ms_per_block = block_bytes / host_gb_s / 1e6
        self._keep_prefixes = view.measure.prefix_cache == "warm"
        described = self.step_times, self._speculation
        self.tokenizer = None if source.folder is None else Tokenizer.load(source.folder)
        self.info = EngineInfo(
            name="simulated",
            weights=source.weights,
            fingerprint=source.fingerprint,
            vocab_size=model.vocab_size,
            max_model_len=longest,
            eos_token_ids=model.eos_token_ids,
            max_num_seqs=policy.max_num_seqs,
            load_s=0.0,
            warnings=[f"simulated: {one.describe()}" for one in described if one is not None],
            clock=self.clock,
        )
        self._step_rows, self._seed = options.step_rows, view.measure.seed
        self.cache: CacheManager
        self._requests: dict[str, SimulatedRequest]
        self._rows: list[tuple[float, ...]]
        self._stride: int  # of the steps that get a row
        self._num_steps: int
        self._num_requests: int
        self._largest_batch: int
        self._build()

    def _build(self) -> None:
        self.cache = CacheManager(self._layout)
        self._requests = {}
        self._begin()

    def another(self) -> SimulatedEngine:
        """An engine of the same configuration, with a clock, a cache and requests of its own."""
        engine = copy(self)
        engine.clock = engine.submission_clock = VirtualClock()
        if self._speculation is not None:
            engine._speculation = self._speculation.at(engine.clock)
        engine.info = replace(self.info, clock=engine.clock)
        engine._build()
        return engine

    @property
    def num_unfinished(self) -> int:
        """Requests that it has."""
        return len(self._requests)

    @property
    def caches_prefixes(self) -> bool:
        """Whether requests find what others have computed."""
        return self._layout.prefix_caching

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values over all layers."""
        return float(self._kv["kv_bytes_per_token"])

    def submit(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        max_tokens = self.tokens_wanted(request_id, prompt_token_ids, params, self._requests)
        self._add(SimulatedTokens(prompt_token_ids, request_id), request_id, params, max_tokens)

    def take_over(self, tokens: SimulatedTokens, request_id: str, params: SamplingParams) -> None:
        """Go on with a request whose first tokens another engine has computed and handed over: as
        if a request had just left their full blocks in the prefix cache.

        Args:
            tokens: its prompt and the tokens of its answer so far.
            params: `max_tokens` counts the tokens that are missing.
        """
        insert_prefix(self.cache, tokens, lambda first, blocks: None)
        assert params.max_tokens is not None
        self._add(tokens, request_id, params, params.max_tokens)

    def _add(
        self, tokens: SimulatedTokens, request_id: str, params: SamplingParams, max_tokens: int
    ) -> None:
        request = SimulatedRequest(
            request_id,
            tokens,
            params,
            len(tokens) + max_tokens,
            params.seed if params.seed is not None else self._own_seed(),
            self.submission_clock.now(),
        )
        self.scheduler.add(request)
        self._requests[request_id] = request

    def _own_seed(self) -> int:
        seed = hash((self._seed, self._num_requests)) & (2**63 - 1)  # as the engine derives it
        self._num_requests += 1
        return seed

    def abort(self, request_id: str) -> None:
        """End a request early; unknown and finished ones are ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.finish(request, "abort")

    def poll(self, timeout_s: float | None = None) -> list[EngineOutput]:
        """One step; see BenchEngine. Runs once for every token of every request: kept lean."""
        clock, scheduler = self.clock, self.scheduler
        start = clock.time
        if self._steady.compute():
            decoded, context = self._steady.requests, self._steady.context
            counts = len(decoded), len(decoded), 0
            milliseconds = self.step_times(*counts, context, 0.0, 0)
            clock.time += milliseconds / 1e3
            self._count_step((start, *counts, 0, context, 0), (0.0, milliseconds))
            return self._sampled([(request, 1) for request in decoded])
        plan = scheduler.plan()
        scheduled = plan.scheduled
        outputs = [self._ended(request, "shed", ()) for request in plan.shed]
        if not scheduled:
            if not outputs:
                wake_s = math.inf if plan.next_poll_s is None else plan.next_poll_s - start
                idle_s = min(wake_s, IDLE_S if timeout_s is None else timeout_s)
                clock.sleep(idle_s if idle_s > 0 else IDLE_S)
            return self._step_ended(plan, outputs)
        counts, context, pairs = self._begun(plan, start)
        read: float = context
        if self._windowed is not None:
            read, pairs = windowed_reads(self._windowed, scheduled, context, pairs)
        if drafts := plan.num_drafts:
            assert self.speculator is not None
            self.speculator.draft(plan)
        drafting = 1e3 * (clock.time - start)
        milliseconds = self.step_times(*counts, read, pairs, drafts)
        if plan.transfers and self._host_ms_per_block:
            moved = len(plan.transfers.saves) + len(plan.transfers.loads)
            milliseconds += moved * self._host_ms_per_block
        clock.time += milliseconds / 1e3
        computed, sampling = self._computed(plan)
        known = (start, *counts, drafts, context, len(scheduler.waiting))
        self._count_step(known, (drafting, milliseconds))
        outputs += self._sampled(sampling)
        return self._step_ended(computed, outputs)

    def _begun(self, plan: StepPlan, start: float) -> tuple[tuple[int, int, int], int, float]:
        """Note the first steps of requests; requests, tokens and prefill tokens of a step, the
        tokens that attention reads, and the pairs of its prompts."""
        prefill = context = decoded = 0
        pairs = 0.0
        request: Any  # each is a SimulatedRequest
        for part in plan.scheduled:
            request, first, count, is_prefill, _ = part
            end = first + count
            held = end - request.cache.num_evicted  # see ScheduledRequest.seq_len
            context += held
            if is_prefill:
                prefill += count
                pairs += count * (2 * held - count + 1) / 2
                if request.started_s is None:
                    request.begin(start)
            else:
                decoded += count
        return (len(plan.scheduled), prefill + decoded, prefill), context, pairs

    def _sampled(self, sampling: list[tuple[Any, int]]) -> list[EngineOutput]:
        """Let requests have so many further tokens each, and end those that then have all."""
        outputs = []
        for request, count in sampling:
            reason = request.grow(count)
            if reason is not None:
                self.scheduler.finish(request, reason)
                outputs.append(self._ended(request, reason, TOKEN * count))
            elif count == 1:
                outputs.append(request.output)
            else:
                outputs.append(replace(request.output, token_ids=TOKEN * count))
        self._steady.note_running()
        return outputs

    def _step_ended(self, plan: StepPlan, outputs: list[EngineOutput]) -> list[EngineOutput]:
        events = self.scheduler.events
        if events.listeners[StepEnded]:
            events.emit(StepEnded(self.clock.time, plan))
        return outputs

    def _computed(self, plan: StepPlan) -> tuple[StepPlan, list[tuple[Any, int]]]:
        """Note that a step was computed; its plan with the accepted drafts only, and the requests
        that get tokens from it, with how many."""
        if plan.num_drafts:
            assert self.speculator is not None
            plan, _ = self.speculator.verify(plan, TOKEN * plan.num_tokens, None)
        sampling: list[tuple[Any, int]] = []
        computed = self.scheduler.computed
        request: Any
        for part in plan.scheduled:
            request, first, count, _, drafts = part
            if first + count == request.token_ids.length:
                sampling.append((request, 1 + drafts))
            computed(part)
        return plan, sampling

    def _ended(self, request: Any, reason: str, token_ids: tuple[int, ...]) -> EngineOutput:
        del self._requests[request.request_id]
        return replace(request.output, token_ids=token_ids, finish_reason=reason)

    def _count_step(self, known: tuple[float, ...], times: tuple[float, float]) -> None:
        """Count a step, and keep a row of some; the cache is fullest now, before finished requests
        leave it."""
        if self._num_steps % self._stride == 0:
            pool, running = self.cache.pool, self.scheduler.running
            slots = wasted_slots(self.cache, running), pool.num_used * self.cache.layout.block_size
            self._rows.append((*known, pool.num_used, pool.num_usable, *slots, *times))
            if len(self._rows) > self._step_rows:
                self._rows = self._rows[::2]
                self._stride *= 2
        self._num_steps += 1
        self._largest_batch = max(self._largest_batch, int(known[1]))

    def reset(self) -> None:
        for request_id in list(self._requests):
            self.abort(request_id)
        if not self._keep_prefixes:
            self.cache.reset_prefix_cache()
        self.recount()

    def recount(self) -> None:
        for request_id in list(self._requests):
            self.abort(request_id)
        # Equal measurements are equal to the last bit.
        self.clock.time = 0.0
        self._begin()

    def _begin(self) -> None:
        """Count from here."""
        self._rows = []
        self._stride = 1
        self._num_steps = self._largest_batch = self._num_requests = 0
        self.scheduler: Scheduler = make_scheduler(
            self._policy, self.cache, self._preemption, self.clock.now
        )
        self.speculator: Speculator | None = None
        if self._speculation is not None:
            times = self.step_times
            self.speculator = self._speculation.speculator(
                lambda tokens: times(tokens, tokens, 0, 0.0, 0.0, 0)
            )
            self.scheduler.rules = (*self.scheduler.rules, self.speculator)
        self._steady = SteadyDecoding(self.scheduler, self._windowed is None)
        self._base = self._counters()

    def steps(self) -> list[dict[str, Any]]:
        """See BenchEngine; the time of a step without drafting is all in `forward_ms`."""
        rows: list[dict[str, Any]] = [dict(zip(ROW, row, strict=True)) for row in self._rows]
        if (between := self._communication) is not None:
            for row in rows:
                logits = row["num_requests"] + row["num_drafts"]
                row["collective_ms"] = between.ms(row["num_tokens"], logits)
        return rows

    def speculation(self) -> SpeculationReport | None:
        if self.speculator is None:
            return None
        proposer = self.speculator.proposer
        return SpeculationReport(proposer.name, proposer.options, self.speculator.counters)

    def observe(self, sink: Callable[[StepBundle], None]) -> StepObserver:
        return StepObserver(self.scheduler, sink)

    def _counters(self) -> Counters:
        return scheduling_counters(self.scheduler, self.cache)

    def liveness(self) -> dict[str, dict[str, float | str]]:
        counts = since(self._base, self._counters())
        return {
            "batching": {**counts["batching"], "largest_batch": float(self._largest_batch)},
            "cache": {
                **counts["cache"],
                "block_size": float(self.cache.layout.block_size),
                **self._kv,
            },
            "speculative": draft_counters(self.speculator),
            "engine": {"steps": float(self._num_steps), "steps_a_row": float(self._stride)},
        }

    def close(self) -> None:
        self.reset()
