"""The gate: may this measurement be quoted? Every reason against it is one sentence with its
numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

from minivllm.bench.hardware.readings import Energy, Roofline
from minivllm.bench.metrics.prefix_sharing import check_cold
from minivllm.bench.metrics.reconciliation import Steps, check_clock, reconcile
from minivllm.bench.metrics.request_trace import UNKNOWN_TOKEN, RequestTrace
from minivllm.bench.metrics.roofline import exceeds
from minivllm.bench.metrics.stream_validity import check_stream
from minivllm.bench.records.figures import Metrics
from minivllm.bench.records.record import Validity
from minivllm.bench.workloads.stopping import Stopping
from minivllm.bench.workloads.workload import Workload

# Little's law is exact over the whole window; this leaves room for late endings
LITTLE_TOLERANCE = 0.05
LATE_SHARE = 0.1  # of the mean latency, spent before the driver got round to submitting
WINDOW_TOLERANCE = 0.1  # between the energy's window and the throughput's
LONG_ANSWER = 8  # tokens, of which all are the same by accident in no text
NAMED = 3  # examples named in a sentence
ANSWERED = ("ok", "empty", "shed")  # statuses of requests that did not fail


@dataclass(frozen=True)
class Evidence:
    """What one measurement is judged by, but for what was seen from outside, see
    `telemetry_validity`.

    Args:
        traces, workload: as the driver returned them, and the requests that were sent.
        metrics: what `metrics.compute` made of the traces.
        energy, roofline, liveness: of the window; the roofline with MBU and MFU.
        cold: whether the prefix cache should have been empty before.
        max_concurrency: of an open loop; None is no limit.
        stopping: when it was to stop, and whether too many requests had failed.
        steps, has_steps: see `reconcile`.
        tick_s, jumped: seconds between two values of the clock, and why its times cannot be
            trusted, where known.
        writes_text: the answers are a model's whose weights are not random.
    """

    traces: Sequence[RequestTrace]
    workload: Workload
    metrics: Metrics
    energy: Energy = field(default_factory=Energy)
    roofline: Roofline = field(default_factory=Roofline)
    liveness: Mapping[str, Mapping[str, float | str]] = field(default_factory=dict)
    cold: bool = False
    max_concurrency: int | None = None
    stopping: Stopping = field(default_factory=Stopping)
    steps: Steps = ()
    has_steps: bool = False
    tick_s: float | None = None
    jumped: str | None = None
    writes_text: bool = False


class Check:
    """A check of a user's own, as `measure.checks` names it: it has `reasons` or `notes`, or
    both."""

    def reasons(self, evidence: Evidence) -> Iterable[str]:
        """A sentence for each reason why the measurement is invalid."""
        return ()

    def notes(self, evidence: Evidence) -> Iterable[str]:
        """A sentence for each remark that leaves it valid."""
        return ()


def check(evidence: Evidence, own: Mapping[str, Check] | None = None) -> Validity:
    """Judge one measurement.

    Args:
        evidence: of it.
        own: checks of a user's own, by the names that their sentences begin with.
    """
    traces, liveness = evidence.traces, evidence.liveness
    failures, tolerated = _failures(traces, evidence.stopping)
    accounts = (
        check_stream(liveness, evidence.metrics.e2e_ms.mean),
        reconcile(traces, evidence.steps, liveness, evidence.has_steps),
    )
    reasons = [
        *([stopped] if (stopped := evidence.stopping.reason()) else []),
        *([] if tolerated else failures),
        *_counts(traces, evidence.workload),
        *_times(traces),
        *(
            _littles_law(traces, evidence.metrics)
            if all(trace.completed for trace in traces)
            else ()
        ),
        *_above_limit(evidence.roofline),
        *chain.from_iterable(reasons for reasons, _ in accounts),
        *_clock(evidence.metrics, evidence.tick_s, evidence.jumped),
    ]
    notes = [
        *([f"{line}, which measure.max_error_rate allows" for line in failures if tolerated]),
        *_shed(traces),
        *_lateness(traces, evidence.max_concurrency),
        *_limit_notes(evidence.roofline),
        *_energy_notes(evidence.energy, evidence.metrics),
        *_recordings(liveness),
        *_overlaps(liveness),
        *chain.from_iterable(notes for _, notes in accounts),
        *(check_cold(evidence.workload, liveness, traces) if evidence.cold else ()),
        *(one_token_answers(traces, "stream" in liveness) if evidence.writes_text else ()),
    ]
    for name, one in (own or {}).items():
        reasons += [f"{name}: {line}" for line in _sentences(one.reasons(evidence))]
        notes += [f"{name}: {line}" for line in _sentences(one.notes(evidence))]
    return Validity(not reasons, reasons, notes)


def _sentences(found: Iterable[str]) -> Iterable[str]:
    """What a check of a user's own returns, also one sentence in place of several."""
    return [found] if isinstance(found, str) else found


