"""attention=auto: the fastest backend that can serve the model here."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial

from minivllm.attention.base import AttentionBackend
from minivllm.attention.eager import EagerBackend
from minivllm.attention.flash import FlashBackend
from minivllm.attention.kernels.cpu import CPUBackend
from minivllm.attention.sdpa import SDPABackend
from minivllm.attention.triton import TritonBackend
from minivllm.cache.kv import KVCache
from minivllm.cache.spec import AttentionSpec
from minivllm.errors import BadInput
from minivllm.kernels.context import BuildContext


def select(
    specs: Sequence[AttentionSpec], kv: KVCache, context: BuildContext | None = None
) -> AttentionBackend:
    """The first backend whose constraints hold, in order of speed among the tested ones. The record
    holds its name."""
    on_gpu = (partial(TritonBackend, context=context), SDPABackend, FlashBackend)
    on_cpu = (partial(CPUBackend, context=context), SDPABackend)
    for backend in on_gpu if kv.parts[0][0].is_cuda else on_cpu:
        with contextlib.suppress(BadInput):
            return backend(specs, kv)
    return EagerBackend(specs, kv)
