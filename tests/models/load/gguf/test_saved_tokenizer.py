"""Tokenizers of GGUF files as files: this project and transformers read the same of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minivllm.errors import BadInput
from minivllm.models.load.generation import with_ends
from minivllm.models.load.gguf.saved_tokenizer import write_tokenizer
from minivllm.models.load.tokenizer import Tokenizer
from tests.gguf_files import LLAMA
from tests.gguf_tokenizers import BYTES, SPM, TEXTS, UNIGRAM, byte_level, file_of, trained

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
MESSAGES = [{"role": "user", "content": "It's  12 \n Größe"}, {"role": "assistant", "content": ""}]
SPACES = {"tokenizer.ggml.add_space_prefix": True, "tokenizer.ggml.remove_extra_whitespaces": True}
# By type of model in config.json, which transformers chooses a class by: family, and metadata.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "smollm": ("llama", "llama", byte_level("smollm")),
    "llama 3": (
        *("llama", "llama"),
        byte_level("llama-bpe") | {"tokenizer.ggml.bos_token_id": len(trained()[0])},
    ),
    "llama 2": ("llama", "llama", SPM),
    "mistral": ("llama", "mistral", SPM | {"tokenizer.ggml.padding_token_id": 0}),
    "tekken": ("llama", "mistral", byte_level("tekken")),
    "qwen 2": ("qwen2", "qwen2", byte_level("qwen2")),
    "qwen 3": ("qwen3", "qwen3", byte_level("qwen2")),
    "gemma": ("gemma2", "gemma2", SPM | {"tokenizer.ggml.add_space_prefix": False}),
    "phi 3": ("phi3", "phi3", SPM | {"tokenizer.ggml.add_bos_token": False}),
    "phi 4": ("phi3", "phi3", byte_level("gpt-4o")),
    "unigram": ("llama", "llama", UNIGRAM | SPACES),
}


def written(folder: Path, case: str, **further: Any) -> tuple[Path, Tokenizer]:
    """A folder with the tokenizer of a case, and that tokenizer."""
    family, kind, values = CASES[case]
    path = file_of(folder / "file.gguf", values | further, family)
    (folder / "made").mkdir()
    write_tokenizer(path, folder / "made")
    (folder / "made" / "config.json").write_text(json.dumps({"model_type": kind}))
    tokenizer = Tokenizer.load(path)
    assert tokenizer is not None
    return folder / "made", tokenizer


@pytest.mark.parametrize("case", CASES)
def test_transformers_reads_the_same_ids_and_chats(case: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder, ours = written(tmp_path, case, **{"tokenizer.chat_template": TEMPLATE})
    theirs, again = AutoTokenizer.from_pretrained(folder), Tokenizer(folder)
    for text in [*TEXTS, f"{TEXTS[0]}<|im_end|>\n </s>\n <think> {TEXTS[6]}"]:
        for special in (True, False):
            ids = ours.encode(text, special)
            assert theirs(text, add_special_tokens=special).input_ids == ids
            assert again.encode(text, special) == ids
            assert theirs.decode(ids, skip_special_tokens=special) == ours.decode(ids, special)
            assert again.decode(ids, special) == ours.decode(ids, special)
    text = ours.chat_text(MESSAGES)
    assert theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True) == text
    assert again.chat_text(MESSAGES) == text
    assert {*theirs.all_special_ids} <= {*ours.special_ids} == {*again.special_ids}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        assert again.special_id(name) == ours.special_id(name)
        if name in ours.special_tokens:
            assert getattr(theirs, f"{name}_id") == ours.special_id(name)


def test_every_end_is_in_the_generation_settings(tmp_path: Path) -> None:
    from transformers import GenerationConfig

    tokens = [*BYTES["tokenizer.ggml.tokens"], "<|eot_id|>"]
    tokens[3] = "<|im_end|>"
    types = [*BYTES["tokenizer.ggml.token_type"], 3]
    types[3] = 3
    values = BYTES | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    ids = {"eos": 7, "bos": 96, "padding": 96}
    values |= {f"tokenizer.ggml.{name}_token_id": token for name, token in ids.items()}
    write_tokenizer(file_of(tmp_path / "file.gguf", values), tmp_path)
    settings = GenerationConfig.from_pretrained(tmp_path)
    assert settings.eos_token_id == [7, 3]  # and not <|eot_id|>, which the embedding lacks
    assert (settings.bos_token_id, settings.pad_token_id) == (96, 96)
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 8}
    config |= {"num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 8}
    assert with_ends(config, tmp_path)[0]["eos_token_id"] == [7, 3]


def test_named_templates_are_those_that_transformers_finds(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    named = {"tokenizer.chat_template.tool_use": "tools of {{ bos_token }}"}
    folder, _ = written(tmp_path, "llama 2", **named, **{"tokenizer.chat_template": TEMPLATE})
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs.chat_template == {"default": TEMPLATE, "tool_use": "tools of {{ bos_token }}"}
    assert Tokenizer(folder).chat_template == TEMPLATE


def test_a_template_is_written_nowhere_else(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"'\.\./\.\./x' has no name that a file may have") as raised:
        written(tmp_path, "llama 2", **{"tokenizer.chat_template.../../x": "x"})
    assert "\n" not in str(raised.value)


def test_without_a_tokenizer_there_are_the_ends(tmp_path: Path) -> None:
    values = {"tokenizer.ggml.eos_token_id": 3}
    write_tokenizer(file_of(tmp_path / "file.gguf", LLAMA | values), tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": [3]}
    assert not (tmp_path / "tokenizer.json").exists()
