"""workload=shared_prefix: prompts with the same beginning, as behind a system prompt or in a
tree of documents."""

from __future__ import annotations

import numpy as np

from minivllm.bench.workloads.generator import Drawn, Reader
from minivllm.bench.workloads.lengths import Lengths, check_amount, check_fits
from minivllm.bench.workloads.options import SharedPrefixOptions
from minivllm.bench.workloads.prompts import Encode
from minivllm.bench.workloads.synthetic import WORKLOAD_STREAM, Synthetic
from minivllm.bench.workloads.workload import Workload, WorkloadRequest

PREFIX_ADVICE = (
    "lower workload.prefix_len, workload.depth or workload.input_len, or raise "
    "model.max_model_len if it is below the model's own"
)


class SharedPrefix(Synthetic, SharedPrefixOptions):
    """Requests that share the beginnings of their prompts, token for token.

    A prompt is the texts of the nodes on a way from the root of a tree to one of its leaves, and
    then a text of its own. There are `num_prefixes` trees; every node has `branching` children,
    down to `depth`. Each request takes a leaf at random, uniformly.

    Raises:
        BadInput: a knob has no sensible value.
    """

    name = "shared_prefix"
    LENGTHS = (*Drawn.LENGTHS, "prefix_len")

    def check_lengths(self, max_model_len: int) -> None:
        count, lengths = self.count, self.lengths
        typical = self.depth * lengths["prefix_len"].typical + lengths["input_len"].typical
        check_amount("workload.num_requests", count, count * typical, "ask for fewer")
        longest = [lengths[name].longest for name in ("prefix_len", "input_len", "output_len")]
        prefix, own, output = (1 if length is None else length for length in longest)
        what = f"workload={self.name}: the longest request"
        check_fits(what, self.depth * prefix + own, output, max_model_len, PREFIX_ADVICE)

    def make(self, reader: Reader, seed: int) -> Workload:
        self.check_lengths(reader.max_model_len)
        rng = np.random.default_rng([WORKLOAD_STREAM, seed])
        # way from the root -> the node's own text
        nodes: dict[tuple[int, ...], tuple[int, ...]] = {}

        def text(length: Lengths, encode: Encode | None) -> tuple[int, ...]:
            return reader.draw(length.sample(rng, 1), encode, rng)[0]

        further = reader.encode_further

        requests = []
        for i, output_len in enumerate(self.lengths["output_len"].sample(rng, self.count)):
            below = rng.integers(self.branching, size=self.depth - 1)
            way = (int(rng.integers(self.num_prefixes)), *map(int, below))
            prompt: tuple[int, ...] = ()
            for level in range(1, self.depth + 1):
                if way[:level] not in nodes:
                    nodes[way[:level]] = text(
                        self.lengths["prefix_len"], reader.encode if level == 1 else further
                    )
                prompt += nodes[way[:level]]
            prompt += text(self.lengths["input_len"], further)
            what = f"workload={self.name}: request {i}"
            check_fits(what, len(prompt), output_len, reader.max_model_len, PREFIX_ADVICE)
            prompt_text = reader.text(prompt)
            requests.append(
                WorkloadRequest(f"r{i}", prompt, output_len, self.ignore_eos, prompt_text)
            )
        return Workload(tuple(requests))
