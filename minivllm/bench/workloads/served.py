"""workload=served: what the clients of a server ask."""

from __future__ import annotations

from minivllm.bench.workloads.generator import Generator, Reader
from minivllm.bench.workloads.options import ServedOptions
from minivllm.bench.workloads.workload import Workload
from minivllm.errors import BadInput


class Served(ServedOptions, Generator):
    """Requests that come from a server's clients, so that nothing here makes them."""

    name = "served"

    def check_lengths(self, max_model_len: int) -> None:
        """Raise BadInput: a benchmark makes its own requests."""
        raise BadInput("workload=served is what clients ask of preset=serve: choose another one")

    def make(self, reader: Reader, seed: int) -> Workload:
        self.check_lengths(reader.max_model_len)
        raise AssertionError("it raises")
