"""How long a device idled in a trace, from events that are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # not in its __all__

from minivllm.bench.idle import Idle, Idleness, decoding_run, idle_share, idleness, merged, told

INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)))


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([], []),
        ([(1.0, 3.0)], [(1.0, 3.0)]),
        ([(5.0, 6.0), (1.0, 3.0)], [(1.0, 3.0), (5.0, 6.0)]),
        ([(1.0, 4.0), (2.0, 6.0)], [(1.0, 6.0)]),  # two streams
        ([(1.0, 9.0), (2.0, 3.0), (4.0, 5.0)], [(1.0, 9.0)]),  # nested
        ([(1.0, 2.0), (2.0, 3.0)], [(1.0, 3.0)]),  # one ends as the next begins
        ([(1.0, 1.0), (4.0, 3.0)], []),  # no time at all
    ],
)
def test_intervals_are_merged(
    intervals: list[tuple[float, float]], expected: list[tuple[float, float]]
) -> None:
    assert merged(intervals) == expected


@given(INTERVALS, st.integers(0, 30), st.integers(0, 30))
def test_what_is_idle_is_what_nothing_covers(intervals: list[tuple[int, int]], begin: int, end: int) -> None:
    share = idle_share(intervals, begin, end)
    if end <= begin:
        assert share is None
    else:
        free = [t for t in range(begin, end) if not any(a <= t < b for a, b in intervals)]
        assert share == pytest.approx(len(free) / (end - begin))


def step(requests: int, prompts: int = 0) -> dict[str, Any]:
    return {"num_requests": requests, "num_tokens": requests + prompts, "num_prefill_tokens": prompts}


def test_the_longest_run_of_like_steps_that_decode() -> None:
    assert decoding_run([]) == range(0)
    assert decoding_run([step(1, 8), step(2, 8)]) == range(0)
    steps = [step(1, 8), *[step(1)] * 2, step(2, 8), *[step(2)] * 4, step(1), step(1)]
    assert decoding_run(steps) == range(4, 8)
    assert decoding_run([step(2)] * 2 + [step(1)] * 2) == range(2)  # the first of equals


def event(name: str, start: float, end: float, device: Any, annotation: bool = False) -> Any:
    times = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, time_range=times, device_type=device, is_user_annotation=annotation)


def kernel(start: float, end: float) -> Any:
    return event("gemm", start, end, DeviceType.CUDA)


def prepare(at: float) -> Any:
    return event("prepare", at, at + 1, DeviceType.CPU, True)


def test_a_trace_of_a_gpu() -> None:
    """A prompt and five decoding steps of 1 ms, whose kernels take 0.9 ms; the host prepares them in that order."""
    starts = [1000.0 * i for i in range(1, 7)]
    events = [
        event("aten::mm", 0.0, 9000.0, DeviceType.CPU),  # the host's time is no device's
        event("forward", 0.0, 9000.0, DeviceType.CUDA, True),
        *[kernel(at + 50, at + 950) for at in starts],
        *[kernel(at + 100, at + 200) for at in starts],  # on another stream
        *[prepare(at) for at in reversed(starts)],
    ]
    found = idleness(events, [step(4, 60), *[step(4)] * 5])
    assert found is not None and found.decoding is not None
    assert found.whole == Idle(6, 4, 5.9, pytest.approx(1 - 5400 / 5900))
    assert found.decoding == Idle(3, 4, 3.0, pytest.approx(0.1))  # from the second to the last
    assert told(found) == (
        "The device was idle for 8.5% of the 5.9 ms from its first kernel to the end of its last one, and for 10.0% of the "
        "3.0 ms of 3 steps in which 4 requests only decoded."
    )


def test_without_decoding_steps_the_whole_alone_is_told() -> None:
    events = [kernel(0, 30), kernel(60, 100), *[prepare(at) for at in (0, 20)]]
    expected = Idleness(Idle(2, 3, 0.1, pytest.approx(0.3)), None)
    assert idleness(events, [step(3, 8)] * 2) == expected
    assert told(Idleness(Idle(2, 3, 0.1, 0.3), None)).endswith("to the end of its last one.")
    decoding = [step(3)] * 2
    assert idleness(events, decoding) == expected  # none but the first and the last
    assert idleness(events[:2], [step(3)] * 5) == Idleness(Idle(5, 3, 0.1, pytest.approx(0.3)), None)


def test_one_kernel_is_never_idle_and_none_is_no_device() -> None:
    assert idleness([kernel(5, 8)], [step(1)]) == Idleness(Idle(1, 1, 0.003, 0.0), None)
    on_cpu = [event("aten::mm", 0.0, 5.0, DeviceType.CPU), prepare(0)]
    assert idleness(on_cpu, [step(1)]) is None and idleness([], []) is None
