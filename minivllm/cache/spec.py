"""Specifications of a cache: attention of each layer, layout of the memory, transfers, counters,
and the protocol of policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from minivllm.errors import BadInput

if TYPE_CHECKING:
    from minivllm.cache.eviction.policies import Eviction


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention: its shape and its constants."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # a token sees this many positions, its own included
    soft_cap: float | None = None  # scores become soft_cap * tanh(scores / soft_cap)


SCALE_BYTES = 4  # scale of a compressed head of a token, float32


def token_bytes(kv_heads: int, head_dim: int, dtype_bytes: int, kv_dtype: str) -> int:
    """Bytes that one token's keys and values take in one layer, with their scales.

    Args:
        kv_heads: number of key heads, which is that of value heads.
        head_dim: numbers of a head.
        dtype_bytes: bytes of a number in the model's dtype.
        kv_dtype: as in CachePolicy.
    """
    head = head_dim * dtype_bytes if kv_dtype == "auto" else head_dim + SCALE_BYTES
    return 2 * kv_heads * head


@dataclass(frozen=True)
class CacheDemand:
    """What a cache is to hold, and the memory that is free for it."""

    bytes_per_token: int
    available_bytes: int
    max_model_len: int
    max_num_seqs: int

    def affordable(self, fraction: float, block_size: int, most: int) -> int:
        """Blocks of `block_size` tokens that fit into a fraction of the free memory, up to `most`.

        Raises:
            BadInput: not even one does.
        """
        fitting = int(self.available_bytes * fraction) // (self.bytes_per_token * block_size)
        if (count := min(fitting, most)) < 1:
            raise BadInput(
                f"the KV cache gets no block of {block_size} tokens: {fraction:g} of "
                f"{self.available_bytes / 2**20:.0f} MiB free is too little; raise "
                "cache.memory_fraction, lower model.max_model_len, or set cache.num_blocks with "
                "cache=paged"
            )
        return count


@dataclass(frozen=True)
class CacheLayout:
    """How the cache's memory is cut up, and what is done with it."""

    block_size: int  # tokens a block
    num_blocks: int  # blocks, the reserved block 0 included
    prefix_caching: bool = False
    retains_kv: bool = True  # False: every step computes whole sequences
    host_slots: int = 0  # blocks in host memory, for requests that are swapped out
    # Blocks in host memory for cold blocks of the prefix cache, numbered after `host_slots`.
    offload_slots: int = 0
    disk_records: int = 0  # blocks on disk, for colder blocks
    # Folder of the disk tier's file; None is the system's folder for temporary files.
    offload_dir: str | None = None
    eviction: Eviction | None = None  # what a request drops when its budget is full

    @property
    def most_reusable_blocks(self) -> int:
        """Blocks of the prefix cache that a request may begin with. With eviction, fewer than the
        budget: the blocks after them do not follow all tokens of the prompt."""
        return self.num_blocks if self.eviction is None else self.eviction.budget - 1


def require_unscored(backend: str, eviction: Eviction | type[Eviction] | None) -> None:
    """Check an attention backend that returns no attention scores.

    Raises:
        BadInput: eviction goes by these scores.
    """
    if eviction is not None and eviction.scored:
        raise BadInput(
            f"attention={backend} cannot return the attention that cache.eviction={eviction.name} "
            "goes by; use attention=eager, or cache.eviction=streaming"
        )


Move = tuple[int, int]  # from, to


class Transfers(NamedTuple):
    """Blocks to move before a step computes, in the order of the fields; none if not `any` of
    them."""

    spills: Sequence[Move] = ()  # host slot to disk record, written in the background
    saves: Sequence[Move] = ()  # device block to host slot
    copies: Sequence[Move] = ()  # device block to device block
    loads: Sequence[Move] = ()  # host slot to device block
    reads: Sequence[Move] = ()  # disk record to host slot, in the background


NOTHING = Transfers()


class PendingTransfers(NamedTuple):
    """The moves of the next step while it is planned; see Transfers."""

    spills: list[Move]
    saves: list[Move]
    copies: list[Move]
    loads: list[Move]
    reads: list[Move]

    def take(self) -> Transfers:
        """Hand the moves out; none is pending afterwards."""
        taken = Transfers(*map(tuple, self))
        for moves in self:
            moves.clear()
        return taken


@dataclass
class CacheCounters:
    """What the cache did, for the liveness of its knobs."""

    prefix_tokens_looked_up: int = 0
    prefix_tokens_reused: int = 0
    blocks_copied: int = 0  # copy-on-write
    blocks_shared: int = 0  # by forked requests
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0
    blocks_offloaded: int = 0  # cold blocks, to host memory
    blocks_restored: int = 0
    blocks_to_disk: int = 0
    blocks_from_disk: int = 0
    disk_errors: int = 0  # records that could not be written or read
    blocks_evicted: int = 0
    tokens_evicted: int = 0
    queries_observed: int = 0  # whose attention scores were summed


class CachePolicy(Protocol):
    """A `cache` option: decides the layout. All other code is the same for all options."""

    name: str
    kv_dtype: str  # how keys and values are stored: "auto" (in the model's dtype), "int8" or "fp8"

    def layout(self, demand: CacheDemand) -> CacheLayout:
        """Cut the free memory into blocks. Raises BadInput if it holds not even one request."""
