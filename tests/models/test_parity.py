"""float32 parity with transformers, layer by layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm.kernels.device import BuildContext
from minivllm.models.load.loading import LoadedModel, load_model
from minivllm.models.options import ModelOptions
from minivllm.quant.plain import Plain
from tests.reference import FAMILIES, VARIANTS, CausalAttention, make_batch, make_checkpoint

CPU = torch.device("cpu")
PROMPTS = [[5, 17, 3, 99, 42, 8, 77, 5, 60], [1], [9, 4, 30, 31, 32] * 12]


def load(folder: Path, dtype: str = "float32", **options: Any) -> LoadedModel:
    return load_model(
        ModelOptions(str(folder), **options), quant=Plain(dtype), context=BuildContext(CPU)
    )


def run(loaded: LoadedModel, prompts: list[list[int]]) -> tuple[list[Tensor], Tensor]:
    """What goes into each layer, then what leaves the final norm; and the logits."""
    states: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: states.append(args[0]))
        for layer in loaded.model.model.layers
    ]
    hidden = loaded.model(make_batch(prompts), CausalAttention(loaded.model.attention_specs))
    for hook in hooks:
        hook.remove()
    return [*states, hidden], loaded.model.compute_logits(hidden)


@torch.no_grad()
def expected(reference: Any, prompts: list[list[int]]) -> tuple[list[Tensor], Tensor]:
    outputs = [reference(torch.tensor([prompt]), output_hidden_states=True) for prompt in prompts]
    layers = zip(*(output.hidden_states for output in outputs), strict=True)
    return [torch.cat([one[0] for one in layer]) for layer in layers], torch.cat(
        [o.logits[0] for o in outputs]
    )


@pytest.mark.parametrize("case", VARIANTS)
def test_every_layer_and_the_logits_match_transformers(case: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[case]
    reference = make_checkpoint(tmp_path, family, **overrides)
    states, logits = run(load(tmp_path), PROMPTS)
    expected_states, expected_logits = expected(reference, PROMPTS)
    assert len(states) == len(expected_states) == 4
    for state, wanted in zip(states, expected_states, strict=True):
        torch.testing.assert_close(state, wanted, atol=1e-4, rtol=0)
    torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=0)
    assert expected_logits.std() > 0.1  # or the comparison would say nothing


def test_a_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "whole")
    make_checkpoint(tmp_path / "shards", max_shard_size="30KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    whole, shards = (run(load(tmp_path / name), PROMPTS)[1] for name in ("whole", "shards"))
    assert torch.equal(whole, shards)


def old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """The same config.json as versions of transformers before 5 wrote it."""
    old = config | {"torch_dtype": config["dtype"]}
    del old["dtype"]
    ropes = old.pop("rope_parameters")
    if local := ropes.get("sliding_attention"):
        old["rope_local_base_freq"], ropes = local["rope_theta"], ropes["full_attention"]
        old["sliding_window_pattern"] = 3
    if config["model_type"] in ("gemma2", "gemma3_text", "qwen2"):
        del old["layer_types"]  # which follow from other keys
        old.pop("_sliding_window_pattern", None)
    scaling = dict(ropes)
    old["rope_theta"] = scaling.pop("rope_theta")
    old["partial_rotary_factor"] = scaling.pop("partial_rotary_factor", None)
    scaling["type"] = scaling.pop("rope_type")
    if scaling["type"] == "longrope":
        scaling["type"] = "su"
    old["rope_scaling"] = None if scaling["type"] == "default" else scaling
    return old


@pytest.mark.parametrize(
    "case",
    [name for name in VARIANTS if "rope" in name or "rotary" in name]
    + ["llama", "gemma2", "gemma3_text", "qwen2 window"],
)
def test_old_and_new_spellings_load_the_same_model(case: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[case]
    make_checkpoint(tmp_path, family, **overrides)
    new = load(tmp_path)
    path = tmp_path / "config.json"
    old = old_spelling(json.loads(path.read_text()))
    assert not {"rope_parameters", "dtype"} & old.keys()
    path.write_text(json.dumps(old))
    assert load(tmp_path).config == new.config
    assert torch.equal(run(load(tmp_path), PROMPTS)[1], run(new, PROMPTS)[1])


# A rounded score may choose another expert, here and in transformers alike: test_moe.py rounds one
# mixture alone.
@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family not in ("mixtral", "qwen3_moe")]
)
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.06), ("float16", 0.008)])
def test_16_bit_stays_within_rounding_of_float32(
    dtype: str, tolerance: float, family: str, tmp_path: Path
) -> None:
    reference = make_checkpoint(tmp_path, family)
    loaded = load(tmp_path, dtype)
    logits = run(loaded, PROMPTS)[1]
    wanted = expected(reference, PROMPTS)[1]
    assert logits.dtype is loaded.model.dtype is getattr(torch, dtype)
    assert (logits.float() - wanted).norm() / wanted.norm() < tolerance


def test_a_sequence_does_not_see_its_neighbours_in_the_batch(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    loaded = load(tmp_path)
    together = run(loaded, PROMPTS)[1].split([len(prompt) for prompt in PROMPTS])
    for prompt, logits in zip(PROMPTS, together, strict=True):
        torch.testing.assert_close(run(loaded, [prompt])[1], logits, atol=1e-5, rtol=0)


def test_positions_up_to_the_last_one_work(tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path)
    prompt = [i % 128 for i in range(256)]
    logits = run(load(tmp_path, max_model_len=256), [prompt])[1]
    torch.testing.assert_close(logits, expected(reference, [prompt])[1], atol=1e-4, rtol=0)
