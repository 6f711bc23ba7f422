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
    threads: int | None = knob(None, at_least=1, at_most=1024)
    cores: str | int | None = knob(None, unasked=True)
    determinism: Literal["off", "run", "batch"] = "off"
    cpu_kernels: Literal["auto", "on", "off"] = "auto"
    kernel_choice: Literal["fixed", "measured"] = knob("fixed", unasked=True)
    fused_kernels: Literal["auto", "triton", "off"] = "auto"
    linear_kernel: Literal["torch", "triton"] = "torch"
    moe: Literal["auto", "grouped", "loop"] = "auto"
    native_layers: bool = True
    trim_last_layer: bool = True
    overlap: bool = False
    cuda_graphs: bool | Literal["auto"] = "auto"
    compile: bool = False
    passes: list[dict[str, Any]] = knob(factory=list, unasked=True)
    profile: bool = False

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
    runs_dir: str = "runs"
    reports_dir: str = "reports"
    runs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_folder_name(self, "name")
