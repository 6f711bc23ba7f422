"""engine=llamacpp against a stand-in: its command line, its file, its counters."""

from __future__ import annotations

from pathlib import Path

import pytest

from minivllm import BadInput
from minivllm.engines.llamacpp import engine as llamacpp
from tests.engines.conftest import Make
from tests.engines.driving import requests, run

pytest.importorskip("aiohttp")


def test_knobs_become_arguments(make: Make, tmp_path: Path) -> None:
    engine = make(
        "llamacpp",
        "quant=int8",
        "cache.kv_dtype=int8",
        "batching.max_num_seqs=4",
        "model.max_model_len=256",
        "speculative=ngram",
        "runtime.device=cpu",
        "+engine.args.flash_attn='on'",
        "+engine.args.repack=false",
    )
    given = engine.started.stand_in.given
    assert given.pop("model") == str(tmp_path / "tiny-Q8_0.gguf")
    for name in ("port", "slot-save-path", "host"):
        del given[name]
    assert given == {
        "ctx-size": "1024",
        "parallel": "4",
        "batch-size": "2048",
        "threads": "1",
        "threads-batch": "1",
        "no-cache-prompt": True,
        "cache-prompt": False,
        "cache-ram": "0",
        "cache-type-k": "q8_0",
        "cache-type-v": "q8_0",
        "spec-type": "ngram-simple",
        "spec-ngram-simple-size-n": "4",
        "spec-ngram-simple-size-m": "3",
        "device": "none",
        "metrics": True,
        "log-verbosity": "4",
        "flash-attn": "on",
        "no-repack": True,
        "repack": False,
    }


def test_a_pool_of_blocks_is_shared_by_the_slots(make: Make) -> None:
    given = make("llamacpp", "cache.num_blocks=100", "cache.block_size=32").started.stand_in.given
    assert given["ctx-size"] == "3200" and given["kv-unified"] is True


def test_metrics_and_log_become_counters(make: Make) -> None:
    engine = make("llamacpp", "cache.prefix_caching=true", "batching.max_num_seqs=2")
    engine.reset()
    assert engine.started.stand_in.resets >= 2, "a slot was not erased"
    prompt = tuple(range(40, 60))
    run(engine, requests([prompt, (*prompt, 7), (9, 9)], [200, 200, 200]))
    counts = engine.liveness()
    assert 19 <= counts["cache"]["prefix_tokens_reused"] <= 20
    rate = counts["cache"]["prefix_tokens_reused"] / 43
    assert counts["cache"]["prefix_hit_rate"] == pytest.approx(rate)
    assert counts["batching"]["largest_batch"] == 2, "of three requests two run at once"
    assert counts["cache"]["kv_dtype"] == "f16" and counts["attention"]["flash_attn"] == "auto"
    assert counts["quant"] == {"file_type": "BF16", "file_bytes": 1000, "activations": "none"}
    assert counts["engine"]["version"] == "11434 (0c1e570)"
    engine.reset()
    assert engine.liveness()["cache"]["prefix_tokens_reused"] == 0


def test_one_request_at_a_time(make: Make) -> None:
    engine = make("llamacpp", "batching=sequential")
    assert engine.started.stand_in.given["parallel"] == "1" and engine.info.max_num_seqs == 1
    run(engine, requests([(1, 2), (3, 4)], [20, 20]))
    assert engine.liveness()["batching"]["largest_batch"] == 1


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["engine.gguf=null"], "engine.gguf is missing"),
        (["quant=int4"], "tiny-Q4_0.gguf is not there"),
        (["engine.gguf=one.gguf", "quant=int8"], r"Q8_0 file is asked for .* write \{type\}"),
        (["engine.gguf=one.gguf", "engine.gguf_type=F16"], "F16 file is asked for"),
        (["quant=int8", "quant.dtype=float16"], "quant.dtype=float16 is not supported"),
        (["quant=nf4"], "quant=nf4 is not supported by engine=llamacpp"),
        (["cache.kv_dtype=fp8"], "cache.kv_dtype=fp8 is not supported"),
        (["cache.block_size=32"], "cache.block_size=32 is not supported"),
        (["model.weights=random"], "model.weights=random is not supported"),
        (["batching.chunked_prefill=false"], "batching.chunked_prefill=false is not supported"),
    ],
)
def test_what_llama_cpp_has_not_is_an_error(make: Make, overrides: list[str], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        make("llamacpp", *overrides)


def test_packed_weights_are_said_to_have_activations_of_eight_bits(make: Make) -> None:
    asked = make("llamacpp", "quant=int8", "quant.activations=int8")
    assert llamacpp.ROUNDED not in asked.info.warnings
    assert asked.liveness()["quant"]["activations"] == "int8"
    assert llamacpp.ROUNDED in make("llamacpp", "quant=int8").info.warnings
