"""Suffix decoding: a draft is what most often followed the last tokens, here and in the outputs of
finished requests."""

from __future__ import annotations

from collections import deque

from minivllm.engine.request import Request
from minivllm.extras.speculative.options import SuffixOptions
from minivllm.extras.speculative.proposer import Proposer
from minivllm.extras.speculative.proposers.suffix_index import SuffixIndex


class FinishedOutputs:
    """Outputs of finished requests, the oldest dropped first.

    Args:
        longest: run to look up, in tokens.
        most_requests, most_tokens: bounds; tokens count the mark after each output.
    """

    def __init__(self, longest: int, most_requests: int, most_tokens: int) -> None:
        self.index = SuffixIndex(longest)
        self._most_requests, self._most_tokens = most_requests, most_tokens
        self._lengths: deque[int] = deque()  # of the outputs with their marks, oldest first

    def add(self, token_ids: list[int]) -> None:
        """Keep an output; of one that is too long its end."""
        length = min(len(token_ids) + 1, self._most_tokens)
        if length < 2 or not self._most_requests:
            return
        while (
            len(self.index) + length > self._most_tokens
            or len(self._lengths) >= self._most_requests
        ):
            self.index.drop(self._lengths.popleft())
        self.index.extend(token_ids[1 - length :])
        self.index.end_text()
        self._lengths.append(length)


class SuffixProposer(Proposer):
    """speculative=suffix: SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975), a chain for each
    request.

    The longest run of last tokens is looked up that occurred before, in the request's own tokens or
    in finished outputs; its own tokens come first where both have it. A longer run allows a longer
    draft. The paper's suffix trees have a node at every depth; here runs have 1, 2, 4, ... tokens,
    and the latest `MOST_VOTES` occurrences vote, so that time and memory of a token grow with the
    logarithm of `max_tree_depth`, and those of a proposal with nothing.
    """

    name = "suffix"

    def __init__(self, options: SuffixOptions) -> None:
        self.options: SuffixOptions = options
        self.forget()
        self.own: dict[Request, SuffixIndex] = {}

    def propose(self, request: Request, most: int) -> list[int]:
        own = self.own.get(request)
        if own is None:
            own = self.own[request] = SuffixIndex(self.options.max_tree_depth)
        token_ids = request.token_ids
        own.extend(token_ids[len(own) :])
        for level in reversed(range(len(own.lengths))):
            length = own.lengths[level]
            run = tuple(token_ids[-length:])
            for index in (own, self.outputs.index):
                if places := index.occurrences(level, run):
                    most = min(most, int(self.options.max_spec_factor * length))
                    return index.continuation(places, most, self.options.min_token_prob)
        return []

    def finished(self, request: Request) -> None:
        """Drop the request's own index, and learn its output."""
        self.own.pop(request, None)
        self.outputs.add(request.output_token_ids)

    def forget(self) -> None:
        options = self.options
        self.outputs = FinishedOutputs(
            options.max_tree_depth, options.max_cached_requests, options.max_cached_tokens
        )
