"""Selective eviction: which blocks a request drops when it holds as many as its budget allows. Pure
Python.

A request that has filled its budget drops whole blocks, the same in all layers and heads, and
continues. A step never computes beyond a full budget, so a request drops blocks at the same
positions whatever the chunks of its tokens: what a token attends to depends on the tokens before it
alone. Tokens keep their true positions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from minivllm.cache.options import PagedOptions
from minivllm.errors import BadInput
from minivllm.platform.plug_ins import make_own


@dataclass(frozen=True)
class Eviction:
    """A `cache.eviction` choice: which blocks a request drops when its budget is full. The first
    and the newest blocks stay.

    Args:
        block_size: tokens a block.
        budget: most blocks that a request holds.
        sinks: first blocks, which always stay.
        window: newest blocks, which always stay.
    """

    block_size: int
    budget: int
    sinks: int
    window: int

    name: ClassVar[str]
    # Whether the policy needs attention scores, which not every attention backend returns.
    scored: ClassVar[bool] = False
    # Whether the scores of a block are kept after an eviction.
    remembers: ClassVar[bool] = False

    @property
    def capacity(self) -> int:
        """Tokens that a request may hold."""
        return self.budget * self.block_size

    def drop(self, scores: Sequence[float]) -> list[int]:
        """Which of a request's `budget` full blocks are dropped: at least one, in ascending order.
        This class drops all between sinks and window.

        Args:
            scores: attention that each block got from the observed queries.
        """
        return list(range(self.sinks, self.budget - self.window))

    def observed(self, held: int, count: int) -> int:
        """How many of a step's last queries add to the attention scores. This class needs none.

        Args:
            held: tokens that the request holds before the step.
            count: tokens that the step computes.
        """
        return 0

    def check(self, windows: Iterable[int | None]) -> None:
        """Raises BadInput if a layer with such a sliding window would see wrong tokens.

        Masks count tokens in the cache. The count is right as long as the cache holds all tokens of
        a layer's window without a gap: tokens before the gap are outside the window by either
        count."""
        kept = self.window * self.block_size
        largest = max((window for window in windows if window is not None), default=0)
        if largest > kept:
            raise BadInput(
                f"cache.eviction={self.name} keeps the last {kept} tokens for sure, and the "
                f"model has layers with a sliding window of {largest}: set "
                f"cache.eviction_window={largest} or more, or cache.eviction=none"
            )


class Streaming(Eviction):
    """Attention sinks and a window (StreamingLLM, Xiao et al. 2024).

    The window is a least length: all blocks between sinks and window are dropped at once, and then
    the request grows again. Unlike in the paper, whose positions are those within the cache, tokens
    keep their positions."""

    name = "streaming"


class HeavyHitters(Eviction):
    """Heavy hitters (H2O, Zhang et al. 2023): of the blocks between sinks and window, the half with
    the highest attention scores stays. Scores are summed over all layers, heads and queries since a
    block was computed."""

    name = "h2o"
    scored = True
    remembers = True

    def drop(self, scores: Sequence[float]) -> list[int]:
        """Of blocks with equal scores the older one is dropped."""
        between = sorted(super().drop(scores), key=lambda index: scores[index])
        return sorted(between[: len(between) - len(between) // 2])

    def observed(self, held: int, count: int) -> int:
        """All queries of the step."""
        return count


class SnapKV(HeavyHitters):
    """The newest queries choose (SnapKV, Li et al. 2024): H2O with the attention scores of the
    window's queries alone.

    The paper evicts once, at the end of the prompt. This class evicts whenever the budget is full,
    in a long prompt and in the output."""

    name = "snapkv"
    remembers = False

    def observed(self, held: int, count: int) -> int:
        """The queries that will be in the window when the budget is full."""
        first = (self.budget - self.window) * self.block_size
        return max(0, min(count, held + count - first))


POLICIES: dict[str, type[Eviction]] = {cls.name: cls for cls in (Streaming, HeavyHitters, SnapKV)}


OWN = "no eviction policy: derive it from minivllm.cache.eviction.policies.Eviction"


def make_eviction(options: PagedOptions) -> Eviction:
    """The policy that `cache.eviction` names, another than "none", or of a class of the user's own.
    The budget is rounded down to whole blocks, sinks and window up.

    Raises:
        BadInput: the budget leaves nothing to drop; prefixes are cached, whose blocks come without
            the attention that they got; a class of the user's own is no policy.
    """
    choice, block_size = options.eviction, options.block_size
    blocks = options.eviction_budget // block_size
    window = options.eviction_window
    first = -(-options.eviction_sinks // block_size)
    last = max(1, blocks // 2) if window is None else -(-window // block_size)
    if first + last >= blocks:
        raise BadInput(
            f"cache.eviction_budget={options.eviction_budget} is {blocks} blocks of {block_size} "
            f"tokens, and with {first} for sinks and {last} for the window nothing is left to "
            "evict: raise it, or lower eviction_sinks, eviction_window or block_size"
        )
    given = {"block_size": block_size, "budget": blocks, "sinks": first, "window": last}
    policy = (
        POLICIES[choice](**given)
        if isinstance(choice, str)
        else make_own("cache.eviction", choice, Eviction, OWN, **given)
    )
    if policy.scored and options.prefix_caching:
        raise BadInput(
            f"cache.eviction={policy.name} needs the attention that every block got, which is not "
            "known of cached prefixes: use cache.prefix_caching=false or cache.eviction=streaming"
        )
    return policy
