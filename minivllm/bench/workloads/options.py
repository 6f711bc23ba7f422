"""The knobs of `workload` and `arrival`: which requests, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from minivllm.platform.options import Options, knob, option

# A number of tokens, or a distribution of it, which the workload checks
# (minivllm/bench/workloads/lengths.py).
Length = int | dict[str, Any]
AUTO = "auto"


def distribution(kind: str, **given: float) -> dict[str, Any]:
    """A distribution with what it takes, and null for what it does not take."""
    others = ("value", "mean", "std", "min", "max", "values", "weights", "path")
    return {"distribution": kind, **dict.fromkeys(others), **given}


def uniform(low: int, high: int) -> Any:
    """A knob whose default is a uniform distribution."""
    return knob(factory=lambda: distribution("uniform", min=low, max=high), at_least=1)


def _lognormal(mean: int, std: int, low: int, high: int) -> Any:
    return knob(
        factory=lambda: distribution("lognormal", mean=mean, std=std, min=low, max=high),
        at_least=1,
    )


@dataclass(frozen=True)
class SyntheticOptions(Options):
    """What every workload of requests with drawn lengths has."""

    group = "workload"
    num_requests: int | Literal["auto"] = knob(32, at_least=1)
    """Number of requests; auto (task=bench): as many as fill fill_s on what should be the fastest
    arm, found by one pilot for all arms."""
    input_len: Length = knob(64, at_least=1)
    """Prompt tokens: a number, or a distribution: fixed (value), uniform (min, max), normal or
    lognormal (mean and std in tokens, clipped to min and max), empirical (values or a file of them
    at path, and perhaps weights)."""
    output_len: Length = knob(32, at_least=1)
    """Output tokens; the same."""
    ignore_eos: bool = True
    """Every engine generates exactly the drawn length, past an end-of-sequence token."""
    _: KW_ONLY
    fill_s: float = knob(10.0, above=0, unasked=True)
    """Seconds that num_requests=auto fills."""

    @property
    def count(self) -> int:
        """Number of requests. Raises BadInput while it is auto."""
        if isinstance(self.num_requests, str):
            raise self.bad("num_requests", "is for task=bench: give a number")
        return self.num_requests


@option("minivllm.bench.workloads.synthetic.Smoke")
@dataclass(frozen=True)
class SmokeOptions(SyntheticOptions):
    """workload=smoke."""

    num_requests: int | Literal["auto"] = knob(16, at_least=1)


@option("minivllm.bench.workloads.synthetic.Chat")
@dataclass(frozen=True)
class ChatWorkloadOptions(SyntheticOptions):
    """workload=chat."""

    input_len: Length = uniform(64, 256)
    output_len: Length = uniform(32, 128)


@option("minivllm.bench.workloads.synthetic.LongDocument")
@dataclass(frozen=True)
class LongDocumentOptions(SyntheticOptions):
    """workload=long_document."""

    num_requests: int | Literal["auto"] = knob(16, at_least=1)
    input_len: Length = uniform(8192, 32768)
    output_len: Length = uniform(64, 256)


@option("minivllm.bench.workloads.synthetic.Summarize")
@dataclass(frozen=True)
class SummarizeOptions(SyntheticOptions):
    """workload=summarize."""

    input_len: Length = _lognormal(1024, 384, 256, 1792)
    output_len: Length = _lognormal(96, 32, 32, 192)


@option("minivllm.bench.workloads.synthetic.Code")
@dataclass(frozen=True)
class CodeOptions(SyntheticOptions):
    """workload=code."""

    input_len: Length = _lognormal(1152, 384, 128, 1792)
    output_len: Length = _lognormal(24, 32, 1, 192)


@option("minivllm.bench.workloads.shared_prefix.SharedPrefix")
@dataclass(frozen=True)
class SharedPrefixOptions(SyntheticOptions):
    """workload=shared_prefix."""

    num_prefixes: int = knob(2, at_least=1)
    """trees: system prompts, or tenants."""
    prefix_len: Length = knob(256, at_least=1)
    """Tokens that each node of a tree adds to what it inherits; a number, or a distribution as in
    workload=chat."""
    depth: int = knob(2, at_least=1)
    """Nodes on the way from a root to a leaf; 1 is the root alone."""
    branching: int = knob(4, at_least=1)
    """Children of a node."""


@option("minivllm.bench.workloads.images.Images")
@dataclass(frozen=True)
class ImagesOptions(SyntheticOptions):
    """workload=images."""

    num_requests: int | Literal["auto"] = knob(16, at_least=1)
    input_len: Length = knob(32, at_least=1)
    """Tokens of text, after the images; a number, or a distribution as in workload=chat."""
    images: Length = knob(1, at_least=1)
    """Pictures of a request; the same."""
    width: Length = uniform(256, 768)
    """Pixels of a picture; the same."""
    height: Length = uniform(256, 768)
    """Pixels of a picture; the same."""
    reuse: float = knob(0.0, at_least=0, at_most=1)
    """Chance that a picture is one that came before."""


@option("minivllm.bench.workloads.multi_turn.MultiTurn")
@dataclass(frozen=True)
class MultiTurnOptions(Options):
    """workload=multi_turn."""

    group = "workload"
    num_conversations: int = knob(8, at_least=1)
    """Number of conversations."""
    turns: Length = knob(4, at_least=1)
    """Turns of a conversation; a number, or a distribution as in workload=chat."""
    input_len: Length = uniform(16, 64)
    """Tokens that the user adds in a turn; the same."""
    output_len: Length = uniform(32, 96)
    """Tokens of an answer; the same."""
    think_s: float = knob(0.5, at_least=0)
    """Mean seconds from the end of an answer to the user's next turn."""
    think: Literal["fixed", "exponential"] = "exponential"
    """Distribution of these times."""
    ignore_eos: bool = True
    """Go on to the full output length past an end-of-sequence token."""


