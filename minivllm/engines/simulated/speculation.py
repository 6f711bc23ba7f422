"""Speculation in a simulation: the engine's own rule, over drafts that are counted, not known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

from minivllm.bench.hardware.clock import VirtualClock
from minivllm.bench.records.identity import requested
from minivllm.config.groups import Config
from minivllm.engine.request import Request
from minivllm.engine.step import StepPlan
from minivllm.engines.simulated.options import SimulatedOptions
from minivllm.engines.simulated.recorded_steps import drafting_records, fit_drafts
from minivllm.engines.simulated.step_times import RooflineTimes, StepTimes
from minivllm.errors import BadInput
from minivllm.extras.speculative.fit import draft_source
from minivllm.extras.speculative.lengths import AdaptiveLengths, DraftLengths, FixedLengths
from minivllm.extras.speculative.options import (
    DraftOptions,
    EarlyExitOptions,
    NoSpeculationOptions,
    SpeculativeOptions,
    require_layers,
)
from minivllm.extras.speculative.proposer import Proposer
from minivllm.extras.speculative.speculation import Speculator
from minivllm.extras.speculative.verification import GivenAcceptance, uniform
from minivllm.models.config import ModelConfig
from minivllm.models.costs import architecture_costs, trims

DRAFTS_AT_ALL = 1  # keeps this draw independent of the verdicts


class SimulatedDrafts(Proposer):
    """Proposes places for drafts; to fill them lets the virtual time of drafting pass.

    Args:
        name: of the proposer that this stands for.
        options: its knobs.
        clock: of the simulation.
        times: of a step of the drafting model; None: drafting takes no time.
        share: of a request's steps in which it has a draft.
    """

    def __init__(
        self,
        name: str,
        options: SpeculativeOptions,
        clock: VirtualClock,
        times: StepTimes | None,
        share: float,
    ) -> None:
        self.name, self.options = name, options
        self.clock, self.times, self.share = clock, times, share

    def propose(self, request: Request, most: int) -> list[int]:
        if self.share < 1:
            position = len(request.token_ids)
            if uniform(request.seed, position, DRAFTS_AT_ALL) >= self.share:
                return []
        return [0] * most

    def fill(self, plan: StepPlan) -> None:
        parts = [part for part in plan.scheduled if part.num_drafts]
        for depth in range(max(part.num_drafts for part in parts) if self.times else 0):
            ends = [part.start + 1 + depth for part in parts if part.num_drafts > depth]
            self.clock.sleep(self.draft_ms(len(ends), sum(ends)) / 1e3)

    def draft_ms(self, requests: int, context: float = 0.0) -> float:
        """Milliseconds to draft one token for each of so many requests, which have so many tokens
        together."""
        if self.times is None:
            return 0.0
        return self.times(requests, requests, 0, context, 0.0, 0)


@dataclass(frozen=True)
class SimulatedSpeculation:
    """What a configuration's `speculative` is in a simulation.

    Args:
        drafts: proposes.
        rates: of acceptance (`GivenAcceptance`).
        weight_bytes: of a drafting model beside the target.
        kv_bytes_per_token: of its own keys and values.
        longest: see Speculator.
    """

    drafts: SimulatedDrafts
    rates: Sequence[float]
    weight_bytes: int
    kv_bytes_per_token: int
    longest: int | None

    def speculator(self, step_ms: Callable[[int], float]) -> Speculator:
        """The engine's rule.

        Args:
            step_ms: milliseconds of a step of so many tokens.
        """
        options = self.drafts.options
        lengths: DraftLengths = FixedLengths(options.num_speculative_tokens)
        if options.adaptive:
            # Asked for every place of every draft.
            times = cache(step_ms), cache(self.drafts.draft_ms)
            lengths = AdaptiveLengths(options.num_speculative_tokens, *times)
        verifier = GivenAcceptance(self.rates)
        now = self.drafts.clock.now
        return Speculator(self.drafts, lengths, verifier, _clear_nothing, self.longest, now)

    def at(self, clock: VirtualClock) -> SimulatedSpeculation:
        """The same on another clock."""
        drafts = copy(self.drafts)
        drafts.clock = clock
        return replace(self, drafts=drafts)

    def describe(self) -> str:
        """One line for the record."""
        rates = ", ".join(f"{rate:.3g}" for rate in self.rates)
        drafts, times = self.drafts, self.drafts.times
        takes = "takes no time" if times is None else f"by {times.describe()}"
        return (
            f"drafts in {100 * drafts.share:.0f} % of a request's steps, accepted at {rates}; "
            f"drafting {takes}"
        )


def _clear_nothing(blocks: Sequence[int]) -> None:
    """Counted tokens have no keys and values."""


def simulated_speculation(
    config: Config, engine: SimulatedOptions, model: ModelConfig, clock: VirtualClock
) -> SimulatedSpeculation | None:
    """Speculation as it is configured; None: one token a step.

    Args:
        config: the resolved configuration.
        engine: the knobs of the engine.
        model: the target.
        clock: of the simulation.

    Raises:
        BadInput: acceptance or the time of drafting is neither given nor recorded, or the proposer
            is of the user's own.
    """
    options = config.speculative
    if isinstance(options, NoSpeculationOptions):
        return None
    if not isinstance(options, SpeculativeOptions):
        raise BadInput(
            f"speculative={config.target('speculative')}: a simulation knows what minivllm's own "
            "proposers cost, not this one; use engine=minivllm"
        )
    rates, share = _acceptance(config, options, engine.steps)
    times: StepTimes | None = None
    weight_bytes = kv_bytes = 0
    if isinstance(options, DraftOptions | EarlyExitOptions):
        costs, draft_bytes = _draft_costs(config, options, model)
        if isinstance(options, DraftOptions):
            weight_bytes = draft_bytes
            kv_bytes = costs["kv_bytes_per_token"] if options.model is not None else 0
        if engine.steps is not None:
            times = fit_drafts(engine.steps, config)
        elif engine.bandwidth_gb_s is not None and engine.tflops is not None:
            limits = engine.bandwidth_gb_s * 1e9, engine.tflops * 1e12
            times = RooflineTimes(costs, *limits, engine.overhead_ms)
    name = str((config.get("choices") or {}).get("speculative"))
    drafts = SimulatedDrafts(name, options, clock, times, share)
    return SimulatedSpeculation(drafts, rates, weight_bytes, kv_bytes, model.rope.restarts_at)


def _draft_costs(
    config: Config, options: DraftOptions | EarlyExitOptions, model: ModelConfig
) -> tuple[dict[str, Any], int]:
    """Costs and bytes of the weights of a drafting model, see `architecture_costs`."""
    quant: Mapping[str, Any] = config["quant"]
    kv_dtype = config["cache"].get("kv_dtype", "auto")
    if isinstance(options, EarlyExitOptions):
        layers = options.exit_layer
        require_layers(layers, model.num_layers)
        model = replace(
            model,
            num_layers=layers,
            layer_types=model.layer_types[:layers],
            dense_layers=tuple(layer for layer in model.dense_layers if layer < layers),
            vocab_size=min(options.head_tokens or model.vocab_size, model.vocab_size),
        )
    elif options.model is not None:
        model = ModelConfig.from_dict(draft_source(options.model, allow_random=True).config)
        quant, kv_dtype = options.quant or quant, "auto"
    else:
        assert options.quant is not None
        quant = {**options.quant, "dtype": quant.get("dtype", "bfloat16")}
    if isinstance(options, DraftOptions) and options.quant is not None and options.lm_head:
        quant = {**quant, "lm_head": "lm_head" in quant}
    return architecture_costs(model, dict(quant), kv_dtype, trims(config["runtime"]))


def _acceptance(
    config: Config, options: SpeculativeOptions, place: str | None
) -> tuple[Sequence[float], float]:
    """Rates of acceptance by position, and the share of a request's steps in which it has a draft.

    `speculative.acceptance` goes before recorded rates. Without records there is always a draft.
    """
    recorded = [] if place is None else _recorded(place, config, options)
    share = 1.0
    if not isinstance(options, DraftOptions | EarlyExitOptions):  # A model always drafts.
        share = _share(recorded)
    if options.rates is not None:
        return options.rates, share
    judged = [one for one in recorded if one["given_acceptance"] is None]
    if not judged:
        raise BadInput(
            "engine=simulated needs to know how many drafts are right: set "
            "speculative.acceptance=RATE, or engine.steps=RUNS to records with this proposer, "
            "num_speculative_tokens and decoding, and speculative.adaptive=false"
        )
    accepted = [float(sum(one["num_drafts"] for one in judged))]  # drafts, then by position
    for position in range(options.num_speculative_tokens):
        accepted.append(sum(one["num_drafts"] * _at(one, position) for one in judged))
    return [now / before if before else 0.0 for before, now in pairwise(accepted)], share


def _at(section: Mapping[str, Any], position: int) -> float:
    """The share of drafts that are accepted at a position."""
    shares = section["acceptance_by_position"]
    return float(shares[position]) if position < len(shares) else 0.0


def _recorded(place: str, config: Config, options: SpeculativeOptions) -> list[dict[str, Any]]:
    """The sections `speculation` of records with this proposer, all drafts of the same length."""
    records = drafting_records(place, config)
    decoding = requested("decoding", config["decoding"])
    sections = [
        record.get("speculation")
        for record in records
        if requested("decoding", record["config"].get("decoding") or {}) == decoding
    ]
    return [
        one
        for one in sections
        if one
        and one["num_drafts"]
        and not one["adaptive"]
        and one["num_speculative_tokens"] == options.num_speculative_tokens
    ]


def _share(recorded: Sequence[Mapping[str, Any]]) -> float:
    """Drafts of recorded requests in a step, without those of which nothing is known."""
    known = [one for one in recorded if one["num_accepted_tokens"]]
    if not known:
        return 1.0
    requests = [one["num_accepted_tokens"] / (one["tokens_per_step"] - 1) for one in known]
    return min(1.0, float(sum(one["num_drafts"] for one in known) / sum(requests)))
