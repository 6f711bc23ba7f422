"""attention=flash: the kernels of the flash-attn packages over the paged cache."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.attention.base import StepBatch
from minivllm.attention.options import FlashAttentionOptions
from minivllm.cache.kv import KVCache
from minivllm.cache.spec import AttentionSpec, require_unscored
from minivllm.errors import BadInput

# Module, function and distribution by version. `_arguments` has the differences in arguments.
PACKAGES = {
    2: ("flash_attn", "flash_attn_varlen_func", "flash-attn"),
    3: ("flash_attn_interface", "flash_attn_with_kvcache", "flash-attn-3"),
    4: ("flash_attn.cute", "flash_attn_varlen_func", "flash-attn-4"),
}
INSTALL = {
    2: "pip install flash-attn --no-build-isolation",
    3: "python setup.py install in the folder hopper of flash-attention's sources",
    4: "pip install --pre flash-attn-4",
}
# Versions that read paged keys, by major compute capability, the one made for it first.
SERVES = {8: (2,), 9: (3, 4, 2), 10: (4, 2), 11: (4, 2)}
# flash-attn 2 reads pages of a multiple of so many tokens.
PAGE = 256


@dataclass(frozen=True)
class Ragged:
    """Lengths of a step as flash-attn's kernels take them."""

    # int32 [R + 1], first key of each request among the keys of all requests in a row
    key_starts: Tensor
    max_query_len: int
    max_seq_len: int


class FlashBackend:
    """FlashAttention (Dao 2023; Shah et al. 2024): one call for the whole ragged batch, which reads
    keys in place.

    Args:
        specs: attention of each layer.
        kv: the cache.
        options: the knobs; None takes their defaults.

    Raises:
        BadInput: device, dtype or head size is none of flash-attn's; eviction goes by attention,
            which it does not return; no flash-attn that serves this GPU is installed; the cache is
            compressed; pages are of a size that flash-attn 2 does not read.
    """

    name = "flash"

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        kv: KVCache,
        options: FlashAttentionOptions | None = None,
    ) -> None:
        capability = check_kernel(specs, kv)
        if kv.compressed:
            raise BadInput(
                "attention=flash reads no compressed cache; use attention=triton or "
                "cache.kv_dtype=auto"
            )
        version = (options or FlashAttentionOptions()).version
        self.version, self.call, self.library = _find(version, capability)
        size = kv.layout.block_size
        if self.version == 2 and size % PAGE:
            raise BadInput(
                f"attention=flash: flash-attn 2 reads blocks of a multiple of {PAGE} tokens, not "
                f"{size}; use cache.block_size={PAGE}, or attention=triton"
            )
        self.specs, self.kv = specs, kv
        self.counters = {"launches": 0}

    def prepare(self, batch: StepBatch) -> Ragged:
        """Lengths of the keys."""
        starts = F.pad(batch.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        return Ragged(starts, max(batch.query_lens_host), max(batch.seq_lens_host))

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: StepBatch) -> Tensor:
        self.kv.write(layer, batch.slot_mapping, k, v)
        keys, values = self.kv.parts[layer]
        self.counters["launches"] += 1
        out = self.call(q, keys, values, **self._arguments(self.specs[layer], batch))
        # some versions return the logarithms of the sums, too
        return out[0] if isinstance(out, tuple) else out

    def _arguments(self, spec: AttentionSpec, batch: StepBatch) -> dict[str, Any]:
        """Keyword arguments of a call. All versions align masks at the last key: a query sees
        itself and the tokens before it."""
        lengths: Ragged = batch.attention
        # keys to the left and to the right of a query's own
        window = (-1, -1) if spec.window is None else (spec.window - 1, 0)
        given: dict[str, Any] = {
            "cu_seqlens_q": batch.query_start_loc,
            "max_seqlen_q": lengths.max_query_len,
            "softmax_scale": spec.scale,
            "causal": True,
            "window_size": window,
            "softcap": spec.soft_cap or 0.0,
        }
        if self.version == 2:
            given |= {"cu_seqlens_k": lengths.key_starts, "max_seqlen_k": lengths.max_seq_len}
            given["block_table"] = batch.block_table
        elif self.version == 3:
            given |= {"cache_seqlens": batch.seq_lens, "page_table": batch.block_table}
        else:
            given |= {"seqused_k": batch.seq_lens, "page_table": batch.block_table}
            # The kernel for heads of 256 takes the capacity of the block table as length.
            given["max_seqlen_k"] = batch.block_table.shape[1] * self.kv.layout.block_size
            given["window_size"] = (None, None) if spec.window is None else window
        return given


def check_kernel(specs: Sequence[AttentionSpec], kv: KVCache) -> tuple[int, int]:
    """The GPU's compute capability, after checking what all versions of flash-attn need.

    Raises BadInput for the first that does not hold.
    """
    require_unscored("flash", kv.layout.eviction)
    device = kv.parts[0][0].device
    if device.type != "cuda":
        raise BadInput("attention=flash needs an NVIDIA GPU; use attention=auto or attention=sdpa")
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        raise BadInput(
            "attention=flash needs a GPU of compute capability 8.0 or later; use attention=sdpa"
        )
    if kv.dtype not in (torch.float16, torch.bfloat16):
        raise BadInput(
            "attention=flash computes in 16 bits only; use quant=bf16, or attention=sdpa"
        )
    if any(spec.head_dim % 8 or spec.head_dim > 256 for spec in specs):
        raise BadInput(
            "attention=flash takes heads of a multiple of 8 up to 256; use attention=triton or "
            "attention=sdpa"
        )
    return capability


def _find(chosen: str | int, capability: tuple[int, int]) -> tuple[int, Callable[..., Any], str]:
    """Version, function and full name of the flash-attn to use. Raises BadInput if there is
    none."""
    serving = SERVES.get(capability[0], (2,))
    candidates = (
        serving if chosen == "auto" else tuple(number for number in serving if number == chosen)
    )
    for number in candidates:
        module_name, function, distribution = PACKAGES[number]
        try:
            module = importlib.import_module(module_name)
            kernel = getattr(module, function)
        except (ImportError, AttributeError):
            # flash_attn is also the folder of version 4.
            continue
        try:
            release = version(distribution)
        except PackageNotFoundError:
            release = getattr(module, "__version__", "of unknown release")
        return number, kernel, f"{distribution} {release}"
    where = f"a GPU of compute capability {capability[0]}.{capability[1]}"
    if not candidates:
        raise BadInput(
            f"attention.version={chosen}: flash-attn {chosen} reads no paged cache on {where}; "
            f"use attention.version={serving[0]}, or attention=triton"
        )
    names = " or ".join(PACKAGES[number][2] for number in candidates)
    raise BadInput(
        f"attention=flash needs {names} on {where}, and none is installed: "
        f"{INSTALL[candidates[-1]]}, or use attention=triton"
    )
