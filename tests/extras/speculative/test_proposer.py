"""Drafts for several requests at once."""

from __future__ import annotations

import pytest

from minivllm.extras.speculative.options import NgramOptions, SuffixOptions
from minivllm.extras.speculative.proposer import Proposer
from minivllm.extras.speculative.proposers.ngram import NgramProposer
from minivllm.extras.speculative.proposers.suffix import SuffixProposer
from tests.extras.speculative.growing import request


@pytest.mark.parametrize(
    "proposer", [NgramProposer(NgramOptions()), SuffixProposer(SuffixOptions())]
)
def test_each_request_gets_a_draft_of_its_own_length(proposer: Proposer) -> None:
    requests = [request([1, 2, 3, 4] * 4), request([5, 6]), request([7, 8, 9] * 5)]
    drafts = [proposer.propose(*pair) for pair in zip(requests, [2, 2, 4], strict=True)]
    assert drafts == [[1, 2], [], [7, 8, 9, 7]]
    assert [proposer.propose(one, 0) for one in requests] == [[], [], []]
