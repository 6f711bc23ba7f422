"""Whether cells took turns, so that what changed on the machine met all."""

from __future__ import annotations

import itertools
from datetime import datetime

from minivllm.analysis.cell import Cell


def took_turns(*cells: Cell) -> bool:
    """Whether block 0 of all came before block 1 of any, and so on, on one host."""
    hosts = {row.get("provenance.host") for cell in cells for row in cell.timed}
    starts: dict[int, list[datetime]] = {}
    for cell in cells:
        for row in cell.timed:
            try:
                begun = datetime.fromisoformat(str(row.get("provenance.started_at")))
            except ValueError:
                return False
            starts.setdefault(int(row.get("block") or 0), []).append(begun)
    blocks = [starts[block] for block in sorted(starts)]
    if len(hosts) != 1 or len(blocks) < 2 or any(len(begun) != len(cells) for begun in blocks):
        return False
    return all(max(now) < min(later) for now, later in itertools.pairwise(blocks))
