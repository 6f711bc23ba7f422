"""cache=contiguous: every request reserves the longest sequence it could become."""

from __future__ import annotations

from minivllm.cache.options import ContiguousOptions
from minivllm.cache.spec import CacheLayout
from minivllm.errors import BadInput


class ContiguousCache(ContiguousOptions):
    """KV cache with one slab of `max_model_len` tokens a request, as engines had before paging.

    It is the paged cache with one block a sequence, so that scheduler, runner and attention are the
    same code and only the waste differs.
    """

    name = "contiguous"
    kv_dtype = "auto"

    def layout(
        self, *, bytes_per_token: int, available_bytes: int, max_model_len: int, max_num_seqs: int
    ) -> CacheLayout:
        """See CachePolicy."""
        slabs = self.num_sequences
        if slabs is None:
            affordable = int(available_bytes * self.memory_fraction) // (
                bytes_per_token * max_model_len
            )
            slabs = min(affordable, max_num_seqs)
        if slabs < 1:
            raise BadInput(
                f"the KV cache holds no sequence of {max_model_len} tokens: "
                f"{self.memory_fraction:g} of {available_bytes / 2**20:.0f} MiB free is too "
                "little; lower model.max_model_len, or use cache=paged"
            )
        return CacheLayout(max_model_len, slabs + 1)
