"""Words that may not be generated."""

from __future__ import annotations

from minivllm import LLM, SamplingParams
from minivllm.extras.masks.bad_words import BadWords


def test_a_bad_word_is_never_generated() -> None:
    with LLM("tiny", overrides=["cache.num_blocks=64"]) as llm:
        prompt = "def main():"
        free = llm.generate(prompt, SamplingParams(max_tokens=24))[0].outputs[0]
        ids = free.token_ids
        assert llm.tokenizer is not None
        word = llm.tokenizer.decode(ids[2:4]).strip()
        assert word and word in (free.text or "")
        kept = llm.generate(prompt, SamplingParams(max_tokens=24, bad_words=(word,)))[0].outputs[0]
        assert kept.token_ids != ids
        bad = llm.tokenizer.encode(word, add_special_tokens=False)
        assert bad not in [kept.token_ids[i : i + len(bad)] for i in range(len(kept.token_ids))]


def test_it_adds_to_the_mask_of_the_request() -> None:
    class Characters:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [ord(character) - ord("a") for character in text.strip()]

    alone = BadWords(["ab", "c"], Characters(), 4)  # type: ignore[arg-type]
    assert alone([], [0]).tolist() == [True, False, False, True]
    assert alone([0], []).tolist() == [True, True, False, True]
    both = BadWords(["ab"], Characters(), 4, lambda prompt, output: [0, 1])  # type: ignore[arg-type]
    assert both([], [0]) == [0]
    assert both([], [1]) == [0, 1]
    none = BadWords(["ab"], Characters(), 4)  # type: ignore[arg-type]
    assert none([], []) is None
