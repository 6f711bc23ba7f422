"""What a step's one buffer holds, against the definition of each tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.engine.batch_inputs import ROOM, StepInputs, pack
from minivllm.engine.options import SamplingParams
from minivllm.engine.request import Request
from minivllm.engine.step import ScheduledRequest
from minivllm.kernels.transfer import upload

CPU = torch.device("cpu")


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[ScheduledRequest], int]:
    size = draw(st.sampled_from([1, 3, 16]))
    step = draw(st.sampled_from([1, 2, 5, 100, 398]))  # coprime to 399, so each block comes once
    offset = draw(st.integers(0, 398))
    parts, free = [], (1 + (offset + place * step) % 399 for place in range(399))
    for index in range(draw(st.integers(1, 5))):
        length = draw(st.integers(2, 40))
        prompt_logprobs = draw(st.sampled_from([None, None, 1]))
        params = SamplingParams(prompt_logprobs=prompt_logprobs)
        first, stride = draw(st.integers(-3, 200)), draw(st.integers(1, 203))
        tokens = [(first + 3 + place * stride) % 204 - 3 for place in range(length)]
        request = Request(str(index), tokens, params, max_num_tokens=length + 1, seed=0)
        start = draw(st.integers(0, length - 1))
        count = draw(st.sampled_from([1, length - start, draw(st.integers(1, length - start))]))
        request.cache.num_evicted = draw(st.integers(0, start // size)) * size
        held = start + count - request.cache.num_evicted
        request.cache.block_table.extend(
            next(free) for _ in range(-(-held // size) + draw(st.integers(0, 1)))
        )
        parts.append(ScheduledRequest(request, start, count))
    return parts, size


@given(steps(), st.booleans())
def test_every_tensor_is_what_the_step_says(
    step: tuple[list[ScheduledRequest], int], every: bool
) -> None:
    parts, size = step
    ints, shape, query_lens, rotated_lens, *_ = pack(parts, size, every)
    tensors = shape.unpack(upload(bytearray(ints), CPU))
    rows = [(part.request, at) for part in parts for at in range(part.start, part.end)]
    assert tensors["token_ids"].tolist() == [request.token_ids[at] for request, at in rows]
    assert tensors["positions"].tolist() == [at for _, at in rows]
    for slot, (request, at) in zip(tensors["slot_mapping"].tolist(), rows, strict=True):
        index = at - request.cache.num_evicted
        assert slot == request.cache.block_table.blocks[index // size] * size + index % size
    expected = [
        row
        for row, (request, at) in enumerate(rows)
        if every or request.params.prompt_logprobs is not None or at == request.num_tokens - 1
    ]
    assert tensors["logit_rows"].tolist() == expected
    counts = [part.num_tokens for part in parts]
    assert tensors["query_start_loc"].tolist() == [0, *np.cumsum(counts)]
    assert list(query_lens) == counts
    assert list(rotated_lens) == [part.request.num_rotated_tokens for part in parts]
    lengths = [part.end - part.request.cache.num_evicted for part in parts]
    assert tensors["seq_lens"].tolist() == list(shape.seq_lens) == lengths
    longest = max(lengths)
    width = -(-(longest + -longest % ROOM) // size)
    assert tensors["block_table"].shape[1] == width
    for row, part in zip(tensors["block_table"].tolist(), parts, strict=True):
        blocks = part.request.cache.block_table.blocks[:width]
        assert row == blocks + [0] * (width - len(blocks))
    indices = ("token_ids", "positions", "slot_mapping", "logit_rows")
    assert all(tensor.dtype == torch.int64 for name, tensor in tensors.items() if name in indices)
    assert all(
        tensor.dtype == torch.int32 for name, tensor in tensors.items() if name not in indices
    )


@given(st.lists(steps(), min_size=2, max_size=6), st.data())
def test_tensors_that_are_written_again_hold_the_new_step(
    drawn: list[tuple[list[ScheduledRequest], int]], data: st.DataObject
) -> None:
    inputs = StepInputs(CPU)
    for parts, size in drawn + data.draw(st.permutations(drawn + drawn)):
        ints, shape, *_ = pack(parts, size)
        fresh = shape.unpack(upload(bytearray(ints), CPU))
        kept = inputs.put(ints, shape)
        assert kept.keys() == fresh.keys()
        assert all(torch.equal(kept[name], fresh[name]) for name in fresh)


def test_a_step_that_was_made_in_inference_mode_is_written_again_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs, request = (
        StepInputs(CPU),
        Request("0", [5], SamplingParams(), max_num_tokens=199, seed=0),
    )
    # as on a GPU, whose tensors are no memory of the host
    monkeypatch.setattr(inputs, "_on_host", False)
    request.cache.block_table.extend([1, 2])
    with torch.inference_mode():
        inputs.put(*pack([ScheduledRequest(request, 0, 1)], 4)[:2])
    request.token_ids.append(7)
    tensors = inputs.put(*pack([ScheduledRequest(request, 1, 1)], 4)[:2])
    assert tensors["token_ids"].tolist() == [7] and tensors["positions"].tolist() == [1]


def test_requests_that_decode_keep_their_tensors() -> None:
    size = 4
    inputs, request = (
        StepInputs(CPU),
        Request("0", [5], SamplingParams(), max_num_tokens=199, seed=0),
    )
    request.cache.block_table.extend(range(1, 50))
    seen = []
    for position in range(150):
        ints, shape, *_ = pack([ScheduledRequest(request, position, 1)], size)
        tensors = inputs.put(ints, shape)
        assert tensors["token_ids"].tolist() == [5 + position] and tensors[
            "positions"
        ].tolist() == [position]
        seen.append(tensors["token_ids"].data_ptr())
        request.token_ids.append(6 + position)
    assert (
        len(set(seen[:ROOM])) == len(set(seen[ROOM:])) == 1
    )  # then the table has no room for one block more
