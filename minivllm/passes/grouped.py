"""All experts of a mixture in two grouped matrix products, torch's `grouped_mm`, in place of a loop
over experts.

The loop needs the number of tokens of each expert on the host. Grouped products keep it on the
device, as the ends of the groups: nothing waits, and a CUDA graph can hold the step. Only mixtures
with plain experts are replaced."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minivllm.errors import BadInput
from minivllm.kernels.cpu.linear import PackedLinear
from minivllm.models.config import require_experts
from minivllm.models.load.loading import LoadedModel
from minivllm.models.moe import MoE
from minivllm.passes.base import PassContext, PassReport
from minivllm.quant.base import frozen
from minivllm.quant.plain import PlainLinear

_ALIGNED = 16  # bytes: alignment of the rows of a matrix of grouped_mm


class GroupedMoE(MoE):
    """MoE whose experts' weights are two tensors, which the constructor takes from the experts of
    `inner`."""

    in_graphs = "untried"  # on any GPU so far

    def __init__(self, inner: MoE) -> None:
        nn.Module.__init__(self)
        self.num_experts, self.top_k, self.normalize = (
            inner.num_experts,
            inner.top_k,
            inner.normalize,
        )
        self.gate = inner.gate
        self.gate_up, self.down = (
            _stacked(inner.experts, name) for name in ("gate_up_proj", "down_proj")
        )
        # A bound method of the first expert, which has no weights any more.
        self.gated: Callable[[Tensor], Tensor] = inner.experts[0].gated  # type: ignore[assignment]
        # Always the same memory, as a captured graph writes to a fixed address.
        self.experts_run = nn.Buffer(self.down.new_zeros((), dtype=torch.int64), persistent=False)

    @property
    def experts(self) -> nn.ParameterList:  # type: ignore[override]
        """The two weights of all experts."""
        return nn.ParameterList([self.gate_up, self.down])

    def run_experts(self, x: Tensor, ends: Tensor) -> Tensor:
        """The outputs of all experts [rows, hidden]; waits for nothing on a GPU."""
        counts = ends.diff(prepend=ends.new_zeros(1))
        assert isinstance(self.experts_run, Tensor)
        self.experts_run.copy_((counts > 0).sum())
        both = F.grouped_mm(x, self.gate_up.transpose(1, 2), offs=ends)
        return F.grouped_mm(self.gated(both), self.down.transpose(1, 2), offs=ends)


class GroupExperts:
    """Groups the experts of mixtures with plain weights."""

    name = "grouped"

    def apply(self, loaded: LoadedModel, context: PassContext) -> PassReport:
        """The counter is of experts that are no modules any more."""
        count = group_experts(loaded.model, context.build.moe, context.device)
        return PassReport(self.name, count, counters={"experts": count * loaded.config.num_experts})


def _weight(linear: nn.Module) -> Tensor | None:
    """The weight [out, in] of a plain layer without bias; None of any other."""
    if not isinstance(linear, PlainLinear | PackedLinear) or linear.bias is not None:
        return None
    return linear.weight.to_dense() if isinstance(linear, PackedLinear) else linear.weight


def _stacked(experts: nn.ModuleList, name: str) -> nn.Parameter:
    """One weight of all experts, [experts, out, in]. Each expert loses its own weight when it is
    copied."""
    whole: Tensor | None = None
    for i, expert in enumerate(experts):
        weight = _weight(getattr(expert, name))
        assert weight is not None
        if whole is None:
            whole = weight.new_empty(len(experts), *weight.shape)
        whole[i] = weight
        delattr(expert, name)
    assert whole is not None
    return frozen(whole)


def _why_not(moe: MoE) -> str | None:
    """The reason why a mixture cannot be grouped, or None."""
    layers = [
        getattr(expert, name) for expert in moe.experts for name in ("gate_up_proj", "down_proj")
    ]
    for layer in layers:
        weight = _weight(layer)
        if weight is None:
            return f"its experts are {type(layer).__name__}"
        if weight.shape[1] * weight.element_size() % _ALIGNED:
            return f"rows of {weight.shape[1]} weights are no multiple of {_ALIGNED} bytes"
    return None


def group_experts(model: nn.Module, choice: str, device: torch.device) -> int:
    """Group the experts of the mixtures that allow it. Returns the number of replaced mixtures.

    Args:
        model: loaded.
        choice: "loop" changes nothing; "grouped" requires that all mixtures can be grouped; "auto"
            groups where torch computes the products without waiting for the host, which is in
            bfloat16 on GPUs of compute capability 9.0. Elsewhere torch runs a loop of its own.
        device: where the model is.

    Raises:
        BadInput: "grouped", and a mixture cannot be, or there is none.
    """
    mixtures = [(name, module) for name, module in model.named_modules() if type(module) is MoE]
    require_experts(choice, len(mixtures))
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    if choice == "loop" or (choice == "auto" and not hopper):
        return 0
    replaced = 0
    with torch.inference_mode():
        for name, moe in mixtures:
            reason = _why_not(moe)
            if (
                reason is None
                and choice == "auto"
                and next(moe.experts.parameters()).dtype != torch.bfloat16
            ):
                continue
            if reason is None:
                model.set_submodule(name, GroupedMoE(moe))
                replaced += 1
            elif choice == "grouped":
                raise BadInput(
                    f"runtime.moe=grouped: {name} cannot be, as {reason}; use runtime.moe=loop, "
                    "plain weights (quant=bf16), and on a CPU runtime.cpu_kernels=off"
                )
    return replaced
