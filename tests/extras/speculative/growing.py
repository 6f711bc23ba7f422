"""Requests whose tokens a test chooses."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from minivllm.engine.options import SamplingParams
from minivllm.engine.request import Request

# So few different tokens that every short run of them occurs again.
tokens = st.lists(st.integers(0, 2), max_size=40)


def request(prompt: Sequence[int] = (1,)) -> Request:
    """A request that may grow as it likes."""
    return Request("a", list(prompt), SamplingParams(), max_num_tokens=1 << 20, seed=0)
