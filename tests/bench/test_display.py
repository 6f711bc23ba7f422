"""What a person sees of a measurement."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from minivllm.bench.display import Display
from minivllm.bench.records.measurement import DEFAULT_ARM, Measurement

MEASUREMENT = Measurement("1f", "c", "sweep", DEFAULT_ARM, 0, "runs/sweep/tiny-bf16-1f", {})


def event(name: str, **details: Any) -> dict[str, Any]:
    return {"event": name, "measurement": MEASUREMENT, "position": 1, "total": 2, **details}


EVENTS = [
    event("loading"),
    event("loading", loaded=45, to_load=99),
    event("loading", loaded=99, to_load=99),
    event("warmup"),
    event("measuring", tokens=30, total_tokens=60, elapsed_s=2.0),
    event("done", status="ok"),
]


def test_elsewhere_each_phase_is_one_plain_line() -> None:
    console = Console(file=io.StringIO(), width=100)
    with Display(console=console) as display:
        for one in EVENTS:
            display.update(one)
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "[1/2] tiny-bf16 loading",
        "[1/2] tiny-bf16 warming up",
        "[1/2] tiny-bf16 measuring",
        "[1/2] tiny-bf16 ok",
    ]


@pytest.mark.parametrize(("repeats", "said"), [(1, ""), (8, ", repeat 7/8"), (3, ", repeat 7")])
def test_a_block_is_counted_among_those_that_were_asked_for(repeats: int, said: str) -> None:
    measurement = replace(MEASUREMENT, block=6, config={"measure": {"repeats": repeats}})
    console = Console(file=io.StringIO(), width=100)
    with Display(console=console) as display:
        display.update(event("loading") | {"measurement": measurement})
    assert console.file.getvalue() == f"[1/2] tiny-bf16{said} loading\n"  # type: ignore[attr-defined]


def test_an_arm_of_a_sweep_is_named() -> None:
    """Cells that differ in a knob which is in no name would read alike."""
    console = Console(file=io.StringIO(), width=100)
    with Display(console=console) as display:
        display.update(
            event("loading") | {"measurement": replace(MEASUREMENT, arm="cache.block_size=32")}
        )
        display.update(event("warmup") | {"measurement": replace(MEASUREMENT, arm="tiny-bf16")})
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "[1/2] tiny-bf16 (cache.block_size=32) loading",
        "[1/2] tiny-bf16 warming up",
    ]


def test_on_a_terminal_loading_has_a_percentage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    seen = []
    with Display(console=console) as display:
        assert display._progress is not None
        for one in EVENTS[:-1]:
            display.update(one)
            task = display._progress.tasks[0]
            seen.append(
                (task.description.removeprefix("[1/2] tiny-bf16 "), task.completed, task.total)
            )
    assert seen == [
        ("loading", 0.0, None),
        ("loading 45 %", pytest.approx(45 / 99), 1.0),
        ("loading 100 %", 1.0, 1.0),
        ("warming up", 0.0, None),
        ("measuring", 0.5, 1.0),
    ]
