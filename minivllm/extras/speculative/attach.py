"""Speculation is put into an engine."""

from __future__ import annotations

from minivllm.engine.engine import Engine
from minivllm.extras.speculative.lengths import AdaptiveLengths, DraftLengths, FixedLengths
from minivllm.extras.speculative.proposer import Proposer
from minivllm.extras.speculative.rejection import Rejection
from minivllm.extras.speculative.speculation import Speculator
from minivllm.extras.speculative.step_cost import StepCost, measure
from minivllm.extras.speculative.verification import GivenAcceptance, SameNoise, Verifier

FREE = StepCost([1], [0.0])  # to draft without a model


def speculate(engine: Engine, proposer: Proposer) -> Speculator:
    """Let an engine draft and verify.

    Args:
        engine: with all passes applied; replays its graphs, if it has any.
        proposer: attached to the engine.
    """
    options, policy = proposer.options, engine.scheduler.policy
    most_drafts = options.num_speculative_tokens
    lengths: DraftLengths = FixedLengths(most_drafts)
    if options.adaptive:
        most = min(policy.max_num_seqs * (1 + most_drafts), policy.max_num_batched_tokens)
        step_ms = measure(engine.launcher.executor, most, policy.max_num_seqs)
        draft_ms = proposer.cost(policy.max_num_seqs) or FREE
        lengths = AdaptiveLengths(most_drafts, step_ms, draft_ms)
    verifier: Verifier = SameNoise()
    if options.rates is not None:
        verifier = GivenAcceptance(options.rates)
    elif options.verify == "rejection":
        verifier = Rejection(engine.launcher.extensions, proposer.draft_logits)
    restart = engine.loaded.config.rope.restarts_at
    longest = None if restart is None else restart - 1
    vocab_size = engine.loaded.config.vocab_size
    speculator = Speculator(
        *(proposer, lengths, verifier, engine.kv.clear, longest), vocab_size=vocab_size
    )
    engine.launcher.speculation = speculator
    # First, so that the other rules see no drafts of a step that failed.
    engine.scheduler.rules = (speculator, *engine.scheduler.rules)
    return speculator
