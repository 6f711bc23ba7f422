"""workload=agentic: from sessions to requests, and what a prefix cache makes of them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from minivllm.bench.driver import drive, prime, require_priming
from minivllm.bench.hardware.clock import Clock
from minivllm.bench.hardware.readings import Energy
from minivllm.bench.metrics.jobs import JobContext, job_figures
from minivllm.bench.metrics.metrics import compute
from minivllm.bench.records.feature_figures import JobFigures
from minivllm.bench.workloads.agents.agentic import Agentic
from minivllm.bench.workloads.arrivals import Concurrency
from minivllm.bench.workloads.workload import Workload
from minivllm.config.compose import build, compose
from minivllm.engine.options import SamplingParams
from minivllm.errors import BadInput
from tests.bench.scripted import ScriptedClock, ScriptedEngine
from tests.bench.workloads.agents.recorded import call, growing, subagent, weka, write

SIMULATED = (
    *("engine=simulated", "engine.bandwidth_gb_s=3350", "engine.tflops=600", "model=qwen3_8b"),
    *("model.weights=random", "engine.memory_gb=80", "cache.prefix_caching=true"),
    *("cache.block_size=64", "model.max_model_len=32768"),
)


SIMULATED_TINY = ("engine=simulated", "engine.bandwidth_gb_s=20", "engine.tflops=0.5")


def made(limit: int = 40_000, **knobs: Any) -> Workload:
    return Agentic(**knobs).generate(None, 1000, limit, 0)


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten sessions in AgentX's form: 16 calls with prompts of up to 18 thousand tokens, and a
    sub-agent in the middle of each."""
    sessions = [growing(16, 40 + i, 15) for i in range(10)]
    return write(tmp_path_factory.mktemp("agents") / "ten.jsonl", *sessions)


def replayed(path: Path, num_blocks: int, **knobs: Any) -> JobFigures:
    """The figures of a replay in a simulation, five sessions at a time."""
    config = compose([*SIMULATED, f"cache.num_blocks={num_blocks}"])
    engine = build(config["engine"], config=config)
    workload = made(path=str(path), **knobs)
    arrival, clock = Concurrency(5), engine.info.clock
    prime(engine, workload, arrival, SamplingParams())
    traces = drive(engine, workload, arrival, SamplingParams(), clock)
    context = JobContext(compute(traces, {}, 5), Energy(), {}, engine.liveness(), "cold")
    engine.close()
    figures = job_figures(traces, workload, context)
    assert figures is not None
    return figures


