"""A workload: the requests of a measurement, as token ids, stored by their content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from minivllm.bench.workloads.lazy_prompt import LazyPrompt
from minivllm.bench.workloads.pictures import PictureReader, another, content
from minivllm.platform.files import as_table, write_parquet


@dataclass(frozen=True)
class WorkloadRequest:
    """One request: a prompt as token ids (and text where there is a tokenizer), and how much to
    generate.

    A later turn of a conversation `follows` another request: its prompt is that request's prompt,
    the answer that the engine gave, and then `prompt_token_ids`. It is due `think_s` after the end
    of that answer.

    Requests of one `session` may wait for any number of earlier ones (`after`) and have prompts of
    their own. Such a request is due when for each of these the seconds of `after_s` have passed
    since its end. A request of a session that waits for none is due `think_s` after the session
    has begun. A conversation is a session, too.
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
    images: tuple[str, ...] = ()  # of the prompt, in its order, by names; see pictures.py
    session: str | None = None
    after: tuple[str, ...] = ()  # earlier requests of the session
    after_s: tuple[float, ...] = ()  # as many

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
            if prompt.reserved:
                row["prompt_reserved"] = [[run.start, run.stop] for run in prompt.reserved]
        for name in AS_JSON:
            if name in row:
                row[name] = json.dumps(row[name], sort_keys=True)
        return row


# columns that a workload's hash is not of, or not as they are
UNHASHED = ("request_id", "text", "follows", "session", "after")
MISSING = object()
AS_JSON = ("sampling", "chat")  # columns of many shapes
SESSION = ("session", "after", "after_s")
OPTIONAL = {
    item.name: item.default
    for item in fields(WorkloadRequest)
    if item.name in ("due_s", "follows", "think_s", "history_len", "images", *AS_JSON, *SESSION)
}


@dataclass(frozen=True)
class Workload:
    """Requests in the order in which they arrive, a conversation's turns one after the other.

    Equal content has an equal `hash`, however it was made. `notes` say what was left out in making
    it; they are neither stored nor part of what it is. The requests of `priming` are run before the
    measurement begins, so that the prefix cache holds the earlier calls of sessions.
    """

    requests: tuple[WorkloadRequest, ...]
    notes: tuple[str, ...] = field(default=(), compare=False)
    priming: tuple[WorkloadRequest, ...] = ()
    # where it is, checked
    _stored: Path | None = field(default=None, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.requests)

    @cached_property
    def openings(self) -> tuple[WorkloadRequest, ...]:
        """Requests whose prompts are known beforehand: those that follow no other."""
        return tuple(request for request in self.requests if request.follows is None)

    @cached_property
    def num_conversations(self) -> int:
        """Conversations and sessions; any other request is one by itself."""
        sessions = {request.session for request in self.openings if request.session is not None}
        return len(sessions) + sum(request.session is None for request in self.openings)

    @cached_property
    def sessions(self) -> dict[str, str]:
        """The conversation or session of each request that is one of several."""
        names: dict[str, str] = {}
        for request in self.requests:
            if request.session is not None:
                names[request.request_id] = request.session
            elif request.follows is not None:
                first = names.setdefault(request.follows, request.follows)
                names[request.request_id] = first
        return names

    @cached_property
    def hash(self) -> str:
        """SHA-256 over token ids (a lazy prompt's runs), max_tokens, ignore_eos and, where it has
        them, the time that a request came, the requests that it waits for and how long, the first
        request of its session, its images, sampling and messages, and the priming; 16 hexadecimal
        digits."""
        digest = hashlib.sha256()
        place = {request.request_id: i for i, request in enumerate(self.requests)}
        first: dict[str, int] = {}  # request of each session
        for i, request in enumerate(self.requests):
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
                    *([[[run.start, run.stop] for run in prompt.reserved]] * bool(prompt.reserved)),
                )
            if request.due_s is not None:
                row.append(request.due_s)
            if request.follows is not None:
                row.append([place[request.follows], request.think_s])
            if request.session is not None:
                row.append([first.setdefault(request.session, i), request.think_s])
                row.append([[place[name] for name in request.after], request.after_s])
            if request.images:
                row.append({"images": [content(name) for name in request.images]})
            row += [
                {name: value} for name in AS_JSON if (value := getattr(request, name)) is not None
            ]
            digest.update(json.dumps(row, separators=(",", ":")).encode() + b"\n")
        if self.priming:
            digest.update(b"priming " + Workload(self.priming).hash.encode())
        return digest.hexdigest()[:16]

    def save(self, folder: Path) -> Path:
        """Store as `<folder>/<hash>.parquet` unless it is there; the file appears whole or not at
        all.

        A file of that name that does not hold these requests (cut off, say) is written again.
        """
        path = folder / f"{self.hash}.parquet"
        if self._stored != path:
            rows = [{**request.row(), "primes": True} for request in self.priming]
            rows += [request.row() for request in self.requests]
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


def turned(request: WorkloadRequest, pictures: PictureReader | None) -> WorkloadRequest:
    """A request as long as another, which no cache takes for it: its prompt's tokens in reverse
    order, and other pictures of the same sizes.

    Args:
        request: of any engine.
        pictures: reads the images of its prompt, if it has any; None: the engine takes none.
    """
    ids = tuple(request.prompt_token_ids)
    if not request.images or pictures is None:
        return replace(request, prompt_token_ids=ids[::-1], chat=None)
    parts = pictures.parts(ids, request.images)[::-1]
    names = tuple(another(part) for part in parts if isinstance(part, str))
    marked = [
        token
        for part in parts
        for token in (pictures.image_mark if isinstance(part, str) else part[::-1])
    ]
    return replace(
        request, prompt_token_ids=pictures.expand(marked, names), images=names, chat=None
    )
