"""Which passes run, as knobs ask, and in which order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minivllm.assembly import build_engine
from minivllm.config.compose import compose
from minivllm.errors import BadInput
from minivllm.kernels import common
from minivllm.kernels.context import BuildContext
from minivllm.passes.base import PassContext, RuntimePass
from minivllm.passes.order import AFTER_ENGINE, BEFORE_ENGINE, OWN_NAMES

CPU = torch.device("cpu")


def chosen_passes(passes: tuple[RuntimePass, ...], *overrides: str) -> list[str]:
    runtime: dict[str, Any] = compose(["runtime.device=cpu", *overrides])["runtime"]
    context = PassContext(BuildContext(CPU, moe=runtime["moe"]), runtime)
    return [one.name for one in passes if one.is_wanted(context)]


def test_names_are_one_pass_s_each() -> None:
    assert {"prune"} | {one.name for one in (*BEFORE_ENGINE, *AFTER_ENGINE)} == OWN_NAMES
    assert len(OWN_NAMES) == 1 + len(BEFORE_ENGINE) + len(AFTER_ENGINE)


@pytest.mark.parametrize(
    ("overrides", "before", "after"),
    [
        ([], ["trim", "grouped"], ["native"]),
        (
            ["runtime.trim_last_layer=false", "runtime.moe=loop", "runtime.native_layers=false"],
            [],
            [],
        ),
        (["runtime.determinism=batch"], ["determinism", "trim", "grouped"], ["native"]),
        (["runtime.compile=true"], ["grouped"], ["native", "compile"]),
    ],
)
def test_knobs_turn_them_on(overrides: list[str], before: list[str], after: list[str]) -> None:
    assert (chosen_passes(BEFORE_ENGINE, *overrides), chosen_passes(AFTER_ENGINE, *overrides)) == (
        before,
        after,
    )


@pytest.mark.parametrize("knob", ["fused_kernels", "linear_kernel"])
def test_what_cannot_run_here_is_told_before_weights_are_loaded(
    knob: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "INTERPRETED", False)
    monkeypatch.setattr(
        "minivllm.models.load.loading.resolve", lambda *_, **__: pytest.fail("loaded")
    )
    with pytest.raises(BadInput, match=rf"runtime.{knob}=triton needs a GPU"):
        build_engine(compose(["runtime.device=cpu", f"runtime.{knob}=triton"]))


def test_the_model_says_what_was_done_to_it() -> None:
    engine = build_engine(compose(["runtime.device=cpu", "runtime.cpu_kernels=off"]))
    assert [(one.name, one.count) for one in engine.loaded.passes] == [
        ("trim", 1),
        ("grouped", 0),
        ("native", 0),
    ]
    engine.close()
