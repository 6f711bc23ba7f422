"""runtime.trim_last_layer: after its attention the last layer computes only tokens whose logits are
wanted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minivllm.passes.base import PassContext, PassReport

if TYPE_CHECKING:
    from minivllm.models.load.loading import LoadedModel


def trims(runtime: Mapping[str, Any]) -> bool:
    """Whether these knobs of `runtime` trim the last layer: compiled layers keep all rows."""
    return bool(runtime.get("trim_last_layer")) and not runtime.get("compile")


class TrimLastLayer:
    """Trims the model's last layer."""

    name = "trim"

    def is_wanted(self, context: PassContext) -> bool:
        """See RuntimePass."""
        return trims(context.runtime)

    def apply(self, loaded: LoadedModel, context: PassContext) -> PassReport:
        """See ModelPass."""
        loaded.model.trim()
        return PassReport(self.name, 1)
