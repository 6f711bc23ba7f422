"""Synthetic workloads: prompts and outputs of set lengths, so that every engine does the same work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from minivllm.bench.checks import at_least_one, check_fits
from minivllm.bench.lengths import Lengths
from minivllm.bench.prompts import Encode, draw_prompts
from minivllm.bench.workload import Workload, WorkloadRequest
from minivllm.options.workload import (
    CHAT_INPUT_LEN,
    CHAT_OUTPUT_LEN,
    CODE_INPUT_LEN,
    CODE_OUTPUT_LEN,
    LONG_INPUT_LEN,
    LONG_OUTPUT_LEN,
    SUMMARIZE_INPUT_LEN,
    SUMMARIZE_OUTPUT_LEN,
)

WORKLOAD_STREAM = 0x30AD  # keeps workload noise apart from arrival noise drawn with the same seed
LENGTH_ADVICE = "lower workload.input_len or workload.output_len, or raise model.max_model_len"

Decode = Callable[[list[int]], str | None]
Length = int | Mapping[str, Any]


class Synthetic:
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
        self.input_len = Lengths.parse("workload.input_len", input_len)
        self.output_len = Lengths.parse("workload.output_len", output_len)
        self.ignore_eos = ignore_eos

    def check_lengths(self, max_model_len: int) -> None:
        """Fail early, before any engine is built, if a request may be longer than the context.

        Raises:
            BadInput: naming the lengths.
        """
        longest_in, longest_out = self.input_len.longest, self.output_len.longest
        if longest_in is not None and longest_out is not None:
            what = f"workload={self.name}: the longest request"
            check_fits(what, longest_in, longest_out, max_model_len, LENGTH_ADVICE)

    def generate(
        self,
        encode: Encode | None,
        vocab_size: int,
        max_model_len: int,
        seed: int,
        decode: Decode | None = None,
    ) -> Workload:
        """Make the requests; equal arguments make equal requests.

        Args:
            encode: text to token ids; None without a tokenizer, which makes prompts of random ids.
            vocab_size: number of token ids.
            max_model_len: longest context, in tokens.
            seed: of lengths and prompts.
            decode: token ids to text, to store the prompts' text beside their ids.

        Raises:
            BadInput: a request is longer than the context.
        """
        self.check_lengths(max_model_len)
        rng = np.random.default_rng([WORKLOAD_STREAM, seed])
        inputs = self.input_len.sample(rng, self.num_requests)
        outputs = self.output_len.sample(rng, self.num_requests)
        for i, lengths in enumerate(zip(inputs, outputs, strict=True)):
            check_fits(f"workload={self.name}: request {i}", *lengths, max_model_len, LENGTH_ADVICE)
        prompts = draw_prompts(inputs, encode, vocab_size, rng)
        return Workload(
            tuple(
                WorkloadRequest(
                    f"r{i}", ids, output_len, self.ignore_eos, decode(list(ids)) if decode else None
                )
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
