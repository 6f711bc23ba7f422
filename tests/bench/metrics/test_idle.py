"""How long a device idled in a trace, from events that are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # not in its __all__

from minivllm.bench.metrics.idle import (
    Decoding,
    Idle,
    Idleness,
    decoding_run,
    idle_share,
    idleness,
    merged,
    sentence,
)

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
def test_what_is_idle_is_what_nothing_covers(
    intervals: list[tuple[int, int]], begin: int, end: int
) -> None:
    share = idle_share(intervals, begin, end)
    if end <= begin:
        assert share is None
    else:
        free = [t for t in range(begin, end) if not any(a <= t < b for a, b in intervals)]
        assert share == pytest.approx(len(free) / (end - begin))


def step(requests: int, prompts: int = 0) -> dict[str, Any]:
    return {
        "num_requests": requests,
        "num_tokens": requests + prompts,
        "num_prefill_tokens": prompts,
    }


def test_the_longest_run_of_like_steps_that_decode() -> None:
    assert decoding_run([]) == range(0)
    assert decoding_run([step(1, 8), step(2, 8)]) == range(0)
    steps = [step(1, 8), *[step(1)] * 2, step(2, 8), *[step(2)] * 4, step(1), step(1)]
    assert decoding_run(steps) == range(4, 8)
    assert decoding_run([step(2)] * 2 + [step(1)] * 2) == range(2)  # the first of equals


def event(
    name: str, start: float, end: float, device: Any, annotation: bool = False, number: int = 0
) -> Any:
    times = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(
        name=name, time_range=times, device_type=device, is_user_annotation=annotation, id=number
    )


def kernel(start: float, end: float, launch: int = 0, name: str = "gemm") -> Any:
    return event(name, start, end, DeviceType.CUDA, number=launch)


def prepare(at: float) -> Any:
    return event("prepare", at, at + 1, DeviceType.CPU, True)


def launch(at: float, number: int, name: str = "cudaGraphLaunch") -> Any:
    return event(name, at, at + 1, DeviceType.CPU, number=number)


def graph(begin: float, end: float, number: int) -> list[Any]:
    """The kernels of a graph: a dependent one after the other, 20 us from each end to the next
    begin, and one beside."""
    middle = (begin + end) / 2
    first, second = kernel(begin, middle - 10, number), kernel(middle + 10, end, number, "attend")
    return [first, second, kernel(begin + 5, begin + 9, number, "beside")]


def test_a_trace_of_a_gpu() -> None:
    """A prompt and five decoding steps of 1 ms: graphs of 900 us, of which 20 are idle, and copies
    before and after them."""
    starts = [1000.0 * i for i in range(1, 7)]
    events = [
        event(
            "aten::mm", 0.0, 9000.0, DeviceType.CPU, number=101
        ),  # torch counts its operations in its own way
        event("forward", 0.0, 9000.0, DeviceType.CUDA, True),
        *[prepare(at) for at in reversed(starts)],
        *[launch(at + 10, 100 + i) for i, at in enumerate(starts)],
        *[one for i, at in enumerate(starts) for one in graph(at + 60, at + 960, 100 + i)],
        *[launch(at + 5, 200 + i, "cudaMemcpyAsync") for i, at in enumerate(starts)],
        *[
            kernel(at + 40, at + 50, 200 + i, "Memcpy HtoD (Pinned -> Device)")
            for i, at in enumerate(starts)
        ],
        *[kernel(at + 970, at + 980, 200 + i, "Memcpy DtoH") for i, at in enumerate(starts)],
    ]
    steps = [step(4, 60), *[step(4)] * 5]
    found = idleness(events, steps)
    assert found is not None and found.decoding is not None
    assert found.whole == Idle(6, 4, 5.94, pytest.approx(1 - 5400 / 5940))
    # To the next step's first kernel it is 100 us, also where the device copies; none of it is
    # within a graph.
    assert found.decoding == Decoding(4, 4, 4.0, pytest.approx(0.1), pytest.approx(0.02))
    assert sentence(found) == (
        "The device was idle for 9.1% of the 5.9 ms from its first kernel to the end of its "
        "last one. Of the 4.0 ms of 4 steps in which 4 requests only decoded, 10.0% lay between "
        "a step's last kernel and the next one's first, and for 2.0% it was idle within steps."
    )


@pytest.mark.parametrize("ahead", [0.0, 900.0, 1700.0])
def test_kernels_are_of_the_step_that_launched_them(ahead: float) -> None:
    """With overlap the host is a step ahead: when it prepares the next, the device is still at the
    one before."""
    starts = [2000.0 + 1000 * i for i in range(5)]
    events = [
        *[prepare(at - ahead) for at in starts],
        *[launch(at - ahead + 10, i, "cuLaunchKernelEx") for i, at in enumerate(starts)],
        *[kernel(at + 20, at + 700, i) for i, at in enumerate(starts)],
        *[launch(at - ahead + 30, 50 + i, "cudaLaunchKernel") for i, at in enumerate(starts)],
        *[kernel(at + 705, at + 1010, 50 + i, "sample") for i, at in enumerate(starts)],
    ]
    found = idleness(events, [step(8)] * 5)
    assert found is not None
    assert found.decoding == Decoding(4, 8, 4.0, pytest.approx(0.01), pytest.approx(0.005))


def test_steps_that_run_beside_each_other_have_nothing_between_them() -> None:
    spans = [(0.0, 130.0), (100.0, 150.0), (200.0, 220.0), (300.0, 350.0)]
    events = [prepare(at) for at in range(4)] + [launch(at + 0.5, at) for at in range(4)]
    events += [kernel(*span, number) for number, span in enumerate(spans)]
    found = idleness(events, [step(2)] * 4)
    assert found is not None
    assert found.decoding == Decoding(3, 2, 0.3, pytest.approx((50 + 80) / 300), pytest.approx(0.0))


def test_a_kernel_of_unknown_launch_is_of_no_step() -> None:
    events = [prepare(at) for at in (0, 100, 200)] + [launch(at + 1, at) for at in (0, 100, 200)]
    events += [kernel(at + 10, at + 60, at) for at in (0, 100, 200)] + [
        kernel(at + 60, at + 90, 7) for at in (0, 100, 200)
    ]
    steps = [step(2)] * 3
    found = idleness(events, steps)
    assert found is not None and found.decoding == Decoding(
        2, 2, 0.2, pytest.approx(0.5), pytest.approx(0.0)
    )
    without = [one for one in events if not (one.name == "cudaGraphLaunch" and one.id == 100)]
    assert (found := idleness(without, steps)) is not None and found.decoding is None


def test_without_decoding_steps_the_whole_alone_is_told() -> None:
    events = [kernel(0, 30), kernel(60, 100), *[prepare(at) for at in (0, 20)]]
    expected = Idleness(Idle(2, 3, 0.1, pytest.approx(0.3)), None)
    assert idleness(events, [step(3, 8)] * 2) == expected
    assert sentence(Idleness(Idle(2, 3, 0.1, 0.3), None)).endswith("to the end of its last one.")
    assert idleness(events, [step(3, 8), step(3)]) == expected  # one that nothing follows
    assert idleness(events[:2], [step(3)] * 5) == Idleness(
        Idle(5, 3, 0.1, pytest.approx(0.3)), None
    )


def test_one_kernel_is_never_idle_and_none_is_no_device() -> None:
    assert idleness([kernel(5, 8)], [step(1)]) == Idleness(Idle(1, 1, 0.003, 0.0), None)
    on_cpu = [event("aten::mm", 0.0, 5.0, DeviceType.CPU), prepare(0)]
    assert idleness(on_cpu, [step(1)]) is None and idleness([], []) is None
