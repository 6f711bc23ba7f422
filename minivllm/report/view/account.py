"""The life of each request: every millisecond from its arrival to its end, by what it was spent on.

The page does the same in JavaScript: what differs there is a fault. Both take their words from
words.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from minivllm.extras.observation.bundle import EngineFacts, Hold, NewRequest, Scheduled

# What a millisecond may be spent on, in the order of a bar:
# - client: before the engine had the request, counted from its scheduled arrival
# - unseen: before the first bundle
# - queued: it waits behind others or for a place
# - blocks: the most urgent waiting request is held for blocks
# - disk: it is held while its cached blocks are read
# - prefill, decode: in a step that computes part of its prompt, or its next token
# - recompute: in a step that computes again what a preemption took
# - stalled: it runs, but the step gives it no token
# - preempted, swapped: from a preemption until it is scheduled again
# - between: it runs, from the end of a step to the start of the next one
PARTS = (
    *("client", "unseen", "queued", "blocks", "disk", "prefill", "decode", "recompute"),
    *("stalled", "preempted", "swapped", "between"),
)
FOR_BLOCKS = ("blocks", "reserve")  # reasons of a Hold
LEAST_SHARE = 1  # per cent, of a part that a sentence names among the rest
IN_STEPS = ("prefill", "decode", "recompute", "stalled")
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
class Life:
    """A request from its arrival on.

    Attributes:
        part: what its time is spent on from `since_s` on.
        ms: milliseconds by part; their sum is the time from arrival to end, or until now.
        steps: number of steps by part, for those parts that are steps.
        reasons: milliseconds of "queued" and of "blocks" by reason, as words.json names it.
        hold: the first hold for blocks of this very request.
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
    ms: dict[str, float] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, float] = field(default_factory=dict)
    spans: list[Stretch] = field(default_factory=list)


class Account:
    """Accounts for the time of every request, item by item.

    Args:
        keep_spans: whether each Life has its `spans`, too.

    Attributes:
        engine: what does not change; None before the first bundle.
        lives: by the number of the request, also of those that have ended.
    """

    def __init__(self, keep_spans: bool = False) -> None:
        self.engine: EngineFacts | None = None
        self.lives: dict[int, Life] = {}
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
        """Account for the time up to the end of a bundle; gauges say nothing of requests."""
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
        for number, life in list(self._unfinished.items()):
            if life.new[:2] not in named:
                del self.lives[number], self._unfinished[number]

    def _meet(self, new: NewRequest) -> Life | None:
        """The life of a request that is named for the first time."""
        if new.number in self._unfinished:
            return None
        life = Life(new, since_s=new.arrival_s)
        self.lives[new.number] = self._unfinished[new.number] = life
        return life

    def _plan(self, item: Mapping[str, Any], sizes: Mapping[int, list[int]]) -> None:
        """Decide what each request spends a step on."""
        decoded = {*item.get("decoded", ())}
        scheduled = {one[0]: Scheduled(*one) for one in item.get("scheduled", ())}
        swapped = {number: how for number, _, how in item.get("preempted", ())}
        held = Hold(*item["held"]) if "held" in item else None
        for number, life in self._unfinished.items():
            work = scheduled.get(number)
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

    def _end(self, item: Mapping[str, Any], forks: list[Life]) -> None:
        """Count the time to the end of a bundle."""
        for life in self._unfinished.values():
            self._spend(life, item["end_s"], item.get("step"))
        for life in forks:  # until now each has lived as its parent
            parent = self.lives[life.new.parent or 0]
            life.ms, life.reasons = dict(parent.ms), dict(parent.reasons)
            life.steps, life.spans = dict(parent.steps), list(parent.spans)
        for number, life in list(self._unfinished.items()):
            if life.state == "done":
                life.end_s = item["end_s"]
                del self._unfinished[number]
            elif life.part in IN_STEPS:
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


@cache
def words() -> dict[str, Any]:
    """The texts of words.json."""
    text = files(__package__).joinpath("words.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def parts(life: Life, client_ms: float = 0.0) -> dict[str, float]:
    """Milliseconds by part, in the order of PARTS; those without any are left out.

    Args:
        client_ms: from the scheduled arrival to the engine's, where that is known.
    """
    ms = {**life.ms, "client": client_ms}
    return {part: ms[part] for part in PARTS if ms.get(part, 0.0) > 0}


def sentence(life: Life, engine: EngineFacts | None, client_ms: float = 0.0) -> str:
    """Why the request took as long as it did: what most of its time was spent on, then the rest.

    Args:
        life: of the request.
        engine: see `Account`.
        client_ms: see `parts`.
    """
    texts, spent = words()["sentence"], parts(life, client_ms)
    total = sum(spent.values())
    kind = "done" if life.end_s is not None else "unfinished"
    said = [
        texts[kind].format(number=life.new.number, id=life.new.request_id, total=duration(total))
    ]
    if total <= 0:
        return said[0]
    ranked = sorted(spent, key=lambda part: -spent[part])  # stable: ties in the order of PARTS
    share = {part: rounded(100 * spent[part] / total, 0) for part in ranked}
    most = ranked[0]
    said.append(
        texts["most"].format(
            share=share[most], time=duration(spent[most]), because=_because(most, life, engine)
        )
    )
    rest = [
        texts["one"].format(part=words()["parts"][part], share=share[part])
        for part in ranked[1:]
        if float(share[part]) >= LEAST_SHARE
    ]
    if rest:
        said.append(texts["rest"].format(list=", ".join(rest)))
    return " ".join(said)


def _because(part: str, life: Life, engine: EngineFacts | None) -> str:
    texts, reason = words(), ""
    if part in ("queued", "blocks"):
        reasons = {one: ms for one, ms in life.reasons.items() if one in texts[part]}
        longest = max(reasons, key=lambda one: reasons[one], default="")
        _, _, needed, free, spare = life.hold or (0, "", 0, 0, 0)
        values = {**(engine or {}), "needed": needed, "free": free, "spare": spare}
        reason = texts[part][longest].format(**values)
    values = {
        "reason": reason,
        "prompt_tokens": life.new.num_prompt_tokens,
        "steps": _counted("steps", life.steps.get(part, 0)),
        "times": _counted("times", life.num_preemptions),
    }
    because: str = texts["because"][part].format(**values)
    return because


def _counted(what: str, count: int) -> str:
    one, several = words()["sentence"][what]
    text: str = (one if count == 1 else several).format(count=count)
    return text


def duration(ms: float) -> str:
    """A time with its unit, to about three digits."""
    texts = words()["sentence"]
    if ms >= 1000:
        text = texts["s"].format(value=rounded(ms / 1000, 2))
    else:
        text = texts["ms"].format(value=rounded(ms, 0 if ms >= 100 else 1 if ms >= 10 else 2))
    return str(text)


def rounded(value: float, digits: int) -> str:
    """A number with so many decimals, halves upwards, as the page rounds, too: also what is half
    but for the rounding errors of a sum, which depend on its order."""
    scale = 10**digits
    return f"{math.floor(value * scale + 0.5 + 1e-6) / scale:.{digits}f}"
