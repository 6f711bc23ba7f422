"""runtime.profile: what a trace holds, where it ends, and that the engine is as it was."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # not in its __all__
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from minivllm import LLM, SamplingParams
from minivllm.bench import profile
from minivllm.bench.metrics import idle
from minivllm.bench.records import storage
from minivllm.bench.records.measurement import Measurement
from minivllm.bench.session import Session
from minivllm.config.compose import compose
from minivllm.engine.executor import phase_begins
from minivllm.engines.minivllm.engine import phase_ranges
from minivllm.errors import BadInput
from minivllm.extras.graphs import GraphKey
from tests.bench.faulty import FaultyEngine
from tests.extras.test_graphs import keep

PHASES = ["schedule", "prepare", "forward", "sample", "emit"]
SMALL = [
    "quant=fp32",
    "runtime.device=cpu",
    "measure.roofline=false",
    "workload.num_requests=3",
    "workload.input_len=8",
]


def session_of(tmp_path: Path, *overrides: str) -> tuple[Session, Measurement]:
    config = compose([*SMALL, "runtime.profile=true", *overrides])
    directory = tmp_path / "sweep" / "cell-r"
    directory.mkdir(parents=True)
    measurement = Measurement("r", "c", "sweep", "a", 0, str(directory), config)
    return Session(config, lambda event, **details: None), measurement


def events_of(folder: Path) -> list[dict[str, Any]]:
    with gzip.open(folder / storage.TRACE) as file:
        return sorted(json.load(file)["traceEvents"], key=lambda event: event.get("ts", 0))


def ranges_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event.get("cat") == "user_annotation"]


def test_a_trace_has_the_phases_and_the_operations_within(tmp_path: Path) -> None:
    session, measurement = session_of(tmp_path, "workload.output_len=6")
    result = session.measure(measurement)
    assert not (measurement.path / storage.TRACE).exists()  # not before the record is made
    session.profile(measurement)
    events = events_of(measurement.path)
    ranges = ranges_of(events)
    # one full batch: the whole load
    assert [event["name"] for event in ranges] == PHASES * len(result.steps)
    for event, after in itertools.pairwise(ranges):
        assert event["ts"] + event["dur"] <= after["ts"] + 1  # one after the other; microseconds
    forward = [event for event in ranges if event["name"] == "forward"]
    products = [event for event in events if event["name"] == "aten::linear"]
    assert products and all(
        any(f["ts"] <= event["ts"] <= f["ts"] + f["dur"] for f in forward) for event in products
    )
    table = (measurement.path / storage.OPERATIONS).read_text()
    assert (
        f"{len(result.steps)} steps of 3 requests (1 of them computed prompt tokens, 5 only "
        "decoded)" in table
    )
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) == profile.LONGEST and not any(f"`{name}`" in table for name in PHASES)
    times = [float(row[2]) for row in rows]
    assert times == sorted(times, reverse=True)
    assert {path.name for path in measurement.path.iterdir()} == {storage.TRACE, storage.OPERATIONS}
    assert "idle" not in table  # there is no device beside the host
    session.close()


def test_a_trace_ends_after_a_number_of_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "PROFILED_STEPS", 4)
    session, measurement = session_of(tmp_path, "workload.output_len=20")
    session.measure(measurement)
    session.profile(measurement)
    assert Counter(
        event["name"] for event in ranges_of(events_of(measurement.path))
    ) == dict.fromkeys(PHASES, 4)
    assert not session.engine.engine.has_unfinished  # type: ignore[attr-defined]
    session.profile(measurement)  # nothing is left of the requests
    session.close()


def test_a_trace_that_prompts_fill_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "PROFILED_STEPS", 2)
    session, measurement = session_of(
        tmp_path, "workload.output_len=3", "batching.max_num_batched_tokens=8"
    )
    session.measure(measurement)
    session.profile(measurement)
    table = (measurement.path / storage.OPERATIONS).read_text()
    assert "2 steps of 3 requests (2 of them computed prompt tokens, 0 only decoded)" in table
    session.close()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("poll", "no space"),
        ("compression", "no space"),
        ("export", "torch could not write the trace"),
        ("empty export", "torch could not write the trace"),
        ("table", "no space"),
    ],
)
def test_a_trace_is_whole_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, words: str
) -> None:
    session, measurement = session_of(tmp_path, "workload.output_len=3")
    session.measure(measurement)

    def fail(*args: Any) -> Any:
        raise OSError("no space left")

    def leave_empty(seen: Any, path: str) -> None:
        Path(path).touch()
        Path(f"{path}.tmp").touch()

    if fault == "poll":
        monkeypatch.setattr(session.engine, "poll", fail)
    elif fault == "compression":
        monkeypatch.setattr("shutil.copyfileobj", fail)
    elif fault == "export":
        monkeypatch.setattr(torch_profile, "export_chrome_trace", lambda seen, path: None)
    elif fault == "empty export":
        monkeypatch.setattr(torch_profile, "export_chrome_trace", leave_empty)
    else:
        monkeypatch.setattr(profile, "operations", fail)
    with pytest.raises(OSError, match=words):
        session.profile(measurement)
    assert list(measurement.path.iterdir()) == []
    assert session.engine.engine.runner.mark is phase_begins  # type: ignore[attr-defined]  # no range is left open
    session.close()


def test_the_engine_is_as_it_was() -> None:
    with LLM("tiny", quant="fp32", device="cpu") as llm:
        objects = (llm.engine, llm.engine.launcher, llm.engine.runner)
        before = [dict(vars(one)) for one in objects]
        with phase_ranges(llm.engine):
            assert llm.engine.runner.mark is not phase_begins
        assert [dict(vars(one)) for one in objects] == before
        assert llm.engine.runner.mark is phase_begins


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_each_step_is_prepared_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: str
) -> None:
    """As `idle.py` takes the steps of a trace to be; kernels that are made up stand in for a
    device's."""
    seen: list[Any] = []

    def with_kernels(events: Any, steps: Any) -> Any:
        seen[:] = [event.time_range.start for event in events if event.name == idle.STEP]

        def made(name: str, device: Any, number: int, at: float) -> Any:
            times = SimpleNamespace(start=at, end=at + 1)
            return SimpleNamespace(
                name=name, id=number, device_type=device, is_user_annotation=False, time_range=times
            )

        launches = [made("cudaGraphLaunch", DeviceType.CPU, i, at + 1) for i, at in enumerate(seen)]
        kernels = [made("gemm", DeviceType.CUDA, i, at + 2) for i, at in enumerate(seen)]
        return idle.idleness([*events, *launches, *kernels], steps)

    monkeypatch.setattr(profile, "idleness", with_kernels)
    session, measurement = session_of(
        tmp_path, "workload.output_len=6", f"runtime.overlap={overlap}"
    )
    result = session.measure(measurement)
    session.profile(measurement)
    assert len(seen) == len(result.steps) == 6
    found = json.loads((measurement.path / storage.IDLE).read_text())
    assert found["whole"]["steps"] == 6 and found["decoding"]["steps"] == 4
    assert found["decoding"]["requests"] == 3
    span_ms = (max(seen) - sorted(seen)[1]) / 1e3  # from the first decoding step to the last
    assert found["decoding"]["span_ms"] == pytest.approx(span_ms)
    assert found["decoding"]["between"] == pytest.approx(1 - 4e-3 / span_ms)
    assert found["decoding"]["within"] == pytest.approx(0.0, abs=1e-9)
    table = (measurement.path / storage.OPERATIONS).read_text()
    assert "in which 3 requests only decoded, " in table
    storage.discard_trace(measurement.path)
    assert list(measurement.path.iterdir()) == []
    session.close()


