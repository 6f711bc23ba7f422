"""What the driver saw of each request of a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

COMPLETED = ("stop", "length")
UNMEASURED = "unmeasured"  # status in a table of a request that only kept up the load


@dataclass(slots=True)
class RequestTrace:
    """What the driver saw of one request. Times are clock seconds; `token_times` has one entry a
    token."""

    request_id: str
    input_tokens: int
    scheduled_s: float  # when it was due; see `drive`
    submitted_s: float | None = None  # when the engine was given it
    started_s: float | None = None  # the engine's first step for it, where the engine says
    finished_s: float | None = None  # its last token; or else, when the driver learned of its end
    token_times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    # "stop" | "length" | "abort" | "shed" | "refused"; None: not finished
    finish_reason: str | None = None
    error: str | None = None  # why it did not complete
    answer_s: float | None = None  # first token after those of a thinking block, if it had one
    reasoning_tokens: int = 0  # of the thinking block, where the engine tells it apart
    # of the prompt, found in the prefix cache, where the engine says so
    cached_tokens: int | None = None
    # of keys and values that went to another replica: bytes, and milliseconds of copying them out
    # and in; None: none went
    kv_transfer: tuple[int, float, float] | None = None

    def add_transfer(self, part: tuple[int, float, float]) -> None:
        """Add a part of what its KV transfer has cost."""
        size, given, taken = self.kv_transfer or (0, 0.0, 0.0)
        self.kv_transfer = size + part[0], given + part[1], taken + part[2]

    @property
    def completed(self) -> bool:
        """Whether it ended as it should and produced something."""
        return self.finish_reason in COMPLETED and bool(self.token_times)

    @property
    def ended_s(self) -> float | None:
        """The last token of one that completed; when the driver learned that it was shed. Other
        ends are failures."""
        return self.finished_s if self.completed or self.status == "shed" else None

    def recount(self, counts: Sequence[int]) -> None:
        """Let each token so far stand for as many as `counts` says, which came when it did."""
        times, ids = self.token_times, self.token_ids
        self.token_times = [
            time_s for time_s, n in zip(times, counts, strict=True) for _ in range(n)
        ]
        self.token_ids = [
            token
            for first, n in zip(ids, counts, strict=True)
            for token in (first, *[UNKNOWN_TOKEN] * (n - 1))[:n]
        ]

    @property
    def status(self) -> str:
        """ok | empty | aborted | shed | refused | unfinished."""
        if self.finish_reason in COMPLETED:
            return "ok" if self.token_times else "empty"
        return {None: "unfinished", "abort": "aborted"}.get(
            self.finish_reason, str(self.finish_reason)
        )


UNKNOWN_TOKEN = 0  # stands for a token whose id a server did not tell
