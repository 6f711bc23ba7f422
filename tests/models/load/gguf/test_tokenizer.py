"""Tokenizers of GGUF files against those that they were made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minivllm.errors import BadInput
from minivllm.models.load.gguf.tokenizer import read_tokenizer
from minivllm.models.load.source import EMBEDDED
from minivllm.models.load.tokenizer import Tokenizer
from tests.gguf_files import LLAMA, script, write
from tests.gguf_tokenizers import BYTES, SPM, STORED, UNIGRAM, file_of, made

TEXTS = [
    "def main():\n    print('Hello, world')  # 12345 tokens",
    "naïve café — 数字 ３ \U0001f600\t\r\n\n  x",
    "<|endoftext|>I'll see <|endoftext|>",
    "",
]


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


def test_control_and_user_defined_tokens_are_never_cut(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, BYTES)
    assert tokenizer.encode("ab<s>ab<tool>") == [94, 96, 94, 97]
    assert tokenizer.decode([94, 96, 97]) == "ab<tool>"
    assert tokenizer.token_id("<s>") == 96 and tokenizer.token_id("<tool>") is None


def test_what_stands_before_and_after_a_text_is_the_files(tmp_path: Path) -> None:
    flags = {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    assert made(tmp_path, SPM | flags).encode("a")[-1] == 2
    assert made(tmp_path, SPM | flags).encode("a")[0] != 1
    assert made(tmp_path, UNIGRAM).encode("ab")[-1] == 2  # as without a key
    assert (
        made(tmp_path, UNIGRAM | flags | {"tokenizer.ggml.add_eos_token": False}).encode("") == []
    )
    for rule, first in (("llama-bpe", [96]), ("tekken", [96]), ("qwen2", [])):
        values = BYTES | {"tokenizer.ggml.pre": rule, "tokenizer.ggml.bos_token_id": 96}
        assert made(tmp_path, values).encode("ab") == [*first, 94]


def test_the_chat_template_has_the_special_tokens(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    tokenizer = made(tmp_path, SPM | {"tokenizer.chat_template": template})
    assert tokenizer.chat_text([{"role": "user", "content": "abc"}]) == "<s>abc</s>"


def test_chat_templates_with_a_name_are_kept_beside_the_default(tmp_path: Path) -> None:
    named = {"tokenizer.chat_template.tool_use": "tools", "tokenizer.chat_template.default": "old"}
    for given, default in (({}, "old"), ({"tokenizer.chat_template": "new"}, "new")):
        files = read_tokenizer(file_of(tmp_path / "file.gguf", BYTES | named | given))
        assert files is not None and files.chat_template == default
        assert files.named_templates == {"tool_use": "tools"}


def test_tokens_of_phi3_take_in_the_spaces_after_them(tmp_path: Path) -> None:
    """As tokenizer.json of Phi-3 has it; but for the beginning and the end of a document."""
    tokens = [*SPM["tokenizer.ggml.tokens"], "<|end|>"]
    types = [*SPM["tokenizer.ggml.token_type"], 3]
    values = SPM | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    values["tokenizer.ggml.scores"] = [*SPM["tokenizer.ggml.scores"], 0.0]
    for family, ids in (
        ("phi3", [269, 259, 1, 267, 259]),
        ("llama", [269, 267, 13, 259, 1, 267, 259]),
    ):
        assert made(tmp_path, values, family).encode("<|end|>\n a<s> a", False) == ids


def test_a_file_without_a_tokenizer_serves_ids(tmp_path: Path) -> None:
    for values in ({}, {"tokenizer.ggml.model": "no_vocab"}):
        assert read_tokenizer(write(tmp_path / "file.gguf", LLAMA | values, STORED)) is None


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "of another kind": (
        {"tokenizer.ggml.model": "bert"},
        r"model='bert' is not read, only gpt2 \(byte-level BPE\), llama and t5 \(sentencepiece's",
    ),
    "an unknown rule": (
        {"tokenizer.ggml.pre": "poro"},
        "pre='poro' is not read; read are llama-bpe",
    ),
    "no rule": ({"tokenizer.ggml.pre": None}, "does not say how text is cut"),
    "a token of 2,000 characters": (
        {"tokenizer.ggml.tokens": ["a" * 2000, *map(str, range(97))]},
        "token 0 of tokenizer.ggml.tokens has 2,000 characters",
    ),
    "no pair": ({"tokenizer.ggml.merges": ["abc"]}, "the merge 'abc' is no pair of tokens"),
    "a merge of no tokens": ({"tokenizer.ggml.merges": ["x yz"]}, "holds no usable tokenizer"),
    "tokens that are numbers": ({"tokenizer.ggml.tokens": [1, 2]}, r"tokens=.* must be texts"),
    "a template that is none": ({"tokenizer.chat_template": 3}, "chat_template=3 must be a string"),
    "a named template that is none": (
        {"tokenizer.chat_template.rag": 3},
        r"chat_template\.rag=3 must be a string",
    ),
    "a hundred templates": (
        {f"tokenizer.chat_template.{i}": "x" for i in range(100)},
        "has 100 chat templates, more than any model",
    ),
}


def test_added_tokens_that_would_take_minutes_are_one_line(tmp_path: Path) -> None:
    tokens = [f"{index:04}" + "a" * 1000 for index in range(2100)]
    values = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [4] * len(tokens)}
    with pytest.raises(BadInput, match=r"2,100 tokens of .* have 2,108,400 bytes, more than in"):
        made(tmp_path, BYTES | values | {"tokenizer.ggml.merges": []})


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line(case: str, tmp_path: Path) -> None:
    change, message = WRONG[case]
    values = {key: value for key, value in (BYTES | change).items() if value is not None}
    with pytest.raises(BadInput, match=message) as raised:
        made(tmp_path, values)
    assert "\n" not in str(raised.value)