def test_ten_sessions_have_the_optimum_where_the_cache_is_large_and_a_cliff_where_it_is_not(
    ten: Path,
) -> None:
    large = replayed(ten, 20_000)
    assert large.sessions == large.num_jobs == 10
    assert large.hit_rate is not None and large.optimal_hit_rate is not None
    assert 0 <= large.optimal_hit_rate - large.hit_rate < 0.01 and large.optimal_hit_rate > 0.85
    assert large.live_tokens is not None
    # a cache that holds what lives at once is as good; one of a fifth of it is not
    held = replayed(ten, large.live_tokens // 64 + 100)
    small = replayed(ten, large.live_tokens // 64 // 3)
    assert held.hit_rate is not None and held.hit_rate > large.hit_rate - 0.01
    assert small.hit_rate is not None and small.hit_rate < large.hit_rate - 0.2
    assert small.optimal_hit_rate == pytest.approx(large.optimal_hit_rate, abs=0.001)
    assert large.latency_s.mean is not None and small.latency_s.mean is not None
    assert large.latency_s.mean < small.latency_s.mean
    assert large.client_lag_ms.n == 10 * 19 and large.cache_state == "cold"


def test_sessions_that_start_midway_find_their_context_in_the_cache(ten: Path) -> None:
    figures = replayed(ten, 20_000, random_starts=5)
    assert figures.cache_state == "primed" and figures.primed_tokens > 0
    assert figures.sessions == 10 and figures.num_jobs == 5
    assert figures.hit_rate is not None and figures.optimal_hit_rate is not None
    assert abs(figures.optimal_hit_rate - figures.hit_rate) < 0.01
    assert figures.jobs_per_hour is not None and figures.token_cost_per_job is None
    workload = made(path=str(ten), random_starts=5)
    assert {request.session for request in workload.priming} == {f"s{i}" for i in range(5)}


@pytest.mark.parametrize("kind", [("runtime.device=cpu", "quant=fp32"), SIMULATED_TINY])
def test_an_engine_says_what_its_cache_had_and_begins_with_what_it_was_primed_with(
    kind: tuple[str, ...],
) -> None:
    """The real one and the simulated one alike, request by request."""
    config = compose([*kind, "cache.prefix_caching=true", "runtime.threads=1"])
    engine = build(config["engine"], config=config)
    knobs = {"num_sessions": 2, "turns": 3, "tool_s": 0.02, "fan_outs": 0, "random_starts": 1}
    workload = Agentic(**knobs, result_len=64, output_len=4).generate(None, 1000, 2048, 0)
    assert workload.priming and {request.session for request in workload.priming} == {"s0"}
    clock, params = engine.info.clock or Clock(), SamplingParams()
    prime(engine, workload, Concurrency(1), params)
    counted = engine.liveness()["cache"]
    assert counted["prefix_tokens_looked_up"] == 0 and engine.steps() == []
    traces = drive(engine, workload, Concurrency(1), params, clock)
    context = JobContext(compute(traces, {}, 1), Energy(), {}, engine.liveness(), "cold")
    figures = job_figures(traces, workload, context)
    assert figures is not None and figures.hit_rate == figures.optimal_hit_rate > 0.6
    assert (
        sum(t.cached_tokens or 0 for t in traces)
        == (engine.liveness()["cache"]["prefix_tokens_reused"])
    )
    assert all(trace.cached_tokens for trace in traces)  # each at least its system prompt
    engine.close()


def test_an_engine_that_cannot_be_primed_is_told_of_it() -> None:
    workload = Agentic(num_sessions=2, random_starts=1).generate(None, 100, 2048, 0)
    engine = ScriptedEngine(ScriptedClock())
    with pytest.raises(BadInput, match=r"workload\.random_starts: engine=scripted cannot begin"):
        require_priming(engine, workload)
    require_priming(engine, Agentic(num_sessions=2).generate(None, 100, 2048, 0))


def test_no_more_sessions_start_midway_than_there_are(ten: Path) -> None:
    with pytest.raises(BadInput, match=r"workload\.random_starts=3 are more than the 2 sessions"):
        Agentic(num_sessions=2, random_starts=3)
    with pytest.raises(BadInput, match=r"workload\.random_starts=11 are more than the 10"):
        made(path=str(ten), random_starts=11)


def test_prompts_are_exactly_as_long_as_recorded(ten: Path) -> None:
    workload = made(path=str(ten), num_sessions=1)
    own = [r for r in workload.requests if r.max_tokens == 40]
    assert [len(r.prompt_token_ids) for r in own] == [64 * (40 + 15 * i) for i in range(16)]
    prompts = [list(r.prompt_token_ids) for r in own]
    for before, after in pairwise(prompts):
        assert after[: len(before)] == before
    assert all(request.ignore_eos for request in workload.requests)
    assert workload.hash == made(path=str(ten), num_sessions=1).hash


def test_replays_beyond_the_file_begin_again_with_other_markers(tmp_path: Path) -> None:
    path = write(tmp_path / "one.json", growing(3, 4, 2))
    workload = made(path=str(path), num_sessions=3)
    firsts = [tuple(r.prompt_token_ids) for r in workload.requests if r.request_id.endswith(".0")]
    shared = 2 * 64  # tools and system
    assert len({first[:shared] for first in firsts}) == 1 and len(set(firsts)) == 3
    assert workload.notes == ("workload=agentic: 3 sessions are replays of 1",)
    same = made(path=str(path), num_sessions=3, cache_bust=False)
    firsts = [tuple(r.prompt_token_ids) for r in same.requests if r.request_id.endswith(".0")]
    assert len(set(firsts)) == 1


def test_recorded_sessions_can_be_shorter(ten: Path) -> None:
    workload = made(path=str(ten), length_scale=0.1, num_sessions=2, limit=2048)
    lengths = [len(r.prompt_token_ids) for r in workload.requests if r.max_tokens == 4]
    assert lengths[0] == pytest.approx(256, abs=3) and max(lengths) <= 1710
    with pytest.raises(BadInput, match=r"ten\.jsonl:1: a call has 16960 prompt \+ 40 output"):
        made(path=str(ten), limit=2048)


def test_sessions_that_the_context_does_not_hold_are_left_out_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "two.jsonl", growing(3, 4, 2), growing(3, 400, 2))
    workload = made(path=str(path), limit=2048, too_long="skip")
    assert {request.session for request in workload.requests} == {"s0"}
    assert workload.notes == (
        "workload=agentic: 1 sessions were left out, longer than the context of 2048",
    )
    with pytest.raises(BadInput, match="no session that can be used: 2 sessions were left out"):
        made(path=str(path), limit=200, too_long="skip")


def test_long_gaps_are_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", weka([call(0, 64, 3, [1]), call(600, 128, 3, [1, 2])]))
    (_, late) = made(path=str(path)).requests
    assert late.after_s == (8.0,)  # 10 s between the starts, of which the answer takes 2
    (_, later) = made(path=str(path), max_idle_s=700.0).requests
    assert later.after_s == (598.0,)


def test_notes_of_sessions_are_added_up(tmp_path: Path) -> None:
    row = weka([call(0, 64, 3, [1]), subagent(3, []), call(9, 70, 3, [])])
    notes = made(path=str(write(tmp_path / "t.jsonl", row, row))).notes
    assert notes == (
        "workload=agentic: 2 sub-agents have no calls and were left out",
        "workload=agentic: 2 calls have no hash_ids: their prompts share nothing",
    )


def test_a_file_is_read_again_once_it_has_changed(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", growing(2, 2, 1))
    Agentic(path=str(path)).check_lengths(2048)
    write(path, growing(2, 2, 1), growing(2, 60, 1))
    with pytest.raises(BadInput, match=r"t\.jsonl:2: a call has"):
        Agentic(path=str(path)).check_lengths(2048)


def test_a_file_is_read_no_further_than_it_must_be(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(growing(2, 2, 1)) + "\n[]\n", encoding="utf-8")
    assert made(path=str(path), num_sessions=1).num_conversations == 1
    for _ in range(2):  # what is wrong stays wrong
        with pytest.raises(BadInput, match=r"t\.jsonl:2: not a session"):
            made(path=str(path))


def test_generated_sessions_fit_the_embedded_model() -> None:
    """Of 1,800 tokens each at most."""
    Agentic().check_lengths(1800)
    workload = made(limit=1800)
    assert workload.num_conversations == 8 and len(workload.requests) > 8 * 12
    assert max(request.length for request in workload.requests) <= 1800
    with pytest.raises(BadInput, match=r"workload=agentic: the longest call has .*compact_at"):
        Agentic().check_lengths(1000)
    wide = {"distribution": "lognormal", "mean": 900, "std": 400}
    with pytest.raises(BadInput, match=r"a call of session \d has \d+ prompt"):
        made(limit=1800, result_len=wide)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"format": "weka"}, "workload.format=weka is of recorded sessions: set workload.path"),
        ({"length_scale": 0.5}, "workload.length_scale is of recorded sessions"),
        ({"turns": 0}, "workload.turns=0 must be"),
        ({"num_sessions": 3_000_000}, "workload.num_sessions times .*take fewer"),
    ],
)
def test_what_makes_no_sense_is_named(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        made(**knobs)
