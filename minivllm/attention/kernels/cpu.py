"""attention=cpu: one C++ kernel reads the paged cache in place, for prompts, chunks and
decoding."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from minivllm.attention.base import StepBatch
from minivllm.cache.kv import KVCache
from minivllm.cache.spec import AttentionSpec, require_unscored
from minivllm.errors import BadInput
from minivllm.kernels.device import BuildContext


class CPUBackend:
    """Online softmax in float32 over tiles of keys, in parallel over requests, key heads and tiles
    of queries.

    A tile begins at a fixed place of the sequence, so a query's result does not depend on other
    requests. Supports every dtype, window and soft cap. The order of numbers within a block of the
    cache is the kernel's own (docs/internals/cpu.md).

    Raises:
        BadInput: the C++ kernels are not in use, a head size is no multiple of 16, the cache is
            compressed, or eviction goes by attention, which is not returned.
    """

    name = "cpu"
    supports_graphs = True  # the kernel uses no lengths of the host

    def __init__(
        self, specs: Sequence[AttentionSpec], kv: KVCache, context: BuildContext | None = None
    ) -> None:
        if context is None or context.kernels is None:
            raise BadInput(
                "attention=cpu needs the C++ kernels: runtime.cpu_kernels=on says why they "
                "cannot be had; use attention=sdpa"
            )
        if any(spec.head_dim % 16 for spec in specs):
            raise BadInput("attention=cpu takes heads of a multiple of 16; use attention=sdpa")
        if kv.compressed:
            raise BadInput(
                "attention=cpu reads no compressed cache; use attention=sdpa or cache.kv_dtype=auto"
            )
        require_unscored(self.name, kv.layout.eviction)
        self.specs, self.kv, self.kernel = specs, kv, context.kernels.paged_attention
        self.constants = [(spec.scale, spec.window or 0, spec.soft_cap or 0.0) for spec in specs]

    def prepare(self, batch: StepBatch) -> None:
        """The layers share nothing."""

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: StepBatch) -> Tensor:
        out: Tensor = self.kernel(q, k, v, *self.arguments(layer, batch))
        return out

    def arguments(self, layer: int, batch: StepBatch) -> tuple[Tensor | float, ...]:
        """The kernel's arguments after q, k and v."""
        return (
            *self.kv.parts[layer],
            *(batch.slot_mapping, batch.query_start_loc, batch.seq_lens, batch.block_table),
            *self.constants[layer],
        )
