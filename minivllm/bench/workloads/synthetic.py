"""Synthetic workloads: prompts and outputs of set lengths, so that every engine does the same
work."""

from __future__ import annotations

import numpy as np

from minivllm.bench.workloads.generator import Drawn, Reader
from minivllm.bench.workloads.lengths import check_amount, check_fits
from minivllm.bench.workloads.options import (
    ChatWorkloadOptions,
    CodeOptions,
    LongDocumentOptions,
    SmokeOptions,
    SummarizeOptions,
    SyntheticOptions,
)
from minivllm.bench.workloads.workload import Workload, WorkloadRequest

WORKLOAD_STREAM = 0x30AD  # keeps workload noise apart from arrival noise drawn with the same seed
LENGTH_ADVICE = (
    "lower workload.input_len or workload.output_len, or raise model.max_model_len if it is "
    "below the model's own"
)


class Synthetic(Drawn, SyntheticOptions):
    """Requests of set lengths, each by itself.

    Raises:
        BadInput: a knob has no sensible value.
    """

    name = "synthetic"

    def check_lengths(self, max_model_len: int) -> None:
        count = self.count
        check_amount(
            "workload.num_requests",
            count,
            count * self.lengths["input_len"].typical,
            "ask for fewer",
        )
        longest_in, longest_out = (
            self.lengths["input_len"].longest,
            self.lengths["output_len"].longest,
        )
        if longest_in is not None and longest_out is not None:
            what = f"workload={self.name}: the longest request"
            check_fits(what, longest_in, longest_out, max_model_len, LENGTH_ADVICE)

    def make(self, reader: Reader, seed: int) -> Workload:
        """See `Generator.generate`; without a tokenizer prompts are of random ids."""
        self.check_lengths(reader.max_model_len)
        rng = np.random.default_rng([WORKLOAD_STREAM, seed])
        inputs = self.lengths["input_len"].sample(rng, self.count)
        outputs = self.lengths["output_len"].sample(rng, self.count)
        for i, lengths in enumerate(zip(inputs, outputs, strict=True)):
            check_fits(
                f"workload={self.name}: request {i}", *lengths, reader.max_model_len, LENGTH_ADVICE
            )
        prompts = reader.draw(inputs, reader.encode, rng)
        return Workload(
            tuple(
                WorkloadRequest(f"r{i}", ids, output_len, self.ignore_eos, reader.text(ids))
                for i, (ids, output_len) in enumerate(zip(prompts, outputs, strict=True))
            )
        )


class Smoke(Synthetic, SmokeOptions):
    """A few short requests of one length: over in seconds on a CPU."""

    name = "smoke"


class Chat(Synthetic, ChatWorkloadOptions):
    """Questions and answers of mixed lengths, as in a conversation of single turns."""

    name = "chat"


class LongDocument(Synthetic, LongDocumentOptions):
    """Questions about documents of 8 to 32 thousand tokens: prefill and the cache's size decide."""

    name = "long_document"


class Summarize(Synthetic, SummarizeOptions):
    """Articles of about a thousand tokens and summaries a tenth as long."""

    name = "summarize"


class Code(Synthetic, CodeOptions):
    """Completions in an editor: much context and a few tokens, with a long tail."""

    name = "code"
