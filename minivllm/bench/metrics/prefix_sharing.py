"""What prompts share: what a prefix cache can have of them, and whether one that should have been
empty was not."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise

from minivllm.bench.metrics.request_trace import RequestTrace
from minivllm.bench.workloads.lazy_prompt import LazyPrompt, runs_of
from minivllm.bench.workloads.workload import Workload

# of the prompt tokens: what tokenizing again and a server's own additions may make
TOLERANCE = 0.01


def check_cold(
    workload: Workload,
    liveness: Mapping[str, Mapping[str, float | str]],
    traces: Sequence[RequestTrace],
) -> list[str]:
    """What to note of a measurement with `measure.prefix_cache=cold`.

    Args:
        workload: the requests that were sent.
        liveness: of the engine, whose group `cache` may count the prompt tokens that it did not
            compute.
        traces: of all requests, with what each found in the cache, where the engine says so.
    """
    prompt_tokens = sum(trace.input_tokens for trace in traces)

    def count(group: str, name: str) -> float:
        return float(liveness.get(group, {}).get(name, 0.0))

    cached = max(
        float(sum(trace.cached_tokens or 0 for trace in traces)),
        count("cache", "cached_prompt_tokens"),
        count("cache", "prefix_tokens_reused"),
    )
    # What another replica computed for the request itself is no hit; nor is what a request that is
    # run again after a preemption finds of its own.
    longest = max((trace.input_tokens + len(trace.token_ids) for trace in traces), default=0)
    own = count("parallel", "tokens_handed_over") + count("batching", "preemptions") * longest
    if cached - own <= TOLERANCE * prompt_tokens:
        return []
    shared = shareable_tokens(workload)
    if cached - own - shared <= TOLERANCE * prompt_tokens:
        return []
    return [
        f"the prefix cache was not cold: {cached:,.0f} of {prompt_tokens:,} prompt tokens came "
        f"from it, and prompts share at most {shared:,} with each other; set engine.cache_reset, "
        "or other prompts with measure.seed, or measure.prefix_cache=warm if it is meant"
    ]


def shareable_tokens(workload: Workload) -> int:
    """Most prompt tokens that a cache which was empty at first may save.

    Of a prompt those are the tokens that it begins with as another one does, the workload's
    priming included, of a later turn all turns before it. Prompts that are known by their positions
    alone are not looked through: of those, what a cache without limit saves, which is the same in
    any order.
    """
    primed = [request.prompt_token_ids for request in workload.priming]
    known = [request.prompt_token_ids for request in workload.openings]
    tree = PrefixTree()
    for prompt in primed:
        if isinstance(prompt, LazyPrompt):
            tree.insert(prompt)
    lazy = sum(tree.insert(prompt) for prompt in known if isinstance(prompt, LazyPrompt))
    prompts = sorted(
        (tuple(prompt), times)
        for each, times in ((primed, 0), (known, 1))
        for prompt in each
        if not isinstance(prompt, LazyPrompt)
    )
    common_lengths = [0, *(common(a, b) for (a, _), (b, _) in pairwise(prompts)), 0]
    saved = zip(prompts, map(max, pairwise(common_lengths)), strict=False)
    later = sum(request.history_len for request in workload.requests)
    return lazy + sum(times * most for (_, times), most in saved) + later


class PrefixTree:
    """The prompts that a prefix cache without limit would know.

    A node is a stretch of tokens with the nodes that go on from its end, by their first tokens; a
    stretch of positions (see `LazyPrompt`) is compared without a look at its tokens.
    """

    def __init__(self) -> None:
        self._root: _Nodes = {}

    def insert(self, prompt: Sequence[int]) -> int:
        """Add a prompt; returns how many of its first tokens are those of an earlier one."""
        nodes, known, new = self._root, 0, False
        for run in runs_of(prompt):
            while len(run):
                first = isinstance(run, range), run[0]  # a position is no token
                if first not in nodes:
                    nodes[first] = run, {}
                    new = True
                stretch, following = nodes[first]
                count = _common(stretch, run)
                if count < len(stretch):  # two ways from here on
                    rest = stretch[count:]
                    nodes[first] = stretch[:count], {(first[0], rest[0]): (rest, following)}
                    following = nodes[first][1]
                known += 0 if new else count
                nodes, run = following, run[count:]
        return known


_Nodes = dict[Hashable, "tuple[Sequence[int], _Nodes]"]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many elements two sequences have in common at their beginnings."""
    if isinstance(a, range) and isinstance(b, range):
        return min(len(a), len(b))
    return common(a, b)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences have in common at their beginnings."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
