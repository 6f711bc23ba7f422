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
