"""The knobs of `runtime`, on which everything runs, and the settings outside every group."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from minivllm.platform.options import Options, knob, option, require_folder_name
from minivllm.platform.plug_ins import names_class
from minivllm.platform.threads import wanted_cores

_GPUS = r"\d{1,3}(-\d{1,3})?"  # one, or a range


@option("runtime")
@dataclass(frozen=True)
class RuntimeOptions(Options):
    """runtime."""

    group = "runtime"
    device: str = "auto"
    """auto, cpu, cuda or cuda:1, numbered by the bus as nvidia-smi does; several are such as
    cuda:0-3."""
    threads: int | None = knob(None, at_least=1, at_most=1024)
    """CPU threads; null: $MINIVLLM_THREADS, or one for each physical core within a container's
    limit."""
    cores: str | int | None = knob(None, unasked=True)
    """CPU cores to pin the process to, such as 0-3,8; null: any."""
    determinism: Literal["off", "run", "batch"] = "off"
    """run: deterministic kernels; batch: tokens depend on the request alone, not on its batch."""
    cpu_kernels: Literal["auto", "on", "off"] = "auto"
    """C++ kernels, compiled at first use; auto: where they compile."""
    kernel_choice: Literal["fixed", "measured"] = knob("fixed", unasked=True)
    """Which of two C++ kernels with equal bits multiplies how many rows; measured: once on a
    machine, then kept."""
    fused_kernels: Literal["auto", "triton", "off"] = "auto"
    """Residual + norm, norm + rotation, gate + product, a draw as one kernel each; auto: triton on
    a GPU."""
    linear_kernel: Literal["torch", "triton"] = "torch"
    """Kernel of products of few rows with 16-bit weights; torch: on a GPU cuBLAS."""
    moe: Literal["auto", "grouped", "loop"] = "auto"
    """Experts of a mixture; grouped: all in two grouped matrix products; loop: one after another;
    auto: grouped on Hopper in bf16."""
    native_layers: bool = True
    """With cpu_kernels, one C++ call for each decoder layer instead of one for each operation."""
    trim_last_layer: bool = True
    """After its attention the last layer computes only tokens whose logits are wanted."""
    overlap: bool = False
    """true: launch the next step before reading the tokens of the last one; for GPUs."""
    cuda_graphs: bool | Literal["auto"] = "auto"
    """Decoding steps recorded once and replayed; auto: on a GPU, where attention and model allow
    it."""
    compile: bool = False
    """torch.compile of the layers, without cpu_kernels and fused_kernels."""
    passes: list[dict[str, Any]] = knob(factory=list, unasked=True)
    """Passes of your own, applied to the loaded model in this order: [{_target_: my_package.MyPass,
    knob: value}]."""
    profile: bool = False
    """true: after each measurement, some steps of the same load under torch's profiler, traced
    beside the record."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(rf"auto|cpu|cuda(:{_GPUS}(,{_GPUS})*)?", self.device):
            raise self.bad(
                "device", "must be auto, cpu, cuda or cuda:<number>; several are such as cuda:0-3"
            )
        if any(int(last) < int(first) for first, last in re.findall(r"(\d+)-(\d+)", self.device)):
            raise self.bad("device", "has a range whose end lies before its beginning")
        wanted_cores({"cores": self.cores})
        if not all(map(names_class, self.passes)):
            raise self.bad(
                "passes", "must be a list of {_target_: my_package.MyPass, ...}, knobs beside"
            )
        if self.compile and (self.cpu_kernels == "on" or self.fused_kernels == "triton"):
            knob = "cpu_kernels=on" if self.cpu_kernels == "on" else "fused_kernels=triton"
            raise self.bad(
                "compile",
                f"cannot look into the kernels of runtime.{knob}: use auto or off there, or "
                "compile=false",
            )
        if self.compile and self.determinism == "batch":
            raise self.bad(
                "compile",
                "makes kernels that may differ between one token and several: use "
                "determinism=run or compile=false",
            )


@dataclass(frozen=True)
class RootOptions(Options):
    """Settings outside every group and section."""

    name: str | None = None
    """The folder of records under runs_dir; null: the time for a lone run, sweep.name for a
    sweep."""
    runs_dir: str = "runs"
    """The folder of records."""
    reports_dir: str = "reports"
    """The folder of reports."""
    runs: list[str] = field(default_factory=list)
    """For task=report, task=compare and task=view: folders of records, by path or by name under
    runs_dir."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_folder_name(self, "name")
