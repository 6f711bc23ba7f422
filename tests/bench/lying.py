"""Engines without torch that say of themselves what is not so, each in one way; and the honest one
that they are made of."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from minivllm.engine.options import SamplingParams
from minivllm.engines.base import EngineOutput
from minivllm.platform.support import EVERY_KNOB, Support
from tests.bench.scripted import ScriptedClock, ScriptedEngine


@dataclass
class CountingEngine(ScriptedEngine):
    """A scripted engine that reports its steps as the project's own does, and its prefix cache.

    Attributes:
        cached: tokens of each prompt that it has before the run.
        config: the resolved configuration, where a session builds it. Its steps then take no time
            of the machine's clock.
        progress: told of loading by engines that load.
        simulated: the session goes by the scripted clock.
        rows: of its steps.
    """

    support: ClassVar[Support] = Support(knobs=EVERY_KNOB)

    clock: ScriptedClock = field(default_factory=ScriptedClock)
    cached: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    progress: object = None
    simulated: bool = False
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.says_start = self.simulated or not self.config
        self.info.clock = self.clock if self.simulated else None

    def poll(self, timeout_s: float | None = None) -> list[EngineOutput]:
        room = self.max_num_seqs - len(self.running)
        new = [one.request_id for one in list(self.waiting)[:room]]
        decoding = len(self.running)
        prompts = sum(len(self.submitted[name][0]) - self.cached for name in new)
        self.rows.append(
            {
                "num_requests": decoding + len(new),
                "num_tokens": decoding + prompts,
                "num_prefill_tokens": prompts,
                "num_drafts": 0,
            }
        )
        outputs = super().poll(timeout_s)
        return [replace(output, cached_tokens=self.cached) for output in outputs]

    def steps(self) -> list[dict[str, Any]]:
        return self.rows

    def liveness(self) -> dict[str, dict[str, float | str]]:
        if not self.config:
            return {}
        return {"batching": {"largest_batch": float(self.largest_batch)}}

    def reset(self) -> None:
        super().reset()
        self.rows = []
        self.largest_batch = 0


class LongAnswers(CountingEngine):
    """Ignores max_tokens."""

    def submit(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        longer = replace(params, max_tokens=2 * (params.max_tokens or 0))
        super().submit(request_id, prompt_token_ids, longer)


class CachedAnswers(CountingEngine):
    """Has whole answers of earlier runs, which it hands out without a step."""

    def poll(self, timeout_s: float | None = None) -> list[EngineOutput]:
        self.clock.time += 0.01
        found, self.waiting = list(self.waiting), type(self.waiting)()
        return [EngineOutput(one.request_id, (7,) * one.remaining, "length") for one in found]


class RememberedAnswers(CachedAnswers):
    """Computes its first answers, and hands out others without a step from then on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.answered = 0

    def poll(self, timeout_s: float | None = None) -> list[EngineOutput]:
        if self.answered:
            return super().poll(timeout_s)
        outputs = CountingEngine.poll(self, timeout_s)
        self.answered += sum(output.finish_reason is not None for output in outputs)
        return outputs


class Bursts(CountingEngine):
    """Hands its tokens on four at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.held: dict[str, list[int]] = {}

    def poll(self, timeout_s: float | None = None) -> list[EngineOutput]:
        outputs = []
        for output in super().poll(timeout_s):
            held = self.held.setdefault(output.request_id, [])
            held += output.token_ids
            if len(held) >= 4 or output.finish_reason:
                outputs.append(replace(output, token_ids=tuple(held)))
                self.held[output.request_id] = []
        return outputs


class CutPrompts(CountingEngine):
    """Reads the first four tokens of a prompt."""

    def submit(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        super().submit(request_id, prompt_token_ids[:4], params)


class MadeUpHits(CountingEngine):
    """Computes whole prompts, and says that half of each was in its prefix cache."""

    def poll(self, timeout_s: float | None = None) -> list[EngineOutput]:
        return [replace(output, cached_tokens=8) for output in super().poll(timeout_s)]


class MadeUpMemory(CountingEngine):
    """Says that its weights take 64 GB."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.info.memory = {"weights": 64_000_000_000}


class SlowAtFirst(CountingEngine):
    """Takes three times as long for the steps of its first ten seconds."""

    def poll(self, timeout_s: float | None = None) -> list[EngineOutput]:
        self.step_s = 3.0 if self.clock.now() < 10 else 1.0
        return super().poll(timeout_s)


@dataclass
class Honest(CountingEngine):
    """Does what its knobs say, and counts it.

    Attributes:
        turbo: a knob of its own.
    """

    turbo: bool = False

    def liveness(self) -> dict[str, dict[str, float | str]]:
        offload = float(self.config["cache"].get("offload_gb") or 0.0)
        return super().liveness() | {
            "cache": {"blocks_restored": offload},
            "engine": {"steps_in_turbo": float(self.turbo)},
        }


class UnreadKnob(Honest):
    """Never reads its own knob."""

    def liveness(self) -> dict[str, dict[str, float | str]]:
        return super().liveness() | {"engine": {}}


class TurnsAnother(Honest):
    """Runs one request at a time as soon as the prefix cache is on."""

    def __post_init__(self) -> None:
        if self.config["cache"].get("prefix_caching"):
            self.max_num_seqs = 1
        super().__post_init__()


class OneSetting(Honest):
    """Takes one size for all sizes of a knob."""

    def liveness(self) -> dict[str, dict[str, float | str]]:
        is_on = float(bool(self.config["cache"].get("offload_gb")))
        return super().liveness() | {"cache": {"blocks_restored": is_on}}


class OnDisk(CountingEngine):
    """Reads its weights from the folder of the model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.info.weights_from = Path(self.config["model"]["path"])


@dataclass
class Keeper(CountingEngine):
    """Takes a second for a new prompt, and a tenth for one that it knows.

    Attributes:
        keeps: whether it knows any.
        reports: whether it says how much it found.
    """

    keeps: bool = True
    reports: bool = False
    known: set[tuple[int, ...]] = field(default_factory=set)
    asked: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.info.keeps_prefixes = True

    def submit(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        self.submitted.pop(request_id, None)  # a prompt is asked twice
        prompt = tuple(prompt_token_ids)
        self.asked.append(prompt)
        self.step_s = 0.1 if prompt in self.known else 1.0
        self.found = len(prompt) if prompt in self.known else 0
        self.known |= {prompt} if self.keeps else set()
        super().submit(request_id, prompt_token_ids, params)

    def poll(self, timeout_s: float | None = None) -> list[EngineOutput]:
        outputs = super().poll(timeout_s)
        return [replace(o, cached_tokens=self.found if self.reports else None) for o in outputs]
