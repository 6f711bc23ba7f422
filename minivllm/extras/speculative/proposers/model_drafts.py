"""Drafts by a model that reads the blocks of the target's cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from minivllm.cache.kv import KVCache
from minivllm.engine.batch_inputs import Sampling, pack, pack_draws
from minivllm.engine.engine import Engine
from minivllm.engine.executor import Executor, ModelRunner
from minivllm.engine.request import Request, placeholder
from minivllm.engine.sampler import SampledTokens, SamplerCounters
from minivllm.engine.step import ScheduledRequest, StepPlan
from minivllm.extras.speculative.proposer import MakeAttention, Proposer
from minivllm.extras.speculative.step_cost import StepCost, measure
from minivllm.extras.speculative.verification import common_prefix
from minivllm.models.load.loading import LoadedModel

# Added to the positions of draws that must be independent of the target's: beyond every context.
OTHER_NOISE = 1 << 30
# A request with so many steps whose drafts are no numbers drafts no more.
MOST_LOST = 2


def widen(logits: Tensor, vocab: int) -> Tensor:
    """Logits [rows, any] as [rows, vocab]: cut, or with the lowest finite scores at the end, which
    masks and penalties can be added to."""
    lowest = max(-1e30, torch.finfo(logits.dtype).min)
    return functional.pad(logits, (0, vocab - logits.shape[1]), value=lowest)


class Computed(NamedTuple):
    """What the keys and values of a request in a second model's cache belong to."""

    known: int  # the first so many tokens of the request
    drafts: Sequence[int]  # and these tokens after them, if they are what has come
    version: int  # of the block table


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
        kv: these; set by `attach`.
        keeps_logits: keep the drafting model's logits until the drafts are verified, and draw with
            noise that is independent of the target's.
    """

    loaded: LoadedModel
    runner: ModelRunner
    executor: Executor
    own_cache = False
    kv: KVCache

    def __init__(self) -> None:
        self.keeps_logits = self.options.verify == "rejection"
        self._logits: dict[Request, list[Tensor]] = {}
        self._computed: dict[Request, Computed] = {}
        # In how many steps a request's own drafts were no numbers.
        self._lost: dict[Request, int] = {}
        self._counters = SamplerCounters()

    def attach(self, engine: Engine, attention: MakeAttention) -> None:
        self._extensions = engine.launcher.extensions
        self._one_by_one = engine.launcher.one_by_one
        self._cache, self._block_size = engine.cache, engine.cache.layout.block_size
        self._budget = engine.scheduler.policy.max_num_batched_tokens

    def cost(self, largest: int) -> StepCost:
        return measure(self.executor, largest, largest)

    def propose(self, request: Request, most: int) -> list[int]:
        """Places for drafts, which `fill` fills: the step's blocks are not ready yet."""
        return [0] * most if self._lost.get(request, 0) < MOST_LOST else []

    def fill(self, plan: StepPlan) -> None:
        """Draft for all requests of a step at once."""
        parts = [part for part in plan.scheduled if part.num_drafts]
        self._logits = {part.request: [] for part in parts} if self.keeps_logits else {}
        if self.own_cache:
            self._catch_up(parts)
        drawn: list[tuple[list[ScheduledRequest], SampledTokens]] = []
        lost: set[Request] = set()
        adjusted = any(part.request.adjusts_logits(part.start + 1) for part in parts)
        for depth in range(max(part.num_drafts for part in parts)):
            drafting = [part for part in parts if part.num_drafts > depth]
            tokens = self._draw(drafting, depth)
            if adjusted:  # Penalties and masks go by the tokens themselves.
                lost |= self._read(drafting, depth, tokens)
                continue
            drawn.append((drafting, tokens))
            for row, part in enumerate(drafting):
                part.request.token_ids[part.start + 1 + depth] = placeholder(row)
        for depth, (drafting, tokens) in enumerate(drawn):
            lost |= self._read(drafting, depth, tokens)
        if self.own_cache:
            self._note(parts, lost)

    def draft_logits(self, request: Request) -> Sequence[Tensor]:
        return self._logits.get(request, ())

    def _draw(self, drafting: Sequence[ScheduledRequest], depth: int) -> SampledTokens:
        """The tokens at one depth, one for each request."""
        scheduled, rows, row = [], [], -1
        for part in drafting:
            end = part.start + 1 + depth
            start = end - 1 if depth else self._next(part)
            scheduled.append(ScheduledRequest(part.request, start, end - start))
            row += end - start
            rows.append(row)
        requests = [part.request for part in drafting]
        positions = [one.end for one in scheduled]
        noise = [position + OTHER_NOISE * self.keeps_logits for position in positions]
        adjustment = None
        if any(map(Request.adjusts_logits, requests, positions)):
            errors = [request.error for request in requests]
            adjustment = self._extensions.adjust_logits(requests, positions)
            for request, error in zip(requests, errors, strict=True):
                request.error = error  # The target finds a mask that fails, if it comes to that.
        one_each = len(rows) == row + 1
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

    def _read(
        self, drafting: Sequence[ScheduledRequest], depth: int, tokens: SampledTokens
    ) -> set[Request]:
        """Put the drafts at one depth where they belong, 0 in place of those whose logits are not
        finite; the requests that have such."""
        lost = set()
        for part, token_id in zip(drafting, tokens.read(self._counters), strict=True):
            part.request.token_ids[part.start + 1 + depth] = max(token_id, 0)
            if token_id < 0:
                lost.add(part.request)
        return lost

    def _note(self, parts: Sequence[ScheduledRequest], lost: set[Request]) -> None:
        """Note what a second model has computed: all drafts but the last ones.

        Keys and values that are no numbers spoil all that comes after them, and what a later owner
        of their blocks computes before it overwrites them: attention multiplies them by 0. So what
        belongs to a lost request is cleared, and computed again if it drafts again.
        """
        for part in parts:
            request, table = part.request, part.request.cache.block_table
            if request in lost:
                self._lost[request] = self._lost.get(request, 0) + 1
                self._computed.pop(request, None)
                counts = self._cache.pool.ref_counts
                self.kv.clear([block for block in table.blocks if counts[block] == 1])
                continue
            first = part.start + 1
            drafts = request.token_ids[first : part.start + part.num_drafts]
            self._computed[request] = Computed(first, drafts, table.version)

    def _next(self, part: ScheduledRequest) -> int:
        """The first token of a request that the drafting model has not computed."""
        request = part.request
        if not self.own_cache:
            return part.start
        done = self._computed.get(request)
        if done is None or done.version != request.cache.block_table.version:
            return 0
        right = common_prefix(done.drafts, request.token_ids[done.known : part.start])
        return min(done.known + right, part.start)

    def _catch_up(self, parts: Sequence[ScheduledRequest]) -> None:
        """Compute the tokens before the last known one that a second model has not computed: a
        prompt, or what came while nothing was drafted.

        Where only one is missing, as after a step whose drafts were all right, the first draft's
        own step computes it.
        """
        for piece in self._pieces(parts):
            self.executor.run(pack(piece, self._block_size)._replace(needs_logits=False))
            for part in piece:
                version = part.request.cache.block_table.version
                self._computed[part.request] = Computed(part.end, (), version)

    def _pieces(self, parts: Sequence[ScheduledRequest]) -> Iterator[list[ScheduledRequest]]:
        """What is to be caught up with, in steps of the engine's budget."""
        piece: list[ScheduledRequest] = []
        left = self._budget
        for part in parts:
            start = self._next(part)
            if part.start - start < 2:
                continue
            while start < part.start:
                count = min(part.start - start, left)
                piece.append(ScheduledRequest(part.request, start, count))
                start, left = start + count, left - count
                if not left:
                    yield piece
                    piece, left = [], self._budget
        if piece:
            yield piece

    def finished(self, request: Request) -> None:
        self._computed.pop(request, None)
        self._logits.pop(request, None)
        self._lost.pop(request, None)
