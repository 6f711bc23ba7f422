"""What goes to the device and comes back in a step, in one copy each and without a wait (one int32
buffer a step, as in transformers' continuous batching)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minivllm.engine.request import Request
from minivllm.engine.step import ScheduledRequest
from minivllm.kernels.transfer import upload

_MOST = np.iinfo(np.int32).max
INT_BYTES = 4  # of an int32
# a block table grows by so many tokens; the tensors of a step that decodes are cut anew as rarely
ROOM = 128


class StepShape(NamedTuple):
    """What the tensors of a StepBatch are cut by."""

    tokens: int
    seq_lens: tuple[int, ...]  # of each request, those of the padding too
    blocks: int  # that each request has room for
    logit_rows: int

    @property
    def cut(self) -> tuple[int, int, int, int]:
        """How long each tensor is; steps of the same cut differ in values only."""
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


def pack(
    scheduled: Sequence[ScheduledRequest],
    block_size: int,
    all_logits: bool = False,
    pad_to: tuple[int, int] = (0, 0),
) -> tuple[bytearray, StepShape]:
    """The integers of one step, as memory holds them, and how to cut them.

    Those that index are int64, as `index_copy_` and the C++ kernels insist, and come first; the
    others are int32. They go through `array`, whose few instructions are sooner back in a
    processor's caches after a step than numpy's.

    Args:
        scheduled: each request's share, its cache blocks already given.
        block_size: tokens a cache block.
        all_logits: logits of every token, not only of each request's last known one.
        pad_to: requests and blocks to make room for, which are enough; (0, 0): what these need, or
            a little more. Requests that are missing have one token, in the reserved block 0.
    """
    size = block_size
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    logit_rows: list[int] = []
    seq_lens = [part.seq_len for part in scheduled]
    width = pad_to[1] or -(-(-(-max(seq_lens) // ROOM) * ROOM) // size)
    for row, part in enumerate(scheduled):
        request = part.request
        blocks = request.cache.block_table.blocks
        if part.num_tokens == 1:  # decoding: by far the most frequent case
            position = part.start
            token_ids.append(request.token_ids[position])
            positions.append(position)
            index = seq_lens[row] - 1
            slots.append(blocks[index // size] * size + index % size)
        else:
            token_ids.extend(request.token_ids[part.start : part.end])
            span = range(part.start, part.end)
            positions.extend(span)
            held = range(seq_lens[row] - part.num_tokens, seq_lens[row])
            slots.extend([blocks[index // size] * size + index % size for index in held])
        if all_logits or request.params.prompt_logprobs is not None:
            logit_rows.extend(range(starts[-1], len(token_ids)))
        elif part.samples:
            logit_rows.append(len(token_ids) - 1)
        starts.append(len(token_ids))
    if (missing := pad_to[0] - len(scheduled)) > 0:
        nothing = [0] * missing
        token_ids, positions, slots = token_ids + nothing, positions + nothing, slots + nothing
        logit_rows += range(starts[-1], starts[-1] + missing)
        starts += range(starts[-1] + 1, starts[-1] + 1 + missing)
        seq_lens += [1] * missing
    pieces: list[array[int] | bytes] = [
        array("q", token_ids + positions + slots + logit_rows),
        array("i", starts + seq_lens),
    ]
    for part in scheduled:
        own = part.request.cache.block_table.blocks[:width]
        pieces.append(array("i", own))
        if len(own) < width:
            pieces.append(bytes(INT_BYTES * (width - len(own))))
    pieces.append(bytes(INT_BYTES * width * max(missing, 0)))
    return bytearray().join(pieces), StepShape(
        len(token_ids), tuple(seq_lens), width, len(logit_rows)
    )


class StepInputs:
    """The tensors of one step after another on `device`.

    They are written again where two steps are cut alike, as while the same requests decode: to make
    them anew takes longer than all else there is to prepare.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._on_host = device, device.type == "cpu"
        self._cut: tuple[int, int, int, int] | None = None
        self._ints = torch.empty(0, dtype=torch.int32)
        self._tensors: dict[str, Any] = {}

    def put(self, ints: bytearray, shape: StepShape) -> dict[str, Any]:
        """The tensors of a StepBatch, by name. Those of the step before hold nothing any more."""
        if shape.cut != self._cut:
            self._host, self._ints = memoryview(ints), upload(ints, self.device)
            self._cut, self._tensors = shape.cut, shape.unpack(self._ints)
        elif self._on_host:
            self._host[:] = ints  # is the memory of the tensors
        else:
            with torch.inference_mode():  # which they may have been made in, whoever calls now
                upload(ints, self.device, into=self._ints)
        return self._tensors


class SamplingColumns(NamedTuple):
    """What drawing needs of R requests, on the device."""

    seeds: Tensor  # int64 [R]
    rows: Tensor  # int32 [R], of the logits
    positions: Tensor  # int32 [R]
    top_k: Tensor  # int32 [R], 0 for all tokens
    temperatures: Tensor  # float32 [R]
    top_p: Tensor  # float32 [R]
    min_p: Tensor  # float32 [R]

    @classmethod
    def unpack(cls, ints: Tensor) -> SamplingColumns:
        """Views of what `pack_sampling` made: int32 [8 R]."""
        count = len(ints) // 8
        seeds, counts, reals = ints.split((2 * count, 3 * count, 3 * count))
        return cls(
            seeds.view(torch.int64), *counts.split(count), *reals.view(torch.float32).split(count)
        )


def pack_sampling(
    requests: Sequence[Request], rows: Sequence[int], pad_to: int = 0
) -> NDArray[np.int32]:
    """The columns of requests, the bits of every number as int32 [8 R].

    Args:
        requests: who draws.
        rows: of the logits, one for each.
        pad_to: least R. What is missing is greedy: its temperature is 0.
    """
    params = [request.params for request in requests]
    count, size = len(requests), max(len(requests), pad_to)
    seeds, counts, reals = (
        np.zeros(size, np.int64),
        np.zeros((3, size), np.int32),
        np.zeros((3, size), np.float32),
    )
    seeds[:count] = [request.seed for request in requests]
    top_k = [min(p.top_k, _MOST) for p in params]
    counts[:, :count] = rows, [r.num_tokens for r in requests], top_k
    reals[:, :count] = (
        [p.temperature for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
    )
    return np.concatenate((seeds.view(np.int32), counts.ravel(), reals.view(np.int32).ravel()))
