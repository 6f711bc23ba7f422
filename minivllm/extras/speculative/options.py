"""The knobs of `speculative`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from minivllm.errors import BadInput
from minivllm.platform.options import Options, knob, option


@dataclass(frozen=True)
class SpeculativeOptions(Options):
    """What every proposer has."""

    group = "speculative"
    num_speculative_tokens: int = knob(3, at_least=1, at_most=32)
    """Most draft tokens of a request in a step."""
    adaptive: bool = True
    """Draft only as many tokens as pay, by measured acceptance and step times: none at large
    batches and on text that is not foreseen; false: always num_speculative_tokens."""
    verify: Literal["same_noise", "rejection"] = "same_noise"
    """same_noise: a draft is accepted while it is the token that the target draws with its own
    noise, so outputs are those of no speculation; rejection: rejection sampling (Leviathan et al.
    2023), for comparison."""
    acceptance: float | tuple[float, ...] | None = None
    """Accept drafts at this rate, or at rates by position, whatever they are, for measurements on
    random weights; null: drafts are judged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0 <= rate <= 1 for rate in self.rates or ()) or self.rates == ():
            raise self.bad("acceptance", "must be rates in [0, 1]")
        if self.rates is not None and self.verify == "rejection":
            raise self.bad("verify", "judges drafts, and speculative.acceptance sets the verdict")

    @property
    def rates(self) -> tuple[float, ...] | None:
        """`acceptance` by position; None: drafts are judged."""
        given = self.acceptance
        return (given,) if isinstance(given, float) else given


NOT_SPECULATING = "minivllm.extras.speculative.proposer.NoProposer"


@option(NOT_SPECULATING)
@dataclass(frozen=True)
class NoSpeculationOptions(Options):
    """speculative=none."""

    group = "speculative"


@option("minivllm.extras.speculative.proposers.early_exit.EarlyExitProposer")
@dataclass(frozen=True)
class EarlyExitOptions(SpeculativeOptions):
    """speculative=early_exit."""

    exit_layer: int = knob(4, at_least=1)
    """Layers that draft, from the first."""
    head_tokens: int | None = knob(None, at_least=1)
    """Draft among so many first token ids, whose part of the head alone is read; null: all."""


def require_layers(exit_layer: int, num_layers: int) -> None:
    """Raise BadInput if a draft by `exit_layer` layers would leave none of the model's out."""
    if exit_layer >= num_layers:
        raise BadInput(
            f"speculative.exit_layer={exit_layer}: the model has {num_layers} layers, and a draft "
            "must leave some out; use fewer"
        )


@option("minivllm.extras.speculative.proposers.draft.DraftProposer")
@dataclass(frozen=True)
class DraftOptions(SpeculativeOptions):
    """speculative=draft."""

    model: dict[str, Any] | None = None
    """A second model, with the target's tokenizer (model@speculative.model=NAME); null: the same
    weights, which need no cache of their own."""
    quant: dict[str, Any] | None = None
    """The draft's precision, of a second model, too (quant@speculative.quant=NAME); null: that of
    the target."""
    pruning: dict[str, Any] | None = knob(None, unasked=True)
    """What the draft leaves out of its model, with a cache of its own
    (pruning@speculative.pruning=NAME); null: nothing."""
    lm_head: bool = True
    """Quantise the draft's head, too, where quant can: each draft token reads all of it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is None and self.quant is None and self.pruning is None:
            raise self.bad(
                "quant",
                "would make the draft the target itself: use quant@speculative.quant=int4, or a "
                "model as model@speculative.model=NAME",
            )


@option("minivllm.extras.speculative.proposers.ngram.NgramProposer")
@dataclass(frozen=True)
class NgramOptions(SpeculativeOptions):
    """speculative=ngram."""

    prompt_lookup_max: int = knob(4, at_least=1, at_most=32)
    """Longest run of last tokens to look up, in tokens; tried first."""
    prompt_lookup_min: int = knob(2, at_least=1, at_most=32)
    """Shortest run, in tokens; each length between the two has an index."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise self.bad(
                "prompt_lookup_min", f"must be at most prompt_lookup_max={self.prompt_lookup_max}"
            )


@option("minivllm.extras.speculative.proposers.suffix.SuffixProposer")
@dataclass(frozen=True)
class SuffixOptions(SpeculativeOptions):
    """speculative=suffix."""

    max_tree_depth: int = knob(24, at_least=1, at_most=256)
    """Longest run of last tokens to look up, in tokens; runs have 1, 2, 4, ... tokens."""
    max_spec_factor: float = knob(1.0, above=0)
    """Most draft tokens for each token of the run that was found."""
    min_token_prob: float = knob(0.1, at_least=0, at_most=1)
    """A draft ends where its share of the votes falls below this."""
    max_cached_requests: int = knob(10_000, at_least=0)
    """Finished requests whose outputs are kept, the oldest dropped first; 0: none."""
    max_cached_tokens: int = knob(65_536, at_least=0)
    """Most tokens of those outputs, up to 850 bytes of host memory each."""


def require_compatible(
    speculative: str, cache: Mapping[str, Any], decoding: Mapping[str, Any], overlap: bool
) -> None:
    """Raise BadInput for what cannot go together with drafts.

    Args:
        speculative: the name of the option.
        cache, decoding: the options' knobs.
        overlap: `runtime.overlap`.
    """
    problems = {
        "decoding.beam_width": (
            decoding.get("beam_width", 1) > 1,
            "beams choose their tokens together; use decoding.beam_width=1",
        ),
        "cache=none": (
            cache.get("_target_") == "minivllm.cache.none.NoCache",
            "every step computes whole sequences; use cache=paged",
        ),
        "cache.eviction": (
            cache.get("eviction", "none") != "none",
            "a rejected draft may have evicted a token; use cache.eviction=none",
        ),
        "runtime.overlap=true": (
            overlap,
            "drafts follow tokens that the host has read; use runtime.overlap=false",
        ),
    }
    for knob_name, (holds, advice) in problems.items():
        if holds:
            raise BadInput(f"speculative={speculative} with {knob_name}: {advice}")
