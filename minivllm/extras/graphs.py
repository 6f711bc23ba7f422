"""CUDA graphs of decoding steps: a step's hundreds of kernels are recorded once and launched
together.

A graph replays the addresses and integers that it was recorded with. So each has its own input
buffer, filled in one copy, and its key holds every integer that was baked in. Where requests begin
and how many tokens they have are no such integers: attention reads them from the buffer, and its
tiles have room for `queries` tokens of each request. So drafts of all lengths lie side by side, as
in a step without a graph, and what is missing is at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minivllm.attention.base import StepBatch
from minivllm.engine.batch_inputs import Draw, PackedStep, SamplingColumns, StepShape
from minivllm.engine.executor import ModelRunner, StepResult, fill_in
from minivllm.engine.options import SamplingParams
from minivllm.errors import first_line
from minivllm.kernels.transfer import upload

# Runs a function that always reads and writes the same tensors; what it returned, and how to do the
# same again.
Capture = Callable[
    [Callable[[], tuple[Tensor, ...]]], tuple[tuple[Tensor, ...], Callable[[], None]]
]

LEAST_TOKENS = 1024  # of context in the narrowest graphs; the next ones have four times as many
MOST_ROWS = 512  # tokens of a graph, as in vLLM: steps of more keep a GPU busy as they come
MOST_GRAPHS = 512  # of a model: each takes seconds and memory
COLUMNS = 8  # integers of a row's sampling parameters


class GraphKey(NamedTuple):
    """What a graph was recorded for. The tiles and splits of attention follow from all but the
    kind."""

    requests: int  # those of the padding too
    blocks: int  # width of the block table
    kind: str  # what comes out: "greedy" or "drawn" tokens, or "logits" that are sampled outside
    queries: int = 1  # most tokens of a request

    @property
    def rows(self) -> int:
        """Tokens, those of the padding too."""
        return self.requests * self.queries

    @property
    def columns(self) -> int:
        """Integers of sampling parameters in the graph's input."""
        return COLUMNS * self.rows if self.kind == "drawn" else 0


@dataclass(frozen=True, slots=True)
class Graph:
    """One recording."""

    padding: NDArray[np.int32]  # see `padding`
    ints: Tensor  # int32, its input: the sampling parameters if it draws, then what `pack` makes
    # Logits [rows, vocab]; or tokens int64 [rows], drawn ones and argmaxes.
    outputs: tuple[Tensor, ...]
    replay: Callable[[], None]
    # What was recorded: it holds all other tensors that a replay reads.
    step: Callable[[], tuple[Tensor, ...]]


def why_failed(error: RuntimeError) -> str:
    """One line about a graph that could not be recorded; torch explains at length."""
    return f"recording failed: {first_line(error)}"


def padding(requests: int, rows: int, num_columns: int) -> NDArray[np.int32]:
    """The input of a graph without requests, int32 [n], up to the block table, which is 0:
    `num_columns` integers of sampling parameters, all greedy, then a step of `rows` tokens in the
    reserved block 0, as `pack` lays it out. Each of `requests` has one of them, the others belong
    to none."""
    indices = np.zeros((4, rows), np.int64)  # token ids, positions, slots, rows of the logits
    indices[3] = np.arange(rows)
    starts, lens = np.arange(requests + 1, dtype=np.int32), np.ones(requests, np.int32)
    columns = np.zeros(num_columns, np.int32)
    return np.concatenate((columns, indices.view(np.int32).ravel(), starts, lens))


def put_step(packed: PackedStep, ints: NDArray[np.int32], requests: int, rows: int) -> None:
    """Write a step with logits of all its tokens into padding of so many requests and rows, without
    columns. The requests of the padding follow its own."""
    count, tokens = len(packed.query_lens), packed.shape.tokens
    own = np.frombuffer(packed.ints, np.int32)
    for column in range(3):  # token ids, positions, slots: int64
        start, wide = 2 * column * rows, 2 * tokens
        ints[start : start + wide] = own[column * wide : (column + 1) * wide]
    own, ints = own[8 * tokens :], ints[8 * rows :]
    ints[: count + 1] = own[: count + 1]  # where requests begin
    ints[count + 1 : requests + 1] += tokens - count
    ints[requests + 1 : requests + 1 + count] = own[count + 1 : 2 * count + 1]
    own_table = own[2 * count + 1 :].reshape(count, packed.shape.blocks)
    table = ints[2 * requests + 1 :].reshape(requests, -1)
    width = min(packed.shape.blocks, table.shape[1])
    table[:count, :width] = own_table[:, :width]


def put_draw(draw: Draw, columns: NDArray[np.int32], rows: int) -> None:
    """Write the columns of a draw into those of so many rows, int32 [8 rows], all greedy."""
    count, own = draw.num_rows, np.frombuffer(draw.columns, np.int32)
    own_columns = own[2 * count :].reshape(6, count)
    drawn = own_columns[0]
    columns[: 2 * rows].view(np.int64)[drawn] = own[: 2 * count].view(np.int64)
    columns[2 * rows :].reshape(6, rows)[:, drawn] = own_columns


