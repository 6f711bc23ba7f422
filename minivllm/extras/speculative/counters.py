"""What speculation did, in vLLM's names."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

MOST_REQUESTS = 100_000  # that are told apart, the latest


@dataclass
class SpeculationCounters:
    """Counts since the last reset.

    A draft is what a request verifies in one step: several draft tokens, of which those before the
    first wrong one are accepted.
    """

    steps: int = 0  # that verified drafts
    # Decoding requests, with a draft or without, summed over all steps.
    num_request_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    draft_s: float = 0.0  # spent on drafting
    # Draft tokens at each position of their draft, and those accepted.
    drafted_per_pos: Counter[int] = field(default_factory=Counter)
    accepted_per_pos: Counter[int] = field(default_factory=Counter)
    # Drafts of each length, and their accepted tokens.
    drafts_of_length: Counter[int] = field(default_factory=Counter)
    accepted_of_length: Counter[int] = field(default_factory=Counter)
    # Drafts, draft tokens and accepted tokens of each request.
    requests: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def note(self, request_id: str, length: int, accepted: int) -> None:
        """Count a draft of `length` tokens, of which the first `accepted` are right."""
        self.num_drafts += 1
        self.num_draft_tokens += length
        self.num_accepted_tokens += accepted
        self.drafted_per_pos.update(range(length))
        self.accepted_per_pos.update(range(accepted))
        self.drafts_of_length[length] += 1
        self.accepted_of_length[length] += accepted
        if len(self.requests) >= MOST_REQUESTS and request_id not in self.requests:
            del self.requests[next(iter(self.requests))]  # the oldest
        drafts, drafted, right = self.requests.get(request_id, (0, 0, 0))
        self.requests[request_id] = drafts + 1, drafted + length, right + accepted