def test_overlapping_steps_have_their_phases_too() -> None:
    with LLM("tiny", quant="fp32", device="cpu", overrides=["runtime.overlap=true"]) as llm:
        with phase_ranges(llm.engine), torch_profile(activities=[ProfilerActivity.CPU]) as seen:
            llm.generate([[1, 2, 3]])
        names = [event.name for event in seen.events() if event.is_user_annotation]
        assert llm.engine.overlap.steps
    # The first step reads no tokens; the last has only those of the one before to read.
    assert names[:9] == [*PHASES[:4], *PHASES] and names[-3:] == ["schedule", "sample", "emit"]


def test_a_replayed_graph_is_the_forward_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("tiny", quant="fp32", device="cpu") as llm:
        logits = llm.logits([1, 2, 3])[-1:]
        graphs = keep(llm.engine, lambda step: ((logits,), lambda: None))
        key = GraphKey(1, graphs.widths[0], "logits")
        graphs.graphs[key] = graphs._record(key)
        monkeypatch.setattr(graphs, "choose", lambda packed: key)
        monkeypatch.setattr(graphs, "fill", lambda key, packed: None)
        monkeypatch.setattr(llm.engine.runner, "forward", lambda *_: pytest.fail("it is replayed"))
        with phase_ranges(llm.engine), torch_profile(activities=[ProfilerActivity.CPU]) as seen:
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
    assert [event.name for event in seen.events() if event.is_user_annotation] == PHASES


