"""Recorded steps in Chrome's trace format, which https://ui.perfetto.dev opens beside a trace of
torch's profiler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from minivllm.extras.observation.bundle import PreemptedRequest, Scheduled
from minivllm.report.view.account import IN_STEPS, Account, Life
from minivllm.report.view.state import ViewState
from minivllm.report.view.why import words

Event = dict[str, Any]
ENGINE, REQUESTS = 1, 2  # "processes" of the trace
STEPS = 1  # the engine's track
TRIMONTH_S = 7889238  # torch's profiler counts its times from the last multiple of it
PHASES = ("schedule", "draft", "prepare", "forward", "sample", "emit", "gap")  # of `timed`


def chrome_trace(items: Sequence[Mapping[str, Any]], unix_s: float | None) -> dict[str, Any]:
    """The trace of a recording: the steps and each request as tracks, counters, and an arrow for
    each preemption, from the request that grew to the one that gave up its blocks.

    Args:
        items: as `read_events` returns them.
        unix_s: Unix time at which their clock was 0; None counts from there.

    Returns:
        A JSON object. Its times count from `baseTimeNanoseconds` as those of torch's traces do.
    """
    base_s = 0 if unix_s is None else int((unix_s + items[0]["time_s"]) // TRIMONTH_S * TRIMONTH_S)
    trace = _Trace((unix_s or 0.0) - base_s)
    return {
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base_s * 1_000_000_000,
        "traceEvents": list(trace.events(items)),
    }


class _Trace:
    """Makes the events.

    Args:
        offset_s: added to all times.
    """

    def __init__(self, offset_s: float) -> None:
        self._offset_s = offset_s
        self._last_end_s: float | None = None
        self._sizes: dict[int, int] = {}  # tokens of each request

    def events(self, items: Sequence[Mapping[str, Any]]) -> Iterator[Event]:
        yield from _name(ENGINE, "engine")
        yield from _name(REQUESTS, "requests")
        yield from _name(ENGINE, "steps", STEPS)
        account, state = Account(keep_spans=True), ViewState()
        arrows = 0
        for item in items:
            account.take(item)
            if "gauges" in item:
                yield from self._gauges(item["gauges"])
                continue
            state.apply(item)  # type: ignore[arg-type]
            yield from self._counters(item, state)
            if "step" in item:
                yield self._step(item, account)
                for one in item.get("preempted", ()):
                    arrows += 1
                    yield from self._arrow(item["time_s"], PreemptedRequest(*one), arrows)
        for number, life in account.lives.items():
            yield from _name(REQUESTS, f"{life.new.request_id}", number + 1)
            yield from self._life(life)

    def _us(self, time_s: float) -> float:
        """Microseconds after the trace's base."""
        return round(1e6 * (time_s + self._offset_s), 3)

    def _slice(
        self, pid: int, tid: int, name: str, start_s: float, end_s: float, **args: Any
    ) -> Event:
        ts = self._us(start_s)
        lasts = round(self._us(end_s) - ts, 3)
        times = {"ts": ts, "dur": lasts}
        return {"ph": "X", "pid": pid, "tid": tid, "name": name, **times, "args": args}

    def _counter(self, name: str, time_s: float, **values: float) -> Event:
        return {"ph": "C", "pid": ENGINE, "name": name, "ts": self._us(time_s), "args": values}

    def _step(self, item: Mapping[str, Any], account: Account) -> Event:
        parts = [Scheduled(*one) for one in item.get("scheduled", ())]
        num_decoded = len(item.get("decoded", ()))
        args: dict[str, Any] = {
            "requests": len(parts) + num_decoded,
            "tokens": sum(part.num_tokens for part in parts) + num_decoded,
            "prompt_tokens": sum(part.num_tokens for part in parts if part.why != "verify"),
        }
        if "held" in item:
            number, reason, *_ = item["held"]
            args["held"] = f"{account.lives[number].new.request_id}: {reason}"
        if "timed" in item:  # of the step that was timed last
            args |= {f"{name}_ms": ms for name, ms in zip(PHASES, item["timed"], strict=True)}
        name = f"step {item['step']}"
        return self._slice(ENGINE, STEPS, name, item["time_s"], item["end_s"], **args)

    def _counters(self, item: Mapping[str, Any], state: ViewState) -> Iterator[Event]:
        end_s, running = item["end_s"], 0
        for one in state.requests.values():
            running += one.state in ("prefill", "decode")
        yield self._counter("requests", end_s, running=running, waiting=state.num_waiting)
        yield self._counter("used blocks", end_s, blocks=state.num_used_blocks)
        made = len(item.get("decoded", ()))
        for new in item.get("new", ()):
            self._sizes[new[0]] = new[2]
        for number in item.get("decoded", ()):
            self._sizes[number] += 1
        for number, num_tokens, _ in item.get("sizes", ()):
            made += max(0, num_tokens - self._sizes[number])
            self._sizes[number] = num_tokens
        if "step" in item:
            if self._last_end_s is not None and end_s > self._last_end_s:
                rate = made / (end_s - self._last_end_s)
                yield self._counter("output tokens/s", end_s, tokens=round(rate, 1))
            self._last_end_s = end_s

    def _gauges(self, gauges: Mapping[str, float]) -> Iterator[Event]:
        time_s = gauges["time_s"]
        yield self._counter("memory", time_s, bytes=gauges["memory_bytes"])
        if "watts" in gauges:
            yield self._counter("power", time_s, watts=gauges["watts"])

    def _arrow(self, time_s: float, preempted: PreemptedRequest, number: int) -> Iterator[Event]:
        """From what the request that grows does in this step to the wait that begins with it."""
        common = {"cat": "preemption", "name": "preempted", "id": number, "pid": REQUESTS}
        both = {"ts": self._us(time_s)}
        yield {**common, **both, "ph": "s", "tid": preempted.needed_by + 1}
        yield {**common, **both, "ph": "f", "bp": "e", "tid": preempted.number + 1}

    def _life(self, life: Life) -> Iterator[Event]:
        """A slice for all of it, and within it what its time was spent on."""
        number, texts = life.new.number + 1, words()["parts"]
        if not life.spans:
            return
        first, last = life.spans[0].start_s, life.spans[-1].end_s
        whole = {
            "prompt_tokens": life.new.num_prompt_tokens,
            "finish_reason": life.finish_reason,
            "preemptions": life.num_preemptions,
        }
        yield self._slice(REQUESTS, number, life.new.request_id, first, last, **whole)
        for one in life.spans:
            args = {"step": one.step} if one.part in IN_STEPS else {}
            yield self._slice(REQUESTS, number, texts[one.part], one.start_s, one.end_s, **args)


def _name(pid: int, name: str, tid: int | None = None) -> Iterator[Event]:
    """What a process or a track is called; tracks stay in the order of their numbers."""
    if tid is None:
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
        return
    track = {"ph": "M", "pid": pid, "tid": tid}
    yield {**track, "name": "thread_name", "args": {"name": name}}
    yield {**track, "name": "thread_sort_index", "args": {"sort_index": tid}}
