"""The ranges of speculative's knobs."""

from __future__ import annotations

from typing import Any

import pytest

from minivllm.errors import BadInput
from minivllm.extras.speculative.options import NgramOptions, SuffixOptions


@pytest.mark.parametrize(
    ("options", "knobs"),
    [
        (NgramOptions, {"num_speculative_tokens": 0}),
        (NgramOptions, {"num_speculative_tokens": 33}),
        (NgramOptions, {"prompt_lookup_min": 0}),
        (NgramOptions, {"prompt_lookup_min": 5}),
        (NgramOptions, {"prompt_lookup_max": 1}),
        (SuffixOptions, {"max_tree_depth": 0}),
        (SuffixOptions, {"max_spec_factor": 0.0}),
        (SuffixOptions, {"min_token_prob": 1.1}),
        (SuffixOptions, {"max_cached_requests": -1}),
        (SuffixOptions, {"max_cached_tokens": -1}),
    ],
)
def test_a_value_out_of_range_is_named(options: type, knobs: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"^speculative\.(num_speculative_tokens|prompt_|max_|min_)"):
        options(**knobs)
