"""The one small interface through which the driver runs any engine, ours or a peer's, and what all
of them have in common behind it."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from minivllm.bench.hardware.clock import ClockProtocol
from minivllm.bench.metrics.speculation import SpeculationReport
from minivllm.bench.records.figures import Cold
from minivllm.bench.workloads.pictures import PictureReader
from minivllm.engine.options import SamplingParams
from minivllm.errors import BadInput
from minivllm.extras.observation.bundle import StepBundle
from minivllm.extras.observation.observer import StepObserver
from minivllm.models.load.tokenizer import Tokenizer


class KvTransfer(NamedTuple):
    """Keys and values that went from one replica to another: their size, and the milliseconds of
    copying them out and in; of a simulation those of its link stand in `ms_given`."""

    num_bytes: int = 0
    ms_given: float = 0.0
    ms_taken: float = 0.0


@dataclass(frozen=True)
class EngineOutput:
    """Tokens of one request that became available to the caller at one moment.

    With its last output a request may correct its earlier outputs: `counts` has an entry for each
    of its tokens so far, and says how many tokens came in that one's place, which stood for a chunk
    of unknown size.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "shed"; None while it goes on
    # clock time of the request's first step, where the engine knows it
    started_s: float | None = None
    error: str | None = None  # why the engine ended it, where it did and knows
    counts: tuple[int, ...] | None = None  # see above
    begins_answer: bool = False  # these tokens are the first after those of a thinking block
    # with the last output: tokens of the thinking block, where the API tells it apart
    reasoning_tokens: int | None = None
    # of the prompt, found in the prefix cache, where the engine says so
    cached_tokens: int | None = None
    kv_transfer: KvTransfer | None = None  # a part of what the request's KV transfer has cost


@dataclass
class EngineInfo:
    """What a loaded engine says of itself; goes into the record."""

    name: str
    weights: str | None  # "checkpoint" | "random"; None: a server's, of which nothing is known
    fingerprint: str  # of the checkpoint, or of architecture and seed
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    max_num_seqs: int
    load_s: float
    compile_s: float | None = None
    packed_weights: str | None = None  # "hit" | "written" | "off", with the reason
    packed_write_s: float | None = None
    memory: dict[str, int | None] = field(
        default_factory=dict
    )  # bytes: weights, weights_16bit, linear, linear_16bit, kv_pool
    model: dict[str, Any] = field(default_factory=dict)  # what the roofline needs, see roofline.py
    attention_backend: str | None = None
    served_model: str | None = None  # a server's name of what it serves, where only it knows
    warnings: list[str] = field(default_factory=list)
    keeps_prefixes: bool = False  # reset() cannot empty its prefix cache
    warms_with_others: bool = False  # the warm-up shows it other prompts than those measured
    takes_chat: bool = False  # see ChatEngine
    tells_ids: bool = True  # whether its answers are known as token ids
    # ids of processes that it computes in, besides this process and those that it has started
    processes: tuple[int, ...] = ()
    # ids of processes on this machine that somebody else has started and that answer: their
    # processor time is the run's; empty: they cannot be found; None: there are none
    servers: tuple[int, ...] | None = None
    # the folder or file that weights were read from, where that is known
    weights_from: Path | None = None
    computes_here: bool = True  # whether this process's memory is the engine's, too
    unmetered: str | None = None  # why energy that it takes cannot be read on this machine
    # of an engine whose time is simulated; None is the machine's
    clock: ClockProtocol | None = None

    def cold(self, first_batch_s: float | None = None) -> Cold:
        """What happened before the steady state; nothing of an engine whose time is simulated."""
        if self.clock is not None:
            return Cold()
        packed = self.packed_weights, self.packed_write_s
        return Cold(self.load_s, self.compile_s, first_batch_s, *packed)

    @property
    def watched(self) -> dict[str, tuple[int, ...]]:
        """The processes that telemetry counts with the worker; nothing where there are none."""
        servers = {} if self.servers is None else {"servers": self.servers}
        return {"processes": self.processes, **servers} if self.processes or servers else {}


