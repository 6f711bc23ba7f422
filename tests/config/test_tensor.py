"""What several ranks cannot do is said when a configuration is composed."""

from __future__ import annotations

import pytest

from minivllm.bench.records.identity import cell_id
from minivllm.config.compose import compose
from minivllm.errors import BadInput


@pytest.mark.parametrize(
    ("overrides", "wrong"),
    [
        (
            ["cache.prefix_caching=true", "cache.offload_gb=1", "cache.offload_disk_gb=1"],
            "use cache.offload_disk_gb=0",
        ),
        (["parallel.tensor=4", "runtime.determinism=batch"], "use parallel.tensor=2, or"),
        (["task=kernels"], "task=kernels times whole kernels"),
        (["runtime.profile=true"], "runtime.profile traces one process"),
        (["runtime.passes=[{_target_: my.Pass}]"], "runtime.passes are applied to a whole model"),
        (["runtime.device=cuda:0"], "runtime.device=cuda:0 must name 2 GPUs"),
        (
            ["speculative=early_exit", "speculative.head_tokens=64"],
            "use speculative.head_tokens=null",
        ),
        (["pruning=wanda"], "pruning=wanda is calibrated with a whole model"),
        (["pruning=layers"], "pruning=layers is calibrated with a whole model"),
    ],
)
def test_the_knob_is_named(overrides: list[str], wrong: str) -> None:
    compose([one for one in overrides if not one.startswith("parallel")])
    with pytest.raises(BadInput, match=r"parallel\.tensor=\d: ") as told:
        compose(["parallel.tensor=2", *overrides])
    assert wrong in str(told.value)


def test_what_ranks_can_do_is_taken() -> None:
    for override in (
        *("runtime.determinism=batch", "runtime.device='cuda:1,3'", "pruning=magnitude"),
        *("runtime.determinism=run", "speculative=early_exit"),
    ):
        compose(["parallel.tensor=2", override])
    compose(["parallel.tensor=2", "pruning=layers", "pruning.layers=[1]"])
    apart = ["parallel.replicas=2", "parallel.disaggregated=true", "cache.prefix_caching=true"]
    compose(["parallel.tensor=2", *apart])


def test_ranks_are_part_of_a_cell_and_a_single_one_is_not() -> None:
    one, two = compose([]), compose(["parallel.tensor=2"])
    older = {name: node for name, node in one.items() if name != "parallel"}
    assert cell_id(one, "f") == cell_id(older, "f") != cell_id(two, "f")
