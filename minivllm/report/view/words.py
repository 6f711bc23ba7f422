"""What a step bundle says, in sentences. The page makes the same ones in JavaScript; both take
their words from words.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from minivllm.extras.observation.bundle import EngineFacts
from minivllm.report.view.why import words

MOVES = ("copied", "saved", "loaded")  # lists of blocks
DISK = ("spilled", "read")  # numbers of blocks


class Sentence(NamedTuple):
    """One decision or change.

    `kind` is "step", "queue", "held", "preempted", "prefill", "decode", "drafts", "cache" or
    "done"; `number` is of the request that it is about, None where it is about none or several.
    `time_s` is when it happened: an arrival or a change of state at its own time, what a step
    decides when it is planned, and what it gives when it ends.
    """

    kind: str
    number: int | None
    text: str
    time_s: float


def sentences(bundle: Mapping[str, Any], engine: EngineFacts | None) -> list[Sentence]:
    """What a bundle says, the most important first.

    Args:
        bundle: as JSON gives it back or as the observer made it.
        engine: facts of the engine, of the first bundle.
    """
    return [
        *_planned(bundle),
        *_waits(bundle, engine),
        *_computed(bundle),
        *_cached(bundle),
        *_ended(bundle),
    ]


def _fill(group: str, name: str, /, **values: Any) -> str:
    text: str = words()[group][name].format(**values)
    return text


def _count(what: str, count: int) -> str:
    one, several = words()["counts"][what]
    text: str = (one if count == 1 else several).format(count=count)
    return text


def _planned(bundle: Mapping[str, Any]) -> list[Sentence]:
    if "step" not in bundle:
        return []
    parts, num_decoded = bundle.get("scheduled", ()), len(bundle.get("decoded", ()))
    tokens = _count("tokens", sum(part[2] for part in parts) + num_decoded)
    requests = _count("requests", len(parts) + num_decoded)
    name = "step" if parts or num_decoded else "idle"
    text = _fill("decisions", name, step=bundle["step"], tokens=tokens, requests=requests)
    return [Sentence("step", None, text, bundle["time_s"])]


def _times(bundle: Mapping[str, Any]) -> dict[tuple[int, str], float]:
    """When each request entered a state, by its number and the state."""
    return {(number, state): time_s for time_s, number, state, _ in bundle.get("states", ())}


def _waits(bundle: Mapping[str, Any], engine: EngineFacts | None) -> list[Sentence]:
    """Who is held and preempted, who arrives, and who is admitted."""
    found = []
    planned_s, entered_s = bundle["time_s"], _times(bundle)
    if "held" in bundle:
        number, reason, needed, free, spare = bundle["held"]
        values = {**(engine or {}), "blocks": _count("blocks", needed), "free": free}
        text = _fill("held", reason, request=number, spare=spare, **values)
        found.append(Sentence("held", number, text, planned_s))
    listed = set()
    for number, by, swapped in bundle.get("preempted", ()):
        listed.add(number)
        name = "swapped" if swapped else "alone" if number == by else "preempted"
        text = _fill("decisions", name, request=number, by=by)
        time_s = entered_s.get((number, "preempted"), planned_s)
        found.append(Sentence("preempted", number, text, time_s))
    for time_s, number, state, _ in bundle.get("states", ()):
        if state == "preempted" and number not in listed and "engine" not in bundle:
            text = _fill("decisions", "restarted", request=number)
            found.append(Sentence("preempted", number, text, time_s))
    for number, _, prompt, most, _, arrival_s, parent in bundle.get("new", ()):
        name = "arrived" if parent is None else "forked"
        values = {"tokens": _count("tokens", prompt), "output": most - prompt, "parent": parent}
        text = _fill("decisions", name, request=number, **values)
        time_s = arrival_s if parent is None else bundle["end_s"]
        found.append(Sentence("queue", number, text, time_s))
    for number, _, reused, overtook in bundle.get("admitted", ()):
        name = "cached" if reused else "overtook" if overtook else "admitted"
        text = _fill("decisions", name, request=number, tokens=_count("tokens", reused))
        time_s = entered_s.get((number, "prefill"), planned_s)
        found.append(Sentence("queue", number, text, time_s))
    return found


def _computed(bundle: Mapping[str, Any]) -> list[Sentence]:
    """Who computes what, and how many drafts were right."""
    found: list[Sentence] = []
    decoding = [1 for _ in bundle.get("decoded", ())]
    for number, start, count, why in bundle.get("scheduled", ()):
        if why == "verify":
            decoding.append(count)
            continue
        tokens = _count("tokens", count)
        text = _fill("decisions", why, request=number, tokens=tokens, start=start)
        found.append(Sentence("prefill", number, text, bundle["time_s"]))
    if decoding:
        requests, tokens = _count("requests", len(decoding)), _count("tokens", sum(decoding))
        text = _fill("decisions", "decode", requests=requests, tokens=tokens)
        found.append(Sentence("decode", None, text, bundle["time_s"]))
    for number, drafts, accepted in bundle.get("drafts", ()):
        values = {"drafts": _count("drafts", drafts), "accepted": accepted}
        text = _fill("decisions", "drafts", request=number, **values)
        found.append(Sentence("drafts", number, text, bundle["end_s"]))
    return found


def _cached(bundle: Mapping[str, Any]) -> list[Sentence]:
    """How blocks came and went that no request owns alone."""
    counts = {"stored": 0, "removed": 0}
    found = []
    for event in bundle.get("kv_events", ()):
        if event["type"] == "AllBlocksCleared":
            found.append(Sentence("cache", None, words()["decisions"]["cleared"], bundle["time_s"]))
        else:
            name = "stored" if event["type"] == "BlockStored" else "removed"
            counts[name] += len(event["blocks"])
    counts |= {name: len(bundle.get(name, ())) for name in MOVES}
    counts |= {name: bundle.get(name, 0) for name in DISK}
    for name, count in counts.items():
        if count:
            text = _fill("decisions", name, blocks=_count("blocks", count))
            time_s = bundle["end_s" if name == "stored" else "time_s"]
            found.append(Sentence("cache", None, text, time_s))
    return found


def _ended(bundle: Mapping[str, Any]) -> list[Sentence]:
    reasons = words()["reasons"]
    return [
        Sentence(
            "done",
            number,
            _fill("decisions", "done", request=number, reason=reasons.get(reason, reason)),
            time_s,
        )
        for time_s, number, state, reason in bundle.get("states", ())
        if state == "done"
    ]
