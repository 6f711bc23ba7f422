"""What only some attention backends offer, each a protocol of its own: a backend has the attribute,
and needs to derive from nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from minivllm.attention.base import AttentionBackend


@runtime_checkable
class GraphBackend(AttentionBackend, Protocol):
    """A backend that says whether CUDA graphs can replay its steps."""

    # True if launches depend on nothing but the shapes of the batch's tensors and what `prepare`
    # computes from upper bounds of the lengths.
    supports_graphs: bool


@runtime_checkable
class LibraryBackend(AttentionBackend, Protocol):
    """A backend whose attention another library computes."""

    library: str  # its name and version, for records


@runtime_checkable
class CountingBackend(AttentionBackend, Protocol):
    """A backend that counts its work."""

    counters: Mapping[str, int]  # since it was made, for `liveness.attention`
