"""The knobs of `workload` and `arrival`: which requests, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from minivllm.platform.options import Options, knob, option

# A number of tokens, or a distribution of it, which the workload checks
# (minivllm/bench/workloads/lengths.py).
Length = int | dict[str, Any]


def _uniform(low: int, high: int) -> dict[str, Any]:
    return {"distribution": "uniform", "min": low, "max": high}


def _lognormal(mean: int, std: int, low: int, high: int) -> dict[str, Any]:
    return {"distribution": "lognormal", "mean": mean, "std": std, "min": low, "max": high}


def _length(default: int | dict[str, Any]) -> Any:
    return knob(factory=lambda: dict(default) if isinstance(default, dict) else default, at_least=1)


@dataclass(frozen=True)
class SyntheticOptions(Options):
    """What every workload of requests with drawn lengths has.

    Args:
        num_requests: how many.
        input_len: prompt tokens; a number, or a distribution (see `Lengths`).
        output_len: output tokens; the same.
        ignore_eos: go on to the full output length past an end-of-sequence token.
    """

    group = "workload"
    num_requests: int = knob(32, at_least=1)
    input_len: Length = _length(64)
    output_len: Length = _length(32)
    ignore_eos: bool = True


@option("minivllm.bench.workloads.synthetic.Smoke")
@dataclass(frozen=True)
class SmokeOptions(SyntheticOptions):
    """workload=smoke."""

    num_requests: int = knob(16, at_least=1)


@option("minivllm.bench.workloads.synthetic.Chat")
@dataclass(frozen=True)
class ChatWorkloadOptions(SyntheticOptions):
    """workload=chat."""

    input_len: Length = _length(_uniform(64, 256))
    output_len: Length = _length(_uniform(32, 128))


@option("minivllm.bench.workloads.synthetic.LongDocument")
@dataclass(frozen=True)
class LongDocumentOptions(SyntheticOptions):
    """workload=long_document."""

    num_requests: int = knob(16, at_least=1)
    input_len: Length = _length(_uniform(8192, 32768))
    output_len: Length = _length(_uniform(64, 256))


@option("minivllm.bench.workloads.synthetic.Summarize")
@dataclass(frozen=True)
class SummarizeOptions(SyntheticOptions):
    """workload=summarize."""

    input_len: Length = _length(_lognormal(1024, 384, 256, 1792))
    output_len: Length = _length(_lognormal(96, 32, 32, 192))


@option("minivllm.bench.workloads.synthetic.Code")
@dataclass(frozen=True)
class CodeOptions(SyntheticOptions):
    """workload=code."""

    input_len: Length = _length(_lognormal(1152, 384, 128, 1792))
    output_len: Length = _length(_lognormal(24, 32, 1, 192))


@option("minivllm.bench.workloads.shared_prefix.SharedPrefix")
@dataclass(frozen=True)
class SharedPrefixOptions(SyntheticOptions):
    """workload=shared_prefix.

    Args:
        num_requests, output_len, ignore_eos: see `SyntheticOptions`.
        input_len: tokens of a request's own, after the prefix; a number, or a distribution (see
            `Lengths`).
        num_prefixes: trees, and so different first tokens.
        prefix_len: tokens of a node; a number, or a distribution.
        depth: nodes on a way from root to leaf; 1 is the root alone.
        branching: children of a node.
    """

    num_prefixes: int = knob(2, at_least=1)
    prefix_len: Length = _length(256)
    depth: int = knob(2, at_least=1)
    branching: int = knob(4, at_least=1)


@option("minivllm.bench.workloads.images.Images")
@dataclass(frozen=True)
class ImagesOptions(SyntheticOptions):
    """workload=images.

    Args:
        num_requests, output_len, ignore_eos: see `SyntheticOptions`.
        input_len: tokens of text, after the images; a number, or a distribution (see `Lengths`).
        images: pictures of a request; the same.
        width, height: pixels of a picture; the same.
        reuse: chance that a picture is one that came before.
    """

    num_requests: int = knob(16, at_least=1)
    input_len: Length = _length(32)
    images: Length = _length(1)
    width: Length = _length(_uniform(256, 768))
    height: Length = _length(_uniform(256, 768))
    reuse: float = knob(0.0, at_least=0, at_most=1)


@option("minivllm.bench.workloads.multi_turn.MultiTurn")
@dataclass(frozen=True)
class MultiTurnOptions(Options):
    """workload=multi_turn.

    Args:
        num_conversations: how many.
        turns: of a conversation; a number, or a distribution (see `Lengths`).
        input_len: tokens that the user adds in a turn; the same.
        output_len: tokens of an answer; the same.
        think_s: mean seconds from the end of an answer to the next turn.
        think: fixed, or exponential: how these times are distributed.
        ignore_eos: go on to the full output length past an end-of-sequence token.
    """

    group = "workload"
    num_conversations: int = knob(8, at_least=1)
    turns: Length = _length(4)
    input_len: Length = _length(_uniform(16, 64))
    output_len: Length = _length(_uniform(32, 96))
    think_s: float = knob(0.5, at_least=0)
    think: Literal["fixed", "exponential"] = "exponential"
    ignore_eos: bool = True


@dataclass(frozen=True)
class FromFileOptions(Options):
    """What every workload that is read from a file has.

    Args:
        path: the file.
        num_requests: take only the first so many; None takes all.
        too_long: what to do with a request that the context cannot hold: error, or skip.
    """

    group = "workload"
    path: str | None = None
    num_requests: int | None = knob(None, at_least=1)
    too_long: Literal["error", "skip"] = "error"


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
    """workload=file.

    Args:
        format: jsonl, sharegpt, csv, parquet, dataset or auto (see `read_prompt_file`).
        split: of a saved dataset that has several.
        columns: the file's own names of its columns, by the names known here: prompt,
            prompt_token_ids, messages, conversations, input_len, output_len.
        output_len: tokens to generate where a line does not say.
        ignore_eos: go on to the full output length past an end-of-sequence token.
        line_sampling: sample each request as its line says, where it says anything.
        oversample: begin the file again where it has fewer than `num_requests`.
    """

    format: Literal["auto", "jsonl", "sharegpt", "csv", "parquet", "dataset"] = "auto"
    split: str | None = knob(None, unasked=True)
    columns: dict[str, Any] | None = knob(None, unasked=True)
    output_len: int = knob(128, at_least=1)
    ignore_eos: bool = False
    line_sampling: bool = knob(True, unasked=True)
    oversample: bool = knob(False, unasked=True)

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
    """workload=trace.

    Args:
        num_requests: the first so many of the slice; None takes all.
        format: azure, mooncake, burstgpt, bailian, columns or auto (see `read_trace`).
        columns: of the format columns, the file's own names of timestamp, input_len, output_len and
            hash_ids; None goes by their usual names.
        time_unit: of its times; None takes dates alone.
        length_scale: factor on the lengths of prompts and answers, and so of shared blocks.
        start_s: where the slice of the trace begins, seconds after its first request.
        duration_s: length of the slice; None goes on to the end.
        block_tokens: prompt tokens that one hash id stands for; None is what the format has.
        copies: of the slice at the same time, each of users of its own: they share no prefix with
            another copy, and their times are shifted, around the end of the slice.
        ignore_eos: generate exactly the trace's lengths.
    """

    format: Literal["auto", "azure", "mooncake", "burstgpt", "bailian", "columns"] = "auto"
    columns: dict[str, Any] | None = knob(None, unasked=True)
    time_unit: Literal["s", "ms", "us", "ns"] | None = knob(None, unasked=True)
    length_scale: float = knob(1.0, above=0)
    start_s: float = knob(0.0, at_least=0)
    duration_s: float | None = knob(None, above=0)
    block_tokens: int | None = knob(None, at_least=1, null_means=512)
    copies: int = knob(1, at_least=1, at_most=4096, unasked=True)
    ignore_eos: bool = True

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
    """arrival=concurrency.

    Args:
        concurrency: requests in flight.
    """

    group = "arrival"
    concurrency: int = knob(8, at_least=1)


@dataclass(frozen=True, kw_only=True)
class OpenLoopOptions(Options):
    """What every open loop has.

    Args:
        max_concurrency: most requests, or conversations, in flight; those that are due wait in the
            client, which counts as latency. None is no limit.
    """

    group = "arrival"
    max_concurrency: int | None = knob(None, at_least=1, unasked=True)


@option("minivllm.bench.workloads.arrivals.Constant", "minivllm.bench.workloads.arrivals.Poisson")
@dataclass(frozen=True)
class RateOptions(OpenLoopOptions):
    """arrival=constant and arrival=poisson.

    Args:
        rate: mean arrivals per second.
        max_concurrency: see `OpenLoopOptions`.
    """

    rate: float = knob(2.0, above=0, at_least=LEAST, at_most=MOST, infinite=AT_ONCE)


@option("minivllm.bench.workloads.arrivals.Gamma")
@dataclass(frozen=True)
class GammaOptions(RateOptions):
    """arrival=gamma.

    Args:
        rate: mean arrivals per second.
        max_concurrency: see `OpenLoopOptions`.
        burstiness: shape of the distribution, as in vLLM's benchmark: 1 is a Poisson process, less
            comes in bursts, more is more even. The gaps' coefficient of variation is 1 /
            sqrt(burstiness).
    """

    burstiness: float = knob(0.5, above=0, at_least=LEAST, at_most=MOST)


@option("minivllm.bench.workloads.arrivals.Ramp")
@dataclass(frozen=True)
class RampOptions(OpenLoopOptions):
    """arrival=ramp.

    Args:
        start_rate: arrivals per second at the start.
        end_rate: the same at the end, and from there on.
        duration_s: how long the ramp takes; None is as long as the requests are expected to last.
        max_concurrency: see `OpenLoopOptions`.
    """

    start_rate: float = knob(1.0, above=0, at_least=LEAST, at_most=MOST, infinite=AT_ONCE)
    end_rate: float = knob(8.0, above=0, at_least=LEAST, at_most=MOST, infinite=AT_ONCE)
    duration_s: float | None = knob(None, above=0)


@option("minivllm.bench.workloads.arrivals.Replay")
@dataclass(frozen=True)
class ReplayOptions(OpenLoopOptions):
    """arrival=replay.

    Args:
        rate_scale: how many times faster than they came.
        max_concurrency: see `OpenLoopOptions`.
    """

    rate_scale: float = knob(1.0, above=0, at_least=LEAST, at_most=MOST, infinite=AT_ONCE)
