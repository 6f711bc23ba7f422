"""What one step sends to a device, as a value, and the tensors that the device cuts from it.

All integers of a step are one int32 buffer (as in transformers' continuous batching), and what
draws need is a second one: one copy each, and nothing waits.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from minivllm.engine.request import Request
from minivllm.engine.step import ScheduledRequest
from minivllm.kernels.transfer import upload

INT_BYTES = 4  # of an int32
MOST_INT = 2**31 - 1
# Block tables grow by this many tokens, so that decoding steps rarely need new tensors.
ROOM = 128


class StepShape(NamedTuple):
    """The sizes of the tensors of a StepBatch."""

    tokens: int
    seq_lens: tuple[int, ...]  # of each request, padding included
    blocks: int  # width of the block table
    logit_rows: int

    @property
    def cut(self) -> tuple[int, int, int, int]:
        """The length of each tensor; steps of the same cut differ in values only."""
        return self.tokens, len(self.seq_lens), self.blocks, self.logit_rows

    def unpack(self, ints: Tensor) -> dict[str, Any]:
        """The tensors of a StepBatch, by name, from what `pack` made: int32 [n], on any device. All
        are views."""
        tokens, requests, blocks, rows = self.cut
        indices, starts, seq_lens, table = ints.split(
            (2 * (3 * tokens + rows), requests + 1, requests, requests * blocks)
        )
        token_ids, positions, slots, logit_rows = indices.view(torch.int64).split(
            (tokens, tokens, tokens, rows)
        )
        return {
            "token_ids": token_ids,
            "positions": positions,
            "slot_mapping": slots,
            "logit_rows": logit_rows,
            "query_start_loc": starts,
            "seq_lens": seq_lens,
            "block_table": table.view(requests, blocks),
        }


class LogitsAdjustment(Protocol):
    """What changes logits before tokens are chosen from them: biases, penalties, masks."""

    @property
    def num_rows(self) -> int:
        """Rows that it is counted for."""

    def apply(self, logits: Tensor) -> None:
        """Change float32 logits [S, vocab] in place."""


class Draw(NamedTuple):
    """Rows that are drawn in one call."""

    columns: bytes  # see `pack_columns`
    # The largest top-k, which bounds the tokens to sort; sys.maxsize where a filter has no top-k,
    # None where no row has a filter.
    top_k_bound: int | None

    @property
    def num_rows(self) -> int:
        """How many rows draw."""
        return len(self.columns) // (8 * INT_BYTES)


class Sampling(NamedTuple):
    """How S tokens are chosen from the logits of a step."""

    rows: tuple[int, ...] | None = None  # of the logits, one per token; None: all, in order
    draws: tuple[Draw, ...] = ()  # all other rows are greedy
    adjustment: LogitsAdjustment | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the model's own argmax."""
        return not self.draws and self.adjustment is None


class PackedStep(NamedTuple):
    """What one step sends to a device: an executor needs nothing else."""

    ints: bytes  # int32, as memory holds them
    shape: StepShape
    query_lens: tuple[int, ...]  # tokens of each request in this step
    rotated_lens: tuple[int, ...]  # the length of each request that some rotary scalings go by
    sampling: Sampling | None = None  # None: no token is chosen
    # Whether placeholders among the token ids stand for tokens of the step before.
    has_placeholders: bool = False
    needs_logits: bool = True  # the logits are read, not only the tokens
    inputs: Any = None  # see StepBatch


