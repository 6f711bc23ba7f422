"""Bytes, operations, and shares of the measured limits, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minivllm.bench.hardware.readings import Roofline
from minivllm.bench.metrics.roofline import usage
from minivllm.config.compose import compose
from minivllm.engine.options import SamplingParams
from minivllm.engines.minivllm.engine import MinivllmEngine
from minivllm.models.costs import model_costs
from minivllm.quant import fp8
from tests.reference import make_checkpoint

MODEL = {
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "hidden_size": 10,
    "vocab_size": 20,
    "num_experts": 0,
    "num_experts_per_token": 0,
    "moe_intermediate_size": 7,
    "dense_layers": (),
}
MIXTURE = MODEL | {"num_experts": 4, "num_experts_per_token": 2, "dense_layers": (0,)}
COSTS = model_costs(MODEL, streamed_params=1000, streamed_weight_bytes=2000, dtype="bfloat16")


def step(**fields: Any) -> dict[str, Any]:
    return {
        "num_requests": 1,
        "num_prefill_tokens": 0,
        "forward_ms": 1.0,
        "schedule_ms": 1.0,
        **fields,
    }


def test_costs_of_a_model() -> None:
    assert COSTS["streamed_weight_bytes"] == 2000
    assert COSTS["flops_per_token"] == 2 * (1000 - 200)
    assert COSTS["head_flops_per_row"] == 2 * 200
    assert COSTS["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 2  # k and v, layers, heads, width, bytes
    assert COSTS["attention_flops_per_token_pair"] == 4 * 2 * 4 * 8


def test_a_trimmed_layer_ends_only_where_logits_are_wanted() -> None:
    """Its output projection, 4 heads of 8 to 10, and its MLP, 3 times 10 by 30, or 2 experts of 3
    times 10 by 7."""
    for model, tail in ((MODEL, 320 + 900), (MIXTURE, 320 + 420)):
        sizes = model | {"intermediate_size": 30}
        whole, trimmed = (
            model_costs(sizes, 9000, 18000, "bfloat16", trims=trims) for trims in (False, True)
        )
        assert whole["flops_per_token"] - trimmed["flops_per_token"] == 2 * tail
        assert trimmed["head_flops_per_row"] - whole["head_flops_per_row"] == 2 * tail
        decode = [step(num_tokens=2, num_requests=2, context_tokens=30)]
        assert usage(whole, decode, Roofline()) == usage(trimmed, decode, Roofline())


def test_decode_bytes_and_mbu() -> None:
    steps = [
        step(num_tokens=2, num_requests=2, context_tokens=30),
        step(num_tokens=2, num_requests=2, context_tokens=32),
        step(num_tokens=10, num_prefill_tokens=9, context_tokens=100),  # mixed: counts for neither
    ]
    result = usage(COSTS, steps, Roofline(bandwidth_bytes_per_s=10e6), cache_bytes=3999)
    assert result.decode_bytes == 2 * 2000 + 128 * 62
    # The body of 4 tokens, 62 pairs of a query and a cached token, and the head of 4 rows.
    assert result.decode_flops == 1600 * 4 + 256 * 62 + 400 * 4
    assert result.decode_s == pytest.approx(0.004)
    assert result.mbu == pytest.approx((4000 + 128 * 62) / 0.004 / 10e6)
    assert result.fits_cache is False  # 5968 bytes a step
    assert result.prefill_flops is None and result.prefill_bytes is None and result.mfu is None
    assert usage(COSTS, steps, Roofline(), cache_bytes=6000).fits_cache is True


def test_a_step_with_drafts_reads_the_weights_once_and_has_a_row_of_logits_for_each() -> None:
    drafting = step(num_tokens=8, num_requests=2, num_drafts=6, context_tokens=38)
    result = usage(COSTS, [drafting], Roofline(bandwidth_bytes_per_s=10e6))
    assert result.decode_bytes == 2000 + 128 * 38
    # Each of two requests has 4 of its 19 tokens computed: 4 * 19 - (1 + 2 + 3) pairs.
    assert result.decode_flops == 1600 * 8 + 256 * 2 * (4 * 19 - 6) + 400 * 8
    assert result.mbu is not None and result.mfu is None


def test_a_mixture_reads_the_experts_that_a_step_ran() -> None:
    """One layer of two has 4 experts of 3 * 10 * 7 = 210 parameters, 2 of them for each token."""
    costs = model_costs(MIXTURE, streamed_params=2000, streamed_weight_bytes=4000, dtype="bfloat16")
    assert costs["expert_weight_bytes"] == 420 and costs["experts_per_token"] == 2
    assert costs["streamed_weight_bytes"] == 4000 - 4 * 420
    assert costs["flops_per_token"] == 2 * (2000 - 200 - 2 * 210)
    quantised = model_costs(MIXTURE, 2000, 2740, "bfloat16", expert_bytes=420)
    assert quantised["expert_weight_bytes"] == 105 and quantised["streamed_weight_bytes"] == 2320
    counted = [
        step(num_tokens=1, context_tokens=0, experts_run=2),
        step(num_tokens=2, context_tokens=0, experts_run=3),
    ]
    assert usage(costs, counted, Roofline()).decode_bytes == 2 * 2320 + 5 * 420
    # An engine that does not count them: those of one token, so that the use is understated and
    # never more.
    assert (
        usage(costs, [step(num_tokens=2, context_tokens=0)], Roofline()).decode_bytes
        == 2320 + 2 * 420
    )


def test_layers_with_a_window_read_no_more_than_it() -> None:
    """One of two layers sees 8 tokens: of requests of 3 and 27 tokens it reads 11, the other 30."""
    costs = model_costs(MODEL, 1000, 2000, "bfloat16", windows=(8, None))
    decode = step(num_tokens=2, num_requests=2, context_tokens=30, window_tokens=11)
    result = usage(costs, [decode], Roofline())
    assert result.decode_bytes == 2000 + 64 * (30 + 11)
    assert result.decode_flops == 1600 * 2 + 128 * (30 + 11) + 400 * 2
    # An engine that does not count them: of 30 tokens at least 8 are within some window.
    uncounted = step(num_tokens=2, num_requests=2, context_tokens=30)
    assert usage(costs, [uncounted], Roofline()).decode_bytes == 2000 + 64 * (30 + 8)
    # Of a prompt of 10 tokens the last two see 8, of its next chunk of 4 all do.
    chunks = [
        step(num_tokens=10, num_prefill_tokens=10, context_tokens=10, window_tokens=8),
        step(num_tokens=4, num_prefill_tokens=4, context_tokens=14, window_tokens=8),
    ]
    pairs = 14 * 15 / 2 + 8 * 9 / 2 + 6 * 8
    assert usage(costs, chunks, Roofline()).prefill_flops == 1600 * 14 + 128 * pairs + 400 * 2


def test_the_engine_counts_what_is_within_the_window(tmp_path: Path) -> None:
    """Two layers of three see 7 tokens."""
    make_checkpoint(tmp_path, "gemma3_text")
    engine = MinivllmEngine(
        compose(["model=hf", f"model.path={tmp_path}", "quant=fp32", "runtime.device=cpu"])
    )
    for length in (3, 20):
        engine.submit(
            str(length), list(range(5, 5 + length)), SamplingParams(max_tokens=3, ignore_eos=True)
        )
    while engine.engine.has_unfinished:
        engine.poll()
    counted = [(s["context_tokens"], s["window_tokens"]) for s in engine.steps()]
    assert counted == [(3 + 20, 3 + 7), (4 + 21, 4 + 7), (5 + 22, 5 + 7)]
    assert engine.info.model["window"] == 7 and engine.info.model[
        "windowed_share"
    ] == pytest.approx(2 / 3)
    engine.close()


@pytest.mark.parametrize(
    ("quant", "on_hopper", "dtype"),
    [
        ("bf16", True, "bfloat16"),
        ("int8_mixed", False, "int8"),
        ("fp8", False, "bfloat16"),
        ("fp8", True, "float8_e4m3fn"),
    ],
)
def test_the_matrix_rate_is_that_of_the_fastest_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quant: str, on_hopper: bool, dtype: str
) -> None:
    """One that a run passes marks it invalid."""
    make_checkpoint(tmp_path, "qwen3")
    monkeypatch.setattr(fp8, "has_kernel", lambda weight, dtype: on_hopper)
    config = compose(["model=hf", f"model.path={tmp_path}", f"quant={quant}", "runtime.device=cpu"])
    engine = MinivllmEngine(config)
    assert engine.info.model["matrix_dtype"] == dtype
    engine.close()


def test_prefill_flops_and_mfu() -> None:
    # One prompt of 4 tokens attends to 1 + 2 + 3 + 4 pairs; its next chunk of 2 to 5 + 6.
    steps = [
        step(num_tokens=4, num_prefill_tokens=4, context_tokens=4),
        step(num_tokens=2, num_prefill_tokens=2, context_tokens=6),
    ]
    result = usage(COSTS, steps, Roofline(matrix_flops_per_s=1e9))
    flops = 1600 * 6 + 256 * 21 + 400 * 2  # the head: one row a step
    assert result.prefill_flops == flops
    assert result.prefill_bytes == 2 * 2000 + 128 * (4 + 6)
    assert result.mfu == pytest.approx(flops / 0.004 / 1e9)
    assert result.mbu is None and result.fits_cache is None


def test_prefill_of_two_equal_prompts() -> None:
    result = usage(
        COSTS,
        [step(num_tokens=6, num_requests=2, num_prefill_tokens=6, context_tokens=6)],
        Roofline(),
    )
    assert result.prefill_flops == 1600 * 6 + 256 * 12 + 400 * 2


def test_overlapping_steps_take_from_the_beginning_of_the_next_to_that_of_the_one_after() -> None:
    """Each waits for the one before it. None is charged what a step of another kind took, or
    idleness."""
    prompt = {"num_tokens": 4, "num_prefill_tokens": 4, "context_tokens": 4}
    kinds = [
        prompt,
        *({"num_tokens": 1, "context_tokens": n} for n in (5, 6, 7, 8)),
        prompt,
        prompt,
        prompt,
    ]
    # the second waits for the prompt of half a second
    begins = (0.0, 0.1, 0.6, 0.7, 0.9, 1.0, 1.1, 5.0)
    steps = [
        step(start_s=begin, gap_ms=0.1, **kind) for begin, kind in zip(begins, kinds, strict=True)
    ]
    steps[-1]["gap_ms"] = 0.0  # nothing was to be done before it
    result = usage(COSTS, steps, Roofline(10e3, 1.0), cache_bytes=1, overlapped=True)
    assert result.decode_bytes == 2 * 2000 + 128 * (5 + 6)
    assert result.decode_s == pytest.approx((0.7 - 0.6) + (0.9 - 0.7))
    assert result.mbu == pytest.approx(result.decode_bytes / 0.3 / 10e3)
    # No prompt has two of its kind behind it without idleness.
    assert result.mfu is result.prefill_s is result.prefill_flops is None


def test_the_share_of_a_run_that_the_limits_would_allow() -> None:
    steps = [
        step(num_tokens=4, num_prefill_tokens=4, context_tokens=4),  # by its operations
        step(num_tokens=1, context_tokens=5),  # by its bytes
        # at least 8 pairs
        step(num_tokens=3, num_requests=2, num_prefill_tokens=2, context_tokens=8),
    ]
    result = usage(COSTS, steps, Roofline(1000.0, 1600.0), window_s=20.0)
    mixed = max((2000 + 128 * 8) / 1000, (1600 * 3 + 256 * 8 + 400 * 2) / 1600)
    least = (1600 * 4 + 256 * 10 + 400) / 1600 + (2000 + 128 * 5) / 1000 + mixed
    assert result.least_s == pytest.approx(least) and result.share == pytest.approx(least / 20)
    for other in (
        usage(COSTS, steps, Roofline(1000.0, 1600.0), cache_bytes=4000, window_s=20.0),
        usage(COSTS, [], Roofline(1000.0, 1600.0), window_s=20.0),
        usage(COSTS, steps, Roofline(1000.0), window_s=20.0),
    ):
        assert other.share is other.least_s is None


def test_without_costs_there_is_nothing_to_say() -> None:
    result = usage({}, [step(num_tokens=1, context_tokens=1)], Roofline(bandwidth_bytes_per_s=1.0))
    assert result.mbu is None and result.bandwidth_bytes_per_s == 1.0
