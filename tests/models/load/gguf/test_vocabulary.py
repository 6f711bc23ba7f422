"""The tokens of a GGUF file, those with a meaning, and files that lie about them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM, SamplingParams
from minivllm.errors import BadInput
from minivllm.models.load.gguf.file import GGUFFile, StoredArray
from minivllm.models.load.gguf.vocabulary import TOKENS, Type, Vocabulary, read_ends
from minivllm.models.load.source import resolve
from tests.gguf_files import LLAMA, tensors, write
from tests.gguf_tokenizers import BYTES, SPM, UNIGRAM, file_of, made

ABSENT = (1 << 32) - 1


def read(path: Path, values: dict[str, Any]) -> Vocabulary:
    return Vocabulary.read(GGUFFile.open(file_of(path / "file.gguf", values)))


def with_tokens(*tokens: tuple[str, int]) -> dict[str, Any]:
    """A byte-level vocabulary with further tokens, from id 98 on."""
    texts, types = zip(*tokens, strict=True)
    return BYTES | {
        "tokenizer.ggml.tokens": [*BYTES["tokenizer.ggml.tokens"], *texts],
        "tokenizer.ggml.token_type": [*BYTES["tokenizer.ggml.token_type"], *types],
    }


def test_several_tokens_end_an_answer(tmp_path: Path) -> None:
    """By their keys, and by texts that end a turn and are no part of one."""
    values = with_tokens(("<|end|>", 3), ("<|im_end|>", 4), ("<|endoftext|>", 1), ("<|user|>", 3))
    values |= {"tokenizer.ggml.eos_token_id": 96, "tokenizer.ggml.eom_token_id": ABSENT}
    vocabulary = read(tmp_path, values)
    assert read_ends(vocabulary.file) == [96, 98, 99]
    assert [vocabulary.types[i] for i in (98, 99, 100)] == [Type.CONTROL, Type.CONTROL, Type.NORMAL]
    tokenizer = made(tmp_path, values)
    assert tokenizer.decode([94, 98, 99, 100]) == "ab<|endoftext|>"
    assert {96, 98, 99, 101} <= {*tokenizer.special_ids}


def test_a_generation_ends_at_each_of_them(tmp_path: Path) -> None:
    """The file names one; whichever the model chooses ends the answer, and is not shown."""
    values = BYTES | {
        TOKENS: [*BYTES[TOKENS][:93], "<|im_end|>", "<|endoftext|>", "<s>"],
        "tokenizer.ggml.token_type": [1] * 93 + [3, 3, 3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 93,
    }
    values[TOKENS][92] = "ab"
    path = write(tmp_path / "file.gguf", LLAMA | values, tensors())
    with LLM(str(path), device="cpu", quant="fp32") as llm:
        for token, ends in ((93, True), (94, True), (95, False), (64, False)):
            chosen = SamplingParams(max_tokens=3, temperature=0.0, allowed_token_ids=[token])
            (answer,) = llm.generate(["ab"], chosen)[0].outputs
            assert answer.finish_reason == ("stop" if ends else "length")
            assert answer.text == ("aaa" if token == 64 else "")


def test_a_token_that_begins_or_ends_a_text_is_no_part_of_one(tmp_path: Path) -> None:
    values = with_tokens(("<bos>", 4), ("<eos>", 3), ("<pad>", 1), ("<unk>", 2))
    keys = {"bos": 98, "eos": 99, "eot": 5, "padding": 100, "unknown": 101}
    values |= {f"tokenizer.ggml.{name}_token_id": token for name, token in keys.items()}
    vocabulary = read(tmp_path, values)
    assert vocabulary.names == {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    assert vocabulary.of_type(Type.CONTROL) == ["<s>", "<bos>", "<eos>"]
    del values["tokenizer.ggml.token_type"]  # then what it names is all that is known
    vocabulary = read(tmp_path, values)
    assert vocabulary.names == {"bos_token": "<bos>", "eos_token": "<eos>"}
    assert vocabulary.of_type(Type.CONTROL) == [vocabulary.tokens[5], "<bos>", "<eos>"]


def test_sentencepiece_has_ids_where_a_file_names_none(tmp_path: Path) -> None:
    for values, names in (
        (SPM, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
        (UNIGRAM, {"eos_token": "<s>", "unk_token": "</s>", "pad_token": "<unk>"}),
    ):
        unnamed = {key: value for key, value in values.items() if not key.endswith("_token_id")}
        assert read(tmp_path, unnamed).names == names
        types = [1] * len(SPM["tokenizer.ggml.tokens"])
        assert read(tmp_path, unnamed | {"tokenizer.ggml.token_type": types}).names == {}


def test_an_end_beyond_the_vocabulary_is_named_once(tmp_path: Path) -> None:
    ids = {"eos": 3, "eot": 96, "bos": ABSENT}
    values = {f"tokenizer.ggml.{name}_token_id": token for name, token in ids.items()}
    path = write(tmp_path / "file.gguf", LLAMA | values, tensors())
    source = resolve({"path": str(path)}, allow_random=False)[1]
    assert source.config["eos_token_id"] == [3]
    (warning,) = source.warnings
    assert "the vocabulary of 96 lacks 96" in warning


def test_spaces_are_stored_either_way(tmp_path: Path) -> None:
    tokens = [*SPM[TOKENS], "   ", "\u2581\u2581\u2581\u2581", ""]
    types = [*SPM["tokenizer.ggml.token_type"], 1, 4, 5]
    values = SPM | {TOKENS: tokens, "tokenizer.ggml.token_type": types}
    vocabulary = read(tmp_path, values)
    assert vocabulary.tokens[-3:] == ["\u2581\u2581\u2581", "    ", f"[EMPTY_{len(tokens) - 1}]"]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a beginning that is no token": (
        {"tokenizer.ggml.bos_token_id": 98},
        r"bos_token_id=98 is no token: there are 98; convert",
    ),
    "a token twice": ({TOKENS: ["a"] * 98}, "tokens has 'a' twice"),
    "types of other tokens": ({"tokenizer.ggml.token_type": [1]}, "98 tokens have 1 types"),
    "a negative id": ({"tokenizer.ggml.bos_token_id": -1.5}, "must be a whole number from 0"),
    "a text for an id": ({"tokenizer.ggml.eos_token_id": "</s>"}, "must be a whole number from 0"),
    "tokens that are one text": ({TOKENS: "abc"}, "tokens=.* must be an array"),
    "types that are texts": ({"tokenizer.ggml.token_type": ["1"]}, "must be numbers"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_vocabulary_that_cannot_be_is_one_line(case: str, tmp_path: Path) -> None:
    change, message = WRONG[case]
    with pytest.raises(BadInput, match=message) as raised:
        read(tmp_path, BYTES | change)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("key", [TOKENS, "tokenizer.ggml.token_type"])
def test_more_values_than_any_vocabulary_has_are_not_read(key: str, tmp_path: Path) -> None:
    file = GGUFFile.open(file_of(tmp_path / "file.gguf", BYTES))
    array = StoredArray(8 if key == TOKENS else 5, 1 << 31, 0, 1 << 40)
    with pytest.raises(BadInput, match=f"{key} has 2,147,483,648 values, more than any"):
        Vocabulary.read(replace(file, metadata=file.metadata | {key: array}))


def test_scores_must_be_numbers_of_each_token(tmp_path: Path) -> None:
    for scores, message in (
        ([1.0], "269 tokens have 1 scores"),
        ([float("nan")] * 269, "scores has numbers that are not finite"),
    ):
        vocabulary = read(tmp_path, SPM | {"tokenizer.ggml.scores": scores})
        with pytest.raises(BadInput, match=message):
            vocabulary.scores()