def pack(
    scheduled: Sequence[ScheduledRequest], block_size: int, all_logits: bool = False
) -> PackedStep:
    """The integers of one step and how to cut them.

    Those that index are int64, as `index_copy_` and the C++ kernels insist, and come first; the
    others are int32. They go through `array`, which is faster than numpy for so few numbers.

    Args:
        scheduled: each request's share, its cache blocks already given.
        block_size: tokens a cache block.
        all_logits: logits of every token, not only of each request's last known one and of its
            drafts.
    """
    size = block_size
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    logit_rows: list[int] = []
    seq_lens = [part.seq_len for part in scheduled]
    width = -(-(-(-max(seq_lens) // ROOM) * ROOM) // size)
    tables: list[array[int] | bytes] = []
    for row, part in enumerate(scheduled):
        request = part.request
        blocks = request.cache.block_table.blocks
        shift = 0 if request.inputs is None else request.inputs.shift
        if part.num_tokens == 1:  # decoding, the most frequent case
            position = part.start
            token_ids.append(request.token_ids[position])
            positions.append(position + shift)
            index = seq_lens[row] - 1
            slots.append(blocks[index // size] * size + index % size)
        else:
            token_ids.extend(request.token_ids[part.start : part.end])
            positions.extend(range(part.start + shift, part.end + shift))
            held = range(seq_lens[row] - part.num_tokens, seq_lens[row])
            slots.extend([blocks[index // size] * size + index % size for index in held])
        if all_logits or request.params.prompt_logprobs is not None:
            logit_rows.extend(range(starts[-1], len(token_ids)))
        elif part.samples:
            logit_rows.append(len(token_ids) - 1 - part.num_drafts)
            if part.num_drafts:
                logit_rows.extend(range(len(token_ids) - part.num_drafts, len(token_ids)))
        starts.append(len(token_ids))
        own = blocks[:width]
        tables.append(array("i", own))
        if len(own) < width:
            tables.append(bytes(INT_BYTES * (width - len(own))))
    indices = array("q", token_ids + positions + slots + logit_rows)
    return PackedStep(
        b"".join([indices, array("i", starts + seq_lens), *tables]),
        StepShape(len(token_ids), tuple(seq_lens), width, len(logit_rows)),
        tuple([part.num_tokens for part in scheduled]),
        tuple([part.request.num_rotated_tokens for part in scheduled]),
    )


class StepInputs:
    """The tensors of one step after another on `device`.

    Steps of the same cut, as while the same requests decode, write into the same tensors: making
    new ones takes longer than the rest of the preparation.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._on_host = device, device.type == "cpu"
        self._cut: tuple[int, int, int, int] | None = None
        self._ints = torch.empty(0, dtype=torch.int32)
        self._tensors: dict[str, Any] = {}

    def put(self, ints: bytes, shape: StepShape) -> dict[str, Any]:
        """The tensors of a StepBatch, by name. Those of the previous step are overwritten."""
        if shape.cut != self._cut:
            host = bytearray(ints)  # the memory of the tensors on a CPU
            self._host, self._ints = memoryview(host), upload(host, self.device)
            self._cut, self._tensors = shape.cut, shape.unpack(self._ints)
        elif self._on_host:
            self._host[:] = ints
        else:
            with torch.inference_mode():  # the tensors may have been made in it
                upload(bytearray(ints), self.device, into=self._ints)
        return self._tensors


class SamplingColumns(NamedTuple):
    """The sampling parameters of R requests, on the device."""

    seeds: Tensor  # int64 [R]
    rows: Tensor  # int32 [R], of the logits
    positions: Tensor  # int32 [R]
    top_k: Tensor  # int32 [R], 0 for all tokens
    temperatures: Tensor  # float32 [R]
    top_p: Tensor  # float32 [R]
    min_p: Tensor  # float32 [R]

    @classmethod
    def upload(cls, columns: bytes, device: torch.device) -> SamplingColumns:
        """What `pack_columns` made, on a device."""
        return cls.unpack(upload(bytearray(columns), device))

    @classmethod
    def unpack(cls, ints: Tensor) -> SamplingColumns:
        """Views of what `pack_columns` made: int32 [8 R]."""
        count = len(ints) // 8
        seeds, counts, reals = ints.split((2 * count, 3 * count, 3 * count))
        return cls(
            seeds.view(torch.int64), *counts.split(count), *reals.view(torch.float32).split(count)
        )


def pack_columns(
    requests: Sequence[Request], rows: Sequence[int], positions: Sequence[int]
) -> bytes:
    """The columns of R requests that draw, the bits of every number as int32 [8 R].

    Args:
        requests: those that draw.
        rows: of the logits, one for each.
        positions: of the tokens that are drawn, one for each.
    """
    params = [request.params for request in requests]
    seeds = array("q", [request.seed for request in requests])
    counts = array("i", rows)
    counts.extend(positions)
    counts.extend([min(p.top_k, MOST_INT) for p in params])
    reals = array("f", [p.temperature for p in params])
    reals.extend([p.top_p for p in params])
    reals.extend([p.min_p for p in params])
    return b"".join((seeds, counts, reals))


def pack_draws(
    requests: Sequence[Request], positions: Sequence[int], one_by_one: bool = False
) -> tuple[Draw, ...]:
    """What draws need of S rows, those with filters apart from those without: a row is drawn in the
    same way whoever is beside it, and a row without filters is not sorted.

    Args:
        requests: row i of the logits belongs to requests[i]; greedy ones have no part.
        positions: row i chooses the token at positions[i].
        one_by_one: a draw for each row, so that no shape depends on the others.
    """
    drawn = [i for i, request in enumerate(requests) if not request.params.greedy]
    kinds = [[i for i in drawn if requests[i].params.filters is kind] for kind in (False, True)]
    draws = []
    for rows in [[row] for row in drawn] if one_by_one else filter(None, kinds):
        members = [requests[row] for row in rows]
        filtered = members[0].params.filters
        bound = max(r.params.top_k or sys.maxsize for r in members) if filtered else None
        own = [positions[row] for row in rows]
        draws.append(Draw(pack_columns(members, rows, own), bound))
    return tuple(draws)
