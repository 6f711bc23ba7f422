"""A scripted clock and an engine that runs on it: every time stamp can be computed by hand."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from minivllm.bench.workloads.workload import Workload, WorkloadRequest
from minivllm.engine.options import SamplingParams
from minivllm.engines.base import EngineInfo, EngineOutput
from minivllm.errors import BadInput


class ScriptedClock:
    """Time passes only when somebody lets it."""

    def __init__(self, now: float = 0.0) -> None:
        self.time = now
        self.slept = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.slept += seconds
        self.time += seconds


@dataclass
class _Running:
    request_id: str
    started_s: float
    remaining: int
    bursts: deque[int]
    tokens: int = 0


@dataclass
class ScriptedEngine:
    """Each step takes `step_s`, starts waiting requests while there is room, and serves every
    running one.

    A request gets one token a step, or what its entry in `bursts` says for its successive steps (0
    for none), until it has `max_tokens`. Token ids count up from 0.
    """

    clock: ScriptedClock
    max_num_seqs: int = 64
    step_s: float = 1.0
    bursts: dict[str, list[int]] = field(default_factory=dict)
    refuse: set[str] = field(default_factory=set)
    abort: set[str] = field(default_factory=set)  # ended at their second step
    eos_after: dict[str, int] = field(default_factory=dict)
    says_start: bool = True

    def __post_init__(self) -> None:
        self.info = EngineInfo(
            "scripted", "random", "none", 100, 1000, (0,), self.max_num_seqs, load_s=0.0
        )
        self.waiting: deque[_Running] = deque()
        self.running: list[_Running] = []
        self.submitted: dict[str, tuple[list[int], SamplingParams]] = {}
        self.largest_batch = 0
        self.polls = 0

    def submit(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        if request_id in self.refuse:
            raise BadInput(f"{request_id} can never fit")
        assert request_id not in self.submitted
        self.submitted[request_id] = (prompt_token_ids, params)
        count = self.eos_after.get(request_id, params.max_tokens or 0)
        self.waiting.append(
            _Running(request_id, 0.0, count, deque(self.bursts.get(request_id, [])))
        )

    def poll(self, timeout_s: float | None = None) -> list[EngineOutput]:
        assert timeout_s is None or timeout_s > 0
        self.polls += 1
        while self.waiting and len(self.running) < self.max_num_seqs:
            self.running.append(self.waiting.popleft())
            self.running[-1].started_s = self.clock.time
        self.largest_batch = max(self.largest_batch, len(self.running))
        self.clock.time += self.step_s
        return [output for request in list(self.running) if (output := self._serve(request))]

    def _serve(self, request: _Running) -> EngineOutput | None:
        name = request.request_id
        count = min(request.bursts.popleft() if request.bursts else 1, request.remaining)
        ids = tuple(range(request.tokens, request.tokens + count))
        request.tokens += count
        request.remaining -= count
        reason = None
        if request.remaining == 0:
            reason = "stop" if name in self.eos_after else "length"
        if name in self.abort and request.tokens >= 2:
            reason = "abort"
        if reason:
            self.running.remove(request)
        started = request.started_s if self.says_start else None
        return EngineOutput(name, ids, reason, started) if ids or reason else None

    def reset(self) -> None:
        self.waiting.clear()
        self.running.clear()
        self.submitted.clear()

    def steps(self) -> list[dict[str, Any]]:
        return []

    def liveness(self) -> dict[str, dict[str, float | str]]:
        return {}

    def text(self, token_ids: list[int]) -> str | None:
        return None

    def encode(self, text: str) -> list[int]:
        raise BadInput("no tokenizer")

    def close(self) -> None:
        self.reset()


def workload(*lengths: tuple[int, int], ignore_eos: bool = True) -> Workload:
    """Requests a, b, c, ... of the given (prompt, output) lengths."""
    return Workload(
        tuple(
            WorkloadRequest(chr(ord("a") + i), tuple(range(1, prompt + 1)), output, ignore_eos)
            for i, (prompt, output) in enumerate(lengths)
        )
    )
