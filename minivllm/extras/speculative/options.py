"""The knobs of `speculative`."""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.platform.options import Options, knob


@dataclass(frozen=True)
class SpeculativeOptions(Options):
    """What every option of speculative has.

    Args:
        num_speculative_tokens: most draft tokens of a request in a step.
    """

    group = "speculative"
    num_speculative_tokens: int = knob(3, at_least=1, at_most=32)


@dataclass(frozen=True)
class NgramOptions(SpeculativeOptions):
    """speculative=ngram.

    Args:
        prompt_lookup_max: longest run of last tokens to look up, in tokens; tried first.
        prompt_lookup_min: shortest run, in tokens. Each length between the two has an index.
    """

    prompt_lookup_max: int = knob(4, at_least=1, at_most=32)
    prompt_lookup_min: int = knob(2, at_least=1, at_most=32)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise self.bad(
                "prompt_lookup_min", f"must be at most prompt_lookup_max={self.prompt_lookup_max}"
            )


@dataclass(frozen=True)
class SuffixOptions(SpeculativeOptions):
    """speculative=suffix.

    Args:
        max_tree_depth: longest run of last tokens to look up, in tokens; runs have 1, 2, 4, ...
            tokens.
        max_spec_factor: most draft tokens for each token of the run that was found.
        min_token_prob: a draft ends where the share of the votes that it followed falls below this.
        max_cached_requests: finished requests whose outputs are kept, the oldest dropped first; 0
            keeps none.
        max_cached_tokens: most tokens of those outputs, with a mark after each; up to 850 bytes of
            host memory a token.
    """

    max_tree_depth: int = knob(24, at_least=1, at_most=256)
    max_spec_factor: float = knob(1.0, above=0)
    min_token_prob: float = knob(0.1, at_least=0, at_most=1)
    max_cached_requests: int = knob(10_000, at_least=0)
    max_cached_tokens: int = knob(65_536, at_least=0)
