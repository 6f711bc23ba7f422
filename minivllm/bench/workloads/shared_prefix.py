"""workload=shared_prefix: prompts that begin alike, as behind a system prompt or in a tree of documents."""

from __future__ import annotations

import numpy as np

from minivllm.bench.workloads.checks import at_least_one, check_amount, check_fits
from minivllm.bench.workloads.generator import Reader
from minivllm.bench.workloads.lengths import Lengths
from minivllm.bench.workloads.prompts import Encode, draw_prompts
from minivllm.bench.workloads.synthetic import WORKLOAD_STREAM, Length, Synthetic
from minivllm.bench.workloads.workload import Workload, WorkloadRequest

PREFIX_ADVICE = "lower workload.prefix_len, workload.depth or workload.input_len, or raise model.max_model_len if it is below the model's own"


class SharedPrefix(Synthetic):
    """Requests that share the beginnings of their prompts, token for token.

    A prompt is the texts of the nodes on a way from the root of a tree to one of its leaves, and then a text
    of its own. There are `num_prefixes` trees; every node has `branching` children, down to `depth`. Each
    request takes a leaf at random, all alike.

    Args:
        num_requests: how many.
        input_len: tokens of a request's own, after the prefix; a number, or a distribution (see `Lengths`).
        output_len: output tokens; the same.
        ignore_eos: go on to the full output length past an end-of-sequence token.
        num_prefixes: trees, and so different first tokens.
        prefix_len: tokens of a node; a number, or a distribution.
        depth: nodes on a way from root to leaf; 1 is the root alone.
        branching: children of a node.

    Raises:
        BadInput: a knob has no sensible value.
    """

    name = "shared_prefix"

    def __init__(
        self,
        num_requests: int = 32,
        input_len: Length = 64,
        output_len: Length = 32,
        ignore_eos: bool = True,
        num_prefixes: int = 2,
        prefix_len: Length = 256,
        depth: int = 2,
        branching: int = 4,
    ) -> None:
        super().__init__(num_requests, input_len, output_len, ignore_eos)
        self.num_prefixes = at_least_one("workload.num_prefixes", num_prefixes)
        self.prefix_len = Lengths.parse("workload.prefix_len", prefix_len)
        self.depth = at_least_one("workload.depth", depth)
        self.branching = at_least_one("workload.branching", branching)

    def check_lengths(self, max_model_len: int) -> None:
        """See Generator."""
        count, typical = self.num_requests, self.depth * self.prefix_len.typical + self.input_len.typical
        check_amount("workload.num_requests", count, count * typical, "ask for fewer")
        longest = [lengths.longest for lengths in (self.prefix_len, self.input_len, self.output_len)]
        prefix, own, output = (1 if length is None else length for length in longest)
        what = f"workload={self.name}: the longest request"
        check_fits(what, self.depth * prefix + own, output, max_model_len, PREFIX_ADVICE)

    def make(self, reader: Reader, seed: int) -> Workload:
        """See `Generator.generate`."""
        self.check_lengths(reader.max_model_len)
        rng = np.random.default_rng([WORKLOAD_STREAM, seed])
        nodes: dict[tuple[int, ...], tuple[int, ...]] = {}  # way from the root -> the node's own text

        def text(length: Lengths, encode: Encode | None) -> tuple[int, ...]:
            return draw_prompts(length.sample(rng, 1), encode, reader.vocab_size, rng)[0]

        further = reader.encode_further

        requests = []
        for i, output_len in enumerate(self.output_len.sample(rng, self.num_requests)):
            below = rng.integers(self.branching, size=self.depth - 1)
            way = (int(rng.integers(self.num_prefixes)), *map(int, below))
            prompt: tuple[int, ...] = ()
            for level in range(1, self.depth + 1):
                if way[:level] not in nodes:
                    nodes[way[:level]] = text(self.prefix_len, reader.encode if level == 1 else further)
                prompt += nodes[way[:level]]
            prompt += text(self.input_len, further)
            what = f"workload={self.name}: request {i}"
            check_fits(what, len(prompt), output_len, reader.max_model_len, PREFIX_ADVICE)
            said = reader.text(prompt)
            requests.append(WorkloadRequest(f"r{i}", prompt, output_len, self.ignore_eos, said))
        return Workload(tuple(requests))
