"""What the stream of a server says against a measurement: tokens that cannot be counted, prompts of
another length."""

from __future__ import annotations

from collections.abc import Mapping

# share of tokens whose chunk may be unknown: so much the latencies between tokens bear
MISPLACED = 0.05
OTHER_PROMPTS = 0.05  # by which the server's count of a text's tokens may differ from ours
TEXTLESS = 2.0  # tokens that a server counts, for each token that their text has
LATE_END = 0.1  # of the mean latency, between a last token and the end of its stream

GroupCounters = Mapping[str, float | str]


def check_stream(
    liveness: Mapping[str, GroupCounters], e2e_ms: float | None = None
) -> tuple[list[str], list[str]]:
    """Judge what an engine counted of a server's streams (its groups `engine` and `stream`).

    Args:
        liveness: counters by group; without a group `stream` there is nothing to judge.
        e2e_ms: the mean latency.

    Returns:
        Reasons against the measurement, and notes.
    """
    stream, engine = liveness.get("stream"), liveness.get("engine") or {}
    if not stream:
        return [], []
    reasons, notes = [], []
    requests, tokens = _number(engine, "requests"), _number(stream, "tokens")
    if uncounted := _number(stream, "requests_uncounted"):
        reasons.append(
            f"of {uncounted:.0f} of {requests:.0f} requests the number of tokens is unknown: "
            "the server tells neither their ids nor `usage`, and their text does not come "
            "to what was asked for"
        )
    late, misplaced = _number(engine, "tokens_counted_late"), _number(stream, "tokens_misplaced")
    if misplaced > MISPLACED * tokens:
        reasons.append(
            f"of {misplaced:.0f} of {tokens:.0f} tokens the arrival time is unknown: chunks of "
            "the stream hold several, and neither ids, `usage` on each chunk nor their text "
            "tells how many"
        )
    elif late or misplaced:
        notes.append(
            f"{late:.0f} of {tokens:.0f} tokens were counted when their stream had ended, from "
            f"the text of each chunk and the server's total; of {misplaced:.0f} the chunk is not "
            "certain"
        )
    if others := _number(engine, "prompts_of_other_length"):
        sent, counted = (_number(stream, f"prompt_tokens_{n}") for n in ("sent", "counted"))
        line = (
            f"the server counts {counted:.0f} prompt tokens where {sent:.0f} were meant, in "
            f"{others:.0f} of {requests:.0f} requests"
        )
        as_text = engine.get("prompts") == "text"
        if engine.get("prompts") == "messages":
            notes.append(f"{line}: its chat template and images make others of the messages")
        elif as_text and abs(counted - sent) <= OTHER_PROMPTS * sent:
            notes.append(f"{line}: it cuts their text into other tokens")
        else:
            reasons.append(f"{line}: it did other work than was asked")
    notes += [
        *_textless(stream),
        *_client_queue(stream, requests),
        *_late_ends(stream, e2e_ms),
    ]
    return reasons, notes


def _late_ends(stream: GroupCounters, e2e_ms: float | None) -> list[str]:
    """A note on streams that ended long after their last token."""
    lag = _number(stream, "end_lag_ms")
    if e2e_ms is None or lag <= LATE_END * e2e_ms:
        return []
    return [
        f"streams ended {lag:.1f} ms after their last token on average, "
        f"{100 * lag / e2e_ms:.0f} % of the latency, which does not include it; the next "
        "request of a closed loop waited for that"
    ]


def _client_queue(stream: GroupCounters, requests: float) -> list[str]:
    """A note on requests that waited for one of the client's own connections."""
    if not (queued := _number(stream, "requests_queued_in_client")):
        return []
    return [
        f"{queued:.0f} of {requests:.0f} requests waited "
        f"{_number(stream, 'client_queue_ms'):.1f} ms on average in the client for one of "
        f"engine.max_connections={_number(stream, 'client_connections'):.0f} connections, which "
        "their latency includes: raise it, or offer fewer at once"
    ]


def _textless(stream: GroupCounters) -> list[str]:
    """A note on answers that have more tokens, as the server counts, than their text."""
    counted, read = _number(stream, "tokens_of_texts"), _number(stream, "text_tokens")
    if counted <= TEXTLESS * read:
        return []
    return [
        f"the server counts {counted:.0f} tokens in answers whose text has {read:.0f} by the "
        "model's tokenizer: more tokens than text"
    ]


def _number(counters: GroupCounters, name: str) -> float:
    value = counters.get(name, 0.0)
    return float(value) if isinstance(value, int | float) else 0.0
