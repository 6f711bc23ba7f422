"""A third party's pass: one class in a package of the user's, named in a list of `runtime`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm import LLM
from minivllm.config.compose import compose
from minivllm.errors import BadInput

SOURCE = """
from minivllm.passes.base import PassReport

class Sharpen:
    name = "sharpen"

    def __init__(self, factor: float = 2.0):
        self.factor = factor

    def apply(self, loaded, context):
        assert [report.name for report in loaded.passes][:1] == ["trim"]
        assert context.engine is None
        loaded.model.model.norm.weight.mul_(self.factor)
        notes = (f"logits are {self.factor:g} times as large",)
        return PassReport(self.name, 1, bytes=0, notes=notes)

class Fuse(Sharpen):
    name = "fuse"

class NoPass:
    pass
"""
# Whether the pass for the C++ kernels runs depends on the machine.
WITHOUT = "runtime.cpu_kernels=off"
SHARPEN = "runtime.passes=[{_target_: my_passes.Sharpen, factor: 4},{_target_: my_passes.Sharpen}]"


@pytest.fixture(autouse=True)
def _module(user_dir: Path) -> None:
    (user_dir / "my_passes.py").write_text(SOURCE)


def test_it_changes_the_model_after_the_built_in_ones() -> None:
    knobs: dict[str, Any] = {"quant": "fp32", "device": "cpu"}
    with LLM("tiny", **knobs, overrides=[WITHOUT]) as plain:
        with LLM("tiny", **knobs, overrides=[WITHOUT, SHARPEN]) as llm:
            # Powers of two change no bit but the exponent's.
            assert torch.equal(llm.logits([5, 6, 7]), 8 * plain.logits([5, 6, 7]))
            reports = llm.engine.loaded.passes
        assert [one.name for one in plain.engine.loaded.passes] == ["trim", "native"]
    assert [one.name for one in reports] == ["trim", "sharpen", "sharpen", "native"]


def test_records_of_a_sweep_say_what_it_did(cli: Callable[..., Any]) -> None:
    load = [WITHOUT, "workload.num_requests=2", "workload.input_len=4", "workload.output_len=2"]
    arms = "runtime.passes=[]," + SHARPEN.removeprefix("runtime.passes=")
    done = cli("-m", arms, "runtime.device=cpu", "measure.roofline=false", "sweep.name=mine", *load)
    assert done.code == 0, done.err
    records = [json.loads(path.read_text()) for path in Path("runs/mine").glob("*/record.json")]
    plain, record = sorted(records, key=lambda one: len(one["config"]["runtime"]["passes"]))
    runtime = record["liveness"]["runtime"]
    assert (runtime["pass_sharpen"], runtime["pass_sharpen_bytes"]) == (2.0, 0.0)
    assert runtime["modules_fused"] == 0.0 and "pass_sharpen" not in plain["liveness"]["runtime"]
    assert "logits are 4 times as large" in json.dumps(record)
    assert record["config"]["runtime"]["passes"][0] == {
        "_target_": "my_passes.Sharpen",
        "factor": 4,
    }


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[{factor: 4}]", "must be a list of {_target_: my_package.MyPass, ...}"),
        (
            "[{_target_: my_passes.Sharpen, factr: 4}]",
            "runtime.passes[0].factr: my_passes.Sharpen takes no such argument; did you mean "
            "factor?",
        ),
        (
            "[{_target_: my_passes.Sharpen, factor: a}]",
            "runtime.passes[0].factor='a' must be a number, says my_passes.Sharpen",
        ),
        (
            "[{_target_: my_passes.Sharper}]",
            "runtime.passes[0]: my_passes has no class Sharper; did you mean Sharpen?",
        ),
    ],
)
def test_a_mistake_is_one_line(cli: Callable[..., Any], value: str, message: str) -> None:
    done = cli("runtime.device=cpu", f"runtime.passes={value}")
    assert done.code == 2 and message in done.err and done.err.count("\n") == 1, done.err
    assert not any(Path().iterdir())


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("my_passes.NoPass", "runtime.passes: my_passes.NoPass is no pass: give it a `name` and"),
        ("my_passes.Fuse", "my_passes.Fuse is named 'fuse', as a pass of minivllm's own is"),
    ],
)
def test_what_is_no_pass_of_its_own_is_told_before_weights_are_loaded(
    target: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "minivllm.models.load.loading.resolve", lambda *_, **__: pytest.fail("loaded")
    )
    with pytest.raises(BadInput, match=message):
        LLM("tiny", device="cpu", overrides=[f"runtime.passes=[{{_target_: {target}}}]"])


def test_the_list_is_part_of_a_cell_where_it_is_not_empty() -> None:
    from minivllm.bench.records.identity import cell_id

    plain, empty, given = (
        cell_id(compose(overrides), "f") for overrides in ([], ["runtime.passes=[]"], [SHARPEN])
    )
    assert plain == empty != given
