"""Workloads: the requests of a measurement as token ids, and the options that make them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from minivllm.bench.lazy_prompt import LazyPrompt
from minivllm.bench.lengths import Lengths
from minivllm.bench.prompt_file import read_prompt_file
from minivllm.bench.prompts import Encode, draw_prompts
from minivllm.bench.storage import write_parquet
from minivllm.errors import BadInput

WORKLOAD_STREAM = 0x30AD  # keeps workload noise apart from arrival noise drawn with the same seed

Decode = Callable[[list[int]], str | None]


@dataclass(frozen=True)
class WorkloadRequest:
    """One request: a prompt as token ids (and text where there is a tokenizer), and how much to generate."""

    request_id: str
    prompt_token_ids: Sequence[int]  # a tuple, or a LazyPrompt
    max_tokens: int
    ignore_eos: bool
    text: str | None = None
    due_s: float | None = None  # when it came, in a workload that has times of its own

    @property
    def length(self) -> int:
        """Prompt and output tokens together."""
        return len(self.prompt_token_ids) + self.max_tokens

    def row(self) -> dict[str, Any]:
        """What is stored of it: plain data, a lazy prompt by its runs."""
        row = dict(vars(self))
        if isinstance(self.prompt_token_ids, LazyPrompt):
            prompt = self.prompt_token_ids
            row["prompt_token_ids"] = None
            row["prompt_runs"] = [[run.start, run.stop] for run in prompt.runs]
            row["prompt_vocab_size"], row["prompt_seed"] = prompt.vocab_size, prompt.seed
        if self.due_s is None:
            del row["due_s"]
        return row

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> WorkloadRequest:
        """The inverse of `row`."""
        row = dict(row)
        runs, size, seed = (row.pop(f"prompt_{name}", None) for name in ("runs", "vocab_size", "seed"))
        lazy = row["prompt_token_ids"] is None
        ids = row.pop("prompt_token_ids")
        prompt = LazyPrompt(tuple(range(*run) for run in runs), size, seed) if lazy else tuple(ids)
        return cls(prompt_token_ids=prompt, **row)


@dataclass(frozen=True)
class Workload:
    """Requests in the order in which they arrive. Equal content has an equal `hash`, however it was made."""

    requests: tuple[WorkloadRequest, ...]

    def __len__(self) -> int:
        return len(self.requests)

    @cached_property
    def hash(self) -> str:
        """SHA-256 over token ids (a lazy prompt's runs), max_tokens, ignore_eos and the time that a request
        came, where it has one; 16 hexadecimal digits."""
        digest = hashlib.sha256()
        for request in self.requests:
            row: list[Any] = [request.prompt_token_ids, request.max_tokens, bool(request.ignore_eos)]
            if isinstance(prompt := request.prompt_token_ids, LazyPrompt):
                row[0] = [[run.start, run.stop] for run in prompt.runs], prompt.vocab_size, prompt.seed
            if request.due_s is not None:
                row.append(request.due_s)
            digest.update(json.dumps(row, separators=(",", ":")).encode() + b"\n")
        return digest.hexdigest()[:16]

    def save(self, folder: Path) -> Path:
        """Store as `<folder>/<hash>.parquet` unless it is there; the file appears whole or not at all."""
        path = folder / f"{self.hash}.parquet"
        if not path.exists():
            write_parquet(path, [request.row() for request in self.requests])
        return path

    @classmethod
    def load(cls, path: Path) -> Workload:
        """Read a stored workload.

        Raises:
            BadInput: the file is missing or unreadable, or its content is not what its name says.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            rows = pq.read_table(path).to_pylist()
            workload = cls(tuple(map(WorkloadRequest.from_row, rows)))
        except (OSError, pa.ArrowException, KeyError, TypeError) as error:
            raise BadInput(
                f"cannot read the workload {path}: {error}; delete it to have it made anew"
            ) from error
        if workload.hash != path.stem:
            raise BadInput(
                f"the workload {path} holds other requests than its name says; delete it to have it made anew"
            )
        return workload


class Synthetic:
    """Prompts and outputs of set lengths: every engine does the same work.

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
        self,
        num_requests: int,
        input_len: int | Mapping[str, Any],
        output_len: int | Mapping[str, Any],
        ignore_eos: bool = True,
    ) -> None:
        self.num_requests = at_least_one("workload.num_requests", num_requests)
        self.input_len = Lengths.parse("workload.input_len", input_len)
        self.output_len = Lengths.parse("workload.output_len", output_len)
        self.ignore_eos = ignore_eos

    def longest(self) -> int | None:
        """Most tokens that prompt and output together can have, from the knobs alone; None if unbounded."""
        if self.input_len.longest is None or self.output_len.longest is None:
            return None
        return self.input_len.longest + self.output_len.longest

    def check_lengths(self, max_model_len: int) -> None:
        """Fail early, before any engine is built, if a request may be longer than the context.

        Raises:
            BadInput: naming the lengths.
        """
        longest_in, longest_out = self.input_len.longest, self.output_len.longest
        if longest_in is not None and longest_out is not None and longest_in + longest_out > max_model_len:
            refuse_length(
                f"workload={self.name}",
                "the longest request",
                longest_in,
                longest_out,
                max_model_len,
                LENGTH_ADVICE,
            )

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
        for i, (prompt_len, output_len) in enumerate(zip(inputs, outputs, strict=True)):
            if prompt_len + output_len > max_model_len:
                refuse_length(
                    f"workload={self.name}",
                    f"request {i}",
                    prompt_len,
                    output_len,
                    max_model_len,
                    LENGTH_ADVICE,
                )
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
        input_len: int | Mapping[str, Any] = 64,
        output_len: int | Mapping[str, Any] = 32,
        ignore_eos: bool = True,
    ) -> None:
        super().__init__(num_requests, input_len, output_len, ignore_eos)


CHAT_INPUT_LEN = {"distribution": "uniform", "min": 64, "max": 256}
CHAT_OUTPUT_LEN = {"distribution": "uniform", "min": 32, "max": 128}


class Chat(Synthetic):
    """Questions and answers of mixed lengths, as in a talk of single turns."""

    name = "chat"

    def __init__(
        self,
        num_requests: int = 32,
        input_len: int | Mapping[str, Any] = CHAT_INPUT_LEN,
        output_len: int | Mapping[str, Any] = CHAT_OUTPUT_LEN,
        ignore_eos: bool = True,
    ) -> None:
        super().__init__(num_requests, input_len, output_len, ignore_eos)


class File:
    """Prompts of one's own, a JSON object a line.

    A line has `prompt` (text), `prompt_token_ids`, or `messages` (OpenAI's roles and contents, joined as
    `role: content` lines), and may have `max_tokens` or `output_len`; other keys are left alone.

    Args:
        path: the file.
        num_requests: take only the first so many lines; None takes all.
        output_len: tokens to generate where a line does not say.
        ignore_eos: go on to the full output length past an end-of-sequence token.

    Raises:
        BadInput: a knob has no sensible value.
    """

    name = "file"

    def __init__(
        self,
        path: str | None = None,
        num_requests: int | None = None,
        output_len: int = 128,
        ignore_eos: bool = False,
    ) -> None:
        if not path:
            raise BadInput("workload=file needs a file of prompts: set workload.path=PROMPTS.jsonl")
        self.path = Path(path)
        self.num_requests = (
            None if num_requests is None else at_least_one("workload.num_requests", num_requests)
        )
        self.output_len = at_least_one("workload.output_len", output_len)
        self.ignore_eos = ignore_eos

    def longest(self) -> int | None:
        """Most tokens of prompt and output together; None if some prompt is text, whose tokens are not known.

        Raises:
            BadInput: the file is missing or a line is wrong.
        """
        longest = 0
        for line in read_prompt_file(self.path, self.num_requests):
            if line.token_ids is None:
                return None
            longest = max(longest, len(line.token_ids) + (line.max_tokens or self.output_len))
        return longest

    def check_lengths(self, max_model_len: int) -> None:
        """Read the file and fail early, before any engine is built, on what cannot be served.

        Raises:
            BadInput: the file is missing, a line is wrong, or prompt ids are longer than the context.
        """
        for line in read_prompt_file(self.path, self.num_requests):
            prompt_len, output_len = len(line.token_ids or ()), line.max_tokens or self.output_len
            if prompt_len + output_len > max_model_len:
                refuse_length(line.where, "the request", prompt_len, output_len, max_model_len, FILE_ADVICE)

    def generate(
        self,
        encode: Encode | None,
        vocab_size: int,
        max_model_len: int,
        seed: int,
        decode: Decode | None = None,
    ) -> Workload:
        """The file's requests, in its order; arguments as for `Synthetic.generate`.

        Raises:
            BadInput: naming file and line: not readable, text without a tokenizer, an id outside the
                vocabulary, or a request longer than the context.
        """
        requests = []
        for i, line in enumerate(read_prompt_file(self.path, self.num_requests)):
            token_ids, text = line.token_ids, line.text
            if text is not None:
                if encode is None:
                    raise BadInput(
                        f"{line.where}: this model has no tokenizer; give prompt_token_ids instead of text"
                    )
                token_ids = tuple(encode(text))
                if not token_ids:
                    raise BadInput(f"{line.where}: the prompt has no tokens")
            assert token_ids is not None
            if max(token_ids) >= vocab_size:
                raise BadInput(
                    f"{line.where}: token id {max(token_ids)} is outside the vocabulary of {vocab_size}"
                )
            if text is None and decode is not None:
                text = decode(list(token_ids))
            request = WorkloadRequest(
                f"r{i}", token_ids, line.max_tokens or self.output_len, self.ignore_eos, text
            )
            if request.length > max_model_len:
                refuse_length(
                    line.where, "the request", len(token_ids), request.max_tokens, max_model_len, FILE_ADVICE
                )
            requests.append(request)
        return Workload(tuple(requests))


LENGTH_ADVICE = "lower workload.input_len or workload.output_len, or raise model.max_model_len"
FILE_ADVICE = "shorten the prompt, lower its max_tokens or workload.output_len, or raise model.max_model_len"


def refuse_length(
    where: str, what: str, prompt_len: int, output_len: int, max_model_len: int, advice: str
) -> None:
    raise BadInput(
        f"{where}: {what} has {prompt_len} prompt + {output_len} output = {prompt_len + output_len} tokens, "
        f"and the context holds {max_model_len}: {advice}"
    )


def at_least_one(knob: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadInput(f"{knob}={value!r} must be a whole number of at least 1")
    return value
