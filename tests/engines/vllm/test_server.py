"""engine=vllm_server against a stand-in: its command line, its counters."""

from __future__ import annotations

import json

import pytest

from minivllm import BadInput
from tests.engines.conftest import Make
from tests.engines.driving import requests, run

pytest.importorskip("aiohttp")


def test_knobs_become_arguments(make: Make) -> None:
    engine = make(
        "vllm_server",
        "quant=fp8",
        "cache.kv_dtype=fp8",
        "cache.prefix_caching=true",
        "batching.max_num_seqs=4",
        "batching.max_num_batched_tokens=512",
        "speculative=ngram",
        "speculative.num_speculative_tokens=5",
        "engine.kv_cache_gb=0.5",
        "+engine.args.enforce_eager=true",
        "+engine.args.seed=null",
    )
    child = engine.started
    assert child.command[:4] == ["python", "-m", "vllm.entrypoints.cli.main", "serve"]
    given = child.stand_in.given
    assert json.loads(given.pop("speculative-config")) == {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }
    assert given.pop("port") == str(engine._client.address("").split(":")[-1].removesuffix("/v1"))
    assert given == {
        "host": "127.0.0.1",
        "dtype": "bfloat16",
        "quantization": "fp8",
        "max-num-seqs": "4",
        "max-num-batched-tokens": "512",
        "enable-chunked-prefill": True,
        "enable-prefix-caching": True,
        "kv-cache-dtype": "fp8",
        "kv-cache-memory-bytes": "500000000",
        "disable-uvicorn-access-log": True,
        "enable-prompt-tokens-details": True,
        "enforce-eager": True,
    }
    assert child.environment["VLLM_SERVER_DEV_MODE"] == "1" and engine.info.max_num_seqs == 4
    assert child.environment["OMP_NUM_THREADS"] == "1" and "PYTHONPATH" not in child.environment


def test_metrics_become_counters(make: Make) -> None:
    engine = make("vllm_server", "cache.prefix_caching=true", "speculative=ngram")
    engine.reset()
    prompt = tuple(range(40, 60))
    run(engine, requests([prompt, (*prompt, 7), (9, 9)], [4, 4, 4]))
    counts = engine.liveness()
    assert counts["cache"]["prefix_tokens_queried"] == 43
    assert 19 <= counts["cache"]["prefix_tokens_reused"] <= 20
    rate = counts["cache"]["prefix_tokens_reused"] / 43
    assert counts["cache"]["prefix_hit_rate"] == pytest.approx(rate)
    assert counts["cache"]["kv_dtype"] == "auto" and counts["batching"]["preemptions"] == 0
    assert counts["batching"]["step_tokens_at_most"] == 512
    assert counts["engine"]["queue_ms"] == pytest.approx(10)
    assert counts["speculative"] == {
        "drafts": 3,
        "draft_tokens": 12,
        "accepted_tokens": 9,
        "acceptance": 0.75,
    }
    assert counts["runtime"]["compiled"] == "took"


def test_random_weights_are_vllms_own(make: Make) -> None:
    engine = make("vllm_server", "model.weights=random")
    given = engine.started.stand_in.given
    assert given["load-format"] == "dummy" and given["skip-tokenizer-init"]
    folder = engine.started.command[4]
    with open(f"{folder}/config.json", encoding="utf-8") as file:
        assert json.load(file)["model_type"] == "qwen3"


def test_a_value_that_vllm_has_not_is_an_error(make: Make) -> None:
    with pytest.raises(
        BadInput, match=r"cache\.kv_dtype=int8 is not supported by engine=vllm_serv"
    ):
        make("vllm_server", "cache.kv_dtype=int8")


def test_it_sees_the_gpus_that_are_named_and_splits_the_model_over_them(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    child = make("vllm_server", "runtime.device=cuda:0-1").started
    assert child.stand_in.given["tensor-parallel-size"] == "2"
    assert child.environment["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_the_degrees_of_parallel_are_those_of_vllm(make: Make) -> None:
    given = make("vllm_server", "parallel.tensor=2", "parallel.replicas=3").started.stand_in.given
    assert (given["tensor-parallel-size"], given["data-parallel-size"]) == ("2", "3")
