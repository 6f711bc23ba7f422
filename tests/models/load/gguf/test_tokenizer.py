"""Tokenizers of GGUF files against those that they were made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minivllm.errors import BadInput
from minivllm.models.load.gguf.tokenizer import CUTS, read_tokenizer
from minivllm.models.load.source import EMBEDDED
from minivllm.models.load.tokenizer import Tokenizer
from tests.gguf_files import LLAMA, Stored, script, tensors, write

STORED: dict[str, Stored] = {"token_embd.weight": tensors()["token_embd.weight"]}
TEXTS = [
    "def main():\n    print('Hello, world')  # 12345 tokens",
    "naïve café — 数字 ３ \U0001f600\t\r\n\n  x",
    "<|endoftext|>I'll see <|endoftext|>",
    "",
]
WORDS = ["\u2581a", "\u2581ab", "ab", "abc", "\u2581abc", "a", "b", "c", "\u2581", "\u2581\u2581"]
HEX = [f"<0x{i:02X}>" for i in range(256)]
SPM: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        *WORDS,
    ],
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(WORDS)],
    "tokenizer.ggml.scores": [0.0] * 259
    + [-4.0, -2.0, -1.0, -3.0, -5.0, -10.0, -11.0, -12.0, -13.0, -6.0],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}
BYTES: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [chr(33 + i) for i in range(94)] + ["ab", "abc", "<s>", "<tool>"],
    "tokenizer.ggml.token_type": [1] * 96 + [3, 4],
    "tokenizer.ggml.merges": ["a b", "ab c"],
}


def made(path: Path, values: dict[str, Any], family: str = "llama") -> Tokenizer:
    own = {key.replace("llama.", f"{family}."): value for key, value in LLAMA.items()}
    tokenizer = Tokenizer.load(write(path / "file.gguf", own | values, STORED, family))
    assert tokenizer is not None
    return tokenizer


def test_the_embedded_tokenizer_is_the_same_in_a_file(tmp_path: Path) -> None:
    script().save("embedded", tmp_path / "tiny.gguf", "q4_0")
    ours, theirs = Tokenizer.load(tmp_path / "tiny.gguf"), Tokenizer(EMBEDDED)
    assert ours is not None
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids and ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.special_id("eos_token") == theirs.special_id("eos_token") == 0
    assert ours.chat_template == theirs.chat_template


@pytest.mark.parametrize("rule", CUTS)
def test_every_rule_of_cutting_gives_the_text_back(rule: str, tmp_path: Path) -> None:
    values = BYTES | {"tokenizer.ggml.pre": rule, "tokenizer.ggml.add_bos_token": False}
    tokenizer = made(tmp_path, values)
    assert tokenizer.decode(tokenizer.encode("abc,abcab;ab")) == "abc,abcab;ab"
    assert tokenizer.encode("abc") == [95]
    assert len(tokenizer.encode("1234")) == 4


def test_control_and_user_defined_tokens_are_never_cut(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, BYTES)
    assert tokenizer.encode("ab<s>ab<tool>") == [94, 96, 94, 97]
    assert tokenizer.decode([94, 96, 97]) == "ab<tool>"
    assert tokenizer.token_id("<s>") == 96 and tokenizer.token_id("<tool>") is None


def test_sentencepiece_merges_the_best_score_first(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, SPM)
    names = {text: index for index, text in enumerate(SPM["tokenizer.ggml.tokens"])}

    def ids(*texts: str) -> list[int]:
        return [names[text] for text in texts]

    # ab has the best score: it is merged before a joins the space in front of it.
    assert tokenizer.encode("abc") == ids("<s>", "\u2581abc")
    assert tokenizer.encode("c") == ids("<s>", "\u2581", "c")
    assert tokenizer.encode("é", add_special_tokens=False) == ids("\u2581", "<0xC3>", "<0xA9>")
    assert tokenizer.decode(tokenizer.encode("abc é  a")) == "abc é  a"
    assert tokenizer.encode("a</s>a", False) == ids("\u2581a", "</s>", "\u2581a")
    unknown = [*tokenizer.encode("abc"), names["<unk>"]]
    assert tokenizer.decode(unknown) == "abc"
    assert tokenizer.decode(unknown, skip_special_tokens=False).endswith("abc<unk>")


def test_what_stands_before_and_after_a_text_is_the_files(tmp_path: Path) -> None:
    flags = {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    assert made(tmp_path, SPM | flags).encode("a")[-1] == 2
    assert made(tmp_path, SPM | flags).encode("a")[0] != 1
    prefix = {"tokenizer.ggml.add_space_prefix": False}
    assert made(tmp_path, SPM | prefix).decode(made(tmp_path, SPM | prefix).encode(" a")) == " a"
    for rule, first in (("llama-bpe", [96]), ("tekken", [96]), ("qwen2", [])):
        values = BYTES | {"tokenizer.ggml.pre": rule, "tokenizer.ggml.bos_token_id": 96}
        assert made(tmp_path, values).encode("ab") == [*first, 94]


def test_gemmas_spaces_and_order_of_merges(tmp_path: Path) -> None:
    tokens = [*SPM["tokenizer.ggml.tokens"]]
    tokens[-1] = "  "
    tokens += ["bc"]  # whose score would merge it first
    values = SPM | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*SPM["tokenizer.ggml.token_type"], 1],
        "tokenizer.ggml.scores": [*SPM["tokenizer.ggml.scores"], 100.0],
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokenizer = made(tmp_path, values, "gemma")
    assert tokenizer.encode("  ", False) == [tokens.index("  ")]
    assert tokenizer.encode("abc", False) == [tokens.index("abc")]
    assert tokenizer.decode(tokenizer.encode("  abc")) == "  abc"


def test_the_chat_template_has_the_special_tokens(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    tokenizer = made(tmp_path, SPM | {"tokenizer.chat_template": template})
    assert tokenizer.chat_text([{"role": "user", "content": "abc"}]) == "<s>abc</s>"


def test_a_file_without_a_tokenizer_serves_ids(tmp_path: Path) -> None:
    for values in ({}, {"tokenizer.ggml.model": "no_vocab"}):
        assert read_tokenizer(write(tmp_path / "file.gguf", LLAMA | values, STORED)) is None


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "of another kind": ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model='t5' is not read, o"),
    "an unknown rule": ({"tokenizer.ggml.pre": "poro"}, "pre='poro' is not read; read are llama3"),
    "no rule": ({"tokenizer.ggml.pre": None}, "does not say how text is cut"),
    "types of other tokens": ({"tokenizer.ggml.token_type": [1]}, "98 tokens have 1 types"),
    "a token twice": ({"tokenizer.ggml.tokens": ["a"] * 98}, "tokens has 'a' twice"),
    "a token of 2,000 characters": (
        {"tokenizer.ggml.tokens": ["a" * 2000, *map(str, range(97))]},
        "token 0 of tokenizer.ggml.tokens has 2,000 characters",
    ),
    "no pair": ({"tokenizer.ggml.merges": ["abc"]}, "the merge 'abc' is no pair of tokens"),
    "a merge of no tokens": ({"tokenizer.ggml.merges": ["x yz"]}, "holds no usable tokenizer"),
    "tokens that are numbers": ({"tokenizer.ggml.tokens": [1, 2]}, r"tokens=.* must be texts"),
    "a template that is none": ({"tokenizer.chat_template": 3}, "chat_template=3 must be a string"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line(case: str, tmp_path: Path) -> None:
    change, message = WRONG[case]
    values = {key: value for key, value in (BYTES | change).items() if value is not None}
    with pytest.raises(BadInput, match=message) as raised:
        made(tmp_path, values)
    assert "\n" not in str(raised.value)


def test_scores_must_be_as_many_as_tokens(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="269 tokens have 1 scores"):
        made(tmp_path, SPM | {"tokenizer.ggml.scores": [1.0]})


def test_a_vocabulary_whose_merges_would_take_minutes_is_one_line(tmp_path: Path) -> None:
    """Each token is short enough; together they have 1.1e9 characters on either side of a cut."""
    tokens = [f"{index:04}" + "a" * 1000 for index in range(1100)]
    given = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.scores": [0.0] * len(tokens),
    }
    with pytest.raises(BadInput, match=r"the 1,100 tokens of .* copies 1,1.* more than any"):
        made(tmp_path, SPM | given)
