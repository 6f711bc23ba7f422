"""workload=trace: the lengths, times and shared prefixes of production traffic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minivllm.bench.lazy_prompt import LazyPrompt, joined
from minivllm.bench.prompts import Encode
from minivllm.bench.trace_file import TraceRow, read_trace
from minivllm.bench.workloads import Decode, Workload, WorkloadRequest, at_least_one, refuse_length
from minivllm.errors import BadInput

UNSHARED = 1 << 62  # where the text of prompts begins that share nothing
STRETCH = 1 << 32  # of it that each line of the trace has for itself
LENGTH_ADVICE = "lower workload.length_scale, or raise model.max_model_len"


class Trace:
    """Requests as long, and with `arrival=replay` as late, as those of a trace.

    Prompts are random token ids: equal where the trace's hash ids are equal, different everywhere else.
    They are computed when looked at (`LazyPrompt`), and have no text.

    Args:
        path: the trace's file.
        format: azure, mooncake, burstgpt or auto (see `read_trace`).
        num_requests: the first so many of the slice; None takes all.
        length_scale: factor on the lengths of prompts and answers, and so of shared blocks.
        start_s: where the slice of the trace begins, seconds after its first request.
        duration_s: length of the slice; None goes on to the end.
        block_tokens: prompt tokens that one hash id stands for.
        ignore_eos: generate exactly the trace's lengths.

    Raises:
        BadInput: a knob has no sensible value.
    """

    name = "trace"
    timed = True  # its requests say when they are due

    def __init__(
        self,
        path: str | None = None,
        format: str = "auto",
        num_requests: int | None = None,
        length_scale: float = 1.0,
        start_s: float = 0.0,
        duration_s: float | None = None,
        block_tokens: int = 512,
        ignore_eos: bool = True,
    ) -> None:
        if not path:
            raise BadInput("workload=trace needs a trace: set workload.path=TRACE.csv (see docs/traces.md)")
        self.path, self.format, self.ignore_eos = Path(path).expanduser(), format, ignore_eos
        self.num_requests = (
            None if num_requests is None else at_least_one("workload.num_requests", num_requests)
        )
        self.block_tokens = at_least_one("workload.block_tokens", block_tokens)
        self.length_scale, self.start_s = _number("length_scale", length_scale), start_s
        self.duration_s = None if duration_s is None else _number("duration_s", duration_s)

    def longest(self) -> int | None:
        """Most tokens of prompt and answer together.

        Raises:
            BadInput: the trace is missing or a line is wrong.
        """
        return max(sum(self._lengths(row)) for row in self._rows())

    def check_lengths(self, max_model_len: int) -> None:
        """Read the trace and fail early, before any engine is built, on a request that cannot be served.

        Raises:
            BadInput: the trace is missing, a line is wrong, or a request is longer than the context.
        """
        for row in self._rows():
            prompt_len, output_len = self._lengths(row)
            if prompt_len + output_len > max_model_len:
                where = f"{self.path}:{row.line}"
                refuse_length(where, "the request", prompt_len, output_len, max_model_len, LENGTH_ADVICE)

    def generate(
        self,
        encode: Encode | None,
        vocab_size: int,
        max_model_len: int,
        seed: int,
        decode: Decode | None = None,
    ) -> Workload:
        """The slice's requests, in order of time; arguments as for `Synthetic.generate`.

        Raises:
            BadInput: as `check_lengths`; or a line's hash ids do not cover its prompt.
        """
        self.check_lengths(max_model_len)
        requests = []
        for i, row in enumerate(self._rows()):
            prompt_len, output_len = self._lengths(row)
            prompt = LazyPrompt(joined(list(self._runs(row, prompt_len))), vocab_size, seed)
            due_s = row.time_s - self.start_s
            requests.append(WorkloadRequest(f"r{i}", prompt, output_len, self.ignore_eos, None, due_s))
        return Workload(tuple(requests))

    def _rows(self) -> list[TraceRow]:
        """The slice."""
        end = math.inf if self.duration_s is None else self.start_s + self.duration_s
        rows = [row for row in read_trace(self.path, self.format) if self.start_s <= row.time_s < end]
        if not rows:
            raise BadInput(
                f"workload.path={self.path} has no request from workload.start_s={self.start_s:g} on"
                + ("" if self.duration_s is None else f" within workload.duration_s={self.duration_s:g}")
            )
        return rows[: self.num_requests]

    def _lengths(self, row: TraceRow) -> tuple[int, int]:
        scale = self.length_scale
        return max(1, round(row.input_tokens * scale)), max(1, round(row.output_tokens * scale))

    def _runs(self, row: TraceRow, prompt_len: int) -> Iterator[range]:
        """The prompt's stretches of text: one a block of the trace, or one of its own."""
        if not row.hash_ids:
            start = UNSHARED + row.line * STRETCH
            yield range(start, start + prompt_len)
            return
        blocks = -(-row.input_tokens // self.block_tokens)
        if len(row.hash_ids) != blocks:
            raise BadInput(
                f"{self.path}:{row.line}: {row.input_tokens} prompt tokens are {blocks} blocks of "
                f"workload.block_tokens={self.block_tokens}, and the line has {len(row.hash_ids)} hash ids"
            )
        scaled = self.block_tokens * self.length_scale
        spacing = self.block_tokens if self.length_scale <= 1 else math.ceil(scaled) + 1
        for k, block in enumerate(row.hash_ids):
            start, end = round(k * scaled), min(round((k + 1) * scaled), prompt_len)
            if k == blocks - 1:
                end = prompt_len  # rounding may have left a token over
            yield range(block * spacing, block * spacing + end - start)


def _number(knob: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise BadInput(f"workload.{knob}={value!r} must be a finite number above 0")
    return float(value)
