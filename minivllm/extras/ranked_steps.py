"""An engine on several ranks: rank 0 plans steps and chooses tokens, and every rank computes its
part of each step.

A packed step is all that a rank needs, so the other ranks have neither requests nor a plan. They
repeat some calls of rank 0: a step of the model, a step of a drafting model, moves of blocks
between tiers, the clearing of blocks, and what goes to another engine or comes from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from minivllm.cache.tiers.transfer import BlockTransfers
from minivllm.engine.batch_inputs import PackedStep
from minivllm.engine.engine import Engine
from minivllm.engine.executor import Executor, ModelRunner, StepResult
from minivllm.extras.graphs import GraphExecutor
from minivllm.extras.speculative.proposer import Proposer
from minivllm.extras.speculative.proposers.model_drafts import ModelDrafts
from minivllm.parallel.ranks import Join, Ranks
from minivllm.parallel.team import Team

MODEL, CLEAR, MOVE, GIVE, TAKE, DRAFT, CLEAR_DRAFT = range(7)  # the calls
BuildPart = Callable[[Join], tuple[Engine, Proposer | None]]


class RankPart:
    """The executor of one rank.

    Args:
        inner: computes the rank's part of a step.
        runner: of that part; it keeps the tokens of the last step.
        ranks: this rank among all.
    """

    def __init__(self, inner: Executor, runner: ModelRunner, ranks: Ranks) -> None:
        self.inner, self.runner, self.ranks = inner, runner, ranks

    def run(self, packed: PackedStep, num_pending: int) -> StepResult:
        """Compute a step; on rank 0 the result has the logits of all ranks.

        Args:
            packed: the step.
            num_pending: tokens of the step before, for which placeholders may stand.
        """
        if packed.has_placeholders:
            self._share_tokens(num_pending)
        result = self.inner.run(packed)
        if result.attention_scores is not None:
            self.ranks.all_reduce(result.attention_scores)  # each rank has those of its heads
        return result

    @torch.inference_mode()
    def _share_tokens(self, count: int) -> None:
        """Give the tokens that rank 0 has chosen to the other ranks."""
        runner = self.runner
        if self.ranks.rank == 0:
            self.ranks.all_reduce(runner.tokens.clone())
        else:
            zeros = torch.zeros(count, dtype=torch.int64, device=runner.device)
            runner.tokens = self.ranks.all_reduce(zeros)


class RankBlocks:
    """A rank's part of the blocks that go to another engine of as many ranks, or come from it.

    Args:
        transfers: of this rank's blocks.
        ranks: this rank among all.
    """

    def __init__(self, transfers: BlockTransfers, ranks: Ranks) -> None:
        self._transfers, self._ranks = transfers, ranks

    def give(self, blocks: Sequence[int]) -> bytes:
        """A copy of blocks with the parts of all ranks; on another rank than 0 its own part."""
        rows = self._transfers.rows(torch.tensor(blocks, dtype=torch.int64))
        device = self._transfers.blocks[0].device  # NCCL gathers there
        return self._ranks.gather(rows.to(device)).cpu().numpy().tobytes()

    def take(self, blocks: Sequence[int], content: bytes) -> None:
        shape = len(blocks), self._ranks.size, self._transfers.row_bytes
        rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(shape)
        self._transfers.fill(torch.tensor(blocks), rows[:, self._ranks.rank])


class LeadingExecutor:
    """The executor of rank 0, which lets all ranks compute each step; see Executor.

    Args:
        part: computes rank 0's own part.
        team: the other ranks.
        number: of the call that they repeat.
    """

    def __init__(self, part: RankPart, team: Team, number: int) -> None:
        self.part, self.team, self._number = part, team, number
        self._chooses = isinstance(part.inner, GraphExecutor)

    @property
    def inner(self) -> Executor:
        """What computes rank 0's own part."""
        return self.part.inner

    def run(self, packed: PackedStep) -> StepResult:
        count = len(self.part.runner.tokens)
        with self.team.together():
            self.team.send("call", self._number, (self._for_others(packed), count))
            return self.part.run(packed, count)

    def _for_others(self, packed: PackedStep) -> PackedStep:
        """The step as other ranks compute it. They choose no tokens, but a CUDA graph is that of
        its kind of choice on every rank, since recording it runs it."""
        sampling = packed.sampling
        keeps = self._chooses and sampling is not None and sampling.adjustment is None
        return packed if keeps else packed._replace(sampling=None)


