"""cache=none: nothing is kept from one step to the next."""

from __future__ import annotations

from minivllm.cache.options import NoCacheOptions
from minivllm.cache.spec import CacheLayout
from minivllm.errors import BadInput


class NoCache(NoCacheOptions):
    """Every step computes whole sequences again: what the KV cache saves, as an ablation.

    A request holds room for its keys and values during a step alone, one region as long as the
    context.
    """

    name = "none"
    kv_dtype = "auto"

    def layout(
        self, *, bytes_per_token: int, available_bytes: int, max_model_len: int, max_num_seqs: int
    ) -> CacheLayout:
        """See CachePolicy."""
        affordable = int(available_bytes * self.memory_fraction) // (
            bytes_per_token * max_model_len
        )
        if affordable < 1:
            raise BadInput(
                f"a step has no room for a sequence of {max_model_len} tokens: "
                f"{self.memory_fraction:g} of {available_bytes / 2**20:.0f} MiB free is too "
                "little; lower model.max_model_len"
            )
        return CacheLayout(max_model_len, min(affordable, max_num_seqs) + 1, retains_kv=False)
