"""Drafts by a model that reads the blocks of the target's cache."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from minivllm.engine.batch_inputs import Sampling, pack, pack_draws
from minivllm.engine.engine import Engine
from minivllm.engine.executor import Executor, ModelRunner
from minivllm.engine.request import Request, placeholder
from minivllm.engine.sampler import SampledTokens, SamplerCounters
from minivllm.engine.step import ScheduledRequest, StepPlan
from minivllm.extras.speculative.proposer import MakeAttention, Proposer
from minivllm.extras.speculative.step_cost import StepCost, measure
from minivllm.models.load.loading import LoadedModel

# Added to the positions of draws that must be independent of the target's: beyond every context.
OTHER_NOISE = 1 << 30


class ModelDrafts(Proposer):
    """A chain of draft tokens for each request: one small step of the drafting model for each
    position, over all requests that draft so far.

    The drafting model draws as the target does, with the same noise at the same positions and with
    the request's own penalties and masks. It writes keys and values into the blocks of the request.
    Where it shares the target's tensors, the target overwrites them when it verifies the drafts, so
    the drafting model needs no cache of its own.

    Attributes:
        loaded: the drafting model, or the one that it is a part of; set by `attach`.
        runner: of the drafting model; set by `attach`.
        executor: runs the drafting model: the runner, or one that hands on to it.
        own_cache: whether the drafting model has keys and values of its own, in the same blocks.
        keeps_logits: keep the drafting model's logits until the drafts are verified, and draw with
            noise that is independent of the target's.
    """

    loaded: LoadedModel
    runner: ModelRunner
    executor: Executor
    own_cache = False

    def __init__(self) -> None:
        self.keeps_logits = self.options.verify == "rejection"
        self._logits: dict[Request, list[Tensor]] = {}
        # Tokens that the drafting model has computed, and the version of the block table.
        self._computed: dict[Request, tuple[int, int]] = {}
        self._counters = SamplerCounters()

    def attach(self, engine: Engine, attention: MakeAttention) -> None:
        """See Proposer."""
        self._extensions = engine.launcher.extensions
        self._one_by_one = engine.launcher.one_by_one
        self._vocab_size = engine.loaded.config.vocab_size
        self._block_size = engine.cache.block_size
        self._chunk = engine.scheduler.policy.max_num_batched_tokens

    def cost(self, largest: int) -> StepCost:
        """See Proposer."""
        return measure(self.executor, largest, largest)

    def propose(self, request: Request, most: int) -> list[int]:
        """Places for drafts, which `fill` fills: the step's blocks are not ready yet."""
        return [0] * most

    def fill(self, plan: StepPlan) -> None:
        """Draft for all requests of a step at once."""
        parts = [part for part in plan.scheduled if part.num_drafts]
        self._logits = {part.request: [] for part in parts} if self.keeps_logits else {}
        self._catch_up(parts)
        drawn: list[tuple[list[ScheduledRequest], SampledTokens]] = []
        adjusted = any(part.request.adjusts_logits(part.start + 1) for part in parts)
        for depth in range(max(part.num_drafts for part in parts)):
            drafting = [part for part in parts if part.num_drafts > depth]
            tokens = self._draw(drafting, depth)
            if adjusted:  # Penalties and masks go by the tokens themselves.
                self._put(drafting, depth, self._read(tokens))
                continue
            drawn.append((drafting, tokens))
            self._put(drafting, depth, [placeholder(row) for row in range(len(drafting))])
        for depth, (drafting, tokens) in enumerate(drawn):
            self._put(drafting, depth, self._read(tokens))
        for part in parts if self.own_cache else ():
            table = part.request.cache.block_table
            self._computed[part.request] = part.start + part.num_drafts, table.version

    def draft_logits(self, request: Request) -> Sequence[Tensor]:
        """See Proposer."""
        return self._logits.get(request, ())

    def _draw(self, drafting: Sequence[ScheduledRequest], depth: int) -> SampledTokens:
        """The tokens at one depth, one for each request."""
        scheduled, rows = [], []
        for part in drafting:
            end = part.start + 1 + depth
            start = end - 1 if depth else self._next(part)
            scheduled.append(ScheduledRequest(part.request, start, end - start))
            rows.append(sum(one.num_tokens for one in scheduled) - 1)
        requests = [part.request for part in drafting]
        positions = [one.end for one in scheduled]
        noise = [position + OTHER_NOISE * self.keeps_logits for position in positions]
        adjustment = None
        if any(map(Request.adjusts_logits, requests, positions)):
            errors = [request.error for request in requests]
            adjustment = self._extensions.adjust_logits(requests, positions)
            for request, error in zip(requests, errors, strict=True):
                request.error = error  # The target finds a mask that fails, if it comes to that.
        one_each = len(rows) == rows[-1] + 1
        sampling = Sampling(
            None if one_each else tuple(rows),
            pack_draws(requests, noise, self._one_by_one),
            adjustment,
        )
        packed = pack(scheduled, self._block_size, all_logits=True)._replace(
            sampling=sampling,
            has_placeholders=depth > 0 and requests[0].token_ids[positions[0] - 1] < 0,
            needs_logits=self.keeps_logits,
        )
        result = self.executor.run(packed)
        if self.keeps_logits:
            assert result.logits is not None
            for request, row in zip(requests, rows, strict=True):
                self._logits[request].append(result.logits[row].clone())
        assert result.tokens is not None
        return SampledTokens(result.tokens, result.argmax)

    def _put(
        self, drafting: Sequence[ScheduledRequest], depth: int, token_ids: Sequence[int]
    ) -> None:
        """Note drafts at one depth."""
        for part, token_id in zip(drafting, token_ids, strict=True):
            part.request.token_ids[part.start + 1 + depth] = token_id

    def _read(self, tokens: SampledTokens) -> list[int]:
        """Drafts as the target knows tokens: 0 in place of one whose logits are not finite, or
        which is the draft model's alone."""
        read = tokens.read(self._counters)
        return [token if 0 <= token < self._vocab_size else 0 for token in read]

    def _next(self, part: ScheduledRequest) -> int:
        """The first token of a request that the drafting model has not computed."""
        if not self.own_cache:
            return part.start
        table = part.request.cache.block_table
        computed, version = self._computed.get(part.request, (0, -1))
        return min(computed, part.start) if version == table.version else 0

    def _catch_up(self, parts: Sequence[ScheduledRequest]) -> None:
        """Compute the tokens before the last known one that the drafting model has not computed:
        a prompt, or what came while nothing was drafted."""
        if not self.own_cache:
            return
        for part in parts:
            start = self._next(part)
            # A few tokens are computed with the first draft.
            while part.start - start >= self._chunk:
                piece = [ScheduledRequest(part.request, start, self._chunk)]
                self.executor.run(pack(piece, self._block_size)._replace(needs_logits=False))
                start += self._chunk
            table = part.request.cache.block_table
            self._computed[part.request] = start, table.version

    def finished(self, request: Request) -> None:
        """See Proposer."""
        self._computed.pop(request, None)
        self._logits.pop(request, None)
