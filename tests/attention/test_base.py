"""What only some attention backends offer is asked of any class with the attribute."""

from __future__ import annotations

import pytest

from minivllm.attention.base import CountingBackend, GraphBackend, LibraryBackend
from tests.reference import CausalAttention


@pytest.mark.parametrize(
    ("capability", "attribute", "value"),
    [
        (GraphBackend, "supports_graphs", True),
        (LibraryBackend, "library", "mine 1.0"),
        (CountingBackend, "counters", {"launches": 1}),
    ],
)
def test_a_class_that_derives_from_nothing_offers_what_it_has(
    capability: type, attribute: str, value: object
) -> None:
    """A third party's backend needs none of them, and no base class."""
    backend = CausalAttention([])
    assert not isinstance(backend, capability)
    setattr(backend, attribute, value)
    assert isinstance(backend, capability)
