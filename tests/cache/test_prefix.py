"""Prefix caching on the real engine: what is computed, and that it says the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from minivllm import LLM, SamplingParams
from minivllm.engine.events import Event, StepTimed
from minivllm.errors import BadInput
from minivllm.llm import RequestOutput
from tests.reference import make_checkpoint

SHARED = [(17 * i) % 4000 + 5 for i in range(512)]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


def serve(caching: bool, prompts: list[list[int]]) -> tuple[list[RequestOutput], list[int], LLM]:
    """Answers to prompts one after another, and the prompt tokens computed for each."""
    llm = LLM(
        "tiny",
        quant="fp32",
        device="cpu",
        overrides=[f"cache.prefix_caching={str(caching).lower()}"],
    )
    computed: list[int] = []

    def listen(event: Event) -> None:
        if isinstance(event, StepTimed):
            computed[-1] += event.num_prefill_tokens

    llm.engine.events.subscribe(listen)
    outputs = []
    for prompt in prompts:
        computed.append(0)
        outputs += llm.generate([prompt], PARAMS)
    return outputs, computed, llm


def test_a_second_request_computes_only_what_it_does_not_share() -> None:
    prompts = [[*SHARED, 9, 8, 7], [*SHARED, 6, 5, 4, 3]]
    plain, all_computed, llm = serve(False, prompts)
    assert all_computed == [515, 516]
    llm.close()
    cached, computed, llm = serve(True, prompts)
    assert computed == [515, 4]
    assert [o.outputs[0].token_ids for o in cached] == [o.outputs[0].token_ids for o in plain]
    assert llm.engine.cache.counters.prefix_tokens_reused == 512
    llm.engine.cache.reset_prefix_cache()
    assert llm.engine.cache.pool.num_free == llm.engine.cache.pool.num_usable
    llm.close()


def test_a_talk_computes_each_turn_once() -> None:
    first = [(7 * i) % 4000 + 5 for i in range(64)]
    llm = LLM("tiny", quant="fp32", device="cpu", overrides=["cache.prefix_caching=true"])
    with llm:
        answer = llm.generate([first], PARAMS)[0].outputs[0].token_ids
        llm.generate([[*first, *answer, 11, 12, 13]], PARAMS)
        # 64 + 7 tokens of the first turn are computed (its last one never was): four blocks of 16
        # are full.
        assert llm.engine.cache.counters.prefix_tokens_reused == 64


def test_logits_of_a_prompt_are_never_taken_from_the_cache() -> None:
    llm = LLM("tiny", quant="fp32", device="cpu", overrides=["cache.prefix_caching=true"])
    with llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=1)
        first, again = (llm.generate([SHARED[:40]], params)[0].prompt_logprobs for _ in range(2))
        assert first is not None and len(first) == 39
        assert again == first


def test_a_rope_that_goes_by_length_shares_nothing(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    make_checkpoint(tmp_path, "llama", rope_parameters=rope)
    with pytest.raises(BadInput, match="prefix_caching=false"):
        LLM(str(tmp_path), device="cpu", overrides=["cache.prefix_caching=true"])