@option("minivllm.bench.workloads.agents.agentic.Agentic")
@dataclass(frozen=True)
class AgenticOptions(Options):
    """workload=agentic."""

    group = "workload"
    path: str | None = None
    """Recorded sessions, a JSON file or a folder of them; null: sessions are generated from the
    lengths below."""
    format: Literal["auto", "weka", "tensorrt_llm", "bailian", "mooncake"] = "auto"
    """Format of the recorded sessions; weka is AgentX's."""
    num_sessions: int | None = knob(None, at_least=1)
    """Replays of sessions; more than the file has start again with its first; null: 8 generated
    ones, or each of the file once."""
    turns: Length = knob(8, at_least=1)
    """Calls of the main agent in a generated session; a number, or a distribution as in
    workload=chat."""
    system_len: int = knob(256, at_least=1)
    """Tokens of the system prompt, the same in all sessions."""
    input_len: Length = uniform(48, 96)
    """Tokens of a task; the same."""
    output_len: Length = uniform(16, 48)
    """Tokens of an answer; the same."""
    result_len: Length = uniform(32, 128)
    """Tokens of a tool's result; the same."""
    tool_s: float = knob(0.5, at_least=0)
    """Mean seconds of a tool call, exponential."""
    fan_outs: int = knob(1, at_least=0)
    """Times that the main agent starts sub-agents and waits for them, at most once between two of
    its calls."""
    subagents: int = knob(2, at_least=1)
    """Sub-agents of a fan-out."""
    subagent_turns: int = knob(2, at_least=1)
    """Calls of a sub-agent."""
    compact_at: int | None = knob(1024, at_least=1)
    """Tokens of context from which on an agent summarises it; null: never."""
    summary_len: int = knob(96, at_least=1)
    """Tokens of such a summary."""
    max_idle_s: float = knob(10.0, at_least=0)
    """Longest gap between the starts of a session's calls; longer ones are cut."""
    cache_bust: bool = True
    """true: every replay has a marker of its own, so that no replay warms the cache for the
    next."""
    random_starts: int = knob(0, at_least=0)
    """Number of the first sessions that start at a random instant, with their earlier turns in the
    prefix cache."""
    length_scale: float = knob(1.0, above=0, at_most=16)
    """Factor on the lengths of recorded prompts and answers."""
    too_long: Literal["error", "skip"] = "error"
    """Treatment of recorded sessions that exceed the context."""
    ignore_eos: bool = True
    """Go on to the full output length past an end-of-sequence token."""


@dataclass(frozen=True)
class FromFileOptions(Options):
    """What every workload that is read from a file has."""

    group = "workload"
    path: str | None = None
    """The file."""
    num_requests: int | None = knob(None, at_least=1)
    """Number of requests from the start of the file, or of its slice; null: all."""
    too_long: Literal["error", "skip"] = "error"
    """Treatment of requests that exceed the context."""


# What `workload.columns` may give another name.
PROMPT_COLUMNS = (
    *("prompt", "prompt_token_ids", "messages", "conversations"),
    *("input_len", "output_len"),
)
TRACE_COLUMNS = ("timestamp", "input_len", "output_len", "hash_ids")


def require_columns(options: Options, known: Sequence[str]) -> None:
    """Raise BadInput unless `columns` gives names to some of the known ones."""
    columns: dict[str, Any] = getattr(options, "columns", None) or {}
    if not all(key in known and isinstance(name, str) and name for key, name in columns.items()):
        raise options.bad("columns", f"must give names of columns to some of {', '.join(known)}")