def _failures(traces: Sequence[RequestTrace], stopping: Stopping) -> tuple[list[str], bool]:
    """A sentence on the requests that did not complete, if there are any, and whether so many
    may."""
    failed = [
        f"{trace.request_id}: {trace.error or trace.status}"
        for trace in traces
        if trace.status not in ANSWERED
    ]
    may = (stopping.max_error_rate or 0) * len(traces)
    tolerated = not stopping.failing and len(failed) <= may
    if not failed:
        return [], tolerated
    line = f"{len(failed)} of {len(traces)} requests did not complete ({_examples(failed)})"
    return [line], tolerated


def _counts(traces: Sequence[RequestTrace], workload: Workload) -> Iterator[str]:
    """Every request of the workload was answered, with as many tokens as it wanted."""
    requested = {request.request_id: request for request in workload.requests}
    if [trace.request_id for trace in traces] != list(requested):
        yield (
            f"{len(traces)} requests were traced and {len(requested)} asked for, or they are not "
            "the same"
        )
        return
    empty = [trace.request_id for trace in traces if trace.status == "empty"]
    if empty:
        yield f"{len(empty)} of {len(traces)} requests produced no token ({_examples(empty)})"
    wrong_prompts, wrong_outputs = [], []
    lengths = {trace.request_id: trace.input_tokens + len(trace.token_ids) for trace in traces}
    for trace in traces:
        request = requested[trace.request_id]
        got, limit = len(trace.token_ids), request.max_tokens
        prompt_len = len(request.prompt_token_ids) + lengths.get(request.follows or "", 0)
        if trace.submitted_s is not None and trace.input_tokens != prompt_len:
            wrong_prompts.append(f"{trace.request_id}: {trace.input_tokens} of {prompt_len}")
        if trace.completed and (got > limit or (request.ignore_eos and got < limit)):
            wrong_outputs.append(f"{trace.request_id}: {got} of {limit}")
    if wrong_prompts:
        yield f"{len(wrong_prompts)} prompts are not as long as asked ({_examples(wrong_prompts)})"
    if wrong_outputs:
        yield f"{len(wrong_outputs)} outputs are not as long as asked ({_examples(wrong_outputs)})"


def _shed(traces: Sequence[RequestTrace]) -> Iterator[str]:
    """A policy that sheds does what it is for, but the latencies are then those of the
    others."""
    shed = [trace.request_id for trace in traces if trace.status == "shed"]
    if shed:
        yield (
            f"{len(shed)} of {len(traces)} requests were shed, too late for their deadline "
            f"({_examples(shed)})"
        )


def _times(traces: Sequence[RequestTrace]) -> Iterator[str]:
    """Time runs forward, and the engine's clock is the driver's."""
    backwards, early = [], []
    for trace in traces:
        times = trace.token_times
        if len(times) != len(trace.token_ids) or any(a > b for a, b in pairwise(times)):
            backwards.append(trace.request_id)
        if not times:
            continue
        if times[0] < trace.scheduled_s:
            early.append(
                f"{trace.request_id}: first token {trace.scheduled_s - times[0]:.3f} s before it "
                "was due"
            )
        elif trace.started_s is not None and not trace.scheduled_s <= trace.started_s <= times[0]:
            offset = trace.started_s - trace.scheduled_s
            early.append(f"{trace.request_id}: first step {offset:+.3f} s from when it was due")
    if backwards:
        yield (
            f"{len(backwards)} requests have token times missing or out of order "
            f"({_examples(backwards)})"
        )
    if early:
        yield (
            f"{len(early)} requests have times that cannot be ({_examples(early)}): the clocks "
            "disagree"
        )


def one_token_answers(traces: Sequence[RequestTrace], served: bool) -> list[str]:
    """A note where half of the answers or more are one token from beginning to end, as of a model
    or a kernel that is broken; fewer are of a small model that decodes greedily.

    Args:
        traces: of an engine that computes.
        served: whether a server answers, which may not tell the ids.
    """
    answers = [
        t
        for t in traces
        if len(t.token_ids) >= LONG_ANSWER and not (served and UNKNOWN_TOKEN in t.token_ids)
    ]
    repeated = [
        f"{t.request_id}: token {t.token_ids[0]}" for t in answers if len(set(t.token_ids)) == 1
    ]
    if not repeated or 2 * len(repeated) < len(answers):
        return []
    return [
        f"{len(repeated)} of {len(answers)} answers of at least {LONG_ANSWER} tokens are one token "
        f"throughout ({_examples(repeated)})"
    ]


