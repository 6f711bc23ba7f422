"""What an engine says of itself, held against what the driver saw: prompts, steps, tokens and
memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from minivllm.bench.hardware.readings import TICKS
from minivllm.bench.metrics.request_trace import RequestTrace

Steps = Sequence[Mapping[str, Any]]
Liveness = Mapping[str, Mapping[str, float | str]]

# Of tokens, which a server may count otherwise: an end token is counted or is not.
SERVER_TOLERANCE = 0.05
BURST = 1.5  # tokens of a request at one moment, on average, for each that its steps made
FINE_S = 1e-5  # a clock that ticks as often as this resolves whatever an engine does


def reconcile(
    traces: Sequence[RequestTrace], steps: Steps, liveness: Liveness, has_steps: bool = False
) -> tuple[list[str], list[str]]:
    """Compare an engine's own account of a window with the driver's.

    Args:
        traces: all requests that were sent, as the driver saw them.
        steps: the engine's rows of steps; a row that lacks a column leaves it unknown.
        liveness: what the engine counted within the window.
        has_steps: the engine has reported steps before, so that no rows are no steps.

    Returns:
        Reasons against the measurement, and notes. What an engine does not count is not judged.
    """
    account = EngineAccount(traces, steps, liveness, has_steps)
    return [*_prompts(account), *_answers(account)], [*_recomputed(account), *_bursts(account)]


@dataclass(frozen=True)
class EngineAccount:
    """Sums of the driver's and of the engine's account; None where the engine does not count."""

    traces: Sequence[RequestTrace]
    steps: Steps
    liveness: Liveness
    has_steps: bool

    def count(self, group: str, name: str) -> float | None:
        """A counter of liveness."""
        value = self.liveness.get(group, {}).get(name)
        return float(value) if isinstance(value, int | float) else None

    def _sum(self, *columns: str) -> float | None:
        """The sum of a column over all steps, less those of the further columns."""
        every = self.count("engine", "steps")  # a long simulation keeps a row of some steps
        if not (self.steps or self.has_steps) or every not in (None, float(len(self.steps))):
            return None
        first, *others = columns
        total = 0.0
        for step in self.steps:
            if step.get(first) is None:
                return None
            total += step[first] - sum(step.get(name) or 0 for name in others)
        return total

    @cached_property
    def answered(self) -> list[RequestTrace]:
        """Requests that got a token: their prompts were computed, or found in a cache."""
        return [trace for trace in self.traces if trace.token_times]

    @cached_property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts that were answered."""
        return sum(trace.input_tokens for trace in self.answered)

    @cached_property
    def output_tokens(self) -> int:
        """Tokens that the driver got."""
        return sum(len(trace.token_times) for trace in self.answered)

    @cached_property
    def cached_tokens(self) -> float:
        """Prompt tokens that came from the prefix cache, by whichever counter says most."""
        return max(sum(t.cached_tokens or 0 for t in self.answered), *self._counted_as_cached())

    def _counted_as_cached(self) -> Iterator[float]:
        for name in ("prefix_tokens_reused", "cached_prompt_tokens"):
            yield self.count("cache", name) or 0.0

    @cached_property
    def prefill_tokens(self) -> float | None:
        """Tokens that steps computed as prompts, those computed again included."""
        return self._sum("num_prefill_tokens")

    @cached_property
    def decode_rows(self) -> float | None:
        """Tokens that steps computed otherwise, drafts included: each gives one token at most."""
        return self._sum("num_tokens", "num_prefill_tokens")

    @cached_property
    def decode_turns(self) -> float | None:
        """As often as a step decoded for a request: at each the driver gets what it gave."""
        turns = self._sum("num_tokens", "num_prefill_tokens", "num_drafts")
        wasted = self.count("runtime", "overlap_wasted_tokens") or 0.0
        return None if turns is None else turns - wasted

    @property
    def repeats_prompts(self) -> bool:
        """Whether prompts may be computed more than once, or without an answer."""
        again = (
            ("batching", "preemptions"),
            ("batching", "forks"),
            ("parallel", "tokens_handed_over"),
        )
        if any(self.count(*counter) for counter in again):
            return True
        # With cache=none a step computes the whole sequence, which is no decoding then.
        whole = not self.decode_rows and self.output_tokens > len(self.answered)
        return whole or len(self.answered) < len(self.traces)


