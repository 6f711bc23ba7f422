"""A step is told in full wherever it says more than tokens."""

from __future__ import annotations

import pytest

from minivllm.engines.base import EngineOutput
from minivllm.engines.replicas.messages import NextTokens, Outputs, step_message

PLAIN = EngineOutput("a", (5,), cached_tokens=16)


def test_further_tokens_are_sent_alone() -> None:
    assert step_message([PLAIN, EngineOutput("b", (6,))]) == NextTokens(["a", "b"], [5, 6])


@pytest.mark.parametrize(
    "other",
    [
        EngineOutput("b", (6,), "length"),
        EngineOutput("b", (6,), started_s=1.0),
        EngineOutput("b", (), "abort", error="no room"),
        EngineOutput("b", (6, 7)),
    ],
)
def test_a_step_that_says_more_is_sent_whole(other: EngineOutput) -> None:
    assert step_message([PLAIN, other]) == Outputs([PLAIN, other])
