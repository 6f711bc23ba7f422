"""The knobs of `parallel`: what is wrong with them is said before anything is loaded."""

from __future__ import annotations

import pytest

from minivllm.assembly import build_engine
from minivllm.bench.records.identity import cell_id
from minivllm.config.compose import compose
from minivllm.engines.supported_knobs import require_supported
from minivllm.errors import BadInput


@pytest.mark.parametrize(
    ("overrides", "wrong"),
    [
        (["parallel.replicas=0"], r"parallel\.replicas=0 must be at least 1"),
        (["parallel.router=nearest"], r"parallel\.router='nearest' must be"),
        (["parallel.router={name: mine}"], "must be {_target_: my_package.MyRouter"),
        (["parallel.load_weight=-1"], "must be at least 0"),
        (["parallel.handover=disk"], r"parallel\.handover='disk' must be"),
        (["parallel.handover=file"], r"hands nothing over: set parallel\.disaggregated=true"),
        (
            ["parallel.replicas=2", "parallel.router=prefix_aware"],
            r"parallel\.router=prefix_aware goes by cached prefixes",
        ),
        (["task=generate", "parallel.replicas=2"], "leave it out with task=generate"),
    ],
)
def test_a_wrong_knob_is_named(overrides: list[str], wrong: str) -> None:
    with pytest.raises(BadInput, match=wrong):
        compose(overrides)


@pytest.mark.parametrize("engine", ["transformers", "llamacpp"])
def test_an_engine_without_replicas_says_so(engine: str) -> None:
    with pytest.raises(BadInput, match=rf"parallel\.replicas=2.* not supported by engine={engine}"):
        require_supported(compose([f"engine={engine}", "parallel.replicas=2"]))


def test_a_simulation_has_the_speed_of_a_file_as_a_link() -> None:
    apart = ["parallel.replicas=2", "parallel.disaggregated=true", "cache.prefix_caching=true"]
    config = compose(["engine=simulated", *apart, "parallel.handover=file"])
    with pytest.raises(BadInput, match=r"parallel\.handover='file' .*engine\.link_gb_s"):
        require_supported(config)


def test_one_process_has_one_engine() -> None:
    with pytest.raises(BadInput, match=r"parallel\.replicas=2: this is one engine"):
        build_engine(compose(["parallel.replicas=2"]))


def test_with_one_replica_the_router_is_no_part_of_a_cell() -> None:
    def cell(*overrides: str) -> str:
        return cell_id(compose(["cache.prefix_caching=true", *overrides]), "f")

    assert cell("parallel.router=prefix_aware", "parallel.load_weight=2") == cell()
    two = cell("parallel.replicas=2")
    assert len({cell(), two, cell("parallel.replicas=2", "parallel.router=prefix_aware")}) == 3


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
    pairs = ["parallel.replicas=2", "parallel.disaggregated=true", "cache.prefix_caching=true"]
    for overrides in (
        *(["runtime.determinism=batch"], ["runtime.device='cuda:1,3'"], ["pruning=magnitude"]),
        *(["runtime.determinism=run"], ["speculative=early_exit"], pairs),
        ["pruning=layers", "pruning.layers=[1]"],
    ):
        assert compose(["parallel.tensor=2", *overrides])["parallel"]["tensor"] == 2


def test_ranks_are_part_of_a_cell_and_a_single_one_is_not() -> None:
    one, two = compose([]), compose(["parallel.tensor=2"])
    older = {name: node for name, node in one.items() if name != "parallel"}
    assert cell_id(one, "f") == cell_id(older, "f") != cell_id(two, "f")
