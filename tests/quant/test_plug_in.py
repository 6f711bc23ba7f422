"""A third party's method: one class that knows nothing of the package's own ones, and one YAML
file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from minivllm import LLM, SamplingParams

SOURCE = """
import torch

class Ternary:
    name = "ternary"

    def __init__(self, layers, dtype="bfloat16"):
        self.dtype, self.skip, self.layers = getattr(torch, dtype), (), layers

    def quantizes(self, layer_name):
        return any(part in layer_name for part in self.layers)

    def pack(self, weight, bias):
        return TernaryLinear(weight, bias)

class TernaryLinear(torch.nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.scale = torch.nn.Buffer(weight.abs().mean(1))
        signs = (weight / self.scale[:, None]).round().clamp(-1, 1)
        self.signs = torch.nn.Buffer(signs.to(torch.int8))
        self.bias = bias

    def forward(self, x):
        out = torch.nn.functional.linear(x, self.signs.to(x.dtype)) * self.scale
        return out if self.bias is None else out + self.bias
"""


def test_a_method_of_ones_own_runs_in_the_engine(
    user_dir: Path, plug_in: Callable[[str, str, str], None]
) -> None:
    (user_dir / "my_ternary.py").write_text(SOURCE)
    plug_in("quant", "ternary", "_target_: my_ternary.Ternary\nlayers: [mlp.down_proj, lm_head]\n")
    with LLM("tiny", quant="ternary", device="cpu", config_dir=user_dir / "conf") as llm:
        loaded = llm.engine.loaded
        kinds = {name: type(module).__name__ for name, module in loaded.model.named_modules()}
        assert kinds["model.layers.0.mlp.down_proj"] == kinds["lm_head"] == "TernaryLinear"
        assert kinds["model.layers.0.mlp.gate_up_proj"] != "TernaryLinear"
        assert loaded.quantized_layers == loaded.config.num_layers + 1
        down = loaded.model.model.layers[0].mlp.down_proj
        rows, columns = down.signs.shape
        assert (
            loaded.linear_bytes
            == loaded.linear_bytes_16bit - loaded.config.num_layers * rows * (columns - 2)
        )
        assert (
            len(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4))[0].outputs[0].token_ids)
            == 4
        )
