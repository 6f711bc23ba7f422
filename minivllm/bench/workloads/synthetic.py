"""Synthetic workloads: prompts and outputs of set lengths, so that every engine does the same work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from minivllm.bench.workloads.checks import at_least_one, check_amount, check_fits
from minivllm.bench.workloads.generator import Drawn, Reader
from minivllm.bench.workloads.options import (
    CHAT_INPUT_LEN,
    CHAT_OUTPUT_LEN,
    CODE_INPUT_LEN,
    CODE_OUTPUT_LEN,
    LONG_INPUT_LEN,
    LONG_OUTPUT_LEN,
    SUMMARIZE_INPUT_LEN,
    SUMMARIZE_OUTPUT_LEN,
)
from minivllm.bench.workloads.prompts import draw_prompts
from minivllm.bench.workloads.workload import Workload, WorkloadRequest

WORKLOAD_STREAM = 0x30AD  # keeps workload noise apart from arrival noise drawn with the same seed
LENGTH_ADVICE = "lower workload.input_len or workload.output_len, or raise model.max_model_len if it is below the model's own"

Length = int | Mapping[str, Any]


class Synthetic(Drawn):
    """Requests of set lengths, each by itself.

    Args:
        num_requests: how many.
        input_len: prompt tokens; a number, or a distribution (see `Lengths`).
        output_len: output tokens; the same.
        ignore_eos: go on to the full output length past an end-of-sequence token.

    Raises:
        BadInput: a knob has no sensible value.
    """

    name = "synthetic"

    def __init__(
        self, num_requests: int, input_len: Length, output_len: Length, ignore_eos: bool = True
    ) -> None:
        self.num_requests = at_least_one("workload.num_requests", num_requests)
        super().__init__(input_len, output_len, ignore_eos)

    def check_lengths(self, max_model_len: int) -> None:
        """See Generator."""
        count = self.num_requests
        check_amount("workload.num_requests", count, count * self.input_len.typical, "ask for fewer")
        longest_in, longest_out = self.input_len.longest, self.output_len.longest
        if longest_in is not None and longest_out is not None:
            what = f"workload={self.name}: the longest request"
            check_fits(what, longest_in, longest_out, max_model_len, LENGTH_ADVICE)

    def make(self, reader: Reader, seed: int) -> Workload:
        """See `Generator.generate`; without a tokenizer prompts are of random ids."""
        self.check_lengths(reader.max_model_len)
        rng = np.random.default_rng([WORKLOAD_STREAM, seed])
        inputs = self.input_len.sample(rng, self.num_requests)
        outputs = self.output_len.sample(rng, self.num_requests)
        for i, lengths in enumerate(zip(inputs, outputs, strict=True)):
            check_fits(f"workload={self.name}: request {i}", *lengths, reader.max_model_len, LENGTH_ADVICE)
        prompts = draw_prompts(inputs, reader.encode, reader.vocab_size, rng)
        return Workload(
            tuple(
                WorkloadRequest(f"r{i}", ids, output_len, self.ignore_eos, reader.text(ids))
                for i, (ids, output_len) in enumerate(zip(prompts, outputs, strict=True))
            )
        )


class Smoke(Synthetic):
    """A few short requests of one length: over in seconds on a CPU."""

    name = "smoke"

    def __init__(
        self,
        num_requests: int = 16,
        input_len: Length = 64,
        output_len: Length = 32,
        ignore_eos: bool = True,
    ) -> None:
        super().__init__(num_requests, input_len, output_len, ignore_eos)


class Chat(Synthetic):
    """Questions and answers of mixed lengths, as in a talk of single turns."""

    name = "chat"

    def __init__(
        self,
        num_requests: int = 32,
        input_len: Length = CHAT_INPUT_LEN,
        output_len: Length = CHAT_OUTPUT_LEN,
        ignore_eos: bool = True,
    ) -> None:
        super().__init__(num_requests, input_len, output_len, ignore_eos)


class LongDocument(Synthetic):
    """Questions about documents of 8 to 32 thousand tokens: prefill and the cache's size decide."""

    name = "long_document"

    def __init__(
        self,
        num_requests: int = 16,
        input_len: Length = LONG_INPUT_LEN,
        output_len: Length = LONG_OUTPUT_LEN,
        ignore_eos: bool = True,
    ) -> None:
        super().__init__(num_requests, input_len, output_len, ignore_eos)


class Summarize(Synthetic):
    """Articles of about a thousand tokens and summaries a tenth as long."""

    name = "summarize"

    def __init__(
        self,
        num_requests: int = 32,
        input_len: Length = SUMMARIZE_INPUT_LEN,
        output_len: Length = SUMMARIZE_OUTPUT_LEN,
        ignore_eos: bool = True,
    ) -> None:
        super().__init__(num_requests, input_len, output_len, ignore_eos)


class Code(Synthetic):
    """Completions in an editor: much context and a few tokens, with a long tail."""

    name = "code"

    def __init__(
        self,
        num_requests: int = 32,
        input_len: Length = CODE_INPUT_LEN,
        output_len: Length = CODE_OUTPUT_LEN,
        ignore_eos: bool = True,
    ) -> None:
        super().__init__(num_requests, input_len, output_len, ignore_eos)
