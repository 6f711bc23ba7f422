"""CUDA graphs of decoding steps: a step's hundreds of kernels are recorded once and launched
together.

A graph replays the addresses and integers that it was recorded with. So each has its own input
buffer, filled in one copy, and its key holds every integer that was baked in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from minivllm.attention.batch import StepBatch
from minivllm.engine.batch_inputs import INT_BYTES, SamplingColumns, pack, pack_sampling
from minivllm.engine.launcher import Launcher
from minivllm.engine.options import SamplingParams
from minivllm.engine.runner import fill_in
from minivllm.engine.sampler import SampledTokens, SamplerCounters
from minivllm.engine.step import ScheduledRequest
from minivllm.errors import first_line
from minivllm.kernels.transfer import upload

# Runs a function that always reads and writes the same tensors; what it returned, and how to do the
# same again.
Capture = Callable[
    [Callable[[], tuple[Tensor, ...]]], tuple[tuple[Tensor, ...], Callable[[], None]]
]

LEAST_TOKENS = 1024  # of context in the narrowest graphs; the next ones have four times as many
MOST_ROWS = 512  # of a graph, as in vLLM: steps of more keep a GPU busy as they come
MOST_GRAPHS = 512  # in all: each takes seconds and memory
COLUMNS = 8  # integers of a row's sampling parameters


class GraphKey(NamedTuple):
    """What a graph was recorded for. The tiles and splits of attention follow from the first
    two."""

    requests: int  # rows, those of the padding too
    blocks: int  # width of the block table
    kind: str  # what comes out: "greedy" or "drawn" tokens, or "logits" that are sampled outside


@dataclass(frozen=True, slots=True)
class Graph:
    """One recording."""

    ints: Tensor  # int32, its input: the sampling parameters if it draws, then what `pack` makes
    # Logits [requests, vocab]; or tokens int64 [requests], drawn ones and argmaxes.
    outputs: tuple[Tensor, ...]
    replay: Callable[[], None]
    # What was recorded: it holds all other tensors that a replay reads.
    step: Callable[[], tuple[Tensor, ...]]


def why_failed(error: RuntimeError) -> str:
    """One line about a graph that could not be recorded; torch explains at length."""
    return f"recording failed: {first_line(error)}"


class GraphKeeper:
    """Records graphs and chooses among them.

    A step that only decodes takes the smallest graph that it fits; what is missing is padding:
    requests of one token in the reserved block 0.

    Args:
        launcher: whose steps are recorded.
        largest: most requests of a step; those of more than `MOST_ROWS` are not recorded.
        max_model_len: most tokens of a request.
        capture: how to record: `CudaCapture`. It raises RuntimeError where it cannot, torch's for
            memory among them.
        warnings: are told what could not be recorded while requests were served.
    """

    def __init__(
        self,
        launcher: Launcher,
        largest: int,
        max_model_len: int,
        capture: Capture,
        warnings: list[str],
    ) -> None:
        # Not the launcher itself, which holds this: both would outlive the engine until garbage is
        # collected.
        runner = self.runner = launcher.runner
        self.kernels, self.one_by_one = launcher.kernels, launcher.one_by_one
        self.capture, self.warnings = capture, warnings
        largest = min(largest, MOST_ROWS)
        sizes = (1, 2, 4, *range(8, 256, 8), *range(256, MOST_ROWS, 16))
        self.sizes = sorted({size for size in sizes if size < largest} | {largest})
        longest, width = (
            -(-max_model_len // runner.block_size),
            -(-LEAST_TOKENS // runner.block_size),
        )
        self.widths = [longest]
        while width < longest:
            self.widths.insert(-1, width)
            width *= 4
        self.pending = torch.zeros(largest, dtype=torch.int64, device=runner.device)
        self.graphs: dict[GraphKey, Graph] = {}
        self.failed: set[str] = set()  # kinds of which no more are recorded
        self.counters = {"graph_replays": 0, "graph_captures": 0}
        self.capture_s = 0.0
        self._num_drawn = 0  # rows of the step that was filled in
        # of the replayed step, if it ends with them
        self._logits = torch.empty(0, device=runner.device)

    @property
    def num_bytes(self) -> int:
        """Device memory of all graphs."""
        return int(getattr(self.capture, "num_bytes", 0)) + self._logits.nbytes

    def capture_all(self, params: SamplingParams) -> None:
        """Record what requests with these parameters need and what greedy ones do, the largest
        first, so that the others find room in its memory. What else comes up is recorded when it is
        first needed.

        Raises:
            RuntimeError: one cannot be recorded.
        """
        kinds = [self._kind([params], params.beam_width > 1)]
        kinds += ["logits"] if params.min_tokens else []  # until they may end
        for kind in dict.fromkeys([*kinds, "greedy"]):
            for blocks in reversed(self.widths):
                for size in reversed(self.sizes):
                    if len(self.graphs) < MOST_GRAPHS:
                        self._add(GraphKey(size, blocks, kind))

    def choose(
        self, scheduled: Sequence[ScheduledRequest], pending: Tensor | None
    ) -> GraphKey | None:
        """The graph for a step, recorded now if it is missing; None where there can be none: it
        computes prompts, or too many requests, or recording has failed or come to `MOST_GRAPHS`."""
        most = self.sizes[-1]
        if len(scheduled) > most or (pending is not None and len(pending) > most):
            return None
        longest = 0
        for part in scheduled:
            if part.num_tokens != 1 or not part.samples:
                return None
            if part.request.group is not None and part.request.unstarted:
                return None
            longest = max(longest, part.seq_len)
        blocks = -(-longest // self.runner.block_size)
        requests = [part.request for part in scheduled]
        key = GraphKey(
            next(size for size in self.sizes if size >= len(scheduled)),
            next(width for width in self.widths if width >= blocks),
            self._kind(
                [r.params for r in requests], any(r.is_joint or not r.may_stop for r in requests)
            ),
        )
        if (
            key not in self.graphs
            and key.kind not in self.failed
            and len(self.graphs) < MOST_GRAPHS
        ):
            try:
                self._add(key)
            except RuntimeError as error:  # what has been recorded goes on
                self.failed.add(key.kind)
                self.warnings.append(
                    f"no more CUDA graphs of the kind {key.kind}: {why_failed(error)}"
                )
        return key if key in self.graphs else None

    def _kind(self, params: Sequence[SamplingParams], outside: bool) -> str:
        """Of a step with such requests; `outside`: one of them is a beam or may not end yet."""
        if outside or any(p.adjusts_logits or p.logprobs is not None for p in params):
            return "logits"
        if all(p.greedy for p in params):
            return "greedy"
        filtered = any(not p.greedy and p.filters for p in params)
        return "logits" if filtered or self.one_by_one else "drawn"

    @torch.inference_mode()
    def fill(
        self, key: GraphKey, scheduled: Sequence[ScheduledRequest], pending: Tensor | None
    ) -> None:
        """Put a step into the input of its graph.

        Args:
            key: from `choose`.
            scheduled: the step.
            pending: int64 [R], the tokens of the step before, where placeholders stand for them.
        """
        graph = self.graphs[key]
        self._num_drawn = 0
        ints, _ = pack(scheduled, self.runner.block_size, pad_to=(key.requests, key.blocks))
        if key.kind == "drawn":
            requests = [part.request for part in scheduled]
            self._num_drawn = sum(not request.params.greedy for request in requests)
            ints = bytearray(pack_sampling(requests, range(len(requests)), key.requests)) + ints
        upload(ints, self.runner.device, into=graph.ints)
        if pending is not None:
            self.pending[: len(pending)].copy_(pending)

    def replay(
        self, key: GraphKey, count: int, counters: SamplerCounters
    ) -> Tensor | SampledTokens:
        """Compute the step that was filled in: the tokens of its `count` requests, or their logits
        [count, vocab].

        They are overwritten by the next replay.
        """
        graph = self.graphs[key]
        graph.replay()
        self.counters["graph_replays"] += 1
        counters.tokens_drawn += self._num_drawn
        counters.drawn_fused += self._num_drawn * self.kernels.fused
        first, *others = (tensor[:count] for tensor in graph.outputs)
        return (
            first if key.kind == "logits" else SampledTokens(first, others[0] if others else None)
        )

    def _keep(self, logits: Tensor) -> Tensor:
        """Logits [size, vocab] in one place for all graphs, whose pool would keep those of each
        apart: gigabytes."""
        if len(self._logits) < len(logits):  # in the run before a recording
            self._logits = logits.new_empty(self.sizes[-1], logits.shape[1])
        return self._logits[: len(logits)].copy_(logits)

    def _add(self, key: GraphKey) -> None:
        begin = time.perf_counter()
        self.graphs[key] = self._record(key)
        self.counters["graph_captures"] += 1
        self.capture_s += time.perf_counter() - begin

    @torch.inference_mode()
    def _record(self, key: GraphKey) -> Graph:
        device, size = self.runner.device, key.requests
        padding, shape = pack([], self.runner.block_size, pad_to=(size, key.blocks))
        extra = COLUMNS * size if key.kind == "drawn" else 0
        ints = upload(bytearray(INT_BYTES * extra) + padding, device).clone()
        # Attention is laid out for the longest requests that the graph takes; shorter ones leave
        # part of it idle.
        lengths = (key.blocks * self.runner.block_size,) * size
        ones = (1,) * size
        tensors = shape.unpack(ints[extra:])
        first = StepBatch(
            **tensors, query_lens_host=ones, seq_lens_host=lengths, rotated_lens_host=ones
        )
        layout = self.runner.attention.prepare(first)

        def step() -> tuple[Tensor, ...]:
            tensors = shape.unpack(ints[extra:])
            token_ids = fill_in(tensors["token_ids"], self.pending)
            batch = first._replace(**{**tensors, "token_ids": token_ids}, attention=layout)
            logits = self.runner.forward(batch)
            if key.kind == "logits":
                return (self._keep(logits),)
            argmax = self.kernels.argmax(logits)
            if key.kind == "greedy":
                return (argmax,)
            columns = SamplingColumns.unpack(ints[:extra])
            drawn = self.kernels.draw(logits, columns, None)
            return torch.where(columns.temperatures > 0, drawn, argmax), argmax

        outputs, replay = self.capture(step)
        return Graph(ints, outputs, replay, step)
