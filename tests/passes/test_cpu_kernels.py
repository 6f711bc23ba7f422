"""Layers on the C++ kernels: when the pass runs, and what it reports."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from minivllm.assembly import build_engine
from minivllm.config.compose import compose
from minivllm.kernels.context import BuildContext
from minivllm.kernels.cpu.library import Kernels
from minivllm.models.cpu_layers import CPUMLP, CPUAttention, CPUNorm
from minivllm.models.load.loading import load_model
from minivllm.models.options import ModelOptions
from minivllm.passes.base import PassContext, apply_passes
from minivllm.passes.cpu_kernels import UseKernels
from minivllm.passes.order import BEFORE_ENGINE
from minivllm.quant.plain import Plain
from tests.reference import make_checkpoint

CPU = torch.device("cpu")


def test_it_is_the_first_pass_and_wanted_where_there_are_kernels() -> None:
    some: Any = SimpleNamespace()
    wanted = [UseKernels().is_wanted(PassContext(BuildContext(CPU, k), {})) for k in (None, some)]
    assert isinstance(BEFORE_ENGINE[0], UseKernels) and wanted == [False, True]


def test_it_reports_the_layers_that_it_changes(kernels: Kernels) -> None:
    context = BuildContext(CPU, kernels)
    loaded = load_model(ModelOptions("embedded"), quant=Plain(), context=context)
    kinds = (CPUNorm, CPUAttention, CPUMLP)
    assert not any(isinstance(module, kinds) for module in loaded.model.modules())
    apply_passes([UseKernels()], loaded, PassContext(context, {}))
    changed = [type(module) for module in loaded.model.modules() if type(module) in kinds]
    (report,) = loaded.passes
    layers = loaded.config.num_layers
    assert (report.name, report.count, report.bytes) == ("cpu_kernels", len(changed), 0)
    assert report.seconds > 0 and len(changed) == 4 * layers + 1


def test_a_model_that_was_loaded_without_kernels_stays_so(kernels: Kernels) -> None:
    """As one of a user's own function may be."""
    loaded = load_model(ModelOptions("embedded"), quant=Plain(), context=BuildContext(CPU))
    apply_passes([UseKernels()], loaded, PassContext(BuildContext(CPU, kernels), {}))
    assert loaded.passes[0].count == 0


def test_determinism_keeps_it(kernels: Kernels, tmp_path: Path) -> None:
    """It would not know an MLP whose activation is computed row by row."""
    make_checkpoint(tmp_path)
    knobs = ["model=hf", f"model.path={tmp_path}", "runtime.device=cpu", "cache.num_blocks=20"]
    counts = []
    for level in ("off", "batch"):
        engine = build_engine(compose([*knobs, f"runtime.determinism={level}"]))
        counts.append({report.name: report.count for report in engine.loaded.passes}["cpu_kernels"])
        engine.close()
    assert counts[0] == counts[1] > 0
