"""Words that may not be generated."""

from __future__ import annotations

from dataclasses import replace

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


def test_no_spelling_of_a_word_is_generated_at_the_beginning_or_after_a_space() -> None:
    """Its form after a space may have another number of tokens, and either may be cut otherwise."""
    with LLM("tiny", overrides=["cache.num_blocks=64"]) as llm:
        tokenizer = llm.tokenizer
        assert tokenizer is not None

        def spelled(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        words = ("isinstance", "elif", "yield", "finally", "return")
        assert any(len(spelled(word)) != len(spelled(f" {word}")) for word in words)
        for word in words:
            letters = [spelled(letter)[0] for letter in word]
            for script in (spelled(word), spelled(f" {word}"), letters, spelled(" ") + letters):
                params = SamplingParams(
                    max_tokens=len(script),
                    token_mask=lambda _, output, script=script: [
                        script[len(output)],
                        *spelled("#"),
                    ],
                    logit_bias={token: 50 for token in script},
                )
                free = llm.generate(["a"], params)[0].outputs[0]
                assert free.text is not None and word in free.text
                kept = llm.generate(["a"], replace(params, bad_words=(word,)))[0].outputs[0]
                assert kept.text is not None and word not in kept.text
                assert kept.token_ids[:-1] == script[:-1]  # only the last token is forbidden


def test_it_adds_to_the_mask_of_the_request() -> None:
    class Characters:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [ord(character) - ord("a") for character in text.strip()]

        @property
        def fast(self) -> Characters:
            return self

        def id_to_token(self, token_id: int) -> str:
            return chr(token_id + ord("a"))

        def token_to_id(self, token: str) -> int | None:
            return ord(token) - ord("a") if len(token) == 1 else None

    alone = BadWords(["ab", "c"], Characters(), 4)  # type: ignore[arg-type]
    assert alone([], [0]).tolist() == [True, False, False, True]
    assert alone([0], []).tolist() == [True, True, False, True]
    both = BadWords(["ab"], Characters(), 4, lambda prompt, output: [0, 1])  # type: ignore[arg-type]
    assert both([], [0]) == [0]
    assert both([], [1]) == [0, 1]
    none = BadWords(["ab"], Characters(), 4)  # type: ignore[arg-type]
    assert none([], []) is None
