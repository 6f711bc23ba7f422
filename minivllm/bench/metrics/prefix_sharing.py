"""Whether a prefix cache that should have been empty was not: what a server took from it, and what
prompts share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from minivllm.bench.workloads.workload import Workload

# of the prompt tokens: what tokenizing again and a server's own additions may make
TOLERANCE = 0.01


def check_cold(
    workload: Workload, liveness: Mapping[str, Mapping[str, float | str]], prompt_tokens: int
) -> list[str]:
    """What to note of a measurement with `measure.prefix_cache=cold`.

    Args:
        workload: what was asked.
        liveness: of the engine; `cached_prompt_tokens` are prompt tokens that a server says it did
            not compute.
        prompt_tokens: of all requests, with the turns before.
    """
    cached = float(liveness.get("cache", {}).get("cached_prompt_tokens", 0.0))
    if cached <= TOLERANCE * prompt_tokens:
        return []
    shared = shareable_tokens(workload)
    if cached - shared <= TOLERANCE * prompt_tokens:
        return []
    return [
        f"the prefix cache was not cold: {cached:,.0f} of {prompt_tokens:,} prompt tokens came "
        f"from it, and prompts share at most {shared:,} with each other; set engine.cache_reset, "
        "or other prompts with measure.seed, or measure.prefix_cache=warm if it is meant"
    ]


def shareable_tokens(workload: Workload) -> int:
    """Most prompt tokens that a cache which was empty at first may save.

    Of a prompt those are the tokens that it begins with as another one does, of a later turn all
    turns before it.
    """
    prompts = sorted(
        tuple(request.prompt_token_ids) for request in workload.requests if request.follows is None
    )
    alike = [0, *(common(a, b) for a, b in pairwise(prompts)), 0]
    return sum(map(max, pairwise(alike))) + sum(
        request.history_len for request in workload.requests
    )


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
