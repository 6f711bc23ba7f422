"""/metrics: what Prometheus reads, in vLLM's names where they mean the same.

vLLM's are those of `vllm/v1/metrics/loggers.py`; prefix_cache_queries and prefix_cache_hits count
tokens, as there.
"""

from __future__ import annotations

import asyncio
from collections import Counter as Counts
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import prometheus_client
from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from minivllm.processes.messages import Step
from minivllm.serving.http.access import Access, access
from minivllm.serving.processes.token_stream import TokenStream
from minivllm.serving.service import EngineService

LABELS = ("model_name", "engine")
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
# vLLM's begin at 10 ms, where a small model's all end.
TOKEN_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
# Counters of the engine: its own name, the metric, and what it counts.
ENGINE_COUNTERS = (
    ("prefix_tokens_looked_up", "prefix_cache_queries", "Prompt tokens looked up as a prefix."),
    ("prefix_tokens_reused", "prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    ("preemptions", "num_preemptions", "Requests that gave their blocks up to others."),
    ("drafts", "spec_decode_num_drafts", "Drafts that were verified."),
    ("draft_tokens", "spec_decode_num_draft_tokens", "Tokens of these drafts."),
    ("accepted_tokens", "spec_decode_num_accepted_tokens", "Draft tokens that were accepted."),
)
REASONS = ("stop", "length", "abort", "error")
# What clients did that is no served request; see docs/guides/operating.md.
CLIENT_EVENTS = (
    *("requests_refused", "clients_left", "slow_readers", "slow_senders", "unauthorized"),
    *("connections_refused", "malformed_frames", "viewers_refused", "viewers_behind"),
    "api_servers_lost",
)


def token_buckets(most: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, ... up to `most` tokens."""
    bounds = (digit * 10**power for power in range(9) for digit in (1, 2, 5))
    return [float(bound) for bound in bounds if bound <= most]


@dataclass
class _Open:
    """A request that has not ended: when the last token of each completion came, how many came in
    the present step, and how many were the first of their completions."""

    stream: TokenStream
    last_s: dict[int, float] = field(default_factory=dict)
    fresh: Counts[int] = field(default_factory=Counts)
    num_first: int = 0


class ServerMetrics(Collector):
    """Counts what the engine of a service does.

    Args:
        service: serves the requests.
    """

    def __init__(self, service: EngineService) -> None:
        self._service, self._open = service, dict[str, _Open]()
        self._values = (service.model, "0")
        self.registry = CollectorRegistry()
        self.registry.register(self)
        longest = token_buckets(service.info.max_model_len)
        histogram = self._histogram
        self._ttft = histogram("time_to_first_token_seconds", FIRST_TOKEN_S)
        self._itl = histogram("inter_token_latency_seconds", TOKEN_S)
        self._tpot = histogram("request_time_per_output_token_seconds", TOKEN_S)
        self._e2e = histogram("e2e_request_latency_seconds", REQUEST_S)
        self._queue = histogram("request_queue_time_seconds", REQUEST_S)
        self._prefill = histogram("request_prefill_time_seconds", REQUEST_S)
        self._decode = histogram("request_decode_time_seconds", REQUEST_S)
        self._inference = histogram("request_inference_time_seconds", REQUEST_S)
        self._prompt_tokens = histogram("request_prompt_tokens", longest)
        self._output_tokens = histogram("request_generation_tokens", longest)
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of requests that have begun.")
        self._generation = self._counter("generation_tokens", "Tokens that were generated.")
        success = Counter(
            self._name("request_success"),
            "Completions that have ended, by reason.",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._success = {reason: success.labels(*self._values, reason) for reason in REASONS}
        service.client.submitted.append(self._note_request)
        service.client.listeners.append(self._note_step)

    def _name(self, name: str) -> str:
        return f"{self._service.options.metrics_prefix}:{name}"

    def _histogram(self, name: str, buckets: Sequence[float]) -> Histogram:
        words = name.replace("_", " ").capitalize()
        made = Histogram(
            self._name(name), f"{words}.", LABELS, registry=self.registry, buckets=buckets
        )
        return made.labels(*self._values)

    def _counter(self, name: str, words: str) -> Counter:
        made = Counter(self._name(name), words, LABELS, registry=self.registry)
        return made.labels(*self._values)

    # ---- as things happen

    def _note_request(self, stream: TokenStream) -> None:
        self._open[stream.request_id] = _Open(stream)
        stream.on_over.append(self._note_over)

    def _note_over(self, stream: TokenStream) -> None:
        """Finish soon: the step that ends a request is noted before."""
        asyncio.get_running_loop().call_soon(self._finish, stream)

    def _note_step(self, step: Step) -> None:
        """Count the tokens of a step; those of one completion share its gap."""
        touched: dict[str, _Open] = {}
        tokens = 0
        for piece in step.pieces:
            one = self._open.get(piece.request_id)
            if one is None:
                continue
            if piece.token_id is not None:
                one.fresh[piece.completion] += 1
                touched[piece.request_id] = one
                tokens += 1
            if piece.finish_reason is not None:
                self._end(piece.finish_reason)
        self._generation.inc(tokens)
        for one in touched.values():
            if not one.last_s:
                self._prompt.inc(one.stream.num_prompt_tokens)
                self._ttft.observe(step.time_s - one.stream.arrived_s)
            for completion, count in one.fresh.items():
                last = one.last_s.get(completion)
                if last is None:
                    one.num_first += count
                for _ in range(count if last is not None else 0):
                    self._itl.observe((step.time_s - (last or 0.0)) / count)
                one.last_s[completion] = step.time_s
            one.fresh.clear()

    def _end(self, reason: str, count: int = 1) -> None:
        """Count completions that have ended; one whose deadline passed was shed."""
        self._success["abort" if reason == "shed" else reason].inc(count)

    def _finish(self, stream: TokenStream) -> None:
        """Note the times of a request that has ended."""
        if (one := self._open.pop(stream.request_id, None)) is None:
            return
        if stream.unfinished:
            self._end("abort", stream.unfinished)
        begun, first, last = stream.begun_s, stream.first_token_s, stream.last_token_s
        self._prompt_tokens.observe(stream.num_prompt_tokens)
        self._output_tokens.observe(stream.num_output_tokens)
        if begun is None or first is None or last is None:
            return
        self._e2e.observe(last - stream.arrived_s)
        self._queue.observe(max(0.0, begun - stream.arrived_s))
        self._prefill.observe(first - begun)
        self._decode.observe(last - first)
        self._inference.observe(last - begun)
        each = (stream.num_output_tokens - one.num_first) / stream.num_completions
        if each > 0:
            self._tpot.observe((last - first) / each)

    # ---- read at each request for them

    def collect(self) -> Iterator[Metric]:
        """What needs no counting: gauges, and counters of the engine and of the server."""
        service = self._service
        replicas = service.client.replicas
        state, counters, info = replicas.state, replicas.counters, replicas.info
        for name, words, value in (
            ("num_requests_running", "Requests in the batch.", state.num_running),
            ("num_requests_waiting", "Requests that wait for the batch.", state.num_waiting),
            ("num_replicas_alive", "Replicas that serve.", len(replicas.serving)),
            ("num_api_servers", "Processes that answer clients.", max(1, len(service.api_servers))),
            ("num_viewers", "Clients that watch the engine.", service.num_viewers),
            (
                "kv_cache_usage_perc",
                "Part of the KV blocks in use; 1 is all.",
                state.num_used_blocks / max(1, info.num_blocks),
            ),
        ):
            yield self._gauge(name, words, {}, value)
        cache = {"block_size": str(info.block_size), "num_gpu_blocks": str(info.num_blocks)}
        yield self._gauge("cache_config_info", "The KV cache.", cache, 1)
        for own, name, words in ENGINE_COUNTERS:
            family = CounterMetricFamily(self._name(name), words, labels=LABELS)
            family.add_metric(self._values, counters.get(own, 0.0))
            yield family
        states = {name: count for name, count in replicas.states().items() if name != "replicas"}
        yield self._counts("num_replicas", "Replicas.", "state", states, GaugeMetricFamily)
        yield self._counts(
            "replica_events", "Replicas that were lost, started again, added or removed.", "event",
            service.client.replica_events,
        )  # fmt: skip
        yield self._counts(
            "client_events", "What clients did that is no served request.", "event",
            {name: service.counts[name] for name in CLIENT_EVENTS},
        )  # fmt: skip
        statuses = {str(status): count for status, count in sorted(service.statuses.items())}
        yield self._counts("http_responses", "Answers over HTTP.", "status", statuses)

    def _gauge(self, name: str, words: str, more: dict[str, str], value: float) -> Metric:
        family = GaugeMetricFamily(self._name(name), words, labels=(*LABELS, *more))
        family.add_metric((*self._values, *more.values()), value)
        return family

    def _counts(
        self,
        name: str,
        words: str,
        label: str,
        counts: dict[str, int],
        kind: type[CounterMetricFamily | GaugeMetricFamily] = CounterMetricFamily,
    ) -> Metric:
        family = kind(self._name(name), words, labels=(*LABELS, label))
        for value, count in counts.items():
            family.add_metric((*self._values, value), count)
        return family


def router(service: EngineService) -> APIRouter:
    """The route that Prometheus reads."""
    prometheus_client.disable_created_metrics()
    routes, metrics = APIRouter(), ServerMetrics(service)

    forms: dict[str, Any] = {"text/plain": {}, "application/openmetrics-text": {}}

    @routes.get("/metrics", response_class=Response, responses={200: {"content": forms}})
    @access(Access.QUIET)
    async def read(request: Request) -> Response:
        """Give all metrics in Prometheus's or OpenMetrics' form."""
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(metrics.registry), headers={"content-type": media_type})

    return routes
