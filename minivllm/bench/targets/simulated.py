"""engine=simulated: the real scheduler, block pool and policies under a virtual clock."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from minivllm.bench.hardware.clock import VirtualClock
from minivllm.bench.metrics.roofline import causal_pairs, in_windows
from minivllm.bench.targets.adapter import Adapter
from minivllm.bench.targets.base import EngineInfo, EngineOutput
from minivllm.bench.targets.liveness import Counters, scheduling_counters, since
from minivllm.bench.targets.options import SimulatedOptions
from minivllm.bench.targets.step_times import RooflineTimes, StepTimes, fit_records
from minivllm.bench.workloads.lazy_prompt import answer_positions, runs_of
from minivllm.cache.manager import CacheManager
from minivllm.cache.spec import CacheDemand
from minivllm.config.compose import build
from minivllm.config.typed import Config
from minivllm.engine.options import SamplingParams
from minivllm.engine.request import Request
from minivllm.engine.step import ScheduledRequest
from minivllm.errors import BadInput
from minivllm.extras.preemption import make_preemption
from minivllm.extras.scheduling import make_scheduler
from minivllm.models.config import ModelConfig
from minivllm.models.costs import architecture_costs, trims
from minivllm.models.load.source import resolve
from minivllm.models.load.tokenizer import Tokenizer

IDLE_S = 1e-3  # how far time advances in a step without work and without a deadline
UNLIMITED = 1 << 60
TOKEN = (0,)
ROW = (
    *("start_s", "num_requests", "num_tokens", "num_prefill_tokens", "context_tokens", "waiting"),
    *("kv_blocks_used", "kv_blocks_total", "kv_slots_wasted", "kv_slots_allocated", "forward_ms"),
)


def _in_windows(
    costs: dict[str, Any], scheduled: Sequence[ScheduledRequest], context: float, pairs: float
) -> tuple[float, float]:
    """Tokens of context that a step reads, and its prompts' pairs: means over layers with and
    without a window."""
    window, near, near_pairs = costs["window"], 0, 0.0
    for part in scheduled:
        held = part.seq_len
        near += min(held, window)
        if part.prefill:
            near_pairs += causal_pairs(held, part.num_tokens, window)
    return in_windows(costs, context, near), in_windows(costs, pairs, near_pairs)


class SimulatedTokens(Sequence[Any]):
    """A request's tokens by where they come from; a slice costs the same however long it is.

    Slices are hashable, and equal where the tokens are: a range of positions (of a `LazyPrompt`'s
    text, or of this answer alone), a tuple of token ids, or a tuple of such
    pieces.

    Args:
        prompt: the prompt.
        request_id: of the request; no two answers share one.
    """

    __slots__ = ("_runs", "_starts", "length")

    def __init__(self, prompt: Sequence[int], request_id: str) -> None:
        runs = runs_of(prompt)
        self._runs = (*runs, answer_positions(request_id))
        self._starts = [0]
        for run in runs:
            self._starts.append(self._starts[-1] + len(run))
        self.length = self._starts[-1]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int | slice) -> Any:
        starts, runs = self._starts, self._runs
        if isinstance(index, int):
            index = range(self.length)[index]
            run = bisect_right(starts, index) - 1
            return runs[run][index - starts[run]]
        start, stop, step = index.start, index.stop, index.step
        if (
            step is not None
            or start is None
            or stop is None
            or not 0 <= start < stop <= self.length
        ):
            start, stop, step = index.indices(self.length)
            if step != 1:
                raise ValueError("simulated tokens are cut into stretches only")
        run = bisect_right(starts, start) - 1
        first = starts[run]
        if stop - first <= len(runs[run]):  # nearly every block of a prefix
            return runs[run][start - first : stop - first]
        pieces = []
        while start < stop:
            end = min(stop, starts[run] + len(runs[run]))
            pieces.append(runs[run][start - starts[run] : end - starts[run]])
            start, run = end, run + 1
        return tuple(pieces)


class SimulatedRequest(Request):
    """A request whose answer is counted, not known."""

    __slots__ = ("output", "started_s")

    def __init__(
        self,
        request_id: str,
        tokens: SimulatedTokens,
        params: SamplingParams,
        max_num_tokens: int,
        arrival_s: float,
    ) -> None:
        super().__init__(
            request_id, tokens, params, max_num_tokens=max_num_tokens, seed=0, arrival_s=arrival_s
        )
        self.started_s: float | None = None
        self.output = EngineOutput(request_id, TOKEN)  # the same object for each token but the last

    def append(self, token_id: int) -> str | None:
        """See Request; the answer goes on to its full length."""
        tokens = self.token_ids
        tokens.length += 1
        return "length" if tokens.length >= self.max_num_tokens else None


def _step_times(
    options: SimulatedOptions, config: Mapping[str, Any], costs: dict[str, Any]
) -> StepTimes:
    if options.steps is not None:
        return fit_records(options.steps, config)
    if options.bandwidth_gb_s is not None and options.tflops is not None:
        limits = options.bandwidth_gb_s * 1e9, options.tflops * 1e12
        return RooflineTimes(costs, *limits, options.overhead_ms)
    raise BadInput(
        "engine=simulated needs to know how long a step takes: set engine.steps=RUNS to records "
        "of this model, or engine.bandwidth_gb_s and engine.tflops for a roofline"
    )


class SimulatedEngine(Adapter):
    """Plans every step with the real scheduler, then lets the time pass that the step would have
    taken.

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
        source = resolve(config["model"], allow_random=True)[1]
        model = ModelConfig.from_dict(source.config)
        cache = build(config["cache"])
        trimmed = trims(config["runtime"])
        costs, weight_bytes = architecture_costs(model, config["quant"], cache.kv_dtype, trimmed)
        self.step_times = _step_times(options, config, costs)
        # Records do not say what was near: what is fitted to them goes by the whole context.
        self._windowed = costs if options.steps is None and costs["window"] is not None else None
        policy = build(config["batching"])
        longest = view.model.max_model_len or model.max_position_embeddings
        memory = UNLIMITED if options.memory_gb is None else int(options.memory_gb * 1e9)
        free = memory - weight_bytes
        layout = cache.layout(
            CacheDemand(costs["kv_bytes_per_token"], free, longest, policy.max_num_seqs)
        )
        preemption = make_preemption(policy.preemption)
        layout = preemption.fit(layout)
        if (eviction := layout.eviction) is not None:
            if eviction.scored:
                raise BadInput(
                    f"cache.eviction={eviction.name} goes by attention scores, and nothing is "
                    "computed in a simulation: use cache.eviction=streaming, or engine=minivllm"
                )
            eviction.check(model.windows)
        self.clock = VirtualClock()
        self.cache = CacheManager(layout)
        self._new_scheduler = partial(
            make_scheduler, policy, self.cache, preemption, self.clock.now
        )
        self.scheduler = self._new_scheduler()
        block_bytes = layout.block_size * costs["kv_bytes_per_token"]
        self._kv = {
            "kv_dtype": costs["dtype"] if cache.kv_dtype == "auto" else cache.kv_dtype,
            "kv_bytes_per_token": float(costs["kv_bytes_per_token"]),
        }
        host_gb_s = math.inf if options.host_gb_s is None else options.host_gb_s
        self._host_ms_per_block = block_bytes / host_gb_s / 1e6
        self._keep_prefixes = view.measure.prefix_cache == "warm"
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
            warnings=[f"simulated: {self.step_times.describe()}"],
            clock=self.clock,
        )
        self._step_rows = options.step_rows
        self._requests: dict[str, SimulatedRequest] = {}
        self._rows: list[tuple[float, ...]]
        self._stride: int  # of the steps that get a row
        self._num_steps: int
        self._largest_batch: int
        self._begin()

    def submit(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        """See BenchEngine."""
        max_tokens = self.tokens_wanted(request_id, prompt_token_ids, params, self._requests)
        request = SimulatedRequest(
            request_id,
            SimulatedTokens(prompt_token_ids, request_id),
            params,
            len(prompt_token_ids) + max_tokens,
            self.clock.now(),
        )
        self.scheduler.add(request)
        self._requests[request_id] = request

    def abort(self, request_id: str) -> None:
        """End a request early; unknown and finished ones are ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.finish(request, "abort")

    def poll(self, timeout_s: float | None = None) -> list[EngineOutput]:
        """One step; see BenchEngine. Runs once for every token of every request: kept lean."""
        clock, scheduler = self.clock, self.scheduler
        start = clock.time
        plan = scheduler.plan()
        scheduled = plan.scheduled
        outputs = [self._ended(request, "shed", ()) for request in plan.shed]
        if not scheduled:
            if not outputs:
                wake_s = math.inf if plan.next_poll_s is None else plan.next_poll_s - start
                idle_s = min(wake_s, IDLE_S if timeout_s is None else timeout_s)
                clock.sleep(idle_s if idle_s > 0 else IDLE_S)
            return outputs
        prefill = context = decoded = 0
        pairs = 0.0
        sampling: list[Any] = []
        request: Any  # each is a SimulatedRequest
        for part in scheduled:
            request, first, count, is_prefill, _ = part
            end = first + count
            held = end - request.cache.num_evicted  # see ScheduledRequest.seq_len
            context += held
            if is_prefill:
                prefill += count
                pairs += count * (2 * held - count + 1) / 2
                if request.started_s is None:
                    request.started_s = start
                    request.output = EngineOutput(request.request_id, TOKEN, None, start)
            else:
                decoded += count
            if end == request.token_ids.length:
                sampling.append(request)
        read: float = context
        if self._windowed is not None:
            read, pairs = _in_windows(self._windowed, scheduled, context, pairs)
        milliseconds = self.step_times(len(scheduled), prefill + decoded, prefill, read, pairs)
        if plan.transfers and self._host_ms_per_block:
            moved = len(plan.transfers.saves) + len(plan.transfers.loads)
            milliseconds += moved * self._host_ms_per_block
        clock.time = start + milliseconds / 1e3
        computed = scheduler.computed
        for part in scheduled:
            computed(part)
        if self._num_steps % self._stride == 0:
            known = (start, len(scheduled), prefill + decoded, prefill, context)
            self._note((*known, len(scheduler.waiting)), milliseconds)
        self._num_steps += 1
        self._largest_batch = max(self._largest_batch, len(scheduled))
        for request in sampling:
            reason = request.append(0)
            if reason is None:
                outputs.append(request.output)
            else:
                scheduler.finish(request, reason)
                outputs.append(self._ended(request, reason, TOKEN))
        return outputs

    def _ended(self, request: Any, reason: str, token_ids: tuple[int, ...]) -> EngineOutput:
        del self._requests[request.request_id]
        return EngineOutput(request.request_id, token_ids, reason, request.started_s)

    def _note(self, known: tuple[float, ...], milliseconds: float) -> None:
        """Keep a row of the step; the cache is fullest now, before finished requests leave it."""
        pool = self.cache.pool
        slots = (
            self.cache.waste((r.cache, r.num_computed_tokens) for r in self.scheduler.running),
            pool.num_used * self.cache.block_size,
        )
        self._rows.append((*known, pool.num_used, pool.num_usable, *slots, milliseconds))
        if len(self._rows) > self._step_rows:
            self._rows = self._rows[::2]
            self._stride *= 2

    def reset(self) -> None:
        """See BenchEngine."""
        for request_id in list(self._requests):
            self.abort(request_id)
        if not self._keep_prefixes:
            self.cache.reset_prefix_cache()
        # Equal measurements are equal to the last bit.
        self.clock.time = 0.0
        self.scheduler = self._new_scheduler()
        self._begin()

    def _begin(self) -> None:
        """Count from here."""
        self._rows = []
        self._stride = 1
        self._num_steps = self._largest_batch = 0
        self._base = self._counters()

    def steps(self) -> list[dict[str, Any]]:
        """See BenchEngine; the time of a step is all in `forward_ms`."""
        return [dict(zip(ROW, row, strict=True)) for row in self._rows]

    def _counters(self) -> Counters:
        return scheduling_counters(self.scheduler, self.cache)

    def liveness(self) -> dict[str, dict[str, float | str]]:
        """See BenchEngine."""
        counts = since(self._base, self._counters())
        return {
            "batching": {**counts["batching"], "largest_batch": float(self._largest_batch)},
            "cache": {**counts["cache"], "block_size": float(self.cache.block_size), **self._kv},
            "engine": {"steps": float(self._num_steps), "steps_a_row": float(self._stride)},
        }

    def close(self) -> None:
        """See BenchEngine."""
        self.reset()
