"""The life of each request: every millisecond from its arrival to its end, by what it was spent on.

The page does the same in JavaScript: what differs there is a fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from minivllm.extras.observation.bundle import EngineFacts, Hold, NewRequest, Scheduled

# What a request would not have had alone, in the order of a bar:
# - queued: it waits behind others or for a place
# - blocks: the most urgent waiting request is held for blocks
# - disk: it is held while its cached blocks are read
# - preempted, swapped: from a preemption until it is scheduled again
# - recompute: in a step that computes again what a preemption took
# - stalled: it runs, but the step gives it no token
# - prompts, others: what a step that computes its tokens takes longer for the prompts of other
#   requests, and for their other tokens, see TokenCost
CAUSES = (
    *("queued", "blocks", "disk", "preempted", "swapped", "recompute", "stalled"),
    *("prompts", "others"),
)
# And the rest of its time:
# - client: before the engine had the request, counted from its scheduled arrival
# - http: in the process of HTTP, before the engine's process is sent the request, and from its
#   last step to the end of the answer
# - unseen: before the first bundle
# - prefill, decode: in a step that computes part of its prompt, or its next token
# - between: it runs, from the end of a step to the start of the next one
PARTS = ("client", "http", "unseen", *CAUSES, "prefill", "decode", "between")
FOR_BLOCKS = ("blocks", "reserve")  # reasons of a Hold
IN_STEPS = ("prefill", "decode", "recompute", "stalled")
MOST_SERVED = 10_000  # requests of HTTP that are remembered until their answer ends
MOST_ANSWERED = 100  # of those that the engine has not named by then, as its frames come later
# What a request in a state spends its time on until a step says so more precisely.
RESTING = {"waiting": "queued", "preempted": "preempted"}


@dataclass(slots=True)
class Stretch:
    """Time that a request spent on one thing."""

    part: str  # of PARTS
    start_s: float
    end_s: float
    step: int | None  # number of the step; None between steps and while it waits


@dataclass(slots=True)
class Beside:
    """What steps computed of one request, and of other requests beside it.

    Its own tokens; theirs of prompts, and others; and the number of steps that had some of theirs.
    """

    own: int = 0
    prompts: int = 0
    others: int = 0
    prompt_steps: int = 0
    other_steps: int = 0

    def add(self, own: int, prompts: int, others: int) -> None:
        """Count one step."""
        self.own += own
        self.prompts += prompts
        self.others += others
        self.prompt_steps += prompts > 0
        self.other_steps += others > 0


@dataclass(slots=True)
class TokenCost:
    """How long a step takes for its tokens: a line through the steps so far, by least squares.

    What a step takes without tokens, a request would have had alone; what each token adds, it has
    from the request whose token it is.
    """

    steps: int = 0
    tokens: int = 0
    ms: float = 0.0
    squares: int = 0  # of tokens
    products: float = 0.0  # of tokens and milliseconds

    def add(self, tokens: int, ms: float) -> None:
        """Take a step."""
        self.steps += 1
        self.tokens += tokens
        self.ms += ms
        self.squares += tokens * tokens
        self.products += tokens * ms

    @property
    def ms_per_token(self) -> float:
        """What one more token adds; 0 where the steps do not tell, as where all are equal.

        A line below 0 without tokens goes through 0: no step takes longer without its tokens.
        """
        spread = self.steps * self.squares - self.tokens * self.tokens
        if spread <= 0:
            return 0.0
        slope = (self.steps * self.products - self.tokens * self.ms) / spread
        if self.ms < slope * self.tokens:
            slope = self.products / self.squares
        return max(0.0, slope)


@dataclass(slots=True)
class ServedRequest:
    """When a request of HTTP came, and when it was sent to the process of the engine.

    The end of its answer may be known before the engine tells of it.
    """

    received_s: float
    sent_s: float
    answered_s: float | None = None  # when its client had the whole answer
    lives: list[Life] = field(default_factory=list)  # its completions


@dataclass(slots=True)
class Life:
    """A request from its arrival on.

    Attributes:
        part: what its time is spent on from `since_s` on.
        ms: milliseconds by part, steps undivided; their sum is the time from arrival to end, or
            until now. `why.parts` divides them.
        steps: number of steps by part, for those parts that are steps.
        beside: of the steps of each part, what they computed.
        reasons: milliseconds of "queued" and of "blocks" by reason, as words.json names it.
        hold: the first hold for blocks of this very request.
        preempted_for: numbers of the requests for which it was preempted, in order; its own where
            it had no block to grow into.
        spans: in order; empty unless the account keeps them.
    """

    new: NewRequest
    part: str = "queued"
    reason: str = ""
    since_s: float = 0.0
    end_s: float | None = None  # None: it goes on
    state: str = "waiting"
    finish_reason: str | None = None
    num_tokens: int = 0
    num_computed: int = 0
    num_lost: int = 0  # how many tokens the last preemption found computed
    num_preemptions: int = 0
    hold: Hold | None = None
    preempted_for: list[int] = field(default_factory=list)
    ms: dict[str, float] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    beside: dict[str, Beside] = field(default_factory=dict)
    reasons: dict[str, float] = field(default_factory=dict)
    spans: list[Stretch] = field(default_factory=list)


class Account:
    """Accounts for the time of every request, item by item.

    Args:
        keep_spans: whether each Life has its `spans`, too.

    Attributes:
        engine: what does not change; None before the first bundle.
        lives: by the number of the request, also of those that have ended.
        cost: of the steps so far.
    """

    def __init__(self, keep_spans: bool = False) -> None:
        self.engine: EngineFacts | None = None
        self.lives: dict[int, Life] = {}
        self.cost = TokenCost()
        self._served: dict[str, ServedRequest] = {}  # by the engine's request id
        self._answered: dict[str, ServedRequest] = {}  # whose answers ended before they were named
        self._unfinished: dict[int, Life] = {}
        self._keep_spans = keep_spans

    @classmethod
    def of(cls, items: Iterable[Mapping[str, Any]], keep_spans: bool = False) -> Account:
        """The account of all items."""
        account = cls(keep_spans)
        for item in items:
            account.take(item)
        return account

    def take(self, item: Mapping[str, Any]) -> None:
        """Account for the time up to the end of a bundle, or for that of a request of HTTP; gauges
        say nothing of requests."""
        if "http" in item:
            self._note_served(*item["http"])
        if "time_s" not in item:
            return
        new = [NewRequest(*one) for one in item.get("new", ())]
        if "engine" in item:
            self._begin(item["engine"], {one[:2] for one in new})
        born = [life for one in new if (life := self._meet(one)) is not None]
        for _, number, state, reason in item.get("states", ()):
            _enter(self.lives[number], state, reason)
        sizes = {number: counts for number, *counts in item.get("sizes", ())}
        for life in self._unfinished.values():
            if "engine" in item:
                life.part, life.reason = "unseen", ""
            self._spend(life, item["time_s"])
        if "engine" in item:
            for life in self._unfinished.values():
                life.part = RESTING.get(life.state, "between")
        elif "step" in item:
            self._plan(item, sizes)
        for number in item.get("decoded", ()):
            self.lives[number].num_tokens += 1
            self.lives[number].num_computed += 1
        for number, (num_tokens, num_computed) in sizes.items():
            life = self.lives[number]
            life.num_tokens, life.num_computed = num_tokens, num_computed
        self._end(item, [life for life in born if life.new.parent in self.lives])

    def _begin(self, engine: EngineFacts, named: set[tuple[int, str]]) -> None:
        """The whole state follows: unfinished requests that it does not name are forgotten."""
        self.engine = engine
        forgotten = [life for life in self._unfinished.values() if life.new[:2] not in named]
        for life in forgotten:
            del self.lives[life.new.number], self._unfinished[life.new.number]
        for life in forgotten:
            self._answer(_served_by(life.new))

    def _meet(self, new: NewRequest) -> Life | None:
        """The life of a request that is named for the first time."""
        if new.number in self._unfinished:
            return None
        life = Life(new, since_s=new.arrival_s)
        self.lives[new.number] = self._unfinished[new.number] = life
        if (served := self._known(_served_by(new))) is not None:
            served.lives.append(life)
            life.since_s, life.part = served.received_s, "http"
            self._spend(life, served.sent_s)
            life.part = "queued"
        return life

    def _note_served(
        self, request_id: str, received_s: float, sent_s: float, answered_s: float | None
    ) -> None:
        """Take what the process of HTTP says of a request: before the engine does, and at its
        end."""
        if answered_s is None:
            self._served[request_id] = ServedRequest(received_s, sent_s)
            _shorten(self._served, MOST_SERVED)
        elif (served := self._served.get(request_id)) is not None and served.answered_s is None:
            served.answered_s = answered_s
            if served.lives:
                self._answer(request_id)
            else:
                self._answered[request_id] = self._served.pop(request_id)
                _shorten(self._answered, MOST_ANSWERED)

    def _known(self, request_id: str) -> ServedRequest | None:
        return self._served.get(request_id) or self._answered.get(request_id)

    def _answer(self, request_id: str) -> None:
        """Count the time from the last steps of a request of HTTP to the end of its answer, once
        both are known."""
        served = self._known(request_id)
        if served is None or served.answered_s is None:
            return
        if any(self._unfinished.get(life.new.number) is life for life in served.lives):
            return
        self._served.pop(request_id, None)
        self._answered.pop(request_id, None)
        for life in served.lives:
            if life.end_s is not None:  # else it was forgotten
                life.part = "http"
                self._spend(life, served.answered_s)

    def _plan(self, item: Mapping[str, Any], sizes: Mapping[int, list[int]]) -> None:
        """Decide what each request spends a step on."""
        decoded = {*item.get("decoded", ())}
        scheduled = {one[0]: Scheduled(*one) for one in item.get("scheduled", ())}
        prompts = sum(one.num_tokens for one in scheduled.values() if one.why != "verify")
        tokens = len(decoded) + sum(one.num_tokens for one in scheduled.values())
        if tokens:
            self.cost.add(tokens, 1e3 * (item["end_s"] - item["time_s"]))
        swapped = {number: how for number, _, how in item.get("preempted", ())}
        for number, needed_by, _ in item.get("preempted", ()):
            self.lives[number].preempted_for.append(needed_by)
        held = Hold(*item["held"]) if "held" in item else None
        for number, life in self._unfinished.items():
            work, grows = scheduled.get(number), False
            if number in decoded:
                life.part = "decode"
            elif work is not None:
                is_prompt = work.start < life.new.num_prompt_tokens and work.why != "verify"
                life.part = "prefill" if is_prompt else "decode"
                if work.start < life.num_lost:
                    life.part = "recompute"
            elif life.state == "preempted":
                if life.part not in ("preempted", "swapped"):
                    life.part = "swapped" if swapped.get(number) else "preempted"
            elif life.state == "waiting":
                _wait(life, held)
            elif life.state != "done" or life.part == "between":
                # With overlapping steps a token of the step before arrives in this one.
                grows = number in sizes and sizes[number][0] > life.num_tokens
                life.part = "decode" if grows else "stalled"
            if life.part in IN_STEPS:
                life.steps[life.part] = life.steps.get(life.part, 0) + 1
                own = _own_tokens(work, number in decoded)
                if life.part != "stalled":
                    beside = life.beside.setdefault(life.part, Beside())
                    beside.add(sum(own) + grows, prompts - own[0], tokens - prompts - own[1])

    def _end(self, item: Mapping[str, Any], forks: list[Life]) -> None:
        """Count the time to the end of a bundle."""
        for life in self._unfinished.values():
            self._spend(life, item["end_s"], item.get("step"))
        for life in forks:  # until now each has lived as its parent
            parent = self.lives[life.new.parent or 0]
            life.ms, life.reasons = dict(parent.ms), dict(parent.reasons)
            life.steps, life.spans = dict(parent.steps), list(parent.spans)
            life.beside = {part: replace(one) for part, one in parent.beside.items()}
        ended = [life for life in self._unfinished.values() if life.state == "done"]
        for life in ended:
            life.end_s = item["end_s"]
            del self._unfinished[life.new.number]
        for life in ended:
            self._answer(_served_by(life.new))
        for life in self._unfinished.values():
            if life.part in IN_STEPS:
                life.part = "between"

    def _spend(self, life: Life, until_s: float, step: int | None = None) -> None:
        """Count the time until then for the present part."""
        ms = 1e3 * (until_s - life.since_s)
        if ms <= 0:
            return
        life.ms[life.part] = life.ms.get(life.part, 0.0) + ms
        if life.part in ("queued", "blocks"):
            life.reasons[life.reason] = life.reasons.get(life.reason, 0.0) + ms
        if self._keep_spans:
            last = life.spans[-1] if life.spans else None
            if last is not None and last.part == life.part and life.part not in IN_STEPS:
                last.end_s = until_s
            else:
                number = step if life.part in IN_STEPS else None
                life.spans.append(Stretch(life.part, life.since_s, until_s, number))
        life.since_s = until_s


def _shorten(requests: dict[str, ServedRequest], most: int) -> None:
    """Forget the oldest where there are too many."""
    if len(requests) > most:
        del requests[next(iter(requests))]


def _served_by(new: NewRequest) -> str:
    """The id of the request of HTTP that a completion belongs to."""
    return new.request_id.partition(".")[0]


def _own_tokens(work: Scheduled | None, decodes: bool) -> tuple[int, int]:
    """Tokens of its prompt, and others, that a step computes of a request."""
    if work is None:
        return 0, int(decodes)
    return (0, work.num_tokens) if work.why == "verify" else (work.num_tokens, 0)


def _enter(life: Life, state: str, reason: str | None) -> None:
    """A request enters a state."""
    life.state, life.finish_reason = state, reason
    if state == "preempted":
        life.num_lost = life.num_computed
        life.num_preemptions += 1


def _wait(life: Life, held: Hold | None) -> None:
    """A request waits, since the most urgent one is held."""
    reason = "" if held is None else held.reason
    is_first = held is not None and held.number == life.new.number
    if reason in FOR_BLOCKS:
        life.part, life.reason = "blocks", reason if is_first else "behind"
        if is_first and reason == "blocks" and life.hold is None:
            life.hold = held
    else:
        life.part = "disk" if reason == "disk" and is_first else "queued"
        life.reason = reason
