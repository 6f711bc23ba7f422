"""A workload: the requests of a measurement, as token ids, stored by their content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from minivllm.bench.workloads.lazy_prompt import LazyPrompt
from minivllm.platform.files import as_table, write_parquet


@dataclass(frozen=True)
class WorkloadRequest:
    """One request: a prompt as token ids (and text where there is a tokenizer), and how much to
    generate.

    A later turn of a conversation `follows` another request: its prompt is that request's prompt,
    the answer that the engine gave, and then `prompt_token_ids`. It is due `think_s` after the end
    of that answer.
    """

    request_id: str
    # a tuple, or a LazyPrompt; of a later turn only what its user adds
    prompt_token_ids: Sequence[int]
    max_tokens: int
    ignore_eos: bool
    text: str | None = None
    due_s: float | None = None  # when it came, in a workload that has times of its own
    follows: str | None = None  # the request of the turn before
    think_s: float | None = None  # of a later turn
    history_len: int = 0  # most tokens of the turns before, prompts and answers
    # fields of SamplingParams that this request has of its own
    sampling: Mapping[str, Any] | None = None
    # for an engine that takes them: messages, tools, as the chat API has them
    chat: Mapping[str, Any] | None = None

    @property
    def length(self) -> int:
        """Most tokens of prompt and output together."""
        return self.history_len + len(self.prompt_token_ids) + self.max_tokens

    @property
    def stand_in(self) -> Sequence[int]:
        """Token ids as many as the prompt may have; they are the prompt's own but for the turns
        before."""
        return (
            (*[0] * self.history_len, *self.prompt_token_ids)
            if self.follows
            else self.prompt_token_ids
        )

    def row(self) -> dict[str, Any]:
        """What is stored of it: plain data, a lazy prompt by its runs."""
        row = {
            name: value
            for name, value in vars(self).items()
            if value != OPTIONAL.get(name, MISSING)
        }
        if isinstance(self.prompt_token_ids, LazyPrompt):
            prompt = self.prompt_token_ids
            row["prompt_token_ids"] = None
            row["prompt_runs"] = [[run.start, run.stop] for run in prompt.runs]
            row["prompt_vocab_size"], row["prompt_seed"] = prompt.vocab_size, prompt.seed
        for name in AS_JSON:
            if name in row:
                row[name] = json.dumps(row[name], sort_keys=True)
        return row


# columns that a workload's hash is not of, or not as they are
UNHASHED = ("request_id", "text", "follows")
MISSING = object()
OPTIONAL = {
    item.name: item.default
    for item in fields(WorkloadRequest)
    if item.name in ("due_s", "follows", "think_s", "history_len", "sampling", "chat")
}
AS_JSON = ("sampling", "chat")  # columns of many shapes


@dataclass(frozen=True)
class Workload:
    """Requests in the order in which they arrive, a conversation's turns one after the other.

    Equal content has an equal `hash`, however it was made. `notes` say what was left out in making
    it; they are neither stored nor part of what it is.
    """

    requests: tuple[WorkloadRequest, ...]
    notes: tuple[str, ...] = field(default=(), compare=False)
    # where it is, checked
    _stored: Path | None = field(default=None, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.requests)

    @cached_property
    def num_conversations(self) -> int:
        """Requests that follow no other; of each conversation one turn at most is in flight."""
        return sum(request.follows is None for request in self.requests)

    @cached_property
    def hash(self) -> str:
        """SHA-256 over token ids (a lazy prompt's runs), max_tokens, ignore_eos and, where it has
        them, the time that a request came, the turn that it follows and when, its sampling and its
        messages; 16 hexadecimal digits."""
        digest = hashlib.sha256()
        place = {request.request_id: i for i, request in enumerate(self.requests)}
        for request in self.requests:
            row: list[Any] = [
                request.prompt_token_ids,
                request.max_tokens,
                bool(request.ignore_eos),
            ]
            if isinstance(prompt := request.prompt_token_ids, LazyPrompt):
                row[0] = (
                    [[run.start, run.stop] for run in prompt.runs],
                    prompt.vocab_size,
                    prompt.seed,
                )
            if request.due_s is not None:
                row.append(request.due_s)
            if request.follows is not None:
                row.append([place[request.follows], request.think_s])
            row += [
                {name: value} for name in AS_JSON if (value := getattr(request, name)) is not None
            ]
            digest.update(json.dumps(row, separators=(",", ":")).encode() + b"\n")
        return digest.hexdigest()[:16]

    def save(self, folder: Path) -> Path:
        """Store as `<folder>/<hash>.parquet` unless it is there; the file appears whole or not at
        all.

        A file of that name that does not hold these requests (cut off, say) is written again.
        """
        path = folder / f"{self.hash}.parquet"
        if self._stored != path:
            rows = [request.row() for request in self.requests]
            if not _holds(path, rows):
                write_parquet(path, rows)
            object.__setattr__(self, "_stored", path)
        return path


def _holds(path: Path, rows: list[dict[str, Any]]) -> bool:
    """Whether a file holds the rows, as far as the hash of a workload is of them."""
    import pyarrow
    import pyarrow.parquet

    if not path.is_file():
        return False
    table = as_table(rows)
    hashed = table.select([name for name in table.column_names if name not in UNHASHED])
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            stored = file.read().select(hashed.column_names)
        return bool(stored.cast(hashed.schema).equals(hashed))
    except (OSError, LookupError, ValueError, pyarrow.ArrowException):
        # cut off, or another file altogether
        return False
