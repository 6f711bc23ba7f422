"""One model saved under the names of every maker gives the same logits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivllm.errors import BadInput
from minivllm.models.load.checkpoint import Checkpoint
from minivllm.models.load.names import StoredTensor, with_model_names
from minivllm.quant.plain import Plain
from tests.later import Later
from tests.models.load.test_loading import load
from tests.models.test_parity import PROMPTS, run
from tests.reference import FAMILIES, SMALL, make_checkpoint

transformers = Later("transformers")

FP32 = Plain("float32")
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])


def make_model(config: Any) -> Any:
    kind = transformers.AutoModelForCausalLM
    return kind.from_config(config, attn_implementation="eager").eval()


def randomise(model: Any) -> Any:
    """Every weight at random, norms too, so that one in the wrong place shows."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(
                1.0 if "norm" in name and "gemma" not in model.config.model_type else 0.0, 0.15
            )
    return model


def check(folder: Path, model: Any) -> None:
    torch.testing.assert_close(
        run(load(folder, FP32), PROMPTS)[1], logits_of(model), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read_as_transformers_saves_it(
    family: str, tied: bool, original: bool, tmp_path: Path
) -> None:
    config = transformers.AutoConfig.for_model(
        family, **(SMALL | FAMILIES[family] | {"tie_word_embeddings": tied})
    )
    model = randomise(make_model(config))
    model.save_pretrained(tmp_path, save_original_format=original)
    check(tmp_path, model)


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("base", [True, False])
def test_the_text_model_of_one_that_sees_images(
    base: bool, tied: bool, original: bool, tmp_path: Path
) -> None:
    text = transformers.AutoConfig.for_model(
        "gemma3_text", **(SMALL | FAMILIES["gemma3_text"] | {"tie_word_embeddings": tied})
    )
    config = transformers.Gemma3Config(
        text_config=text.to_dict(),
        vision_config=VISION,
        mm_tokens_per_image=4,
        image_token_index=127,
        boi_token_index=126,
        eoi_token_index=125,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    model = randomise(transformers.Gemma3ForConditionalGeneration(config).eval())
    (model.model if base else model).save_pretrained(tmp_path, save_original_format=original)
    if base and not tied:
        with pytest.raises(BadInput, match=r"lacks tensor lm_head\.weight .*base model"):
            load(tmp_path)
    else:
        check(tmp_path, model)


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mixtral", "gemma3_text"])
def test_a_base_model_has_no_prefix_and_no_head(
    family: str, original: bool, tmp_path: Path
) -> None:
    config = transformers.AutoConfig.for_model(
        family, **(SMALL | FAMILIES[family] | {"tie_word_embeddings": True})
    )
    model = randomise(make_model(config))
    model.model.save_pretrained(tmp_path, save_original_format=original)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"][0].endswith("Model")
    check(tmp_path, model)
    again = transformers.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(again.embed_tokens.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.removeprefix("model."),
        lambda name: f"module.{name}",
        lambda name: f"_orig_mod.{name}",
        lambda name: name.replace("self_attn.", "self_attn._orig_mod."),
        lambda name: f"language_model.{name}",
        lambda name: f"model.language_model.{name}",
    ],
)
def test_wrappers_are_taken_off(rename: Any, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, tie_word_embeddings=False)
    file = tmp_path / "model.safetensors"
    save_file({rename(name): tensor for name, tensor in load_file(file).items()}, file)
    check(tmp_path, model)


def test_a_name_that_two_tensors_have_is_refused_with_both(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(
        {**tensors, "_orig_mod.model.norm.weight": tensors["model.norm.weight"].clone()}, file
    )
    with pytest.raises(
        BadInput, match=r"tensors \S*norm\.weight and \S*norm\.weight are both model\.norm\.weight"
    ):
        Checkpoint.open(tmp_path)


def test_an_error_names_a_tensor_as_the_file_does(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors | {"norm.weight": torch.ones(7)}, file)
    with pytest.raises(BadInput, match=r"tensor norm\.weight has shape \[7\]"):
        load(tmp_path)


@pytest.mark.parametrize(("layers", "experts"), [(1000, 1 << 17), (1, 1 << 40)])
def test_more_experts_than_any_model_has_are_no_bomb(layers: int, experts: int) -> None:
    many = {}
    for layer in range(layers):
        name = f"model.layers.{layer}.mlp.experts.gate_up_proj"
        many[name] = StoredTensor(Path("sparse"), name, "F32", (experts, 2, 1), 0, 8 * experts)
    with pytest.raises(BadInput, match="more experts than any model"):
        with_model_names(many)


def test_a_layer_of_no_experts_is_left_as_it_is() -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    odd = StoredTensor(Path("file"), name, "X4", (0, 2, 1), 0, 8)  # of a type that nobody knows
    assert with_model_names({name: odd}) == {name: odd}


def test_published_mixtral_names_with_a_quantised_suffix() -> None:
    name = "model.layers.0.block_sparse_moe.experts.3.w1.qweight"
    tensor = StoredTensor(Path("file"), name, "I32", (1, 1), 0, 4)
    assert list(with_model_names({name: tensor})) == [
        "model.layers.0.mlp.experts.3.gate_proj.qweight"
    ]


def shards(folder: Path) -> tuple[Any, list[Path]]:
    """A model in several files, its index beside them."""
    model = make_checkpoint(folder, max_shard_size="60KB")
    return model, sorted(folder.glob("*.safetensors"))


def test_a_single_file_beside_the_index_of_an_older_save_is_read_and_said(tmp_path: Path) -> None:
    shards(tmp_path / "old")
    model = make_checkpoint(tmp_path / "new", seed=1)
    for files in ("whole", "index alone"):
        folder = shutil.copytree(tmp_path / "old", tmp_path / files)
        if files == "index alone":  # as save_pretrained leaves it
            for shard in folder.glob("model-*.safetensors"):
                shard.unlink()
        shutil.copy(tmp_path / "new" / "model.safetensors", folder)
        loaded = load(folder, FP32)
        torch.testing.assert_close(run(loaded, PROMPTS)[1], logits_of(model), atol=1e-4, rtol=0)
        assert any(
            "model.safetensors is read, and not the files that" in message
            for message in loaded.warnings
        )


def test_tensors_that_the_index_does_not_list(tmp_path: Path) -> None:
    model, files = shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    del listed["weight_map"]["model.norm.weight"]  # needed: read
    index.write_text(json.dumps(listed))
    # not needed: said
    save_file({**load_file(files[0]), "model.visual.weight": torch.ones(3)}, files[0])
    loaded = load(tmp_path, FP32)
    torch.testing.assert_close(run(loaded, PROMPTS)[1], logits_of(model), atol=1e-4, rtol=0)
    (message,) = (warning for warning in loaded.warnings if "index" in warning)
    assert "tensor model.visual.weight (1 such)" in message
    # In a file that the index does not list either: said where it is.
    last = listed["weight_map"].popitem()
    name, file = last[0], tmp_path / last[1]
    tensors = load_file(file)
    save_file({name: tensors.pop(name)}, tmp_path / "other.safetensors")
    save_file(tensors, file)
    index.write_text(json.dumps(listed))
    with pytest.raises(BadInput, match=r"lacks tensor \S+ .*which other\.safetensors holds"):
        load(tmp_path)
