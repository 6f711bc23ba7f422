"""runtime.trim_last_layer: which knobs trim; what it computes is in tests of models and engine."""

from __future__ import annotations

import pytest

from minivllm.assembly import build_engine
from minivllm.config.compose import compose
from minivllm.models.costs import trims


@pytest.mark.parametrize(
    ("runtime", "expected"),
    [
        ({"trim_last_layer": True, "compile": False}, True),
        ({"trim_last_layer": True, "compile": True}, False),
        ({"trim_last_layer": False}, False),
        ({}, False),
    ],
)
def test_compiled_layers_keep_all_rows(runtime: dict[str, bool], expected: bool) -> None:
    assert trims(runtime) is expected


@pytest.mark.parametrize("knob", [False, True])
def test_the_last_layer_is_marked(knob: bool) -> None:
    engine = build_engine(compose(["runtime.device=cpu", f"runtime.trim_last_layer={knob}"]))
    assert engine.loaded.model.trims is knob
    assert [one.count for one in engine.loaded.passes if one.name == "trim"] == [1] * knob
    engine.close()