def _prompts(account: EngineAccount) -> Iterator[str]:
    """Every prompt is computed or found: no fewer tokens than prompts have."""
    prompted, cached = account.prompt_tokens, account.cached_tokens
    computed, tolerance = account.prefill_tokens, 0.0
    if computed is None:
        computed = account.count("engine", "prompt_tokens_computed")
        tolerance = SERVER_TOLERANCE
    if computed is not None and computed + cached < (1 - tolerance) * prompted:
        yield (
            f"the engine computed {computed:,.0f} prompt tokens and found {cached:,.0f} in its "
            f"prefix cache, of {prompted:,} that were asked: it cut prompts, or answered without "
            "them"
        )


def _answers(account: EngineAccount) -> Iterator[str]:
    """Every token but an answer's first is the work of a decoding step, or of a prompt that was
    computed again."""
    tokens, answers = account.output_tokens, len(account.answered)
    rows = account.decode_rows
    if rows is not None:
        again = (account.prefill_tokens or 0) - (account.prompt_tokens - account.cached_tokens)
        rows += max(0.0, again)
        if rows < tokens - answers:
            yield (
                f"{tokens:,} tokens of {answers:,} answers came, and the engine's steps decoded "
                f"{rows:,.0f}: answers came from elsewhere than its steps"
            )
        return
    made = account.count("engine", "output_tokens")
    if made is not None and made < (1 - SERVER_TOLERANCE) * (tokens - answers):
        yield (
            f"{tokens:,} tokens of {answers:,} answers came, and the server generated {made:,.0f}: "
            "answers came from elsewhere, as from a cache before it"
        )


def _recomputed(account: EngineAccount) -> Iterator[str]:
    """No more is computed than prompts have beyond what was found in the cache."""
    computed = account.prefill_tokens
    found = sum(trace.cached_tokens or 0 for trace in account.answered)
    if computed is None or account.repeats_prompts or computed <= account.prompt_tokens - found:
        return
    yield (
        f"the engine computed {computed:,.0f} prompt tokens where {account.prompt_tokens:,} were "
        f"asked and {found:,} found in its prefix cache: it computed some twice, or found fewer"
    )


def _bursts(account: EngineAccount) -> Iterator[str]:
    """Tokens come when their step ends. Where several come at once that steps made one by one, the
    time between tokens is that of the one that hands them on."""
    if account.count("decoding", "beam_rounds"):
        return  # the tokens of the best beam are known when all are
    moments = sum(len(set(trace.token_times)) - 1 for trace in account.answered)
    later = account.output_tokens - len(account.answered)
    turns = account.decode_turns if account.decode_rows else None
    if turns is None:
        turns = later - (account.count("speculative", "accepted_tokens") or 0.0)
    if min(turns, later) < BURST * max(moments, 1):
        return
    if not moments:
        yield (
            f"whole answers came at once, {account.output_tokens:,} tokens in "
            f"{len(account.answered):,} of them: their ITL is no time between tokens"
        )
        return
    tokens, moments = account.output_tokens, moments + len(account.answered)
    yield (
        f"tokens came {tokens / moments:.1f} at a time, {tokens:,} at {moments:,} moments: ITL "
        "gives them equal parts of the time between these"
    )


def check_clock(tick_s: float | None, medians_ms: Mapping[str, float | None]) -> list[str]:
    """A reason where the driver's clock is too coarse for the latencies that it gave.

    Args:
        tick_s: seconds between two values of the clock; None: it was not measured.
        medians_ms: latencies by name, in milliseconds.
    """
    if tick_s is None or tick_s <= FINE_S:
        return []
    short = [
        f"{name} of {median:.3g} ms"
        for name, median in medians_ms.items()
        if median is not None and median < 1e3 * TICKS * tick_s
    ]
    if not short:
        return []
    return [
        f"the clock moves every {1e3 * tick_s:.3g} ms, and a time below {TICKS} of its ticks is "
        f"no reading: median {', '.join(short)}"
    ]


def check_resident(record: Mapping[str, Any], device: Mapping[str, Any]) -> list[str]:
    """A note where an engine says that its weights are larger than what was ever resident.

    Args:
        record: with its memory complete; replicas on other hosts are not judged.
        device: of the provenance.
    """
    memory = record["memory"]
    weights, host = memory.get("weights"), memory.get("host_rss_peak")
    held = memory.get("device_process") or memory.get("device_peak_reserved")
    elsewhere = (record["liveness"].get("parallel") or {}).get("backend") == "ray"
    on_host = device.get("kind") == "cpu"
    if not weights or host is None or elsewhere or not (on_host or held):
        return []
    resident = host + (held or 0)
    if weights <= resident:
        return []
    return [
        f"the engine says that its weights take {weights / 1e9:.3g} GB, and no more than "
        f"{resident / 1e9:.3g} GB of it and all else was resident at any time"
    ]
