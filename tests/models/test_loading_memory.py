"""Loading holds the weights on their device and, beyond them, no more than the largest shard."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from minivllm.models.load.checkpoint import INDEX

ROOT = Path(__file__).resolve().parents[2]
MB = 1_000_000
SLACK = 12 * MB  # code of kernels, and what the allocator keeps
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
# A process of its own, which loads the small model first, so that only the large one's weights are
# news.
SCRIPT = """
import json, sys
import torch
from minivllm.bench.hardware.telemetry import own_peak_rss, reset_own_peak_rss
from minivllm.config.compose import build
from minivllm.models.load.loading import load_model

torch.set_num_threads(1)
quant = build(json.loads(sys.argv[1]))
load_model(sys.argv[2], quant=quant, device=torch.device("cpu"))
assert reset_own_peak_rss()
before = own_peak_rss()
loaded = load_model(sys.argv[3], quant=quant, device=torch.device("cpu"))
print(json.dumps([own_peak_rss() - before, loaded.weight_bytes, loaded.weight_bytes_16bit]))
"""
METHODS: dict[str, dict[str, Any]] = {
    "bf16": {"_target_": "minivllm.quant.plain.Plain", "dtype": "bfloat16"},
    "fp32": {"_target_": "minivllm.quant.plain.Plain", "dtype": "float32"},
    "int8": {"_target_": "minivllm.quant.int8.Int8"},
    "nf4": {"_target_": "minivllm.quant.nf4.NF4"},
}


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
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, int]:
    """A small one, a large one, and the large one's largest shard in bytes."""
    folder = tmp_path_factory.mktemp("memory")
    small = {
        "num_hidden_layers": 1,
        "vocab_size": 128,
        "hidden_size": 256,
        "intermediate_size": 256,
    }
    save(folder / "small", CONFIG | small | {"num_attention_heads": 2, "num_key_value_heads": 2}, 1)
    return folder / "small", folder / "large", save(folder / "large", CONFIG, 2)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of resident memory from /proc")
@pytest.mark.parametrize("method", METHODS)
def test_beyond_the_weights_no_more_than_the_largest_shard_is_held(
    method: str, checkpoints: tuple[Path, Path, int]
) -> None:
    small, large, shard = checkpoints
    command = [sys.executable, "-c", SCRIPT, json.dumps(METHODS[method]), str(small), str(large)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    grown, weights, weights_16bit = json.loads(done.stdout)
    beyond = (grown - weights) / MB
    print(
        f"{method}: weights {weights / MB:.0f} MB, {beyond:.0f} MB beyond them; shard "
        f"{shard / MB:.0f} MB"
    )
    assert grown <= weights + shard + SLACK
    if method in ("int8", "nf4"):  # the 16-bit weights were never all there
        assert grown < weights + 0.6 * weights_16bit
