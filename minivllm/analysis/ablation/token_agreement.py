"""Whether an optimisation changes what is generated: the same requests' tokens, with it and without
it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from minivllm.analysis.cell import Cell
from minivllm.analysis.rows import Block, block_of, frame
from minivllm.bench.metrics.request_trace import UNKNOWN_TOKEN
from minivllm.bench.records.storage import REQUESTS

Outputs = dict[Block, dict[str, list[int]]]  # of each block: request id -> token ids


class TokenAgreement:
    """Compares the outputs of arms, each of which is read once."""

    def __init__(self) -> None:
        self._outputs: dict[str, Outputs] = {}

    def share(self, pairs: Iterable[tuple[Cell, Cell]]) -> float | None:
        """Share of the requests with the same tokens in both arms of a pair, over the blocks that
        both have.

        Returns:
            None where no tokens were recorded, as of simulated engines and of servers that
            report no ids.
        """
        same, every = 0, 0
        for one, other in pairs:
            first, second = self._of(one), self._of(other)
            for block in first.keys() & second.keys():
                requests = first[block].keys() & second[block].keys()
                every += len(requests)
                same += sum(first[block][key] == second[block][key] for key in requests)
        return same / every if every else None

    def _of(self, cell: Cell) -> Outputs:
        if cell.arm not in self._outputs:
            self._outputs[cell.arm] = {
                block_of(row): tokens for row in cell.timed if (tokens := _tokens(row))
            }
        return self._outputs[cell.arm]


def _tokens(row: dict[str, Any]) -> dict[str, list[int]]:
    """By request id, of requests whose ids are known; empty where they are not recorded."""
    table = frame(row, REQUESTS, ["request_id", "token_ids"])
    if table is None or "token_ids" not in table:
        return {}
    return {
        key: list(ids)
        for key, ids in zip(table["request_id"], table["token_ids"], strict=True)
        if {*ids} != {UNKNOWN_TOKEN}
    }
