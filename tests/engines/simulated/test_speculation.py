"""Speculation under a virtual clock: how many tokens a step gives, and what drafting takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minivllm.assembly import build_engine
from minivllm.bench.driver import drive
from minivllm.bench.metrics.request_trace import RequestTrace
from minivllm.bench.metrics.speculation import speculation
from minivllm.bench.workloads.arrivals import Offline
from minivllm.bench.workloads.workload import Workload
from minivllm.config.compose import build, compose
from minivllm.engine.options import SamplingParams
from minivllm.engines.simulated.engine import SimulatedEngine
from minivllm.engines.simulated.recorded_steps import fit_drafts
from minivllm.engines.simulated.step_times import RooflineTimes
from minivllm.errors import BadInput
from minivllm.extras.speculative.lengths import EXPLORING
from tests.bench.scripted import workload
from tests.engines.simulated.test_engine import ROOFLINE, engine, write_run

FIXED = "speculative.adaptive=false"
NGRAM = ("speculative=ngram", FIXED)


class Planned:
    """A step takes so long, and so much longer with each token."""

    def __init__(self, fixed: float, token: float = 0.0) -> None:
        self.fixed, self.token = fixed, token

    def __call__(self, requests: int, tokens: int, *others: Any) -> float:
        return self.fixed + self.token * tokens

    def describe(self) -> str:
        return "planned"


def run(under_test: SimulatedEngine, work: Workload) -> list[RequestTrace]:
    return drive(under_test, work, Offline(), SamplingParams(), under_test.clock)


def decoding(under_test: SimulatedEngine) -> int:
    return sum(not step["num_prefill_tokens"] for step in under_test.steps())


# ---- tokens


@pytest.mark.parametrize(("rate", "steps"), [("0", 40), ("1", 10), ("[1,0]", 20)])
def test_sure_drafts_give_sure_steps(rate: str, steps: int) -> None:
    """The prompt gives the first of 41 tokens; 3 drafts are verified with each later one."""
    under_test = engine(*NGRAM, f"speculative.acceptance={rate}")
    (trace,) = run(under_test, workload((7, 41)))
    assert len(trace.token_ids) == 41 and decoding(under_test) == steps


@pytest.mark.parametrize(
    ("rates", "expected"), [("0.5", 1 + 0.5 + 0.25 + 0.125), ("[1,0.6,0]", 1 + 1 + 0.6)]
)
def test_tokens_of_a_step_are_those_that_the_rates_promise(rates: str, expected: float) -> None:
    under_test = engine(*NGRAM, f"speculative.acceptance={rates}")
    run(under_test, workload(*[(7, 1001)] * 4))
    counters = under_test.speculator.counters  # type: ignore[union-attr]
    report = under_test.speculation()
    assert report is not None and report.proposer == "ngram"
    figures = speculation(report, under_test.steps())
    assert figures.mean_acceptance_length == pytest.approx(expected, rel=0.03)
    assert figures.draft_ms == 0 and figures.num_drafts == counters.num_drafts
    assert under_test.liveness()["speculative"]["drafts"] == counters.num_drafts
    assert len(set(counters.requests.values())) > 1  # Each request has verdicts of its own.


def test_verdicts_are_those_of_the_engine() -> None:
    """Both draw them with the seed of the request, at the position of the draft."""
    knobs = ("speculative=early_exit", FIXED, "speculative.acceptance=[0.8,0.5]")
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    prompts = {"a": [5, 6, 7], "b": [8, 9], "c": [4] * 11}
    real, simulated = build_engine(compose([*knobs, "runtime.threads=1"])), engine(*knobs)
    try:
        for name, prompt in prompts.items():
            real.add_request(name, prompt, params, detokenize=False)
            simulated.submit(name, prompt, params)
        while real.scheduler.has_unfinished:
            real.step()
        while simulated.scheduler.has_unfinished:
            simulated.poll()
        assert simulated.speculator is not None
        counters: Any = real.launcher.speculation
        assert vars(counters.counters) | {"draft_s": 0} == vars(simulated.speculator.counters) | {
            "draft_s": 0
        }
        assert simulated.speculator.counters.num_accepted_tokens > 0
    finally:
        real.close()


# ---- time


def test_rejected_drafts_take_the_time_of_drafting_only() -> None:
    """Where a step takes as long with drafts as without."""
    ends = {}
    for name in ("none", "ngram", "early_exit"):
        knobs = (FIXED, "speculative.acceptance=0") if name != "none" else ()
        under_test = engine(f"speculative={name}", *knobs)
        under_test.step_times = Planned(100.0)
        traces = run(under_test, workload((3, 9), (5, 6)))
        drafting = sum(step["draft_ms"] for step in under_test.steps()) / 1e3
        ends[name] = [trace.token_times[-1] for trace in traces], drafting
    assert ends["ngram"] == ends["none"]
    times, drafting = ends["early_exit"]
    assert drafting > 0 and max(times) == pytest.approx(max(ends["none"][0]) + drafting)


def test_a_step_is_asked_for_with_its_drafts() -> None:
    asked: list[tuple[Any, ...]] = []

    class Asked(Planned):
        def __call__(self, *counts: Any) -> float:
            asked.append(counts)
            return super().__call__(*counts)

    under_test = engine(*NGRAM, "speculative.acceptance=1")
    under_test.step_times = Asked(1.0)
    run(under_test, workload((3, 6), (5, 3)))
    # a: 1 token, then 4, then the last, which needs no draft; b: 1, then 2, one of them a draft.
    assert [(*counts[:3], counts[5]) for counts in asked] == [
        *((2, 8, 8, 0), (2, 6, 0, 4), (1, 1, 0, 0))
    ]
    columns = ("num_tokens", "num_drafts", "context_tokens", "forward_ms")
    assert [tuple(step[name] for name in columns) for step in under_test.steps()] == [
        *((8, 0, 8, 1.0), (6, 4, 7 + 7, 1.0), (1, 0, 8, 1.0))
    ]


@pytest.mark.parametrize(("token", "drafts"), [(0.0, True), (50.0, False)])
def test_adaptive_drafts_follow_the_time_of_a_token(token: float, drafts: bool) -> None:
    under_test = engine("speculative=ngram", "speculative.acceptance=0.7")
    under_test.step_times = Planned(10.0, token)
    under_test.reset()
    run(under_test, workload(*[(5, 200)] * 3))
    steps = [step for step in under_test.steps() if not step["num_prefill_tokens"]]
    drafted = [step["num_drafts"] for step in steps]
    if drafts:  # The second step and then one after 64 are without, to compare with.
        assert sum(map(bool, drafted)) == len(drafted) - (1 + (len(drafted) - 2) // 65)
        return
    # The first drafts are made in any case; then one request tries for 1 % of the time.
    tried = [count for count in drafted[1:] if count]
    assert drafted[0] and tried
    assert token * sum(tried) <= 1.1 * EXPLORING * sum(step["forward_ms"] for step in steps)


def test_adaptive_drafts_count_what_drafting_takes() -> None:
    knobs = ("speculative=draft", "speculative.acceptance=0.7")
    shares = []
    for overhead_ms in (0, 100):  # of a step of the drafting model, too
        under_test = engine(*knobs, f"engine.overhead_ms={overhead_ms}")
        under_test.step_times = Planned(10.0)
        under_test.reset()
        run(under_test, workload((5, 200)))
        drafted = [step["num_drafts"] > 0 for step in under_test.steps()]
        shares.append(sum(drafted) / len(drafted))
    assert shares[0] > 0.9 > 0.1 > shares[1]


def test_a_reset_begins_anew() -> None:
    under_test = engine("speculative=early_exit", "speculative.acceptance=0.6")
    work = workload(*[(5, 50)] * 3)
    first = [trace.token_times for trace in run(under_test, work)]
    under_test.reset()
    assert [trace.token_times for trace in run(under_test, work)] == first


# ---- the cache


@pytest.mark.parametrize("policy", ["recompute", "swap"])
def test_drafts_leave_no_block_behind(policy: str) -> None:
    under_test = engine(
        *(*NGRAM, "speculative.acceptance=0.5", f"batching.preemption={policy}"),
        *("cache.num_blocks=9", "cache.block_size=8", "cache.prefix_caching=true"),
    )
    for name in "abcd":
        under_test.submit(name, [1] * 20, SamplingParams(max_tokens=30, ignore_eos=True))
    under_test.poll()
    while under_test.scheduler.has_unfinished:
        under_test.poll()
        requests = [*under_test.scheduler.running, *under_test.scheduler.waiting]
        under_test.cache.pool.check_integrity([one.cache.block_table for one in requests])
        for one in requests:  # No draft outlives its step.
            assert one.num_computed_tokens <= one.num_tokens - 1 <= 20 + 30 - 2
    counters = under_test.liveness()["batching"]
    assert counters["preemptions"] > 0 and under_test.cache.pool.num_used == 0


def test_a_second_model_takes_memory() -> None:
    blocks = {}
    for name in ("int4", "model"):
        knobs = ["speculative=draft", "speculative.acceptance=0.5", "engine.memory_gb=0.2"]
        if name == "model":
            knobs += ["model@speculative.model=tiny", "quant@speculative.quant=fp32"]
        blocks[name] = engine(*knobs).cache.pool.num_blocks
    assert blocks["model"] < 0.7 * blocks["int4"]  # its keys and values lie beside the target's


# ---- what drafting takes


def costs(*overrides: str) -> dict[str, Any]:
    under_test = engine("model=qwen3", "model.weights=random", *overrides)
    times = under_test.speculator.proposer.times  # type: ignore[union-attr]
    assert isinstance(times, RooflineTimes)
    return times.costs


def test_the_roofline_of_drafting_models() -> None:
    """Qwen3-0.6B: 440 million weights in 28 layers, 156 million in the head."""
    given = "speculative.acceptance=0.5"
    early = costs("speculative=early_exit", given, "speculative.exit_layer=7")
    assert early["streamed_weight_bytes"] == pytest.approx(2 * (440e6 / 4 + 155.6e6), rel=0.01)
    assert early["kv_bytes_per_token"] == 7 * 2 * 8 * 128 * 2
    few = costs("speculative=early_exit", given, "speculative.head_tokens=1024")
    all_ = costs("speculative=early_exit", given)
    saved = all_["streamed_weight_bytes"] - few["streamed_weight_bytes"]
    assert saved == 2 * 1024 * (151_936 - 1024)
    draft = costs("speculative=draft", given)
    assert draft["streamed_weight_bytes"] == pytest.approx(0.53 * 596e6, rel=0.01)
    plain = costs("speculative=draft", given, "speculative.lm_head=false")
    assert plain["streamed_weight_bytes"] == pytest.approx(0.53 * 440e6 + 2 * 155.6e6, rel=0.01)
    second = costs("speculative=draft", given, "model@speculative.model=tiny")
    assert second["streamed_weight_bytes"] < 0.1 * draft["streamed_weight_bytes"]


def test_each_depth_is_a_step_of_the_drafting_model() -> None:
    under_test = engine("speculative=draft", FIXED, "speculative.acceptance=1")
    assert under_test.speculator is not None
    asked: list[tuple[Any, ...]] = []

    class Asked(Planned):
        def __call__(self, *counts: Any) -> float:
            asked.append(counts)
            return super().__call__(*counts)

    under_test.speculator.proposer.times = Asked(2.0)  # type: ignore[attr-defined]
    under_test.step_times = Planned(1.0)
    run(under_test, workload((3, 6), (5, 4)))
    # In the second step one has room for 3 drafts and one for 2.
    assert asked == [(2, 2, 0, 10, 0, 0), (2, 2, 0, 12, 0, 0), (1, 1, 0, 6, 0, 0)]
    assert [step["draft_ms"] for step in under_test.steps()] == pytest.approx([0, 6, 0])


def test_recorded_drafting_is_fitted(tmp_path: Path) -> None:
    place, config = str(tmp_path), compose(["speculative=draft", "speculative.acceptance=0.5"])
    write_run(tmp_path / "none", compose([]))
    write_run(tmp_path / "other", compose(["speculative=early_exit"]))
    with pytest.raises(BadInput, match="0 records of this model there draft in the same way"):
        fit_drafts(place, config)
    write_run(tmp_path / "same", compose(["speculative=draft", "speculative.adaptive=false"]))
    fitted = fit_drafts(place, config)
    assert fitted.records == 1 and fitted.steps < 400 and fitted.error < 1e-6
    assert fitted(5, 5, 0, 1000.0, 0.0, 0) == pytest.approx(0.3 + 0.1 * 5)
    assert fitted.describe().startswith("drafting times fitted to")
    simulated = engine("speculative=draft", "speculative.acceptance=0.5", f"engine.steps={place}")
    notes = " ".join(simulated.info.warnings)
    assert "step times fitted to 1200 steps of 3 records" in notes and "drafting times" in notes


# ---- rates


def section(**changes: Any) -> dict[str, Any]:
    """Of 100 drafts 80, 40 and 10 are right up to a position, in 200 steps of requests."""
    return {
        "num_speculative_tokens": 3,
        "adaptive": False,
        "given_acceptance": None,
        "num_drafts": 100,
        "num_accepted_tokens": 130,
        "acceptance_by_position": [0.8, 0.4, 0.1],
        "tokens_per_step": 1 + 130 / 200,
        **changes,
    }


def test_recorded_rates_are_taken(tmp_path: Path) -> None:
    measured = compose(["speculative=suffix", FIXED])
    steps = (f"engine.steps={tmp_path}", "speculative=suffix")
    write_run(tmp_path / "a", measured, speculation=section())
    write_run(tmp_path / "empty", measured, speculation=section(num_drafts=0))
    write_run(tmp_path / "before", measured)  # a record without the section
    write_run(tmp_path / "k", measured, speculation=section(num_speculative_tokens=5))
    write_run(tmp_path / "adaptive", measured, speculation=section(adaptive=True))
    under_test = engine(*steps)
    assert under_test.speculator is not None
    assert under_test.speculator.verifier.rates == pytest.approx([0.8, 0.5, 0.25])  # type: ignore[attr-defined]
    run(under_test, workload((5, 1001)))
    counters = under_test.speculator.counters
    # A proposer that looks up finds something in every second step, as it did.
    assert counters.num_drafts / decoding(under_test) == pytest.approx(0.5, abs=0.05)
    given = engine(*steps, "speculative.acceptance=0.25")
    assert given.speculator.verifier.rates == (0.25,)  # type: ignore[union-attr,attr-defined]


def test_records_from_before_a_knob_are_of_the_same_decoding_and_steps(tmp_path: Path) -> None:
    measured = compose([*NGRAM, FIXED])
    newer = {"decoding": ("structured_outputs", "bad_words"), "runtime": ("passes",)}
    older = {
        group: {k: v for k, v in node.items() if k not in newer.get(group, ())}
        if isinstance(node, dict)
        else node
        for group, node in measured.items()
    }
    assert older["decoding"] != measured["decoding"] and older["runtime"] != measured["runtime"]
    write_run(tmp_path / "a", older, speculation=section())
    under_test = engine(*NGRAM, f"engine.steps={tmp_path}")
    assert under_test.speculator is not None
    assert under_test.speculator.verifier.rates == pytest.approx([0.8, 0.5, 0.25])  # type: ignore[attr-defined]
    with pytest.raises(BadInput, match=r"set speculative\.acceptance=RATE"):
        engine(*NGRAM, f"engine.steps={tmp_path}", "decoding.temperature=0.5")


def test_verdicts_that_were_given_are_no_rates(tmp_path: Path) -> None:
    measured = compose([*NGRAM, "speculative.acceptance=0.9"])
    write_run(tmp_path / "a", measured, speculation=section(given_acceptance=[0.9]))
    with pytest.raises(BadInput, match=r"set speculative\.acceptance=RATE, or engine\.steps=RUNS"):
        engine(*NGRAM, f"engine.steps={tmp_path}")
    with pytest.raises(BadInput, match=r"set speculative\.acceptance=RATE"):
        engine(*NGRAM)


def test_what_cannot_be_simulated_is_refused() -> None:
    given = "speculative.acceptance=0.5"
    with pytest.raises(BadInput, match=r"exit_layer=99: the model has \d+ layers"):
        engine("speculative=early_exit", given, "speculative.exit_layer=99")
    config = compose([*ROOFLINE, *NGRAM, given])
    own = {**config["speculative"], "_target_": "my.Proposer"}
    with pytest.raises(BadInput, match="not this one; use engine=minivllm"):
        build(config["engine"], config={**config, "speculative": own})


def test_a_record_says_what_is_assumed() -> None:
    _, drafts = engine("speculative=draft", "speculative.acceptance=[1,0.5]").info.warnings
    assert "accepted at 1, 0.5; drafting by step times from the roofline" in drafts
    _, drafts = engine(*NGRAM, "speculative.acceptance=0").info.warnings
    assert "in 100 % of a request's steps" in drafts and "drafting takes no time" in drafts