@option("minivllm.bench.workloads.from_file.file.File")
@dataclass(frozen=True)
class FileOptions(FromFileOptions):
    """workload=file."""

    format: Literal["auto", "jsonl", "sharegpt", "csv", "parquet", "dataset"] = "auto"
    """Format of the file; auto: by its name and content."""
    split: str | None = knob(None, unasked=True)
    """Split of a saved dataset that has several."""
    columns: dict[str, Any] | None = knob(None, unasked=True)
    """The file's own names of prompt, prompt_token_ids, messages, conversations, input_len and
    output_len: {prompt: question, output_len: answer_tokens}."""
    output_len: int = knob(128, at_least=1)
    """Tokens to generate for lines without max_tokens; a ShareGPT answer has its own length."""
    ignore_eos: bool = False
    """Go on to the full output length past an end-of-sequence token."""
    line_sampling: bool = knob(True, unasked=True)
    """temperature, top_p, seed, stop, ... of a line go with its request; false: they are left
    alone."""
    oversample: bool = knob(False, unasked=True)
    """true: begin the file again where it has fewer than num_requests."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_columns(self, PROMPT_COLUMNS)
        if self.oversample and self.num_requests is None:
            raise self.bad("oversample", "needs workload.num_requests: how many requests to make")


@option("minivllm.bench.workloads.served.Served")
@dataclass(frozen=True)
class ServedOptions(Options):
    """workload=served, which has no knobs."""

    group = "workload"


@option("minivllm.bench.workloads.from_file.trace.Trace")
@dataclass(frozen=True)
class TraceOptions(FromFileOptions):
    """workload=trace."""

    format: Literal["auto", "azure", "mooncake", "burstgpt", "bailian", "columns"] = "auto"
    """Format of the file; columns: any CSV or JSON lines."""
    columns: dict[str, Any] | None = knob(None, unasked=True)
    """With format=columns, the file's own names of timestamp, input_len, output_len and hash_ids:
    {timestamp: sent, input_len: n_in}; null: their usual names."""
    time_unit: Literal["s", "ms", "us", "ns"] | None = knob(None, unasked=True)
    """With format=columns, the unit of times; null: times are dates."""
    length_scale: float = knob(1.0, above=0)
    """Factor on the lengths of prompts and answers, and so of shared blocks."""
    start_s: float = knob(0.0, at_least=0)
    """Where a slice begins, seconds after the trace's first request."""
    duration_s: float | None = knob(None, above=0)
    """Length of the slice; null goes on to the end."""
    block_tokens: int | None = knob(None, at_least=1, null_means=512)
    """Prompt tokens that one hash id stands for; null: 512 of Mooncake, 16 of Bailian."""
    copies: int = knob(1, at_least=1, at_most=4096, unasked=True)
    """Copies of the slice at the same time, each of users of its own, with their times shifted
    around the end of the slice: more traffic of the same kind."""
    ignore_eos: bool = True
    """Generate exactly the trace's lengths."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_columns(self, TRACE_COLUMNS)
        for name in ("columns", "time_unit"):
            if getattr(self, name) is not None and self.format not in ("auto", "columns"):
                raise self.bad(name, f"is of workload.format=columns, not {self.format}")


AT_ONCE = "for all requests at the start use arrival=offline"

LEAST, MOST = 1e-6, 1e9  # of a rate: beyond them times are no numbers


@option("minivllm.bench.workloads.arrivals.Offline")
@dataclass(frozen=True)
class OfflineOptions(Options):
    """arrival=offline."""

    group = "arrival"


@option("minivllm.bench.workloads.arrivals.Concurrency")
@dataclass(frozen=True)
class ConcurrencyOptions(Options):
    """arrival=concurrency."""

    group = "arrival"
    concurrency: int = knob(8, at_least=1)
    """Requests in flight."""


@dataclass(frozen=True, kw_only=True)
class OpenLoopOptions(Options):
    """What every open loop has."""

    group = "arrival"
    max_concurrency: int | None = knob(None, at_least=1, unasked=True)
    """Most requests, or conversations, in flight; those due wait, which counts as latency; null: no
    limit."""


@option("minivllm.bench.workloads.arrivals.Constant", "minivllm.bench.workloads.arrivals.Poisson")
@dataclass(frozen=True)
class RateOptions(OpenLoopOptions):
    """arrival=constant and arrival=poisson."""

    rate: float = knob(2.0, above=0, at_least=LEAST, at_most=MOST, infinite=AT_ONCE)
    """Mean requests per second."""


@option("minivllm.bench.workloads.arrivals.Gamma")
@dataclass(frozen=True)
class GammaOptions(RateOptions):
    """arrival=gamma."""

    burstiness: float = knob(0.5, above=0, at_least=LEAST, at_most=MOST)
    """Shape of the distribution, as in vLLM's benchmark: 1 is a Poisson process, below come bursts,
    above gaps are more even; their coefficient of variation is 1 / sqrt(burstiness)."""


@option("minivllm.bench.workloads.arrivals.Ramp")
@dataclass(frozen=True)
class RampOptions(OpenLoopOptions):
    """arrival=ramp."""

    start_rate: float = knob(1.0, above=0, at_least=LEAST, at_most=MOST, infinite=AT_ONCE)
    """Requests per second at the start."""
    end_rate: float = knob(8.0, above=0, at_least=LEAST, at_most=MOST, infinite=AT_ONCE)
    """Requests per second at the end, and from there on."""
    duration_s: float | None = knob(None, above=0)
    """Length of the ramp; null: the expected time of all arrivals."""


@option("minivllm.bench.workloads.arrivals.Replay")
@dataclass(frozen=True)
class ReplayOptions(OpenLoopOptions):
    """arrival=replay."""

    rate_scale: float = knob(1.0, above=0, at_least=LEAST, at_most=MOST, infinite=AT_ONCE)
    """Factor on the arrival rate; 2: twice as fast."""