class BenchEngine(Protocol):
    """An engine under test. Single-threaded: the driver calls, the engine answers.

    One with a clock of its own (`info.clock`) is a simulation: the driver goes by that clock,
    prompts may come as any sequence instead of a list, and nothing that is read off the machine is
    put into its record.
    """

    info: EngineInfo

    def submit(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Take a request. Raises BadInput if it can never be served."""

    def poll(self, timeout_s: float | None = None) -> list[EngineOutput]:
        """Run one step (in-process engines) or wait up to `timeout_s` (remote ones) for new
        tokens."""

    def reset(self) -> None:
        """Empty caches and zero counters and step records, before a measured window."""

    def steps(self) -> list[dict[str, Any]]:
        """One dict a step since reset(): start_s, num_requests, num_tokens, num_prefill_tokens,
        num_drafts, context_tokens, waiting, kv_blocks_used, kv_blocks_total, kv_slots_wasted,
        kv_slots_allocated, schedule_ms, draft_ms, prepare_ms, forward_ms, sample_ms, emit_ms,
        gap_ms."""

    def liveness(self) -> dict[str, dict[str, float | str]]:
        """Counters of each knob's own work since reset(), by group: {"quant": {...}, "cache":
        {...}}."""

    def text(self, token_ids: list[int]) -> str | None:
        """Decoded text, or None without a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Raises BadInput without a tokenizer."""

    def close(self) -> None:
        """Release the engine."""


@runtime_checkable
class Profiled(Protocol):
    """What `runtime.profile` asks of an engine, or of its class before there is an engine."""

    def phases(self) -> AbstractContextManager[None]:
        """While it is open, the phases of a step are ranges of torch's profiler, named as in the
        breakdown."""


@runtime_checkable
class ProfiledEngine(BenchEngine, Profiled, Protocol):
    """An engine that `runtime.profile` can trace: it computes in this process, with torch."""


@runtime_checkable
class Observable(Protocol):
    """What `measure.events` asks of an engine, or of its class before there is an engine."""

    def observe(self, sink: Callable[[StepBundle], None]) -> StepObserver:
        """Give `sink` the whole state and then a bundle of each step, until the observer is
        closed. Called after reset(), which ends it, too."""


@runtime_checkable
class ObservableEngine(BenchEngine, Observable, Protocol):
    """An engine whose steps can be seen one by one."""


@runtime_checkable
class LogitsEngine(BenchEngine, Protocol):
    """An engine whose quality can be measured: it also gives logits. The others' quality is
    null."""

    def logits(self, token_ids: list[int]) -> NDArray[np.float32]:
        """Logits of every position of one sequence, float32 [tokens, vocab], computed as for a
        request.

        Called between requests only. Raises BadInput if the sequence does not fit.
        """


@runtime_checkable
class CheckingEngine(BenchEngine, Protocol):
    """An engine that judges a request without taking it, since what it takes is computed at once:
    a server would have the prompt in its cache before the measurement."""

    def require_servable(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams
    ) -> object:
        """Raise BadInput for a request that can never be served."""


@runtime_checkable
class PrimedEngine(BenchEngine, Protocol):
    """An engine that can be measured with what it has cached: what a workload's `priming` needs."""

    def recount(self) -> None:
        """End all requests, and zero counters and step records; caches keep what they hold."""


@runtime_checkable
class SpeculatingEngine(BenchEngine, Protocol):
    """An engine that says what its drafts did. The others' `speculation` is null."""

    def speculation(self) -> SpeculationReport | None:
        """Knobs and counters since reset(); None: it does not draft."""


@runtime_checkable
class SessionEngine(BenchEngine, Protocol):
    """An engine that may serve the requests of a session in one place."""

    def note_session(self, request_id: str, session: str) -> None:
        """Say which session a request is of, before it is submitted."""


@runtime_checkable
class SeeingEngine(BenchEngine, Protocol):
    """An engine that takes images, if its model does."""

    pictures: PictureReader | None  # None: its model takes none

    def note_images(self, request_id: str, names: Sequence[str]) -> None:
        """Say which images a request has, before it is submitted; see workloads/pictures.py."""


@runtime_checkable
class ChatEngine(BenchEngine, Protocol):
    """An engine that is sent messages as they are (roles, images, tools) if `info.takes_chat`."""

    def submit_chat(
        self,
        request_id: str,
        chat: Mapping[str, Any] | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
    ) -> None:
        """Take a request. `chat` has its messages and what goes with them, as the chat API has
        them; None: the prompt's text is one message of a user. See `submit`."""


class Adapter:
    """Base of the engines under test. Subclasses set both attributes when they are built."""

    info: EngineInfo
    tokenizer: Tokenizer | None

    def steps(self) -> list[dict[str, Any]]:
        """None, of engines whose steps cannot be seen; see BenchEngine."""
        return []

    def text(self, token_ids: list[int]) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode(token_ids)

    def encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise BadInput("this checkpoint has no tokenizer: the workload must give token ids")
        return self.tokenizer.encode(text)

    def tokens_wanted(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        unfinished: Container[str],
    ) -> int:
        """How many tokens a request may produce, for engines that do not check requests themselves.

        Args:
            unfinished: ids that are taken.

        Raises:
            BadInput: the id is taken, or the prompt is empty, too long, or holds ids that are none.
        """
        length, limit, vocab = len(prompt_token_ids), self.info.max_model_len, self.info.vocab_size
        if request_id in unfinished:
            raise BadInput(f"request {request_id} is already being served; choose another id")
        if not length:
            raise BadInput(f"request {request_id} has an empty prompt; give at least one token")
        if length >= limit:
            raise BadInput(
                f"request {request_id}: the prompt has {length} tokens and the context is "
                f"{limit}, which leaves no room for output; shorten the prompt or raise "
                "model.max_model_len if it is below the model's own"
            )
        simulated = self.info.clock is not None  # its prompts may be too long to look through
        if not simulated and not 0 <= min(prompt_token_ids) <= max(prompt_token_ids) < vocab:
            raise BadInput(f"request {request_id}: prompt token ids must be in [0, {vocab})")
        return min(params.max_tokens or limit, limit - length)
