"""The form of a step bundle: everything that one step changed and why, ready for JSON.

Requests go by a number, which the bundle that first names a request ties to its id; blocks go by
their place in the pool. Times are seconds on the engine's clock, to the microsecond. Absent keys
mean that there was nothing of the kind. Blocks of the prefix cache come and go by the events of
vLLM's KV event stream (vllm/distributed/kv_events.py), without the token ids of prompts.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypedDict

VERSION = 1  # of this form


class NewRequest(NamedTuple):
    """A request, named for the first time."""

    number: int
    request_id: str
    num_prompt_tokens: int
    max_num_tokens: int  # prompt and output
    priority: int
    arrival_s: float
    parent: int | None  # the leader of its group, where it started on that one's blocks


class StateChange(NamedTuple):
    """A request entered a state."""

    time_s: float
    number: int
    state: str  # waiting, prefill, decode, preempted or done
    finish_reason: str | None


Why = Literal["verify", "prefill", "budget", "share", "cache"]


class Scheduled(NamedTuple):
    """A request's part of the step, but for plain decoding: it computes tokens [start, start +
    num_tokens).

    `why` says what decided their number: "verify", its last token and drafts; "prefill", the rest
    of a prompt or of what a preemption took; a chunk of it otherwise, cut by the step's token
    budget ("budget"), by its share of it ("share") or by what the cache let it hold ("cache").
    """

    number: int
    start: int
    num_tokens: int
    why: Why


class Admitted(NamedTuple):
    """A request left the queue."""

    number: int
    place: int  # how many more urgent ones waited
    num_reused_tokens: int  # found in the prefix cache
    overtook: bool  # one that arrived later had started before


class PreemptedRequest(NamedTuple):
    """A request gave up its blocks, since the cache was full. (One in state "preempted" that no
    bundle lists here started again for another reason.)"""

    number: int
    needed_by: int  # the request that grows, which may be itself
    swapped: bool  # its blocks went to host memory


class Hold(NamedTuple):
    """The most urgent request that could not be admitted, and why: see engine.step.Held; also
    "seqs" (batching.max_num_seqs run), "preempted" (nobody joins in a step that preempts) and
    "policy" (the batching policy waits)."""

    number: int
    reason: Literal["blocks", "budget", "disk", "reserve", "seqs", "preempted", "policy"]
    num_needed: int  # blocks; 0 unless the reason is "blocks"
    num_free: int
    spare: int  # blocks that must stay free


class Sized(NamedTuple):
    """Tokens that a request has, and has computed, at the end of the step, where `decoded` does
    not say it."""

    number: int
    num_tokens: int
    num_computed: int


class Table(NamedTuple):
    """A block table: the first `num_kept` blocks stay, and these come after them."""

    number: int
    num_kept: int
    blocks: list[int]


class Drafted(NamedTuple):
    """Drafts that the step verified for a request."""

    number: int
    num_drafts: int
    num_accepted: int


class EngineFacts(TypedDict):
    """What does not change while an engine runs."""

    version: int
    block_size: int
    num_blocks: int  # usable ones: block 0 is reserved
    max_num_seqs: int
    max_num_batched_tokens: int
    batching: str
    preemption: str


class StepBundle(TypedDict, total=False):
    """One step, or what happened between two steps."""

    step: int  # number of the step; absent between steps
    time_s: float  # when it was planned
    end_s: float
    engine: EngineFacts  # this bundle holds the whole state: what came before is void
    new: list[NewRequest]
    states: list[StateChange]
    # Requests that compute their last token: each has one more token, and one more computed.
    decoded: list[int]
    scheduled: list[Scheduled]  # the others
    admitted: list[Admitted]
    preempted: list[PreemptedRequest]
    held: Hold
    drafts: list[Drafted]
    sizes: list[Sized]
    tables: list[Table]
    kv_events: list[dict[str, Any]]  # BlockStored, BlockRemoved, AllBlocksCleared
    copied: list[tuple[int, int]]  # blocks, before one of their owners writes
    saved: list[tuple[int, int]]  # block to slot of host memory
    loaded: list[tuple[int, int]]  # slot of host memory to block
    spilled: int  # blocks on their way from host memory to disk
    read: int  # and back
    num_waiting: int
    num_used_blocks: int
    # Milliseconds of the step that was timed last: schedule, draft, prepare, forward, sample, emit,
    # and the gap before it; absent where they are not observed.
    timed: tuple[float, ...]
