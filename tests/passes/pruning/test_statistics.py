"""Activations against those that transformers computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minivllm import LLM
from minivllm.passes.pruning.statistics import Statistics, measure
from tests.reference import make_checkpoint

SEQUENCES = [[5, 17, 3, 99, 42, 8], [64, 31, 7, 9, 12, 80, 4, 2]]
PLAIN = [
    *("runtime.device=cpu", "runtime.threads=1", "runtime.cpu_kernels='off'"),
    *("runtime.trim_last_layer=false", "batching.max_num_batched_tokens=5"),
]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Statistics, list[torch.Tensor]]:
    """Statistics, and the hidden states of transformers before and after each layer."""
    folder: Path = tmp_path_factory.mktemp("model")
    theirs = make_checkpoint(folder)
    states: list[torch.Tensor] = []
    layers = theirs.model.layers
    inputs: list[list[torch.Tensor]] = [[] for _ in range(len(layers) + 1)]

    def hidden(at: int, value: torch.Tensor) -> None:
        inputs[at].append(value[0].detach())

    handles = [
        layer.register_forward_pre_hook(lambda _, args, at=at: hidden(at, args[0]))
        for at, layer in enumerate(layers)
    ]
    last = len(layers)
    handles.append(
        layers[-1].register_forward_hook(
            lambda _, args, out: hidden(last, out if torch.is_tensor(out) else out[0])
        )
    )
    with torch.inference_mode():
        for ids in SEQUENCES:
            theirs(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    states = [torch.cat(parts) for parts in inputs]
    with LLM(str(folder), quant="fp32", overrides=PLAIN) as llm:
        return measure(llm.engine, SEQUENCES), states


def test_cosines_and_angles(both: tuple[Statistics, list[torch.Tensor]]) -> None:
    found, states = both
    assert found.num_tokens == 14
    for i, one in enumerate(states):
        for j, other in enumerate(states):
            near = torch.cosine_similarity(one.double(), other.double(), dim=-1).clamp(-1, 1)
            assert found.cosines[i, j] == pytest.approx(float(near.mean()), abs=1e-5)
            turned = near.acos().mean() / torch.pi
            assert found.angles[i, j] == pytest.approx(float(turned), abs=2e-3)
    expected = [1 - float(found.cosines[i, i + 1]) for i in range(len(states) - 1)]
    assert found.block_influence() == pytest.approx(expected)


def test_norms_are_of_the_inputs(both: tuple[Statistics, list[torch.Tensor]]) -> None:
    found, _ = both
    names = {name.split(".", 3)[3] for name in found.norms}
    assert names == {
        *("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    }
    assert found.norms["model.layers.0.mlp.down_proj"].shape == (80,)
    assert all(one.dtype == torch.float32 and one.gt(0).all() for one in found.norms.values())


def test_the_quietest_run() -> None:
    angles = torch.ones(5, 5, dtype=torch.float64)
    angles[1, 3] = 0.1
    found = Statistics(1, angles, angles, {})
    assert found.quietest_run(2) == [1, 2]
