"""engine=sglang against a stand-in: its command line, its counters."""

from __future__ import annotations

import pytest

from minivllm import BadInput
from tests.engines.conftest import Make
from tests.engines.driving import requests, run

pytest.importorskip("aiohttp")


def test_knobs_become_arguments(make: Make) -> None:
    engine = make(
        "sglang",
        "quant=fp8",
        "cache.kv_dtype=fp8",
        "batching.max_num_seqs=4",
        "batching.chunked_prefill=false",
        "speculative=ngram",
        "runtime.device=cpu",
        "+engine.args.disable_cuda_graph=true",
        "+engine.args.disable_overlap_schedule=false",
    )
    child = engine.started
    assert child.command[:3] == ["python", "-m", "sglang.launch_server"]
    given = child.stand_in.given
    del given["port"], given["model-path"]
    assert given == {
        "host": "127.0.0.1",
        "dtype": "bfloat16",
        "quantization": "fp8",
        "random-seed": "0",
        "device": "cpu",
        "max-running-requests": "4",
        "max-prefill-tokens": "2048",
        "chunked-prefill-size": "-1",
        "disable-radix-cache": True,
        "kv-cache-dtype": "fp8_e4m3",
        "speculative-algorithm": "NGRAM",
        "speculative-num-draft-tokens": "3",
        "enable-metrics": True,
        "enable-cache-report": True,
        "disable-cuda-graph": True,
    }
    assert any("stand-in alone" in warning for warning in engine.info.warnings)


def test_metrics_become_counters(make: Make) -> None:
    engine = make("sglang", "cache.prefix_caching=true", "speculative=ngram")
    engine.reset()
    assert engine.started.stand_in.resets >= 1
    prompt = tuple(range(40, 60))
    run(engine, requests([prompt, (*prompt, 7)], [4, 4]))
    counts = engine.liveness()
    assert 19 <= counts["cache"]["prefix_tokens_reused"] <= 20
    assert counts["cache"]["prefix_tokens_queried"] == 41
    assert counts["batching"]["preemptions"] == 0
    assert counts["engine"]["queue_ms"] == pytest.approx(20)
    assert counts["speculative"] == {"drafts": 2, "tokens_per_draft": 4}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("cache.kv_dtype=int8", "cache.kv_dtype=int8 is not supported by engine=sglang"),
        ("quant=nf4", "quant=nf4 is not supported by engine=sglang"),
        ("speculative.prompt_lookup_max=8", "prompt_lookup_max=8 is not supported"),
    ],
)
def test_a_value_that_sglang_has_not_is_an_error(make: Make, override: str, said: str) -> None:
    drafts = ["speculative=ngram"] if override.startswith("speculative") else []
    with pytest.raises(BadInput, match=said):
        make("sglang", *drafts, override)


def test_it_sees_the_gpus_that_are_named_and_splits_the_model_over_them(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    child = make("sglang", "runtime.device=cuda:2-3").started
    assert (child.stand_in.given["device"], child.stand_in.given["tp-size"]) == ("cuda", "2")
    assert child.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    alone = make("sglang", "runtime.device=cuda:1").started
    assert "tp-size" not in alone.stand_in.given
    assert alone.environment["CUDA_VISIBLE_DEVICES"] == "1"


def test_the_degrees_of_parallel_are_those_of_sglang(make: Make) -> None:
    given = make("sglang", "parallel.tensor=4", "parallel.replicas=2").started.stand_in.given
    assert (given["tp-size"], given["dp-size"]) == ("4", "2")