def _clock(metrics: Metrics, tick_s: float | None, jumped: str | None) -> list[str]:
    """The clock ran on evenly, and resolves the latencies."""
    names = ("TTFT", "ITL", "TPOT", "E2E")
    medians = {name: getattr(metrics, f"{name.lower()}_ms").p50 for name in names}
    return [*check_clock(tick_s, medians), *([jumped] if jumped else [])]


def _littles_law(traces: Sequence[RequestTrace], metrics: Metrics) -> Iterator[str]:
    """Requests in the system, counted over time, equal throughput times latency (Little 1961)."""
    window, rate, latency = metrics.duration_s, metrics.requests_per_s, metrics.e2e_ms.mean
    if not window or rate is None or latency is None:
        yield "nothing was measured: the window from first arrival to last token is empty"
        return
    changes = sorted(
        change
        for trace in traces
        if trace.finished_s is not None
        for change in ((trace.scheduled_s, 1), (trace.finished_s, -1))
    )
    area, present = 0.0, 0
    for (time_s, change), (next_s, _) in pairwise(changes):
        present += change
        area += present * (next_s - time_s)
    counted, expected = area / window, rate * latency / 1e3
    if abs(counted - expected) > LITTLE_TOLERANCE * max(counted, expected):
        yield (
            f"Little's law fails: {counted:.2f} requests were in the system on average, and "
            f"{rate:.3g} requests/s times a mean latency of {latency:.1f} ms make {expected:.2f}"
        )


def _above_limit(roofline: Roofline) -> Iterator[str]:
    """Nothing is faster than the hardware, unless it never left the cache."""
    if not exceeds(roofline):
        return
    if roofline.mbu is not None and roofline.mbu > 1:
        yield (
            f"decoding would have used {100 * roofline.mbu:.0f} % of the measured memory bandwidth"
        )
    if roofline.mfu is not None and roofline.mfu > 1:
        yield f"prefill would have used {100 * roofline.mfu:.0f} % of the measured matrix rate"


def _limit_notes(roofline: Roofline) -> Iterator[str]:
    if roofline.fits_cache and max(roofline.mbu or 0, roofline.mfu or 0) > 1:
        yield (
            "the model fits the last-level cache, so its use of the measured limits may exceed "
            "100 %"
        )


def _lateness(traces: Sequence[RequestTrace], max_concurrency: int | None = None) -> Iterator[str]:
    """How late the single-threaded driver was; the latencies include it."""
    sent = [trace for trace in traces if trace.completed and trace.submitted_s is not None]
    if not sent:
        return
    late = sum((trace.submitted_s or 0.0) - trace.scheduled_s for trace in sent) / len(sent)
    latency = sum(trace.token_times[-1] - trace.scheduled_s for trace in sent) / len(sent)
    if late > LATE_SHARE * latency:
        if max_concurrency is not None:
            yield (
                f"requests waited {1e3 * late:.1f} ms on average for one of "
                f"arrival.max_concurrency={max_concurrency} places, {100 * late / latency:.0f} % "
                "of their latency, which includes it"
            )
            return
        yield (
            f"requests were submitted {1e3 * late:.1f} ms late on average, "
            f"{100 * late / latency:.0f} % of their latency, which includes it: the engine's "
            "steps are long beside it"
        )


def _energy_notes(energy: Energy, metrics: Metrics) -> Iterator[str]:
    if energy.joules is None:
        return
    if energy.reason:
        yield f"energy: {energy.reason}"
    if (
        metrics.duration_s
        and energy.window_s
        and abs(energy.window_s / metrics.duration_s - 1) > WINDOW_TOLERANCE
    ):
        yield f"energy is of {energy.window_s:.2f} s and throughput of {metrics.duration_s:.2f} s"


def _recordings(liveness: Mapping[str, Mapping[str, float | str]]) -> Iterator[str]:
    """A CUDA graph that is recorded when it is first needed holds up the requests that need it."""
    if count := int(liveness.get("runtime", {}).get("graph_captures", 0)):
        yield (
            f"{count} CUDA graph{'s were' if count > 1 else ' was'} recorded within the window, "
            "whose times include it"
        )


def overlap_steps(liveness: Mapping[str, Mapping[str, float | str]]) -> int:
    """Steps of the window that were launched before the one before them had ended."""
    return int(liveness.get("runtime", {}).get("overlap_steps", 0))


def _overlaps(liveness: Mapping[str, Mapping[str, float | str]]) -> Iterator[str]:
    """Phases tell less where one of them holds the wait for another step."""
    if count := overlap_steps(liveness):
        yield (
            f"{count} steps overlapped the step before: MBU and MFU are of steps that two of "
            "their kind follow, and phases of a step hold the wait for another "
            "(runtime.overlap=false tells them apart)"
        )


def _examples(items: Sequence[str]) -> str:
    more = f"; {len(items) - NAMED} more" if len(items) > NAMED else ""
    return "; ".join(items[:NAMED]) + more
