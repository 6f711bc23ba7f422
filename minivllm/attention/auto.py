"""attention=auto: the fastest backend that can serve the model here."""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.attention.base import AttentionBackend, AttentionSpec
from minivllm.attention.eager import EagerBackend
from minivllm.attention.kernels.cpu import CPUBackend
from minivllm.attention.sdpa import SDPABackend
from minivllm.cache.kv import KVCache
from minivllm.errors import BadInput


def select(specs: Sequence[AttentionSpec], kv: KVCache) -> AttentionBackend:
    """The first backend, fastest first, whose constraints hold; its name goes into the record."""
    for backend in (CPUBackend, SDPABackend):
        try:
            return backend(specs, kv)
        except BadInput:
            continue
    return EagerBackend(specs, kv)
