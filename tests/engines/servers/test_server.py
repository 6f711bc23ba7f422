"""What every started server has in common: its start, its warm-up, its end, the verdict on its
knobs."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minivllm import BadInput
from minivllm.bench.driver import prime, warm_up
from minivllm.bench.hardware.clock import Clock
from minivllm.bench.workloads.arrivals import Concurrency, Offline
from minivllm.config.compose import build, compose
from minivllm.engine.options import SamplingParams
from minivllm.engines.openai import engine as openai
from minivllm.engines.openai.stream_event import ServerError
from minivllm.engines.peer_process import merged, words
from minivllm.engines.servers.server import MetricsPage
from minivllm.engines.supported_knobs import require_supported
from tests.engines.conftest import Make, ThreadedChild
from tests.engines.driving import requests, run

pytest.importorskip("aiohttp")


def test_the_warm_up_has_other_prompts_and_leaves_an_empty_cache(make: Make) -> None:
    engine = make("llamacpp", "cache.prefix_caching=true", "batching.max_num_seqs=2")
    assert engine.info.warms_with_others
    load = requests([(1, 2, 3), (1, 2, 4)], [4, 4])
    server = engine.started.stand_in
    server.asked.clear()
    others = engine.info.warms_with_others
    warm_up(engine, load, Offline(), SamplingParams(), Clock(), None, 0, others)
    assert sorted(server.asked) == [[3, 2, 1], [4, 2, 1]]
    engine.reset()
    assert server.prompts == []


def test_what_primes_the_cache_is_not_counted(make: Make) -> None:
    engine = make("llamacpp", "cache.prefix_caching=true", "batching.max_num_seqs=2")
    priming = requests([(1, 2, 3), (1, 2, 3)], [2, 2])
    load = replace(requests([(4, 5)], [2]), priming=priming.requests)
    prime(engine, load, Offline(), SamplingParams())
    assert engine.started.stand_in.prompts != []
    counted = engine.liveness()
    assert counted["engine"]["prompt_tokens_computed"] == 0
    assert counted["cache"]["prefix_tokens_reused"] == 0


@pytest.mark.parametrize("name", ["vllm_server", "sglang", "llamacpp"])
def test_each_answer_says_how_much_of_its_prompt_was_cached(make: Make, name: str) -> None:
    engine = make(name, "cache.prefix_caching=true")
    engine.reset()
    traces = run(engine, requests([(1, 2, 3), (1, 2, 3, 4)], [2, 2]), Concurrency(concurrency=1))
    assert [trace.cached_tokens for trace in traces] == [0, 3]


@pytest.mark.parametrize("accepted", [0.0, 3.0])
def test_drafts_of_which_none_is_accepted_have_a_rate(make: Make, accepted: float) -> None:
    engine, page = make("llamacpp"), MetricsPage({})
    counted = {"speculative.draft_tokens": 4.0, "speculative.accepted_tokens": accepted}
    assert engine.derived(page, page, counted)["speculative.acceptance"] == accepted / 4


def test_a_server_without_metrics_is_told_before_anything_is_measured(make: Make) -> None:
    with pytest.raises(BadInput, match=r"engine=llamacpp: GET http://.*/metrics: .*HTTP 404"):
        make("llamacpp", "+engine.args.fault_metrics=true")
    assert ThreadedChild.started[-1].stopped


def test_a_server_that_is_not_ready_is_waited_for(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make("llamacpp", "+engine.args.fault_loading=0.1").info.load_s > 0.1
    with pytest.raises(
        BadInput, match=r"engine=llamacpp: .*not answer within engine.start_timeout_s=2 .*loading"
    ):
        make("llamacpp", "+engine.args.fault_loading=60", "engine.start_timeout_s=2")


def test_a_server_that_ends_leaves_its_last_words(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai, "LOOK_S", 0.01)
    overrides = [f"engine.program={program}", f"engine.gguf={tmp_path}/tiny-BF16.gguf"]
    config = compose(["engine=llamacpp", *overrides, "+engine.args.fault_exit=true"])
    with pytest.raises(
        BadInput, match=r"engine=llamacpp: the server ended with exit code 1; .*unknown model arch"
    ):
        build(config["engine"], config=config)


def test_a_cell_from_the_command_line(cli: Any, program: str, tmp_path: Path) -> None:
    """The worker ends with the server, which has counted its work."""
    result = cli(
        *("engine=llamacpp", f"engine.program={program}", f"engine.gguf={tmp_path}/tiny-BF16.gguf"),
        *("batching.max_num_seqs=2", "cache.prefix_caching=true", "runtime.threads=1"),
        *("workload=shared_prefix", "workload.num_requests=4", "workload.output_len=4"),
        *("workload.prefix_len=16", "workload.input_len=4", "measure.roofline=false"),
    )
    assert result.code == 0, result.err
    (file,) = Path("runs").glob("*/*/record.json")
    record = json.loads(file.read_text(encoding="utf-8"))
    assert record["validity"]["ok"] and record["liveness"]["cache"]["prefix_tokens_reused"] > 0
    words = (file.parent / "run.log").read_text(encoding="utf-8")
    port = re.search(r"--port (\d+)", words)
    assert port is not None
    with socket.socket() as asking:
        assert asking.connect_ex(("127.0.0.1", int(port[1]))) != 0, "the server is still there"


@pytest.mark.parametrize("name", ["vllm", "sglang", "llamacpp"])
def test_every_arm_of_the_lists_can_be_composed(name: str) -> None:
    """Each optimisation is a change of knobs that its engine supports."""
    engine = {"vllm": "vllm_server"}.get(name, name)
    listed = compose([f"engine={engine}", "+ablation=leave_one_out", f"optimisations={name}"])
    options = listed["ablation"]
    assert len(options["optimisations"]) >= 4
    for entry in options["optimisations"].values():
        config = compose([f"engine={engine}", *options["baseline"], *entry["overrides"]])
        require_supported(config)


def test_each_kind_of_value_has_its_form() -> None:
    given = {"a": True, "b": False, "c": None, "d": 3, "e": [1, 2], "f": {"k": 1}}
    line = words(given, negated=True)
    assert line == ["--a", "--no-b", "--d", "3", "--e", "1", "2", "--f", '{"k": 1}']
    assert words({"b": False}, negated=False) == []


def test_the_users_own_win_however_they_are_written() -> None:
    made = {"max-num-seqs": 4, "seed": 0}
    assert merged(made, {"max_num_seqs": 8, "--seed": None}) == {"max-num-seqs": 8, "seed": None}
    assert merged(made, None) == made


BEFORE = """# TYPE vllm:hits counter
vllm:hits_total{engine="0"} 3
vllm:hits_total{engine="1"} 4
vllm:config{cache_dtype="fp8"} 1
vllm:step_bucket{le="8.0"} 2
vllm:step_bucket{le="64.0"} 5
vllm:step_bucket{le="+Inf"} 5
"""


def test_counters_are_summed_over_labels_and_counted_from_before() -> None:
    before = MetricsPage.parse(BEFORE)
    after = MetricsPage.parse(BEFORE.replace("} 4", "} 10") + "vllm:drafts_total 2\n")
    assert before.total("vllm:hits_total") == 7 and before.total("vllm:drafts_total") is None
    assert after.since(before, "vllm:hits_total") == 6
    assert after.since(before, "vllm:drafts_total") == 2  # it came with the first draft
    assert after.since(before, "vllm:nothing") is None
    assert before.label("vllm:config", "cache_dtype") == "fp8"
    assert before.label("vllm:config", "size") is None is before.label("vllm:nothing", "size")


def test_the_largest_bucket_is_that_of_the_window() -> None:
    before = MetricsPage.parse(BEFORE)
    text = BEFORE.replace('le="8.0"} 2', 'le="8.0"} 4')
    text = text.replace('le="64.0"} 5', 'le="64.0"} 7').replace('Inf"} 5', 'Inf"} 7')
    assert MetricsPage.parse(text).largest_bucket(before, "vllm:step") == 8
    assert before.largest_bucket(before, "vllm:step") is None
    assert before.largest_bucket(before, "vllm:nothing") is None


def test_a_page_of_something_else_is_said_so() -> None:
    with pytest.raises(ServerError, match="not in Prometheus' format"):
        MetricsPage.parse("<html>nothing here</html>\n")