def average(
    key: str, cpu_us: float, device_us: float, device: Any, annotation: bool = False
) -> Any:
    return SimpleNamespace(
        key=key,
        count=2,
        self_cpu_time_total=cpu_us,
        self_device_time_total=device_us,
        device_type=device,
        is_user_annotation=annotation,
    )


def test_the_table_of_a_gpu_is_of_its_kernels() -> None:
    averages = [
        average("aten::mm", 9000.0, 700.0, DeviceType.CPU),
        average("forward", 5000.0, 0.0, DeviceType.CPU, True),
        average("forward", 0.0, 1000.0, DeviceType.CUDA, True),  # as long as the kernels within
        average("gemm<a|b>", 0.0, 750.0, DeviceType.CUDA),
        average("x" * 300, 0.0, 250.0, DeviceType.CUDA),
    ]
    lines = [
        line for line in profile.operations(averages, "1 step", True).splitlines() if "`" in line
    ][1:]
    assert lines == [
        "| `gemm<a\\|b>` | 2 | 0.75 | 75.0% |",
        f"| `{'x' * profile.NAME_LENGTH}` | 2 | 0.25 | 25.0% |",
    ]
    on_cpu = profile.operations(averages, "1 step", False)
    # Python's time counts
    assert "| `aten::mm` | 2 | 9.00 | 64.3% |" in on_cpu and "gemm" not in on_cpu
    assert profile.operations([], "0 steps", True).endswith("--: |\n")


def test_an_engine_without_phases_is_refused_before_it_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    session, measurement = session_of(tmp_path)
    measurement.config["engine"]["_target_"] = "builtins.dict"
    with pytest.raises(BadInput, match=r"runtime.profile=true is not supported by engine="):
        session.measure(measurement)
    profile.validate({**measurement.config, "runtime": {"profile": False}})


def make_engine(config: dict[str, Any], progress: Any = None, phases: bool = True) -> Any:
    """A plug-in's function in place of a class."""
    engine = FaultyEngine(config)
    if phases:
        return engine
    names = [name for name in dir(engine) if not name.startswith("_") and name != "phases"]
    return SimpleNamespace(**{name: getattr(engine, name) for name in names})


make_engine.support = FaultyEngine.support  # type: ignore[attr-defined]


@pytest.mark.parametrize("phases", [True, False])
def test_an_engine_that_a_function_makes_is_judged_once_it_is_there(
    tmp_path: Path, phases: bool
) -> None:
    session, measurement = session_of(tmp_path, "workload.output_len=3")
    measurement.config["engine"] = {"_target_": f"{__name__}.make_engine", "phases": phases}
    session.measure(measurement)
    if phases:
        session.profile(measurement)
    else:
        with pytest.raises(
            BadInput, match=r"runtime.profile=true is not supported by engine=faulty"
        ):
            session.profile(measurement)
    assert (measurement.path / storage.TRACE).exists() == phases
    session.close()


def test_only_a_measurement_is_profiled() -> None:
    with pytest.raises(BadInput, match=r"runtime.profile=true is for task=bench"):
        LLM("tiny", overrides=["runtime.profile=true"])
