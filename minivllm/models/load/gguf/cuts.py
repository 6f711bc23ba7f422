"""The rules by which byte-level BPE cuts text before its merges, under the names that GGUF files
have for them (`tokenizer.ggml.pre`).

A rule is what tokenizer.json of the models has; the names, and which of them mean the same, are
llama.cpp's (`llama-vocab.cpp`). Listed are those of the families that GGUF files are read of."""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.models.load.tokenizer_files import QWEN

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # of ByteLevel
DIGIT = r"\p{N}"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
)
_MINICPM = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
)
_SEED = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)
_TAIL = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
_TEKKEN = rf"{_WORDS[0]}|{_WORDS[1]}|\p{{N}}{_TAIL}"
_GPT4O = rf"{_WORDS[0]}{_SHORT}?|{_WORDS[1]}{_SHORT}?|\p{{N}}{{1,3}}{_TAIL}"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_VIKING = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\x{4e00}-\x{9fa5}\x{3040}-\x{30ff}]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}",
)
_CJK = r"[\x{800}-\x{9fa5}\x{ac00}-\x{d7ff}]+"
_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, DIGIT)
# Letters with two cases, of the scripts and the version of Unicode that DeepSeek's list is of.
_CASED = (
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376-377 37b-37d 37f 386 "
    "388-38a 38c 38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba "
    "1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 "
    "1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb "
    "1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 212a-212d "
    "212f-2134 2139 213c-213f 2145-2149 214e 2183-2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2-2cf3 "
    "a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a "
    "ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943"
)
_LETTERS = "".join("-".join(rf"\x{{{end}}}" for end in run.split("-")) for run in _CASED.split())
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[{_LETTERS}]+",
    r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
    r"\s+$",
    _CJK,
    r"\p{N}+",
)


@dataclass(frozen=True)
class Rule:
    """How text becomes the words whose bytes are merged.

    Args:
        cuts: regular expressions; each cuts what those before it left, into its matches and what
            lies between them.
        keeps_tokens: a word that is a token is not merged from its bytes.
        begins: a text begins with the token of a beginning, where the file does not say.
        composes: text is brought into Unicode's NFC first.
    """

    cuts: tuple[str, ...]
    keeps_tokens: bool = False
    begins: bool = False
    composes: bool = False


def _rules(names: str, *cuts: str, **further: bool) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), Rule(cuts, **further))


RULES: dict[str, Rule] = {
    **_rules(
        "llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0",
        _LLAMA3,
        keeps_tokens=True,
        begins=True,
    ),
    **_rules("dbrx smaug-bpe", _LLAMA3),
    **_rules("qwen2 deepseek-r1-qwen", QWEN, composes=True),
    **_rules("megrez kormo f2llmv2", QWEN),
    **_rules("tekken", _TEKKEN, keeps_tokens=True, begins=True),
    **_rules("gpt-4o llama4 kanana2", _GPT4O),
    **_rules("gpt-2 mellum trillion granite-docling a.x-4.0", GPT2),
    **_rules("smollm starcoder refact codeshell exaone minerva-7b", DIGIT, GPT2),
    **_rules("deepseek-llm", *_DEEPSEEK),
    **_rules("deepseek-coder", *_CODER),
    **_rules("deepseek-v3", *_DEEPSEEK3),
    **_rules("seed-coder", _SEED),
    **_rules("minicpm5", r"\p{N}{1,3}", _MINICPM, keeps_tokens=True),
    **_rules("viking", _VIKING, DIGIT),
    **_rules("default", *_DEFAULT),
}
