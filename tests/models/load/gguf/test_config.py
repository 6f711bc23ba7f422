"""Metadata of GGUF files as config.json; the families themselves are in test_weights.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minivllm.errors import BadInput
from minivllm.models.config import ModelConfig
from minivllm.models.load.gguf.config import read_config
from minivllm.models.load.gguf.file import GGUFFile, StoredArray
from tests.gguf_files import LLAMA, Stored, tensors, write

SMALL = {"token_embd.weight": tensors()["token_embd.weight"]}
TIED = SMALL
UNTIED = SMALL | {"output.weight": tensors()["token_embd.weight"]}


def read(
    path: Path, values: dict[str, Any], stored: dict[str, Stored] = TIED, family: str = "llama"
) -> ModelConfig:
    of_family = {key.replace("llama.", f"{family}."): value for key, value in values.items()}
    file = GGUFFile.open(write(path / "file.gguf", of_family, stored, family))
    return ModelConfig.from_dict(read_config(file))


def test_what_a_file_says_and_what_it_leaves_out(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA)
    assert (config.architecture, config.vocab_size, config.hidden_size) == (
        "LlamaForCausalLM",
        96,
        256,
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 64)
    assert config.rms_norm_eps == 1e-5 and config.tie_word_embeddings
    assert config.rope.theta == 10000.0 and config.rope.kind == "default"
    assert config.max_position_embeddings == 64 and config.eos_token_ids == ()
    assert not read(tmp_path, LLAMA, UNTIED).tie_word_embeddings


def test_a_number_of_each_layer_must_be_the_same(tmp_path: Path) -> None:
    key = "llama.attention.head_count_kv"
    assert read(tmp_path, LLAMA | {key: [2, 2]}).num_kv_heads == 2
    with pytest.raises(BadInput, match=r"head_count_kv=\(an array of 2\) differs between layers"):
        read(tmp_path, LLAMA | {key: [2, 4]})


def test_sizes_and_arrays_have_a_bound_before_anything_is_made_of_them(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"gemma3\.block_count=1073741824 must be .* to 1,024"):
        read(tmp_path, LLAMA | {"llama.block_count": 1 << 30}, family="gemma3")
    key = "llama.attention.head_count"
    file = GGUFFile.open(write(tmp_path / "file.gguf", LLAMA, TIED))
    array = StoredArray(0, 1 << 40, 0, 1 << 40)
    with pytest.raises(BadInput, match=f"{key} has 1,099,511,627,776 values, more than any"):
        read_config(replace(file, metadata=file.metadata | {key: array}))


def test_every_end_is_one_token_of_the_vocabulary(tmp_path: Path) -> None:
    ids = {"eos": 3, "eot": 5, "eom": 3}
    values = {f"tokenizer.ggml.{name}_token_id": token for name, token in ids.items()}
    assert read(tmp_path, LLAMA | values).eos_token_ids == (3, 5)


def test_mistral_and_mixtral_are_llamas_to_llama_cpp(tmp_path: Path) -> None:
    windowed = read(tmp_path, LLAMA | {"llama.attention.sliding_window": 16})
    assert windowed.architecture == "MistralForCausalLM" and windowed.windows == (16,)
    experts = {"llama.expert_count": 8, "llama.expert_used_count": 2}
    mixture = read(tmp_path, LLAMA | experts)
    assert mixture.architecture == "MixtralForCausalLM" and mixture.num_experts_per_token == 2


def test_gemmas_scale_of_the_scores_follows_from_the_model(tmp_path: Path) -> None:
    sliding = {"llama.attention.sliding_window": 16, "llama.attention.key_length": 32}
    values = LLAMA | sliding | {"llama.attention.value_length": 32}
    assert read(tmp_path, values, family="gemma2").attention_scale == 32**-0.5
    big = values | {"llama.block_count": 46}
    assert read(tmp_path, big, family="gemma2").attention_scale == 64**-0.5
    third = read(tmp_path, values | {"llama.block_count": 7}, family="gemma3")
    assert [kind == "full_attention" for kind in third.layer_types] == [i == 5 for i in range(7)]
    assert third.local_rope is not None and third.local_rope.theta == 10000.0


def test_a_window_that_a_file_leaves_out(tmp_path: Path) -> None:
    second = read(tmp_path, LLAMA | {"llama.block_count": 2}, family="gemma2")
    assert second.sliding_window == 4096 and second.layer_types[0] == "sliding_attention"
    third = read(tmp_path, LLAMA | {"llama.block_count": 7}, family="gemma3")
    assert set(third.layer_types) == {"full_attention"}
    flags = {"llama.block_count": 3, "llama.attention.sliding_window_pattern": [True, False, True]}
    windowed = LLAMA | flags | {"llama.attention.sliding_window": 8}
    config = read(tmp_path, windowed, family="gemma3")
    assert config.windows == (8, None, 8)


def test_longropes_divisors_are_tensors(tmp_path: Path) -> None:
    ones, twos = np.ones(32, np.float32), np.full(32, 1.1, np.float32)
    stored = TIED | {
        "rope_factors_short.weight": (ones, "F32"),
        "rope_factors_long.weight": (twos, "F32"),
    }
    key = "llama.rope.scaling."
    values = LLAMA | {f"{key}original_context_length": 16}
    scaling = read(tmp_path, values, stored, "phi3").rope.scaling
    assert scaling["short_factor"] == (1.0,) * 32 and scaling["long_factor"] == (1.1,) * 32
    assert scaling["attention_factor"] == 1.0 and scaling["original_max_position_embeddings"] == 16
    values[f"{key}attn_factor"] = 1.25
    assert read(tmp_path, values, stored, "phi3").rope.scaling["attention_factor"] == 1.25


def test_llama3s_rope_is_found_in_its_divisors(tmp_path: Path) -> None:
    divisors = 1 + 7 * (np.arange(32) > 20).astype(np.float32)
    freqs: dict[str, Stored] = {"rope_freqs.weight": (divisors, "F32")}
    with pytest.raises(BadInput, match=r"rope_freqs.weight is not the rope scaling of Llama 3"):
        read(tmp_path, LLAMA, TIED | freqs)
    freqs["rope_freqs.weight"] = (divisors[:30], "F32")
    with pytest.raises(BadInput, match=r"rope_freqs.weight is F32\[30\], and must be F32\[32\]"):
        read(tmp_path, LLAMA, TIED | freqs)


def test_old_and_new_keys_of_scaling(tmp_path: Path) -> None:
    for values in (
        {"llama.rope.scale_linear": 4.0},
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
    ):
        config = read(tmp_path, LLAMA | values)
        assert config.rope.kind == "linear" and config.max_position_embeddings == 256
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
        "llama.rope.scaling.attn_factor": 1.0,
    }
    scaling = read(tmp_path, LLAMA | yarn).rope.scaling
    assert scaling["attention_factor"] == pytest.approx(1.1386, abs=1e-4)  # 1 + 0.1 ln 4


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no heads": ({"llama.attention.head_count": None}, "no metadata of llama for num_attention_h"),
    "text": ({"llama.block_count": "2"}, "llama.block_count='2' must be a whole number"),
    "absurd": ({"llama.block_count": 1 << 30}, "block_count=1073741824 must be .* from 1 to 1,024"),
    "values of another width": (
        {"llama.attention.value_length": 32},
        "value_length=32 must be llama.attention.key_length=64",
    ),
    "a rope of some dimensions": (
        {"llama.rope.dimension_count": 32},
        "dimension_count=32 must be the head's 64",
    ),
    "an unknown scaling": ({"llama.rope.scaling.type": "x"}, "type='x' is not supported: none, l"),
    "old blocks": ({"general.quantization_version": 1}, "in version 1 of ggml's blocks"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_supported_is_one_line(case: str, tmp_path: Path) -> None:
    change, message = WRONG[case]
    values = {key: value for key, value in (LLAMA | change).items() if value is not None}
    with pytest.raises(BadInput, match=message) as raised:
        read(tmp_path, values)
    assert "\n" not in str(raised.value)


def test_an_unknown_architecture_names_the_known_ones(tmp_path: Path) -> None:
    write(tmp_path / "file.gguf", {}, TIED, "rwkv7")
    with pytest.raises(BadInput, match=r"architecture 'rwkv7' is not supported; .* llama, qwen2"):
        read_config(GGUFFile.open(tmp_path / "file.gguf"))


def test_a_file_without_an_embedding_is_no_language_model(tmp_path: Path) -> None:
    norm: dict[str, Stored] = {"output_norm.weight": (np.ones(256, np.float32), "F32")}
    with pytest.raises(BadInput, match=r"has no tensor token_embd.weight"):
        read(tmp_path, LLAMA, norm)
