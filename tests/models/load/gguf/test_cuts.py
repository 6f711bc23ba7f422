"""Rules of cutting text against tokenizers with the parts that tokenizer.json of the models has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, normalizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

from minivllm.models.load.gguf.cuts import RULES
from tests.gguf_tokenizers import TEXTS, byte_level, made, trained

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MINICPM5 = LLAMA3.replace("{1,3}", "+")
DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
CJK = "[一-龥ࠀ-一가-퟿]+"
CASED = r"\s?[\p{Lu}\p{Ll}\p{Lt}]+"  # the same letters in these texts
MARKS = r"\s?[!-/:-~！-／：-～‘-‟　-。]+"
DIGITS = Digits(individual_digits=True)


def split(*patterns: str) -> list[Any]:
    return [Split(Regex(pattern), "isolated") for pattern in patterns]


# By name: the parts before ByteLevel; whether that cuts as GPT-2 does; whether a word that is a
# token is kept; whether text is normalised.
PARTS: dict[str, tuple[list[Any], bool, bool, bool]] = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"),
        (split(LLAMA3), False, True, False),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), (split(LLAMA3), False, False, False)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (split(QWEN2), False, False, True)),
    **dict.fromkeys(("megrez", "kormo", "f2llmv2"), (split(QWEN2), False, False, False)),
    "tekken": (split(TEKKEN), False, True, False),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), (split(GPT4O), False, False, False)),
    **dict.fromkeys(
        ("gpt-2", "mellum", "trillion", "granite-docling", "a.x-4.0"), ([], True, False, False)
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"),
        ([DIGITS], True, False, False),
    ),
    "deepseek-llm": (
        [*split(r"[\r\n]", CASED, MARKS, r"\s+$", CJK), Digits(individual_digits=False)],
        *(False, False, False),
    ),
    "deepseek-coder": (
        [*split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK), DIGITS],
        *(False, False, False),
    ),
    "deepseek-v3": (
        split(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3),
        *(False, False, False),
    ),
    "seed-coder": (split(SEED), False, False, False),
    "minicpm5": (split(r"\p{N}{1,3}", MINICPM5), False, True, False),
    "viking": ([*split(BLOOM), DIGITS], False, False, False),
    "default": (
        split(r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
        *(False, False, False),
    ),
}


def theirs(name: str) -> FastTokenizer:
    """A tokenizer of the trained vocabulary with the parts of a name."""
    parts, as_gpt2, keeps, composes = PARTS[name]
    vocabulary, merges = trained()
    fast = FastTokenizer(BPE(vocabulary, merges, ignore_merges=keeps))
    fast.pre_tokenizer = Sequence([*parts, ByteLevel(add_prefix_space=False, use_regex=as_gpt2)])
    if composes:
        fast.normalizer = normalizers.NFC()
    fast.add_special_tokens([AddedToken("<|im_end|>", normalized=False)])
    fast.add_tokens([AddedToken("<think>", normalized=False)])
    return fast


@pytest.mark.parametrize("name", RULES)
def test_ids_are_those_of_the_models_own_parts(name: str, tmp_path: Path) -> None:
    ours, reference = made(tmp_path, byte_level(name)), theirs(name)
    for text in [*TEXTS, "qzq", f"{TEXTS[0]}<|im_end|>\n<think> {TEXTS[6]}", "".join(TEXTS)]:
        ids = reference.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == ids
        if not RULES[name].composes:
            assert ours.decode(ids, skip_special_tokens=False) == text


def test_the_texts_set_every_rule_apart_from_every_other(tmp_path: Path) -> None:
    """So that none of the comparisons passes with the parts of another name."""
    tokenizers = {rule: made(tmp_path, byte_level(name)) for name, rule in RULES.items()}
    ids = {
        rule: tuple(tuple(tokenizer.encode(text, False)) for text in [*TEXTS, "qzq"])
        for rule, tokenizer in tokenizers.items()
    }
    assert len(set(ids.values())) == len(ids) == len({*RULES.values()}) == 15
