"""The state of an engine, rebuilt from its step bundles."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from minivllm.extras.observation.bundle import EngineFacts, NewRequest, StepBundle


@dataclass(slots=True)
class ViewRequest:
    """A request as far as the bundles tell."""

    new: NewRequest
    state: str = "waiting"
    finish_reason: str | None = None
    num_tokens: int = 0
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)


class ViewState:
    """Requests and blocks of an engine after the bundles so far.

    Attributes:
        engine: what does not change; None before the first bundle.
        requests: unfinished ones, by number.
        cached: blocks whose content the prefix cache may give to a request, with their hashes.
    """

    def __init__(self) -> None:
        self.engine: EngineFacts | None = None
        self.requests: dict[int, ViewRequest] = {}
        self.cached: dict[int, str] = {}
        self.num_waiting = self.num_used_blocks = 0

    def apply(self, bundle: StepBundle) -> list[ViewRequest]:
        """Take the next bundle; the requests that ended in it."""
        if "engine" in bundle:
            self.engine, self.requests, self.cached = bundle["engine"], {}, {}
        requests = self.requests
        for new in bundle.get("new", ()):
            requests[new[0]] = ViewRequest(NewRequest(*new))
        for _, number, state, reason in bundle.get("states", ()):
            requests[number].state, requests[number].finish_reason = state, reason
        for number in bundle.get("decoded", ()):
            requests[number].num_tokens += 1
            requests[number].num_computed += 1
        for number, num_tokens, num_computed in bundle.get("sizes", ()):
            requests[number].num_tokens = num_tokens
            requests[number].num_computed = num_computed
        for number, num_kept, blocks in bundle.get("tables", ()):
            requests[number].blocks[num_kept:] = blocks
        self._cache(bundle)
        self.num_waiting = bundle["num_waiting"]
        self.num_used_blocks = bundle["num_used_blocks"]
        changes = bundle.get("states", ())
        return [requests.pop(number) for _, number, state, _ in changes if state == "done"]

    def _cache(self, bundle: StepBundle) -> None:
        for event in bundle.get("kv_events", ()):
            match event["type"]:
                case "BlockStored":
                    self.cached.update(zip(event["blocks"], event["block_hashes"], strict=True))
                case "BlockRemoved":
                    for block in event["blocks"]:
                        self.cached.pop(block, None)
                case "AllBlocksCleared":
                    self.cached = {}

    def owners(self) -> Counter[int]:
        """How many requests hold each block; a block that nobody holds is absent."""
        return Counter(block for one in self.requests.values() for block in one.blocks)
