"""Whether two cells took turns, so that what changed on the machine met both."""

from __future__ import annotations

import itertools
from datetime import datetime

from minivllm.report.cells import Cell


def took_turns(first: Cell, second: Cell) -> bool:
    """Whether block 0 of both came before block 1 of either, and so on, on one host."""
    hosts = {row.get("provenance.host") for cell in (first, second) for row in cell.timed}
    starts: dict[int, list[datetime]] = {}
    for cell in (first, second):
        for row in cell.timed:
            try:
                begun = datetime.fromisoformat(str(row.get("provenance.started_at")))
            except ValueError:
                return False
            starts.setdefault(int(row.get("block") or 0), []).append(begun)
    blocks = [starts[block] for block in sorted(starts)]
    if len(hosts) != 1 or len(blocks) < 2 or any(len(both) != 2 for both in blocks):
        return False
    return all(max(now) < min(later) for now, later in itertools.pairwise(blocks))