def build_with_team(
    config: Mapping[str, Any], build_part: BuildPart, team: Team | None
) -> tuple[Engine, Proposer | None]:
    """An engine on several ranks, as rank 0 has it: all ranks build their parts at the same time.

    Args:
        config: the resolved configuration.
        build_part: builds rank 0's part.
        team: the other ranks, which outlive the engine; None starts some, which end with it.

    Raises:
        Crashed: another rank has died.
    """
    ranks = team or Team(config["parallel"]["tensor"])
    try:
        with ranks.together():
            ranks.begin(config)
            engine, drafting = build_part(ranks.join)
            ranks.await_parts()
    except BaseException:
        ranks.close(0.0)
        raise
    lead(engine, drafting, ranks)
    close = engine.transfers.close

    def close_all() -> None:
        close()
        if team is None:
            ranks.close()
        else:
            ranks.send("release")

    engine.transfers.close = close_all  # type: ignore[method-assign]
    return engine, drafting


def facts(engine: Engine) -> dict[str, int]:
    """The memory that a rank's part of an engine takes, in bytes."""
    loaded = engine.loaded
    seeing = 0 if loaded.vision is None else loaded.vision.tower.num_bytes
    return {
        "weights": loaded.weight_bytes + seeing,
        "weights_16bit": loaded.weight_bytes_16bit + seeing,
        "linear": loaded.linear_bytes,
        "linear_16bit": loaded.linear_bytes_16bit,
        "kv_pool": engine.kv.num_bytes,
    }


def lead(engine: Engine, drafting: Proposer | None, team: Team) -> None:
    """Let the other ranks repeat what rank 0 does, once every rank has built its part."""
    parts = _parts(engine, drafting, team.ranks)
    engine.launcher.executor = LeadingExecutor(parts[0], team, MODEL)
    kv, transfers = engine.kv, engine.transfers
    kv.clear = team.repeated(CLEAR, kv.clear)  # type: ignore[method-assign]
    transfers.run = team.repeated(MOVE, transfers.run)  # type: ignore[method-assign]
    part = RankBlocks(transfers, team.ranks)
    transfers.give = team.repeated(GIVE, part.give)  # type: ignore[method-assign]
    transfers.take = team.repeated(TAKE, part.take)  # type: ignore[method-assign]
    transfers.block_bytes *= team.size
    if isinstance(drafting, ModelDrafts):
        drafting.executor = LeadingExecutor(parts[1], team, DRAFT)
        if drafting.own_cache:
            own = drafting.kv
            own.clear = team.repeated(CLEAR_DRAFT, own.clear)  # type: ignore[method-assign]


def follow(
    engine: Engine,
    drafting: Proposer | None,
    ranks: Ranks,
    heard: Iterable[tuple[str, tuple[Any, ...]]],
) -> None:
    """Repeat the calls of rank 0 on another rank, until it says something else."""
    parts = _parts(engine, drafting, ranks)
    part = RankBlocks(engine.transfers, ranks)
    calls: list[Callable[..., Any]] = [parts[0].run, engine.kv.clear, engine.transfers.run]
    calls += [part.give, part.take]
    if isinstance(drafting, ModelDrafts):
        calls += [parts[1].run, *([drafting.kv.clear] if drafting.own_cache else [])]
    for kind, arguments in heard:
        if kind != "call":
            return
        number, given = arguments
        calls[number](*given)


def _parts(engine: Engine, drafting: Proposer | None, ranks: Ranks) -> list[RankPart]:
    """This rank's parts of the model and of a drafting model."""
    parts = [RankPart(engine.launcher.executor, engine.runner, ranks)]
    if isinstance(drafting, ModelDrafts):
        parts.append(RankPart(drafting.executor, drafting.runner, ranks))
    return parts
