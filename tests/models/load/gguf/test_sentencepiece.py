"""The models of sentencepiece against its rules and against tokenizers of the same vocabulary."""

from __future__ import annotations

import json
import struct
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE, Unigram
from tokenizers.trainers import BpeTrainer, UnigramTrainer

from minivllm.errors import BadInput
from tests.gguf_tokenizers import HEX, SPM, TEXTS, UNIGRAM, made

TOKENS, TYPES, SCORES = (f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores"))
PREFIX, EXTRA = "tokenizer.ggml.add_space_prefix", "tokenizer.ggml.remove_extra_whitespaces"
SPACE = "\u2581"
NAMES = {text: index for index, text in enumerate(SPM[TOKENS])}


def ids(*texts: str) -> list[int]:
    return [NAMES[text] for text in texts]


@cache
def pieces(model: str) -> tuple[tuple[str, float], ...]:
    """Tokens and scores that a trainer finds for the texts."""
    fast = FastTokenizer(Unigram() if model == "t5" else BPE())
    fast.normalizer = normalizers.Replace(" ", SPACE)
    fast.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    trainer: Any = (
        UnigramTrainer(vocab_size=350, show_progress=False, unk_token="<unk>")
        if model == "t5"
        else BpeTrainer(vocab_size=900, show_progress=False)
    )
    fast.train_from_iterator([text for text in TEXTS[:8] for _ in range(3)], trainer)
    vocabulary = json.loads(fast.to_str())["model"]["vocab"]
    if model == "t5":
        return tuple((token, score) for token, score in vocabulary if token != "<unk>")
    ordered = sorted(vocabulary, key=vocabulary.__getitem__)
    return tuple((token, -float(index)) for index, token in enumerate(ordered))


def values_of(model: str, **further: Any) -> dict[str, Any]:
    """The metadata of those tokens, with a token of each byte."""
    trained = pieces(model)
    return {
        "tokenizer.ggml.model": model,
        TOKENS: ["<unk>", "<s>", "</s>", *HEX, *(token for token, _ in trained)],
        TYPES: [2, 3, 3, *[6] * 256, *[1] * len(trained)],
        SCORES: [0.0] * 259 + [score for _, score in trained],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **further,
    }


def merged(text: str, scores: dict[str, float]) -> list[str]:
    """What sentencepiece's BPE makes of a text: of all neighbours that form a token, those of the
    best score are merged, the leftmost first, until none are left."""
    symbols = list(SPACE + text.replace(" ", SPACE)) if text else []
    while True:
        pairs = [
            (-scores[left + right], place)
            for place, (left, right) in enumerate(pairwise(symbols))
            if left + right in scores
        ]
        if not pairs:
            break
        place = min(pairs)[1]
        symbols[place : place + 2] = ["".join(symbols[place : place + 2])]
    return [
        part
        for symbol in symbols
        for part in ([symbol] if symbol in scores else (f"<0x{b:02X}>" for b in symbol.encode()))
    ]


def test_merges_are_those_of_the_best_score(tmp_path: Path) -> None:
    values = values_of("llama")
    ours, scores = made(tmp_path, values), dict(pieces("llama"))
    texts = [text for text in TEXTS if "<s>" not in text] + ["\u4e2d\u6587 \U0001f9ff <0x41>"]
    for text in texts:
        tokens = [values[TOKENS][index] for index in ours.encode(text, add_special_tokens=False)]
        assert tokens == merged(text, scores)
        assert ours.decode(ours.encode(text)) == text


def test_merges_are_those_of_a_tokenizer_with_the_parts_of_llama(tmp_path: Path) -> None:
    from transformers.convert_slow_tokenizer import generate_merges

    values = values_of("llama")
    scores, usual = dict(pieces("llama")), {token for token, _ in pieces("llama")}
    vocabulary = {token: index for index, token in enumerate(values[TOKENS])}
    merges = generate_merges(vocabulary, scores | dict.fromkeys(vocabulary.keys() - usual, -1e9))
    reference = FastTokenizer(
        BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    parts: list[Any] = [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    reference.normalizer = normalizers.Sequence(parts)
    reference.add_special_tokens(["<unk>", "<s>", "</s>"])
    ours = made(tmp_path, values)
    for text in TEXTS:
        assert ours.encode(text, False) == reference.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("has_bytes", [True, False])
def test_a_unigram_model_is_a_tokenizer_of_the_same_tokens(has_bytes: bool, tmp_path: Path) -> None:
    values = values_of("t5", **{PREFIX: True, EXTRA: True})
    if not has_bytes:
        values[TYPES] = [2, 3, 3, *[5] * 256, *values[TYPES][259:]]
    scores = dict(pieces("t5"))
    pairs = [(token, scores.get(token, min(scores.values()))) for token in values[TOKENS]]
    reference = FastTokenizer(Unigram(pairs, 0, has_bytes))
    parts: list[Any] = [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), SPACE)]
    reference.normalizer = normalizers.Sequence(parts)  # as T5's, whose charsmap is left out
    reference.pre_tokenizer = pre_tokenizers.Metaspace()
    reference.decoder = decoders.Metaspace()
    reference.add_special_tokens(["<unk>", "<s>", "</s>"])
    ours = made(tmp_path, values)
    texts = [text for text in TEXTS if "<" not in text and text == text.strip("\n\t\r")]
    assert len(texts) >= 8
    for text in [*texts, "\u4e2d\u6587 \U0001f9ff"]:
        assert ours.encode(text, False) == reference.encode(text, add_special_tokens=False).ids
        if has_bytes:
            assert ours.decode(ours.encode(text)) == " ".join(text.split(" ")).strip(" ") or (
                "  " in text
            )


def test_the_text_of_a_byte_is_no_byte(tmp_path: Path) -> None:
    for model in ("llama", "t5"):
        tokenizer = made(tmp_path, values_of(model))
        encoded = tokenizer.encode("a<0x41>", add_special_tokens=False)
        assert NAMES["<0x41>"] not in encoded and tokenizer.decode(encoded) == "a<0x41>"


def test_the_best_score_joins_first(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, SPM)
    # ab has the best score: it is merged before a joins the space in front of it.
    assert tokenizer.encode("abc") == ids("<s>", "\u2581abc")
    assert tokenizer.encode("c") == ids("<s>", "\u2581", "c")
    assert tokenizer.encode("é", add_special_tokens=False) == ids("\u2581", "<0xC3>", "<0xA9>")
    assert tokenizer.decode(tokenizer.encode("abc é  a")) == "abc é  a"
    assert tokenizer.encode("a</s>a", False) == ids("\u2581a", "</s>", "\u2581a")
    unknown = [*tokenizer.encode("abc"), NAMES["<unk>"]]
    assert tokenizer.decode(unknown) == "abc"
    assert tokenizer.decode(unknown, skip_special_tokens=False).endswith("abc<unk>")


def test_the_most_probable_tokens_are_those_of_a_unigram_model(tmp_path: Path) -> None:
    """In the same vocabulary: "abc" alone has the score -3, and "ab" with "c" -13."""
    tokenizer = made(tmp_path, UNIGRAM)
    assert tokenizer.encode("abc") == [*ids("abc"), 2]
    assert tokenizer.encode("abab", False) == ids("ab", "ab")
    assert tokenizer.encode("ab c", False) == ids("ab", "\u2581", "c")
    assert tokenizer.encode("é", False) == ids("<0xC3>", "<0xA9>")
    assert tokenizer.encode("abdc</s>a", False) == ids("ab", "<0x64>", "c", "</s>", "a")


def test_spaces_are_kept_or_taken_out(tmp_path: Path) -> None:
    for values in (SPM, UNIGRAM):
        plain = made(tmp_path, values | {PREFIX: False})
        assert plain.decode(plain.encode("  a b ")) == "  a b "
        assert plain.encode("a", False) == ids("a")
        narrow = made(tmp_path, values | {PREFIX: True, EXTRA: True})
        assert narrow.encode("  a   b\n  ", False) == ids("\u2581a", "\u2581", "b", "<0x0A>")
        assert narrow.encode("   ", False) == []


def test_user_defined_tokens_are_found_in_the_text(tmp_path: Path) -> None:
    """Of those that begin at a place, the longest: as Gemma's, whose tokens are of spaces."""
    tokens = [*SPM[TOKENS], "   ", "\u2581\u2581\u2581\u2581", "<b>"]
    types = [*SPM[TYPES], 4, 4, 4]
    scores = [*SPM[SCORES], 0.0, 0.0, 0.0]
    values = SPM | {TOKENS: tokens, TYPES: types, SCORES: scores, PREFIX: False}
    for model in ("llama", "t5"):
        tokenizer = made(tmp_path, values | {"tokenizer.ggml.model": model})
        encoded = tokenizer.encode("a    b   <b>c", False)
        assert encoded == [*ids("a"), 270, *ids("b"), 269, 271, *ids("c")]
        assert tokenizer.decode(encoded) == "a    b   <b>c"


def test_gemmas_spaces_and_order_of_merges(tmp_path: Path) -> None:
    tokens = [*SPM[TOKENS]]
    tokens[-1] = "  "
    tokens += ["bc"]  # whose score would merge it first
    values = SPM | {
        TOKENS: tokens,
        TYPES: [*SPM[TYPES], 1],
        SCORES: [*SPM[SCORES], 100.0],
        PREFIX: False,
    }
    tokenizer = made(tmp_path, values, "gemma")
    assert tokenizer.encode("  ", False) == [tokens.index("  ")]
    assert tokenizer.encode("abc", False) == [tokens.index("abc")]
    assert tokenizer.decode(tokenizer.encode("  abc")) == "  abc"


def charsmap(letter: str, other: str) -> list[int]:
    """A map of one byte to another, as sentencepiece stores it: a double array, and texts."""
    array = [0] * 512
    array[ord(letter)] = 0x100 << 10 | 1 << 8 | ord(letter)
    array[ord(letter) ^ 0x100] = 1 << 31  # the text at 0
    return [*struct.pack("<I512I", 4 * len(array), *array), *other.encode(), 0]


def test_characters_are_mapped_before_they_are_tokens(tmp_path: Path) -> None:
    key = "tokenizer.ggml.precompiled_charsmap"
    for values in (SPM, UNIGRAM):
        tokenizer = made(tmp_path, values | {key: charsmap("B", "b"), PREFIX: False})
        assert tokenizer.encode("aBc", False) == ids("abc")
        with pytest.raises(BadInput, match="holds no usable tokenizer") as raised:
            made(tmp_path, values | {key: [1, 2, 3]})
        assert "\n" not in str(raised.value)


def test_a_map_that_leads_out_of_itself_is_one_line_when_it_is_read(tmp_path: Path) -> None:
    key, broken = "tokenizer.ggml.precompiled_charsmap", charsmap("B", "b")
    broken[4 + 4 * ord("B") : 8 + 4 * ord("B")] = struct.pack("<I", 1 << 30 | 1 << 8 | ord("B"))
    for values in (SPM, UNIGRAM):
        with pytest.raises(BadInput, match="holds no usable tokenizer") as raised:
            made(tmp_path, values | {key: broken})
        assert "\n" not in str(raised.value)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no scores": ({SCORES: None}, "a unigram model of tokens needs scores"),
    "nothing for unknown text": ({TYPES: [1] * 269}, "needs token for unknown text"),
    "scores of other tokens": ({SCORES: [1.0]}, "269 tokens have 1 scores"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_unigram_model_that_cannot_be_is_one_line(case: str, tmp_path: Path) -> None:
    change, message = WRONG[case]
    given = {key: value for key, value in (UNIGRAM | change).items() if value is not None}
    with pytest.raises(BadInput, match=message) as raised:
        made(tmp_path, given)
    assert "\n" not in str(raised.value)


def test_a_vocabulary_whose_merges_would_take_minutes_is_one_line(tmp_path: Path) -> None:
    """Each token is short enough; together they have 1.1e9 characters on either side of a cut."""
    tokens = [f"{index:04}" + "a" * 1000 for index in range(1100)]
    given = {TOKENS: tokens, TYPES: [1] * len(tokens), SCORES: [0.0] * len(tokens)}
    with pytest.raises(BadInput, match=r"the 1,100 tokens of .* copies 1,1.* more than any"):
        made(tmp_path, SPM | given)


def test_a_unigram_model_that_would_take_the_memory_is_one_line(tmp_path: Path) -> None:
    tokens = [f"{index:04}" + SPACE * 1000 for index in range(1700)]
    given = {TOKENS: tokens, TYPES: [2, *[1] * 1699], SCORES: [-1.0] * len(tokens)}
    with pytest.raises(BadInput, match=r"1,700 tokens of .* have 5,106,800 bytes, more than in"):
        made(tmp_path, UNIGRAM | given)