def batch_sizes(largest: int) -> list[int]:
    """Requests of the graphs for steps of up to `largest`."""
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, MOST_ROWS, 16))
    return [*(size for size in sizes if size < largest), largest]


class GraphExecutor:
    """The executor that replays graphs; steps that fit none go on to the runner.

    A step that only decodes, or verifies drafts as well, takes the smallest graph that it fits;
    what is missing is padding: requests of one token in the reserved block 0, and tokens of none.

    Args:
        runner: its steps are recorded, and it computes the others.
        one_by_one: whether each request is sampled by itself.
        block_size: tokens a cache block.
        largest: most requests of a step; those of more than `MOST_ROWS` tokens are not recorded.
        max_model_len: most tokens of a request.
        capture: how to record: `CudaCapture`. It raises RuntimeError where it cannot, torch's for
            memory among them.
        warnings: gets a line for what could not be recorded while requests were served.
        queries: most tokens of a request in a step: one, and its drafts. Steps have one of each, or
            are recorded with room for so many of each.

    Attributes:
        others: of drafting models, see `beside`.
    """

    def __init__(
        self,
        runner: ModelRunner,
        one_by_one: bool,
        block_size: int,
        largest: int,
        max_model_len: int,
        capture: Capture,
        warnings: list[str],
        queries: int = 1,
    ) -> None:
        self.runner, self.one_by_one, self.block_size = runner, one_by_one, block_size
        self.capture, self.warnings = capture, warnings
        self.largest, self.max_model_len = largest, max_model_len
        # Requests of the graphs, by the most tokens of each request.
        self.sizes = {
            width: batch_sizes(min(largest, MOST_ROWS // width))
            for width in sorted({1, queries})
            if width <= MOST_ROWS
        }
        longest, width = -(-max_model_len // block_size), -(-LEAST_TOKENS // block_size)
        self.widths = [longest]
        while width < longest:
            self.widths.insert(-1, width)
            width *= 4
        self.most_rows = max(width * sizes[-1] for width, sizes in self.sizes.items())
        self.pending = torch.zeros(self.most_rows, dtype=torch.int64, device=runner.device)
        self.graphs: dict[GraphKey, Graph] = {}
        self.failed: set[str] = set()  # kinds of which no more are recorded
        self.counters = {"graph_replays": 0, "graph_captures": 0}
        self.own_capture_s = 0.0
        self.others: list[GraphExecutor] = []
        # of the replayed step, if it ends with them
        self._logits = torch.empty(0, device=runner.device)

    @property
    def num_bytes(self) -> int:
        """Device memory of all graphs, those beside these too."""
        logits = sum(one._logits.nbytes for one in (self, *self.others))
        return int(getattr(self.capture, "num_bytes", 0)) + logits

    @property
    def capture_s(self) -> float:
        """Seconds of recording, of those beside these too."""
        return self.own_capture_s + sum(one.own_capture_s for one in self.others)

    def beside(self, runner: ModelRunner, queries: int) -> GraphExecutor:
        """An executor for the steps of a drafting model over the same requests. Its graphs take
        their memory from the same pool, and it counts in these counters. It is not among `others`
        yet."""
        other = GraphExecutor(
            runner,
            self.one_by_one,
            self.block_size,
            self.largest,
            self.max_model_len,
            self.capture,
            self.warnings,
            queries,
        )
        other.counters = self.counters
        return other

    def run(self, packed: PackedStep) -> StepResult:
        """Results of a replay are overwritten by the next one."""
        key = self.choose(packed)
        if key is None:
            return self.runner.run(packed)
        graph = self.graphs[key]
        self.fill(key, packed)
        prepared_s = self.runner.mark("forward")
        graph.replay()
        self.counters["graph_replays"] += 1
        first, *others = (tensor[: packed.shape.tokens] for tensor in graph.outputs)
        if key.kind == "logits":
            return self.runner.sample(packed, first, prepared_s)
        self.runner.tokens = first
        return StepResult(prepared_s, self.runner.mark("sample"), first, *others)

    def capture_all(
        self, params: SamplingParams, kinds_of: Mapping[int, Sequence[str]] = MappingProxyType({})
    ) -> None:
        """Record what requests with these parameters need and what greedy ones do, the largest
        first, so that the others find room in its memory. What else comes up is recorded when it is
        first needed.

        Args:
            params: of the requests that are expected.
            kinds_of: for keys of `sizes`, the kinds that are needed whatever the parameters.

        Raises:
            RuntimeError: one cannot be recorded.
        """
        outside = params.beam_width > 1 or params.adjusts_logits or params.logprobs is not None
        outside |= not params.greedy and (params.filters or self.one_by_one)
        kinds = ["logits" if outside else "greedy" if params.greedy else "drawn"]
        kinds += ["logits", "greedy"] if params.min_tokens else ["greedy"]  # until they may end
        shapes = [(queries, size) for queries, sizes in self.sizes.items() for size in sizes]
        shapes.sort(key=lambda shape: -shape[0] * shape[1])
        for kind in dict.fromkeys([*kinds, "logits"]):
            for blocks in reversed(self.widths):
                for queries, size in shapes:
                    wanted = kind in kinds_of.get(queries, kinds)
                    if wanted and len(self.graphs) < MOST_GRAPHS:
                        self._add(GraphKey(size, blocks, kind, queries))

    def choose(self, packed: PackedStep) -> GraphKey | None:
        """The graph for a step, recorded now if it is missing; None where there can be none: it
        computes prompts, or too many requests, or recording has failed or come to `MOST_GRAPHS`."""
        count, shape = len(packed.query_lens), packed.shape
        longest = max(packed.query_lens)
        queries = next((width for width in self.sizes if width >= longest), None)
        if queries is None or shape.tokens != shape.logit_rows or count > self.sizes[queries][-1]:
            return None
        if packed.has_placeholders and len(self.runner.tokens) > len(self.pending):
            return None
        blocks = -(-max(shape.seq_lens) // self.block_size)
        key = GraphKey(
            next(size for size in self.sizes[queries] if size >= count),
            next(width for width in self.widths if width >= blocks),
            self._kind(packed),
            queries,
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

    def _kind(self, packed: PackedStep) -> str:
        sampling = packed.sampling
        if packed.needs_logits or sampling is None or sampling.rows is not None:
            return "logits"
        if sampling.is_greedy:
            return "greedy"
        filtered = any(draw.top_k_bound is not None for draw in sampling.draws)
        outside = filtered or self.one_by_one or sampling.adjustment is not None
        return "logits" if outside else "drawn"

    @torch.inference_mode()
    def fill(self, key: GraphKey, packed: PackedStep) -> None:
        """Put a step into the input of its graph."""
        graph = self.graphs[key]
        ints = np.zeros(len(graph.ints), np.int32)
        ints[: len(graph.padding)] = graph.padding
        put_step(packed, ints[key.columns :], key.requests, key.rows)
        if key.kind == "drawn" and packed.sampling is not None:
            put_draw(packed.sampling.draws[0], ints[: key.columns], key.rows)
        upload(ints, self.runner.device, into=graph.ints)
        if packed.has_placeholders:
            tokens = self.runner.tokens
            self.pending[: len(tokens)].copy_(tokens)

    def _keep(self, logits: Tensor) -> Tensor:
        """Logits [rows, vocab] in one place for all graphs, whose pool would keep those of each
        apart: gigabytes."""
        if len(self._logits) < len(logits):  # in the run before a recording
            self._logits = logits.new_empty(self.most_rows, logits.shape[1])
        return self._logits[: len(logits)].copy_(logits)

    def _add(self, key: GraphKey) -> None:
        begin = time.perf_counter()
        self.graphs[key] = self._record(key)
        self.counters["graph_captures"] += 1
        self.own_capture_s += time.perf_counter() - begin

    @torch.inference_mode()
    def _record(self, key: GraphKey) -> Graph:
        runner, requests = self.runner, key.requests
        extra, prefix = key.columns, padding(requests, key.rows, key.columns)
        table = np.zeros(requests * key.blocks, np.int32)
        ints = upload(np.concatenate((prefix, table)), runner.device).clone()
        # Attention is laid out for the longest requests that the graph takes, with the most tokens
        # in a step; shorter ones leave part of it idle.
        lengths, queries = (key.blocks * self.block_size,) * requests, (key.queries,) * requests
        shape = StepShape(key.rows, lengths, key.blocks, key.rows)
        first = StepBatch(
            **shape.unpack(ints[extra:]),
            query_lens_host=queries,
            seq_lens_host=lengths,
            rotated_lens_host=lengths,
        )
        layout = runner.attention.prepare(first)

        def step() -> tuple[Tensor, ...]:
            tensors = shape.unpack(ints[extra:])
            token_ids = fill_in(tensors["token_ids"], self.pending)
            batch = first._replace(**{**tensors, "token_ids": token_ids}, attention=layout)
            logits = runner.forward(batch)
            if key.kind == "logits":
                return (self._keep(logits),)
            argmax = runner.ops.argmax(logits)
            if key.kind == "greedy":
                return (argmax,)
            columns = SamplingColumns.unpack(ints[:extra])
            drawn = runner.ops.draw(logits, columns)
            return torch.where(columns.temperatures > 0, drawn, argmax), argmax

        outputs, replay = self.capture(step)
        return Graph(prefix, ints, outputs, replay, step)
