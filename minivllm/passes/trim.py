"""runtime.trim_last_layer: after its attention the last layer computes only tokens that need
logits."""

from __future__ import annotations

from minivllm.models.costs import trims
from minivllm.models.families.llama import LlamaForCausalLM
from minivllm.models.layers import Attention
from minivllm.models.load.loading import LoadedModel
from minivllm.passes.base import PassContext, PassReport


def trim(model: LlamaForCausalLM) -> None:
    """Let the last layer compute what follows its attention only for tokens that need logits: no
    other token of the step depends on it. To be called before passes replace the attention
    modules."""
    last = model.model.layers[-1].get_submodule("self_attn")
    assert isinstance(last, Attention)
    model.trims = last.trims = True


class TrimLastLayer:
    """Trims the model's last layer."""

    name = "trim"

    def is_wanted(self, context: PassContext) -> bool:
        return trims(context.runtime)

    def apply(self, loaded: LoadedModel, context: PassContext) -> PassReport:
        trim(loaded.model)
        return PassReport(self.name, 1)
