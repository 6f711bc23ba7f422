"""Why a request took as long as it did: its time by part, and a sentence about it.

The page does the same in JavaScript: what differs there is a fault. Both take their words from
words.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from minivllm.report.view.account import CAUSES, PARTS, Account, Life

LEAST_SHARE = 1  # per cent, of a part that a sentence names


@cache
def words() -> dict[str, Any]:
    """The texts of words.json."""
    text = files(__package__).joinpath("words.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def parts(life: Life, account: Account, client_ms: float = 0.0) -> dict[str, float]:
    """Milliseconds by part, in the order of PARTS; those without any are left out. The time of a
    step is divided among the request's own tokens and those of others, see TokenCost; where
    its steps were faster than that says, all their tokens bear them equally.

    Args:
        life: of a request.
        account: that it is of.
        client_ms: from the scheduled arrival to the engine's, where that is known.
    """
    ms = {**life.ms, "client": client_ms, "prompts": 0.0, "others": 0.0}
    per_token = account.cost.ms_per_token
    for part, beside in life.beside.items():
        tokens = beside.prompts + beside.others
        if tokens and (whole := ms.get(part, 0.0)) > 0:
            each = min(per_token, whole / (tokens + beside.own))
            ms["prompts"] += each * beside.prompts
            ms["others"] += each * beside.others
            ms[part] = whole - each * tokens
    return {part: ms[part] for part in PARTS if ms.get(part, 0.0) > 0}


def sentence(life: Life, account: Account, client_ms: float = 0.0) -> str:
    """Why the request took as long as it did: first what it would not have had alone, the longest
    first, then the rest.

    Args:
        life: of a request.
        account: that it is of.
        client_ms: see `parts`.
    """
    texts, spent = words()["sentence"], parts(life, account, client_ms)
    total = sum(spent.values())
    # Stable: ties stay in the order of PARTS.
    ranked = sorted(spent, key=lambda part: (part not in CAUSES, -spent[part]))
    share = {part: rounded(100 * spent[part] / total, 0) for part in ranked}
    shown = [part for part in ranked if float(share[part]) >= LEAST_SHARE]
    alone = total - sum(spent[part] for part in ranked if part in CAUSES)
    kind = "done" if life.end_s is not None else "unfinished"
    kind += "_beside" if shown and shown[0] in CAUSES else ""
    values = {"number": life.new.number, "id": life.new.request_id}
    clauses = [texts[kind].format(**values, total=duration(total), alone=duration(alone))]
    if not shown:
        return clauses[0]
    first, *others = shown
    because = _because(first, life, account)
    clauses.append(
        texts["most"].format(share=share[first], time=duration(spent[first]), because=because)
    )
    rest = [texts["one"].format(part=words()["parts"][one], share=share[one]) for one in others]
    if rest:
        clauses.append(texts["rest"].format(list=", ".join(rest)))
    return " ".join(clauses)


def _because(part: str, life: Life, account: Account) -> str:
    texts, reason = words(), ""
    if part in ("queued", "blocks"):
        reasons = {one: ms for one, ms in life.reasons.items() if one in texts[part]}
        longest = max(reasons, key=lambda one: reasons[one], default="")
        _, _, needed, free, spare = life.hold or (0, "", 0, 0, 0)
        values = {**(account.engine or {}), "needed": needed, "free": free, "spare": spare}
        reason = texts[part][longest].format(**values)
    beside = [*life.beside.values()]
    steps = life.steps.get(part, 0)
    if part in ("prompts", "others"):
        steps = sum(one.prompt_steps if part == "prompts" else one.other_steps for one in beside)
    tokens = sum(one.prompts if part == "prompts" else one.others for one in beside)
    values = {
        "reason": reason,
        "prompt_tokens": life.new.num_prompt_tokens,
        "tokens": f"{tokens:,}",
        "steps": _counted("steps", steps),
        "times": _counted("times", life.num_preemptions),
        "for": preempted_for(life.new.number, life.preempted_for),
    }
    because: str = texts["because"][part].format(**values)
    return because


def preempted_for(number: int, needed_by: Sequence[int]) -> str:
    """For which requests the blocks of a request were taken, as part of a sentence: "" where
    nobody needed them."""
    texts, others = words()["sentence"]["for"], [*dict.fromkeys(needed_by)]
    if number in others:
        others.remove(number)
        if not others:
            return str(texts["alone"])
    if not others:
        return ""
    *most, last = map(str, others)
    listed = f"{', '.join(most)} and {last}" if most else last
    text: str = texts["several" if most else "one"].format(requests=listed)
    return text


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
