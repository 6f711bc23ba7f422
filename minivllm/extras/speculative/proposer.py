"""What proposers have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from minivllm.engine.request import Request


class Proposer(Protocol):
    """Guesses the next tokens of a request. A wrong guess costs time and changes no output."""

    name: str

    @abstractmethod
    def propose(self, request: Request, most: int) -> list[int]:
        """At most `most` draft tokens that may follow `request.token_ids`, none if nothing is worth
        a guess. Tokens may have been appended since the last call; none may have changed."""

    @abstractmethod
    def finished(self, request: Request) -> None:
        """Drop what is kept for a request that has ended, whether it was ever proposed for or
        not."""


class HostProposer(Proposer):
    """A proposer without a model, which serves one request after another."""

    def propose_batch(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[list[int]]:
        """A draft for each request, of at most its length."""
        return [
            self.propose(request, most) for request, most in zip(requests, lengths, strict=True)
        ]
