"""/metrics: figures in Prometheus's form, and a board that asks only for them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as parse

from minivllm.serving.http.metrics import token_buckets
from tests.serving.raw import ask
from tests.serving.running import ROOT, RunningServer, serving

BOARD = ROOT / "docs" / "grafana" / "minivllm.json"
# Names of vLLM 0.32's metrics that this server has, with their types.
OF_VLLM = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "cache_config_info": "gauge",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "num_preemptions": "counter",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "request_success": "counter",
    "spec_decode_num_drafts": "counter",
    "spec_decode_num_draft_tokens": "counter",
    "spec_decode_num_accepted_tokens": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_inference_time_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
}


def read(url: str) -> str:
    return ask(url, "/metrics", method="GET").body.decode()


def values(url: str) -> dict[str, float]:
    """Every sample by its name and the labels that are not the server's own."""
    found = {}
    for family in parse(read(url)):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            words = ",".join(labels.values())
            found[f"{sample.name}[{words}]" if words else sample.name] = sample.value
    return found


def grown(url: str, work: Callable[[], object]) -> dict[str, float]:
    """What a piece of work adds to each sample."""
    before = values(url)
    work()
    return {name: value - before.get(name, 0.0) for name, value in values(url).items()}


def test_the_figures_are_those_of_the_requests(server: RunningServer) -> None:
    body = {"prompt": "import os\n" * 40, "max_tokens": 10, "ignore_eos": True}

    def work() -> None:
        for n in (1, 3):
            answer = ask(server.url, "/v1/completions", body | {"n": n})
            assert answer.status == 200
        assert ask(server.url, "/v1/completions", body | {"n": 0}).status == 400

    added = grown(server.url, work)
    prompt = json.loads(ask(server.url, "/v1/completions", body).body)["usage"]["prompt_tokens"]
    expected = {
        "prompt_tokens_total": 2 * prompt,
        "generation_tokens_total": 40,
        "request_success_total[length]": 4,
        "request_success_total[abort]": 0,
        "time_to_first_token_seconds_count": 2,
        "inter_token_latency_seconds_count": 36,
        "e2e_request_latency_seconds_count": 2,
        "request_queue_time_seconds_count": 2,
        "request_generation_tokens_sum": 40,
        "request_prompt_tokens_sum": 2 * prompt,
        "http_responses_total[400]": 1,
        "num_requests_running": 0,
    }
    assert {name: added[f"minivllm:{name}"] for name in expected} == expected
    assert added["minivllm:prefix_cache_hits_total"] > 0
    assert added["minivllm:prefix_cache_hits_total"] < added["minivllm:prefix_cache_queries_total"]
    sums = [
        added[f"minivllm:{name}_seconds_sum"]
        for name in ("request_queue_time", "request_prefill_time", "request_decode_time")
    ]
    whole = added["minivllm:e2e_request_latency_seconds_sum"]
    assert math.isclose(sum(sums), whole, rel_tol=1e-6) and min(sums) >= 0
    now = values(server.url)
    assert now["minivllm:kv_cache_usage_perc"] == now["minivllm:num_requests_waiting"] == 0


def test_names_and_types_are_those_of_vllm() -> None:
    with serving("task.metrics_prefix=vllm", "speculative=ngram") as server:
        body = {"prompt": "a = 1\n" * 20, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
        drafted = grown(server.url, lambda: ask(server.url, "/v1/completions", body))
        text = read(server.url)
        (_, head) = ("accept", "application/openmetrics-text; version=1.0.0")
        other = ask(server.url, "/metrics", method="GET", headers={"accept": head})
    types = {family.name: family.type for family in parse(text)}
    named = {name: types.get(f"vllm:{name}") for name in OF_VLLM}
    assert named == OF_VLLM and not any(name.startswith("minivllm") for name in types)
    assert {family.name for family in open_metrics(other.body.decode())} >= {
        f"vllm:{name}" for name in OF_VLLM
    }
    drafts, tokens, accepted = (
        drafted[f"vllm:spec_decode_num_{name}_total"]
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    assert 0 < drafts <= tokens and 0 < accepted <= tokens
    # Tokens of one step share its gap: each token but the first has one.
    assert drafted["vllm:inter_token_latency_seconds_count"] == 39


def test_the_board_asks_only_for_metrics_that_there_are(server: RunningServer) -> None:
    board = json.loads(BOARD.read_text())
    there = {name.partition("[")[0] for name in values(server.url)}
    there |= {sample.name for family in parse(read(server.url)) for sample in family.samples}
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries.append(board["templating"]["list"][1]["query"])
    asked = {name for query in queries for name in re.findall(r"minivllm:\w+", query)}
    assert len(asked) > 10 and asked - there == set()


@given(st.integers(1, 10**8))
def test_buckets_of_tokens_reach_the_longest(most: int) -> None:
    bounds = token_buckets(most)
    assert bounds == sorted(set(bounds)) and bounds[0] == 1
    assert most / 2.5 <= bounds[-1] <= most


@pytest.mark.parametrize("path", ["/metrics"])
def test_metrics_need_the_key(guarded: RunningServer, path: str) -> None:
    assert ask(guarded.url, path, method="GET").status == 401
