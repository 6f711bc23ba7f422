"""Random token ids of prompts: uniform over a vocabulary but for ids that no prompt may hold."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from minivllm.errors import BadInput
from minivllm.models.load.reserved_ids import Reserved


@lru_cache(maxsize=8)
def drawable(vocab_size: int, reserved: Reserved) -> NDArray[np.int64]:
    """The ids below `vocab_size` that are not reserved, int64, ascending.

    Raises:
        BadInput: there is none.
    """
    allowed = np.ones(vocab_size, dtype=np.bool_)
    for run in reserved:
        allowed[run.start : run.stop] = False
    ids = np.flatnonzero(allowed)
    if not len(ids):
        raise BadInput(
            f"all {vocab_size} token ids are special, so that no random prompt can be made: give "
            "prompts with workload=file"
        )
    return ids


def draw_ids(
    length: int, vocab_size: int, reserved: Reserved, rng: np.random.Generator
) -> tuple[int, ...]:
    """So many random ids. Raises BadInput as `drawable` does."""
    ids = drawable(vocab_size, reserved)
    drawn: list[int] = ids[rng.integers(0, len(ids), size=length)].tolist()
    return tuple(drawn)
