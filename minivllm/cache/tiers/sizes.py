"""The sizes of the tiers below the device, from the knobs of cache=paged."""

from __future__ import annotations

from dataclasses import replace

from minivllm.cache.options import PagedOptions
from minivllm.cache.spec import CacheLayout
from minivllm.cache.tiers.disk import scratch_file
from minivllm.errors import BadInput


def probe_disk(options: PagedOptions) -> None:
    """Check before a model is loaded that the disk tier's file can be made.

    Raises:
        BadInput: `cache.offload_dir` cannot be written to.
    """
    if options.offload_disk_gb:
        scratch_file(options.offload_dir).close()


def with_tiers(layout: CacheLayout, options: PagedOptions, block_bytes: int) -> CacheLayout:
    """A layout with as many slots in host memory and records on disk as the knobs allow.

    Raises:
        BadInput: a tier that is asked for holds not one block of `block_bytes` bytes.
    """
    for name in ("offload_gb", "offload_disk_gb"):
        if 0 < getattr(options, name) * 1e9 < block_bytes:
            raise BadInput(
                f"cache.{name}={getattr(options, name):g} holds not one block of "
                f"{block_bytes / 1e9:g} GB; raise it"
            )
    return replace(
        layout,
        host_slots=int(options.swap_space_gb * 1e9) // block_bytes,
        offload_slots=int(options.offload_gb * 1e9) // block_bytes,
        disk_records=int(options.offload_disk_gb * 1e9) // block_bytes,
        offload_dir=options.offload_dir,
    )
