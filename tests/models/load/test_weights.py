"""Loading holds the weights on their device and, beyond them, no more than the largest shard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minivllm.config.compose import build
from minivllm.kernels.device import BuildContext
from minivllm.models.load.checkpoint import INDEX
from minivllm.models.load.loading import load_model
from minivllm.models.options import ModelOptions

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
METHODS: dict[str, dict[str, Any]] = {
    "bf16": {"_target_": "minivllm.quant.plain.Plain", "dtype": "bfloat16"},
    "fp32": {"_target_": "minivllm.quant.plain.Plain", "dtype": "float32"},
    "int8": {"_target_": "minivllm.quant.int8.Int8"},
    "nf4": {"_target_": "minivllm.quant.nf4.NF4"},
}


class Held(TorchDispatchMode):
    """Counts bytes of what operations make or are given, while it is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.reordered = self.peak = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if not isinstance(leaf, Tensor) or leaf.device.type != "cpu":
                continue
            if leaf.is_mkldnn:  # oneDNN's memory: its end cannot be seen, so it is held for good
                self.reordered += leaf.nbytes
            else:
                storage = leaf.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, self.reordered + sum(size for _, size in self.alive.values()))
        return out


def save(folder: Path, config: dict[str, Any], shards: int) -> int:
    """A random bfloat16 checkpoint; returns the size of its largest shard in bytes."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    tensors = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        head = f"model.layers.{layer}"
        tensors |= {f"{head}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
        tensors |= {f"{head}.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        tensors |= {f"{head}.mlp.down_proj.weight": (hidden, inner)}
        tensors |= {
            f"{head}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")
        }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    block = torch.randn(max(inner, config["vocab_size"]) * hidden).mul_(0.02).bfloat16()
    names, index, sizes = list(tensors), {}, []
    step = -(-len(names) // shards)
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part: dict[str, Tensor] = {}
        for name in names[number * step : (number + 1) * step]:
            shape = torch.Size(tensors[name])
            part[name], index[name] = block[: shape.numel()].view(shape).clone(), file
        save_file(part, folder / file)
        sizes.append((folder / file).stat().st_size)
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    return max(sizes)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A checkpoint, and its largest shard in bytes."""
    folder = tmp_path_factory.mktemp("memory") / "model"
    return folder, save(folder, CONFIG, 2)


@pytest.mark.parametrize("method", METHODS)
def test_beyond_the_weights_no_more_than_the_largest_shard_is_held(
    method: str, checkpoint: tuple[Path, int]
) -> None:
    folder, shard = checkpoint
    with Held() as held:
        loaded = load_model(
            ModelOptions(str(folder)),
            quant=build(METHODS[method]),
            context=BuildContext(torch.device("cpu")),
        )
    weights = loaded.weight_bytes
    print(f"{method}: weights {weights}, {held.peak - weights} beyond them; shard {shard}")
    assert weights <= held.peak <= weights + shard
    if method in ("int8", "nf4"):  # the 16-bit weights were never all there
        assert held.peak < weights + 0.6 * loaded.weight_bytes_16bit
