"""attention=auto: the fastest backend that can serve the model here."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from minivllm.attention.base import AttentionBackend
from minivllm.cache.kv import KVCache
from minivllm.cache.spec import AttentionSpec
from minivllm.errors import BadInput
from minivllm.kernels.device import BuildContext
from minivllm.platform.plug_ins import constructor

# By device type, in order of speed among the tested ones; each is imported where its turn comes.
BACKENDS = {
    "cuda": (
        "minivllm.attention.triton.TritonBackend",
        "minivllm.attention.sdpa.SDPABackend",
        "minivllm.attention.flash.FlashBackend",
    ),
    "cpu": ("minivllm.attention.kernels.cpu.CPUBackend", "minivllm.attention.sdpa.SDPABackend"),
}
REFERENCE = "minivllm.attention.eager.EagerBackend"  # serves every model anywhere


def select(
    specs: Sequence[AttentionSpec], kv: KVCache, context: BuildContext | None = None
) -> AttentionBackend:
    """The first backend whose constraints hold. The record holds its name."""
    for target in BACKENDS["cuda" if kv.parts[0][0].is_cuda else "cpu"]:
        with contextlib.suppress(BadInput):
            return _made(target, specs, kv, context)
    return _made(REFERENCE, specs, kv, context)


def _made(
    target: str, specs: Sequence[AttentionSpec], kv: KVCache, context: BuildContext | None
) -> AttentionBackend:
    factory, taken = constructor(target, (), ["context"], ["specs", "kv"])
    backend: AttentionBackend = factory(specs=specs, kv=kv, **dict.fromkeys(taken, context))
    return backend
