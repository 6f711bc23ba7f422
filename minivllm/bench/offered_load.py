"""What an engine is to serve in one measurement, and which of it is measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from minivllm.bench.driver import full_batch
from minivllm.bench.metrics import metrics
from minivllm.bench.metrics.latency import Metric
from minivllm.bench.metrics.objectives import unknown_objective
from minivllm.bench.metrics.request_trace import RequestTrace
from minivllm.bench.metrics.validity import Check
from minivllm.bench.options import MeasureOptions
from minivllm.bench.records.figures import Metrics
from minivllm.bench.workloads.arrivals import Arrival
from minivllm.bench.workloads.stopping import Stopping
from minivllm.bench.workloads.workload import Workload
from minivllm.engine.options import SamplingParams
from minivllm.errors import BadInput
from minivllm.platform.plug_ins import make_own

# What `measure` takes of a user's own: the class, and what another one is.
OWN = {
    "metrics": (
        Metric,
        "no metric: derive it from minivllm.bench.metrics.latency.Metric or Distribution",
    ),
    "checks": (Check, "no check: derive it from minivllm.bench.metrics.validity.Check"),
}


@dataclass(frozen=True)
class OfferedLoad:
    """A workload, when its requests come, how they are decoded, and when the measurement stops."""

    workload: Workload
    arrival: Arrival
    params: SamplingParams
    seed: int
    metrics: Mapping[str, Metric]  # of the user's own, by their names in `metrics.own`
    checks: Mapping[str, Check]  # of the user's own, by name
    slo: Mapping[str, float | None]
    stopping: Stopping

    @classmethod
    def of(
        cls, workload: Workload, arrival: Arrival, params: SamplingParams, measure: MeasureOptions
    ) -> OfferedLoad:
        """The load of a measurement with these settings.

        Raises:
            BadInput: a metric or a check of the user's own cannot be made, is of another kind, or
                judges nothing.
        """
        stopping = Stopping(measure.duration_s, measure.cooldown_s, measure.max_error_rate)
        own = {
            kind: {
                name: make_own(f"measure.{kind}.{name}", node, *what)
                for name, node in getattr(measure, kind).items()
            }
            for kind, what in OWN.items()
        }
        for name, one in own["checks"].items():
            if type(one).reasons is Check.reasons and type(one).notes is Check.notes:
                raise BadInput(
                    f"measure.checks.{name}: {type(one).__name__} judges nothing: define `reasons` "
                    "or `notes`"
                )
        slo = vars(measure.slo)
        return cls(workload, arrival, params, measure.seed, **own, slo=slo, stopping=stopping)

    @cached_property
    def most_tokens(self) -> int:
        """Output tokens of the whole workload, if no answer ends early."""
        return sum(request.max_tokens for request in self.workload.requests)

    def tokens_expected(self, tokens: int, elapsed_s: float) -> int:
        """Output tokens of the whole run, as far as `tokens` in so many seconds tell: those of the
        workload, or as many as come until the measurement ends by time."""
        stopping = self.stopping
        if stopping.duration_s is None or elapsed_s <= 0:
            return self.most_tokens
        sent_s = stopping.duration_s + stopping.cooldown_s
        return min(self.most_tokens, max(tokens, round(tokens * sent_s / elapsed_s)))

    def sent(self, traces: Sequence[RequestTrace]) -> Workload:
        """The requests that were sent."""
        if len(traces) == len(self.workload):
            return self.workload
        names = {trace.request_id for trace in traces}
        return Workload(tuple(r for r in self.workload.requests if r.request_id in names))

    def until_s(self, traces: Sequence[RequestTrace]) -> float | None:
        """When the measurement ended by time; None where the workload had ended before."""
        until_s = self.stopping.measured_until_s
        later = any(trace.scheduled_s >= until_s for trace in traces)
        by_time = math.isfinite(until_s) and (later or len(traces) < len(self.workload))
        return until_s if by_time and not self.stopping.failing else None

    def figures(self, traces: Sequence[RequestTrace], max_num_seqs: int) -> tuple[Metrics, Metrics]:
        """The metrics of all that was sent, and of what is measured.

        Args:
            traces: one a request that was sent.
            max_num_seqs: most requests that the engine runs at once.
        """
        batch = full_batch(max_num_seqs, self.arrival, self.sent(traces).num_conversations)
        sessions = self.workload.sessions
        whole = metrics.compute(traces, self.slo, batch, self.metrics, sessions=sessions)
        if (until_s := self.until_s(traces)) is None:
            return whole, whole
        return whole, metrics.compute(traces, self.slo, batch, self.metrics, until_s, sessions)

    def notes(self, traces: Sequence[RequestTrace]) -> list[str]:
        """Sentences for the record on what was left out, or not measured."""
        stopping, count, until_s = self.stopping, len(self.workload), self.until_s(traces)
        measured = [t for t in traces if until_s is None or t.scheduled_s < until_s]
        notes = [*self.workload.notes, *unknown_objective(measured, self.slo)]
        if stopping.duration_s is None or stopping.failing:
            return notes
        if until_s is None:
            return [
                *notes,
                f"the {count} requests of the workload were over before "
                f"measure.duration_s={stopping.duration_s:g}: ask for more",
            ]
        cooling = len(traces) - len(measured)
        return [
            *notes,
            f"measure.duration_s={stopping.duration_s:g}: the {len(traces) - cooling} of {count} "
            f"requests that were due within it are measured; {cooling} more kept up the load for "
            f"{stopping.cooldown_s:g} s, and energy and cost include them",
        ]
