"""Keys and values of prompts in another engine, beside what its own cache holds."""

from __future__ import annotations

from minivllm import LLM, SamplingParams
from minivllm.extras.handover import put_prefix, take_prefix

KNOBS = ["quant=fp32", "runtime.threads=1", "cache.prefix_caching=true", "cache.block_size=8"]
OWN, OTHER = list(range(2, 40)), list(range(50, 95))
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


def tokens(llm: LLM, prompt: list[int]) -> list[int]:
    return llm.generate([prompt], PARAMS)[0].outputs[0].token_ids


def test_what_a_prefix_takes_the_place_of_is_saved_first() -> None:
    """The pool holds one of the two prompts; the other one's blocks are offloaded to the host."""
    with LLM("tiny", overrides=[*KNOBS, "cache.num_blocks=32"]) as first:
        known, others = tokens(first, OWN), tokens(first, OTHER)
        content = take_prefix(first.engine.cache, first.engine.transfers, OTHER)
    knobs = [*KNOBS, "cache.num_blocks=8", "cache.offload_gb=0.1", "model.max_model_len=56"]
    with LLM("tiny", overrides=knobs) as second:
        engine = second.engine
        assert tokens(second, OWN) == known
        assert put_prefix(engine.cache, engine.transfers, OTHER, content) == 40
        counters = engine.cache.counters
        assert counters.blocks_offloaded > 0
        assert tokens(second, OTHER) == others
        before = counters.blocks_restored
        assert tokens(second, OWN) == known
        assert counters.blocks_restored > before
