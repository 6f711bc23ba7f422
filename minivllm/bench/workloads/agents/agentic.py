"""workload=agentic: jobs of agents, generated or recorded."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import count
from pathlib import Path

import numpy as np

from minivllm.bench.workloads.agents.files import read_sessions
from minivllm.bench.workloads.agents.generated import generate, longest_context
from minivllm.bench.workloads.agents.session import (
    AgentSession,
    SessionReplay,
    at_length,
    random_start,
    without_long_gaps,
)
from minivllm.bench.workloads.agents.text import DENOMINATOR
from minivllm.bench.workloads.generator import Drawn, Reader
from minivllm.bench.workloads.lengths import check_amount, check_fits
from minivllm.bench.workloads.options import AgenticOptions
from minivllm.bench.workloads.synthetic import WORKLOAD_STREAM
from minivllm.bench.workloads.workload import Workload
from minivllm.errors import BadInput
from minivllm.platform.untrusted import place

GENERATED = 8  # sessions, where nobody says how many
SESSION_STREAM, START_STREAM = 0, 1
LENGTH_ADVICE = (
    "lower workload.compact_at, workload.turns, workload.result_len or workload.system_len, or "
    "raise model.max_model_len if it is below the model's own"
)
FILE_ADVICE = (
    "lower workload.length_scale, raise model.max_model_len if it is below the model's own, or "
    "leave the session out with workload.too_long=skip"
)
FEWER = "take fewer with workload.num_sessions"


class Agentic(Drawn, AgenticOptions):
    """Sessions of agents: each call's prompt goes on with the one before, tools take time between
    them, and sub-agents work side by side.

    Prompts are random token ids, equal where those of the session are, of exactly its lengths (see
    `LazyPrompt`). The answer of an engine is not part of the next prompt: text as long stands in
    its place, so that every engine gets the same requests.

    Raises:
        BadInput: a knob has no sensible value.
    """

    name = "agentic"
    LENGTHS = (*Drawn.LENGTHS, "turns", "result_len")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path is None and self.format != "auto":
            raise BadInput(
                f"workload.format={self.format} is of recorded sessions: set workload.path too"
            )
        if self.path is None and self.length_scale != 1:
            raise BadInput(
                "workload.length_scale is of recorded sessions: set workload.path, or the lengths "
                "of generated ones"
            )
        if self.path is None:
            self._check_random_starts(self.num_sessions or GENERATED)

    def _check_random_starts(self, sessions: int) -> None:
        if self.random_starts > sessions:
            raise BadInput(
                f"workload.random_starts={self.random_starts} are more than the {sessions} "
                "sessions: set workload.num_sessions too, or fewer"
            )

    def check_lengths(self, max_model_len: int) -> None:
        if self.path is not None:
            self._recorded(max_model_len)
        elif (longest := longest_context(self, self.lengths)) is not None:
            what = f"workload={self.name}: the longest call"
            check_fits(what, *longest, max_model_len, LENGTH_ADVICE)

    def make(self, reader: Reader, seed: int) -> Workload:
        """The sessions, one after the other; see `Generator.generate`.

        Request `s2.5` is the sixth call of the third session. The calls that a session had made
        when it is to start at a random instant are in the workload's `priming`.
        """
        limit = reader.max_model_len
        notes: list[str] = []
        if self.path is None:
            sessions = self._generated(seed)
            for session in sessions:
                call, what = session.longest, f"workload={self.name}: a call of {session.where}"
                check_fits(what, call.prompt_len, call.output_len, limit, LENGTH_ADVICE)
        else:
            sessions, notes = self._recorded(limit)
        replay = SessionReplay(
            reader.vocab_size, seed, self.ignore_eos, self.cache_bust, reader.reserved
        )
        replays = self.num_sessions or len(sessions)
        self._check_random_starts(replays)
        calls = sum(len(sessions[i % len(sessions)].calls) for i in range(replays))
        check_amount("workload.num_sessions", calls, 0, FEWER)  # prompts take no memory
        requests, priming = [], []
        for i in range(replays):
            session = without_long_gaps(sessions[i % len(sessions)], self.max_idle_s)
            start_s = None
            if i < self.random_starts:
                start_s = random_start(session, _generator(START_STREAM, seed, i))
            own, before = replay.requests(session, i, start_s)
            requests += own
            priming += before
        if self.path is not None and replays > len(sessions):
            notes.append(f"{replays} sessions are replays of {len(sessions)}")
        words = tuple(f"workload={self.name}: {note}" for note in notes)
        return Workload(tuple(requests), words, tuple(priming))

    def _generated(self, seed: int) -> list[AgentSession]:
        sessions = self.num_sessions or GENERATED
        calls = round(sessions * self.lengths["turns"].typical)
        check_amount("workload.num_sessions times workload.turns", calls, 0, FEWER)
        return generate(self, self.lengths, sessions, lambda i: _generator(SESSION_STREAM, seed, i))

    def _recorded(self, max_model_len: int) -> tuple[list[AgentSession], list[str]]:
        """The sessions of the file that the context holds, and what to note of them."""
        assert self.path is not None
        knob = f"workload.path={self.path}"
        path = place(self.path, knob)
        factor = Fraction(self.length_scale).limit_denominator(DENOMINATOR)
        kept, left_out = [], 0
        for session in _read(path, self.format, knob):
            scaled = at_length(session, factor)
            call = scaled.longest
            if self.too_long == "skip" and call.prompt_len + call.output_len > max_model_len:
                left_out += 1
                continue
            what = f"{session.where}: a call"
            check_fits(what, call.prompt_len, call.output_len, max_model_len, FILE_ADVICE)
            kept.append(scaled)
            if len(kept) == self.num_sessions:
                break
        why = f"{left_out} sessions were left out, longer than the context of {max_model_len}"
        if not kept:
            raise BadInput(f"{knob} has no session that can be used: {why}")
        counts: Counter[str] = Counter()
        for note in (note for session in kept for note in session.notes):
            number, _, words = note.partition(" ")
            counts[words] += int(number)
        return kept, [why] * bool(left_out) + [f"{n} {words}" for words, n in counts.items()]


class _Sessions:
    """The sessions of a file, read as far as they were needed."""

    def __init__(self, source: Iterator[AgentSession]) -> None:
        self._source, self._known = source, list[AgentSession]()

    def __iter__(self) -> Iterator[AgentSession]:
        for index in count():
            if index == len(self._known):
                session = next(self._source, None)
                if session is None:
                    return
                self._known.append(session)
            yield self._known[index]


_READ: dict[tuple[object, ...], _Sessions] = {}  # of the last file, which arms share


def _read(path: Path, format: str, knob: str) -> Iterator[AgentSession]:
    key = (path, format, _state(path))
    if key not in _READ:
        _READ.clear()
        _READ[key] = _Sessions(read_sessions(path, format, knob))
    try:
        yield from _READ[key]
    except BadInput:
        _READ.clear()  # the source has ended there
        raise


def _state(path: Path) -> object:
    """What changes when a file does, or one in a folder."""
    files = [path, *sorted(path.glob("*.json"))] if path.is_dir() else [path]
    states = []
    for file in files:
        try:
            status = os.stat(file)
        except OSError:
            continue  # reading it says what is wrong
        states.append((str(file), status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(states)


def _generator(stream: int, seed: int, index: int) -> np.random.Generator:
    return np.random.default_rng([WORKLOAD_STREAM, seed, stream, index])
