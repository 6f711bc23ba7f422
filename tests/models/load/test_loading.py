"""Loading: what is stored where, what it costs, and what is refused before a weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from minivllm.errors import BadInput
from minivllm.kernels.device import BuildContext
from minivllm.models.load import weights as weights_module
from minivllm.models.load.checkpoint import INDEX
from minivllm.models.load.loading import LoadedModel, RandomWeights, load_model
from minivllm.models.options import ModelOptions
from minivllm.quant.int4 import Int4
from minivllm.quant.int8 import Int8
from minivllm.quant.nf4 import NF4
from minivllm.quant.plain import Plain
from tests.later import Later
from tests.models.test_parity import PROMPTS, run
from tests.reference import make_checkpoint

transformers = Later("transformers")

CPU = torch.device("cpu")
ARCHITECTURE = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def load(
    folder: Path | str = "", quant: Any = None, progress: Any = None, **options: Any
) -> LoadedModel:
    return load_model(
        ModelOptions(str(folder), **options),
        quant=quant or Plain("bfloat16"),
        context=BuildContext(CPU),
        progress=progress,
    )


def rewrite(folder: Path, change: Any) -> None:
    """Let `change` alter the checkpoint's tensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def stored_bytes(model: nn.Module) -> int:
    """Bytes of all weights that a model holds, tied ones once; not the rotary table."""
    tensors = {id(t): t for module in model.modules() for t in module.parameters(recurse=False)}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def test_nothing_stays_on_the_meta_device_or_takes_gradients(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    model = load(tmp_path).model
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert tensor.device == CPU, name
        assert not tensor.requires_grad, name
    assert not model.training


def test_a_tied_head_shares_the_embedding_s_memory(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, tie_word_embeddings=True)
    loaded = load(tmp_path)
    embedding = loaded.model.model.embed_tokens.weight
    assert loaded.model.lm_head.weight.data_ptr() == embedding.data_ptr()
    make_checkpoint(tmp_path, tie_word_embeddings=False)
    assert load(tmp_path).weight_bytes - loaded.weight_bytes == embedding.numel() * 2


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("method", [Plain("float32"), Plain("float16"), Int8(), NF4()])
def test_bytes_are_those_of_the_tensors(method: Any, tied: bool, tmp_path: Path) -> None:
    parameters = sum(
        p.numel() for p in make_checkpoint(tmp_path, tie_word_embeddings=tied).parameters()
    )
    loaded = load(tmp_path, method)
    assert loaded.weight_bytes == stored_bytes(loaded.model)
    repeated = 3 * (4 + 2 - 2) * 16  # the q and k norms are kept once for each head
    assert loaded.weight_bytes_16bit == 2 * (parameters + repeated)
    outside = loaded.weight_bytes - loaded.linear_bytes
    assert (
        outside
        == (loaded.weight_bytes_16bit - loaded.linear_bytes_16bit) // 2 * method.dtype.itemsize
    )
    assert loaded.quantized_layers == (0 if isinstance(method, Plain) else 12)


@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_checkpoint_dtype_and_compute_dtype_are_independent(
    stored: torch.dtype, compute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, dtype=stored)
    monkeypatch.setattr(weights_module, "_CHUNK", 1000)  # so that tensors come in several pieces
    loaded = load(tmp_path, Plain(compute))
    dtype = getattr(torch, compute)
    tensors = load_file(tmp_path / "model.safetensors")
    assert torch.equal(
        loaded.model.model.embed_tokens.weight, tensors["model.embed_tokens.weight"].to(dtype)
    )
    assert {t.dtype for t in loaded.model.parameters()} == {dtype}
    if compute == "float32":
        reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        with torch.no_grad():
            expected = torch.cat(
                [reference(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]
            )
        torch.testing.assert_close(run(loaded, PROMPTS)[1], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("indexed", [True, False])
def test_shards_are_the_same_model_as_one_file(indexed: bool, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "one")
    make_checkpoint(tmp_path / "many", max_shard_size="60KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    if not indexed:
        (tmp_path / "many" / INDEX).unlink()
    one, many = (
        run(load(tmp_path / name, Plain("float32")), PROMPTS)[1] for name in ("one", "many")
    )
    assert torch.equal(one, many)


def test_random_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    options: dict[str, Any] = {"weights": "random", "architecture": ARCHITECTURE}
    first, again, other = (run(load(seed=seed, **options), PROMPTS)[1] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.isfinite().all()
    exact = run(load(quant=Plain("float32"), **options), PROMPTS)[1]
    assert (first.float() - exact).norm() / exact.norm() < 0.06  # the same model in another dtype
    assert load(seed=0, **options).fingerprint != load(seed=1, **options).fingerprint


def test_random_weights_are_normal_and_norms_are_ones() -> None:
    loaded = load(weights="random", architecture=ARCHITECTURE, quant=Plain("float32"))
    embedding = loaded.model.model.embed_tokens.weight
    assert abs(embedding.std().item() - 0.02) < 0.001
    assert abs(embedding.mean().item()) < 0.001
    assert (loaded.model.model.norm.weight == 1).all()
    assert (loaded.model.model.layers[0].self_attn.qk_norm.weight == 1).all()
    assert loaded.weights == "random"
    assert "random" in loaded.warnings[0]


def test_the_method_that_is_given_stays_as_it_is() -> None:
    """Another engine of the process may use it with other kernels, or none."""
    kernels: Any = SimpleNamespace(has_linear=False)
    method = Plain("float32")
    load_model(
        ModelOptions("", weights="random", architecture=ARCHITECTURE),
        quant=method,
        context=BuildContext(CPU, kernels),
    )
    assert method.kernels is None
    assert method.within(BuildContext(CPU, kernels)).kernels is kernels


def test_random_tensors_longer_than_the_block_do_not_repeat_rows() -> None:
    out = torch.empty(5000, 1024)
    RandomWeights(0).fill("some.weight", out)
    assert len(torch.unique(out[:, 0])) > 4900
    assert abs(out.std().item() - 0.02) < 0.001


class Counting:
    """A quantisation that follows how many 16-bit weights are alive."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.alive, self.peak, self.total = inner, 0, 0, 0
        self.dtype, self.skip, self.name = inner.dtype, inner.skip, inner.name

    def quantizes(self, layer_name: str) -> bool:
        return bool(self.inner.quantizes(layer_name))

    def pack(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        import weakref

        size = weight.numel()
        self.alive += size
        self.total += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(weight, self._gone, size)
        packed: nn.Module = self.inner.pack(weight, bias)
        return packed

    def _gone(self, size: int) -> None:
        self.alive -= size


@pytest.mark.parametrize("method", [Int8, NF4, Int4])
def test_a_quantised_model_never_exists_whole_in_16_bits(method: Any) -> None:
    counting = Counting(method())
    load(weights="random", architecture=ARCHITECTURE, quant=counting)
    assert counting.total == 6 * (128 * 512 + 256 * 128 + 128 * 512 + 256 * 128)
    assert counting.alive == 0
    # the layer being packed, and at most the one being assembled
    assert counting.peak <= 2 * 128 * 512


def test_skipped_layers_stay_plain_and_unknown_names_are_mistakes() -> None:
    options: dict[str, Any] = {"weights": "random", "architecture": ARCHITECTURE}
    loaded = load(quant=Int8(skip=["down_proj", "layers.0."]), **options)
    kinds = {name: type(module).__name__ for name, module in loaded.model.named_modules()}
    assert kinds["model.layers.1.mlp.down_proj"] != "Int8Linear"
    assert kinds["model.layers.0.self_attn.qkv_proj"] != "Int8Linear"
    assert kinds["model.layers.1.self_attn.qkv_proj"] == "Int8Linear"
    assert loaded.quantized_layers == 5 * 3
    with pytest.raises(
        BadInput, match=r"down_porj.*down_proj, gate_up_proj, lm_head, o_proj, qkv_proj"
    ):
        load(quant=Int8(skip=["down_porj"]), **options)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("method", [Int8, NF4, Int4])
def test_a_quantised_head_is_counted_and_leaves_the_embedding_alone(
    method: Any, tied: bool
) -> None:
    options: dict[str, Any] = {
        "weights": "random",
        "architecture": ARCHITECTURE | {"tie_word_embeddings": tied},
    }
    plain, loaded = load(quant=method(), **options), load(quant=method(lm_head=True), **options)
    head, embedding = loaded.model.lm_head, loaded.model.model.embed_tokens.weight
    assert type(head) is type(loaded.model.model.layers[0].mlp.down_proj)
    assert torch.equal(embedding, plain.model.model.embed_tokens.weight)
    assert loaded.weight_bytes == stored_bytes(loaded.model)
    assert loaded.weight_bytes_16bit == plain.weight_bytes_16bit
    assert loaded.linear_bytes == plain.linear_bytes
    assert loaded.quantized_layers == plain.quantized_layers + 1
    size = 2 * 512 * 128
    assert plain.lookup_bytes == (0 if tied else size)
    assert loaded.lookup_bytes == size
    # What a step streams: the quantised head, and no longer the table or the head in 16 bits.
    streamed, before = loaded.weight_bytes - size, plain.weight_bytes - plain.lookup_bytes
    assert before - streamed == size - stored_bytes(head)
    hidden = torch.randn(3, 128).bfloat16()
    close, expected = (
        model.compute_logits(hidden).float() for model in (loaded.model, plain.model)
    )
    assert 0 < (close - expected).norm() / expected.norm() < 0.13


def test_max_model_len_is_bounded_by_the_model(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    assert load(tmp_path).max_model_len == 256
    assert load(tmp_path, max_model_len=100).max_model_len == 100
    for length, limit in ((257, "256"), (0, "at least 1")):
        with pytest.raises(BadInput, match=f"max_model_len={length}.*{limit}"):
            load(tmp_path, max_model_len=length)


def test_a_tensor_of_the_wrong_shape_is_named_with_its_file(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    name = "model.layers.1.self_attn.k_proj.weight"
    rewrite(tmp_path, lambda tensors: tensors.update({name: tensors[name][:16]}))
    with pytest.raises(
        BadInput, match=rf"model\.safetensors: tensor {name} has shape \[16, 48\].*\[32, 48\]"
    ):
        load(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(
        BadInput, match=r"lacks tensor model\.layers\.2\.mlp\.up_proj\.weight \(1 missing\)"
    ):
        load(tmp_path)


def test_an_unexpected_tensor_is_named_and_known_buffers_are_not(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    rewrite(
        tmp_path,
        lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}),
    )
    load(tmp_path)
    rewrite(tmp_path, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}))
    with pytest.raises(
        BadInput, match=r"model\.safetensors: tensor \S+q_proj\.bias \(1 such\) has no place"
    ):
        load(tmp_path)


def test_a_tied_head_that_was_saved_too_is_ignored_if_it_is_the_embedding(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, tie_word_embeddings=True)
    rewrite(
        tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    )
    loaded = load(tmp_path)
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    rewrite(tmp_path, lambda t: t["lm_head.weight"].mul_(1.1))
    with pytest.raises(
        BadInput, match=r"model\.safetensors: tensor lm_head.* set tie_word_embeddings to false"
    ):
        load(tmp_path)


def test_an_untied_head_that_is_missing_is_told_with_its_remedy(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, tie_word_embeddings=False)
    rewrite(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(
        BadInput, match=r"lacks tensor lm_head\.weight \(1 missing\).*tie_word_embeddings to true"
    ):
        load(tmp_path)


def test_another_model_s_names_are_shown_beside_the_missing_ones(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)

    def prefix(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[f"language.{name}"] = tensors.pop(name)

    rewrite(tmp_path, prefix)
    with pytest.raises(
        BadInput, match=r"lacks tensor model\.\S+ \(\d+ missing\) and holds language\.\S+, which"
    ):
        load(tmp_path)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    rewrite(tmp_path, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(BadInput, match=f"{name} is stored as I8"):
        load(tmp_path)


def test_wrong_config_is_told_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 4, "layer_types": None})
    )
    monkeypatch.setattr(weights_module, "read_into", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(BadInput, match=r"lacks tensor model\.layers\.3"):
        load(tmp_path)


def test_a_broken_tokenizer_is_told_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path)
    assert load(tmp_path).tokenizer is None
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(weights_module, "read_into", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(BadInput, match=r"tokenizer\.json cannot be read as a tokenizer"):
        load(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_file_that_changes_while_it_is_read_is_named_with_the_tensor(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"

    def change(done: int, total: int) -> None:
        path.unlink() if damage == "gone" else path.write_bytes(path.read_bytes()[:5000])

    what = "it ends early" if damage == "cut" else "No such file"
    with pytest.raises(
        BadInput, match=rf"model\.safetensors: tensor model\.\S+ cannot be read.*{what}.*changed"
    ):
        load(tmp_path, progress=change)


@pytest.mark.parametrize("tied", [True, False])
def test_progress_ends_at_the_bytes_of_all_tensors(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = sum(
        p.numel() for p in make_checkpoint(tmp_path, tie_word_embeddings=tied).parameters()
    )
    monkeypatch.setattr(weights_module, "_CHUNK", 4096)
    for options, size in ({"folder": tmp_path}, 4), ({"folder": tmp_path, "weights": "random"}, 1):
        seen: list[tuple[int, int]] = []
        load(**options, progress=lambda done, total, seen=seen: seen.append((done, total)))
        assert {total for _, total in seen} == {size * parameters}
        assert [done for done, _ in seen] == sorted({done for done, _ in seen})
        assert seen[-1] == (size * parameters, size * parameters)
