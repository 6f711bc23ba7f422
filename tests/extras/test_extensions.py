"""Rows of logits and whose they are, against the rows that packing makes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minivllm.engine.batch_inputs import pack
from minivllm.engine.options import SamplingParams
from minivllm.engine.request import Group, Request
from minivllm.engine.step import ScheduledRequest, StepPlan
from minivllm.extras.extensions import sampled_rows


class Joint(Group):
    """Members that choose their tokens together."""

    joint = True


KINDS = ("prompt", "chunk", "decodes", "drafts", "joint", "starts samples")


@st.composite
def parts(draw: st.DrawFn) -> ScheduledRequest:
    """A share of a step, of any kind."""
    kind = draw(st.sampled_from(KINDS))
    asks = draw(st.booleans()) and kind != "joint"
    params = SamplingParams(prompt_logprobs=1 if asks else None)
    length, drafts = draw(st.integers(3, 9)), 0
    requests = [Request("r", list(range(length)), params, max_num_tokens=99, seed=0)]
    requests += [Request("m", [0], params, max_num_tokens=99, seed=i) for i in (1, 2)]
    start, count = 0, length
    if kind == "chunk":
        count = draw(st.integers(1, length - 1))
    elif kind in ("decodes", "drafts", "joint"):
        drafts = draw(st.integers(1, 3)) if kind == "drafts" else 0
        start, count = length - 1, 1 + drafts
    request = requests[0]
    request.token_ids += [7] * drafts
    request.cache.block_table.extend(range(1, 6))
    if kind == "joint":
        Joint(requests)
    elif kind == "starts samples":
        Group(requests)
        for member in requests[1:]:
            member.token_ids = list(request.token_ids)
    return ScheduledRequest(request, start, count, kind != "decodes", drafts)


@given(st.lists(parts(), min_size=1, max_size=5))
def test_each_row_chooses_the_token_after_its_own(scheduled: list[ScheduledRequest]) -> None:
    """Packing says which tokens of the step have logits; the rows must be those of the last known
    token before drafts and of each draft."""
    plan = StepPlan(tuple(scheduled), num_drafts=sum(part.num_drafts for part in scheduled))
    packed = pack(scheduled, block_size=4)
    tokens = packed.shape.unpack(
        __import__("torch").frombuffer(bytearray(packed.ints), dtype=__import__("torch").int32)
    )
    logit_rows = tokens["logit_rows"].tolist()
    places = [(part.request, place) for part in scheduled for place in range(part.start, part.end)]
    rows = sampled_rows(plan)
    numbers = range(len(logit_rows)) if rows.rows is None else rows.rows
    own = {place: row for row, place in enumerate(logit_rows)}
    expected = []
    for part in scheduled:
        if part.samples and not part.request.is_joint:
            last = len(part.request.token_ids) - part.num_drafts
            expected += [(part.request, position) for position in range(last, part.end + 1)]
    started = [
        (member, part.request)
        for part in scheduled
        for member in part.request.unstarted
        if part.samples and not part.request.is_joint
    ]
    pairs = list(zip(rows.requests, rows.positions, strict=True))
    assert pairs == [*expected, *((member, parent.num_tokens) for member, parent in started)]
    for (request, position), row in zip(pairs, numbers, strict=True):
        parent = next((parent for member, parent in started if member is request), request)
        assert places[logit_rows[row]] == (parent, position - 1)
    assert rows.forks == tuple((parent, member) for member, parent in started)
    joint = {part.request for part in scheduled if part.request.is_joint}
    assert rows.joint.keys() == joint
    for request, row in rows.joint.items():
        assert own[places.index((request, request.num_tokens - 1))] == row
