"""Weights that are kept are those that would be packed, whatever the checkpoint; damage costs a
start, and no more."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.errors import BadInput
from minivllm.kernels.cpu.library import Kernels
from minivllm.kernels.device import BuildContext
from minivllm.models.load.loading import LoadedModel, load_model
from minivllm.models.options import ModelOptions
from minivllm.passes.pruning.plan import PruningPlan
from minivllm.quant.fp8 import FP8
from minivllm.quant.int4 import Int4
from minivllm.quant.int8 import Int8
from minivllm.quant.int8_mixed import Int8Mixed
from minivllm.quant.nf4 import NF4
from minivllm.quant.plain import Plain
from tests.gguf_files import LLAMA, tensors, write
from tests.models.load.gguf.test_packed import quantized
from tests.quant.stored.test_base import quantized_copy, saved_by_transformers
from tests.reference import VARIANTS, make_checkpoint

CPU = torch.device("cpu")
SIZES = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128}
PROMPTS = [[5, 17, 3, 99, 42, 8], [1], [9, 4, 30] * 9]


def load(
    folder: Path, kernels: Kernels, quant: Any = None, cache: object = "off", **options: Any
) -> LoadedModel:
    return load_model(
        ModelOptions(str(folder), packed_cache=str(cache), **options),
        quant=quant or Plain(),
        context=BuildContext(CPU, kernels),
    )


def require_equal(one: LoadedModel, other: LoadedModel) -> None:
    """Weights, counts and warnings are the same."""
    mine, theirs = dict(one.model.named_parameters()), dict(other.model.named_parameters())
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        same = theirs[name]
        assert value.dtype is same.dtype and torch.equal(value, same), name
        assert not same.requires_grad and same.device == CPU
    for name in ("weight_bytes", "lookup_bytes", "weight_bytes_16bit", "linear_bytes"):
        assert getattr(one, name) == getattr(other, name), name
    for name in ("linear_bytes_16bit", "quantized_layers", "linear_inputs", "stored_bytes"):
        assert getattr(one, name) == getattr(other, name), name
    assert one.warnings == other.warnings and one.fingerprint == other.fingerprint
    assert [type(m) for m in one.model.modules()] == [type(m) for m in other.model.modules()]


def require_kept(folder: Path, kernels: Kernels, quant: Any, cache: Path) -> LoadedModel:
    plain = load(folder, kernels, quant)
    written, hit = (load(folder, kernels, quant, cache) for _ in range(2))
    assert [plain.packed_cache, written.packed_cache, hit.packed_cache] == ["off", "written", "hit"]
    assert written.packed_write_s is not None and hit.packed_write_s is None
    require_equal(plain, written)
    require_equal(plain, hit)
    return hit


@pytest.mark.parametrize(
    ("variant", "quant"),
    [
        *((name, "bf16") for name in ("llama biases", "qwen3 tied", "gemma2", "qwen3_moe")),
        *(("qwen3", quant) for quant in ("int8", "int4", "nf4")),
        *(("qwen3 tied", quant) for quant in ("int8 with head", "int4 without one layer")),
    ],
)
def test_kept_weights_are_those_that_are_packed(
    variant: str, quant: str, panels: Kernels, tmp_path: Path
) -> None:
    methods = {
        "bf16": Plain(),
        "int8": Int8(),
        "int4": Int4(group_size=32),
        "nf4": NF4(),
        "int8 with head": Int8(lm_head=True),
        "int4 without one layer": Int4(skip=("layers.1.",)),
    }
    family, overrides = VARIANTS[variant]
    make_checkpoint(tmp_path, family, **{**overrides, **SIZES})
    require_kept(tmp_path, panels, methods[quant], tmp_path / "cache")


@pytest.mark.parametrize("quant", ["bf16", "int4"])
def test_tokens_and_logits_are_the_same(quant: str, panels: Kernels, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", **SIZES)
    results = []
    for cache in ("off", tmp_path / "cache", tmp_path / "cache"):
        knobs = ["runtime.threads=1", "cache.num_blocks=40", f"model.packed_cache='{cache}'"]
        with LLM(str(tmp_path), device="cpu", quant=quant, overrides=knobs) as llm:
            answers = llm.generate(PROMPTS, SamplingParams(max_tokens=8, ignore_eos=True))
            ids = [answer.outputs[0].token_ids for answer in answers]
            results.append((ids, llm.logits(PROMPTS[0]), llm.engine.loaded.packed_cache))
    assert [outcome for _, _, outcome in results] == ["off", "written", "hit"]
    for ids, logits, _ in results[1:]:
        assert ids == results[0][0] and (logits == results[0][1]).all()


def test_random_weights_of_one_seed_are_kept(panels: Kernels, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", **SIZES)
    cache = tmp_path / "cache"
    first = load(tmp_path, panels, cache=cache, weights="random", seed=1)
    other = load(tmp_path, panels, cache=cache, weights="random", seed=2)
    again = load(tmp_path, panels, cache=cache, weights="random", seed=1)
    outcomes = [one.packed_cache for one in (first, other, again)]
    assert outcomes == ["written", "written", "hit"]
    require_equal(first, again)


@pytest.mark.parametrize("kind", ["awq", "gptq", "gptq_v2"])
def test_quantised_checkpoints_are_kept(kind: str, panels: Kernels, tmp_path: Path) -> None:
    packed, _ = quantized_copy(tmp_path, kind)
    hit = require_kept(packed, panels, Int4(), tmp_path / "cache")
    assert any("were quantised before" in warning for warning in hit.warnings)


@pytest.mark.parametrize(("form", "quant"), [("Q8_0", Int8()), ("Q4_0", Int4()), ("Q4_K", Int4())])
def test_gguf_files_are_kept(form: str, quant: Any, panels: Kernels, tmp_path: Path) -> None:
    stored = tensors(form=form) if form == "Q4_K" else quantized(form)
    path = write(tmp_path / "model.gguf", LLAMA, stored)
    assert require_kept(path, panels, quant, tmp_path / "cache").stored_bytes


def test_bitsandbytes_checkpoints_are_kept(panels: Kernels, tmp_path: Path) -> None:
    saved_by_transformers(tmp_path, load_in_4bit=True, bnb_4bit_quant_type="nf4")
    require_kept(tmp_path / "packed", panels, NF4(), tmp_path / "cache")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (FP8, "qkv_proj is FP8Linear"),
        (Int8Mixed, "qkv_proj is Int8MixedLinear"),
        (lambda: Plain("float32"), "qkv_proj is PackedLinear"),
    ],
    ids=["fp8", "int8_mixed", "fp32"],
)
def test_layers_without_the_kernels_step_aside(
    make: Callable[[], Any], reason: str, panels: Kernels, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, **SIZES)
    for _ in range(2):
        loaded = load(tmp_path, panels, make(), tmp_path / "cache")
        assert loaded.packed_cache == f"off: model.layers.0.self_attn.{reason}"
    assert not list((tmp_path / "cache").iterdir())


def test_without_kernels_nothing_is_kept(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, **SIZES)
    loaded = load_model(
        ModelOptions(str(tmp_path), packed_cache=str(tmp_path / "cache")),
        quant=Plain(),
        context=BuildContext(CPU),
    )
    assert loaded.packed_cache == "off: the C++ kernels for CPUs are not in use"


def test_weights_that_are_changed_while_they_are_read_step_aside(
    panels: Kernels, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, **SIZES)
    config = json.loads((tmp_path / "config.json").read_text())
    loaded = load_model(
        ModelOptions(str(tmp_path), packed_cache=str(tmp_path / "cache")),
        quant=Plain(),
        context=BuildContext(CPU, panels),
        transform=PruningPlan(config, [0, 1, 2]),
    )
    assert loaded.packed_cache == "off: weights that are pruned or split are not kept"


def test_an_order_of_inputs_steps_aside(panels: Kernels, tmp_path: Path) -> None:
    packed, _ = quantized_copy(tmp_path, "act_order")
    loaded = load(packed, panels, Int4(), tmp_path / "cache")
    assert "Int4Linear" in loaded.packed_cache


class Own(Plain):
    """A method of a third party, whose code the identity does not have."""


def test_a_method_of_ones_own_steps_aside(panels: Kernels, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, **SIZES)
    loaded = load(tmp_path, panels, Own(), tmp_path / "cache")
    assert loaded.packed_cache == "off: the quantisation method is not minivllm's own"


def test_small_models_are_kept_where_a_folder_is_named(
    panels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, **SIZES)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert load(tmp_path, panels, cache="auto").packed_cache == "off: the model is small"
    monkeypatch.setattr("minivllm.models.load.loading.SMALLEST", 1)
    outcomes = [load(tmp_path, panels, cache="auto").packed_cache for _ in range(2)]
    assert outcomes == ["written", "hit"]
    assert list((tmp_path / "xdg" / "minivllm" / "packed").glob("*.packed.safetensors"))


def entry(cache: Path) -> Path:
    (path,) = cache.glob("*.packed.safetensors")
    return path


def changed(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "a byte": changed,
    "its end": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "everything": lambda path: path.write_bytes(b""),
    "another format": lambda path: path.write_text("text"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_one_warning_and_the_weights_are_packed_again(
    damage: str, panels: Kernels, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, "qwen3", **SIZES)
    cache = tmp_path / "cache"
    first = load(tmp_path, panels, cache=cache)
    DAMAGE[damage](entry(cache))
    mended, hit = (load(tmp_path, panels, cache=cache) for _ in range(2))
    assert mended.packed_cache == "written" and hit.packed_cache == "hit"
    (warning,) = mended.warnings
    assert warning.startswith("model.packed_cache: the weights are packed again: ")
    assert "\n" not in warning
    mended.warnings.clear()
    require_equal(first, mended)
    require_equal(first, hit)


def test_weights_of_another_model_are_not_taken(panels: Kernels, tmp_path: Path) -> None:
    """A file that was renamed."""
    make_checkpoint(tmp_path, "qwen3", **SIZES)
    cache = tmp_path / "cache"
    load(tmp_path, panels, cache=cache, weights="random", seed=1)
    other = entry(cache)
    first = load(tmp_path, panels, cache=cache, weights="random", seed=2)
    (own,) = set(cache.glob("*.packed.safetensors")) - {other}
    other.replace(own)
    again = load(tmp_path, panels, cache=cache, weights="random", seed=2)
    assert again.packed_cache == "written"
    assert "the weights of another model" in again.warnings.pop()
    require_equal(first, again)


def test_what_does_not_fit_is_told(panels: Kernels, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, **SIZES)
    loaded = load(tmp_path, panels, cache=tmp_path / "cache", packed_cache_gb=1e-5)
    assert loaded.packed_cache.startswith("off: it takes ")
    (warning,) = loaded.warnings
    assert warning.startswith("model.packed_cache: packed weights are not kept: it takes ")


def test_a_folder_that_cannot_be_used_is_told_first(panels: Kernels, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, **SIZES)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"^model\.packed_cache=.*cannot be made"):
        load(tmp_path, panels, cache=tmp_path / "file" / "cache")
