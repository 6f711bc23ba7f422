"""From a resolved configuration to an engine: the one place where the option classes meet.

What only some engines have is imported in the function that gives it to them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from minivllm.attention.base import AttentionBackend
from minivllm.attention.options import AUTO, require_invariant
from minivllm.cache.kv import KVCache, bytes_per_token, kv_cache
from minivllm.cache.manager import CacheManager
from minivllm.cache.spec import CacheDemand, CachePolicy
from minivllm.cache.tiers.transfer import BlockTransfers
from minivllm.config.compose import OPTIONS, build
from minivllm.config.groups import Config
from minivllm.engine.batching import BatchingPolicy
from minivllm.engine.engine import Engine
from minivllm.engine.executor import ModelRunner, sampler_ops
from minivllm.engine.launcher import Launcher
from minivllm.engine.preemption import Preemption
from minivllm.errors import BadInput
from minivllm.extras.extensions import RequestExtras
from minivllm.extras.scheduling.scheduler import make_preemption, make_scheduler
from minivllm.extras.speculative.options import NOT_SPECULATING
from minivllm.extras.vision.options import require_no_vision
from minivllm.fit import (
    require_fit,
    require_memory_for_weights,
    require_one_engine,
    require_shares_fit,
)
from minivllm.kernels.cpu import library
from minivllm.kernels.device import BuildContext, free_memory, select_device, takes_triton
from minivllm.models.load.loading import LoadedModel
from minivllm.models.load.source import resolve
from minivllm.models.load.weights import Progress
from minivllm.parallel.ranks import Join, alone
from minivllm.passes.base import ModelPass, PassContext, apply_passes
from minivllm.passes.order import AFTER_ENGINE, BEFORE_ENGINE, OWN_NAMES, wanted
from minivllm.passes.pruning.options import NOT_PRUNING
from minivllm.platform.plug_ins import make_own
from minivllm.platform.threads import pin, thread_count
from minivllm.quant.base import QuantMethod

if TYPE_CHECKING:
    from minivllm.extras.speculative.proposer import Proposer
    from minivllm.extras.vision.encoder import Encoder
    from minivllm.parallel.team import Team
    from minivllm.passes.pruning.plan import PruningPlan
    from minivllm.passes.shard import Shard

NO_PASS = (
    "no pass: give it a `name` and a method `apply(loaded, context)` that returns a PassReport"
)


def _attention(chosen: dict[str, Any], determinism: str, device: torch.device) -> dict[str, Any]:
    """The attention option; at the level "batch" Triton's kernels in one shape, which `auto` takes
    on a GPU, or plain torch.

    Raises:
        BadInput: another was chosen, see `require_invariant`.
    """
    require_invariant(chosen["_target_"], determinism)
    if determinism != "batch" or chosen["_target_"] != AUTO:
        return chosen
    if takes_triton("attention", "auto", "invariant", device):
        return {"_target_": "minivllm.attention.triton.TritonBackend"}
    return {"_target_": "minivllm.attention.invariant.InvariantBackend"}


def _own_passes(nodes: Sequence[Mapping[str, Any]]) -> list[ModelPass]:
    """The user's own passes, as `runtime.passes` lists them.

    Raises:
        BadInput: one is no pass, does not take its knobs, or is named as one of minivllm's.
    """
    passes = []
    for node in nodes:
        one = make_own("runtime.passes", node, ModelPass, NO_PASS)
        if one.name in OWN_NAMES:
            raise BadInput(
                f"runtime.passes: {node['_target_']} is named {one.name!r}, as a pass of "
                "minivllm's own is: choose another name"
            )
        passes.append(one)
    return passes


def _cache_memory(
    loaded: LoadedModel,
    cache: CachePolicy,
    preemption: Preemption,
    max_num_seqs: int,
    context: BuildContext,
    draft_bytes: int,
    encoder: Encoder | None,
) -> tuple[KVCache, BlockTransfers]:
    """The memory of the KV cache, laid out for the model and so many sequences, where each token
    takes `draft_bytes` beside it for a drafting model. What `encoder` takes is left free.

    Raises:
        BadInput: the cache option cannot serve this model, or not here.
    """
    specs, dtype, rope = loaded.model.attention_specs, loaded.model.dtype, loaded.config.rope
    token_bytes = bytes_per_token(specs, dtype, cache.kv_dtype) + draft_bytes
    reserved = 0 if encoder is None else encoder.most_bytes
    free = context.ranks.least(max(0, free_memory(context.device) - reserved))
    layout = cache.layout(CacheDemand(token_bytes, free, loaded.max_model_len, max_num_seqs))
    if layout.prefix_caching and rope.depends_on_length:
        raise BadInput(
            f"cache.prefix_caching: this model's rope scaling ({rope.kind}) turns keys by the "
            "prompt's length, so prompts of different lengths share nothing; use "
            "cache.prefix_caching=false"
        )
    layout = preemption.fit(layout)
    if layout.eviction is not None:
        layout.eviction.check(spec.window for spec in specs)
    kv = kv_cache(specs, layout, dtype, context.device, cache.kv_dtype)
    return kv, BlockTransfers(kv)


@dataclass(frozen=True)
class _Parts:
    """How the parts of an engine are made that a drafting model needs, too."""

    config: Config
    attention: Mapping[str, Any]
    passes: Sequence[ModelPass]  # before the engine is built
    context: PassContext
    offered: Mapping[str, Any]  # see `build`

    def model(
        self, node: Mapping[str, Any], quant: QuantMethod, pruning: Mapping[str, Any]
    ) -> LoadedModel:
        """A model without what `pruning` leaves out, with the passes applied.

        Raises:
            BadInput: a model class of the user's own is to be pruned; see also `load_model`.
        """
        begin = time.perf_counter()
        plan = self._pruning_plan(node, pruning)
        shard = self._shard(node, plan, quant)
        offered = {**self.offered, "transform": shard or plan}
        loaded: LoadedModel = build(node, offered, quant=quant)
        if shard is not None:
            loaded.config = shard.model
        if plan is not None:
            plan.finish(loaded, time.perf_counter() - begin)
        apply_passes(self.passes, loaded, self.context)
        return loaded

    def _pruning_plan(
        self, node: Mapping[str, Any], pruning: Mapping[str, Any]
    ) -> PruningPlan | None:
        """What is left out of a model; None: nothing. Raises BadInput, see `pruning_plan`."""
        if pruning["_target_"] == NOT_PRUNING:
            return None
        from minivllm.passes.pruning.calibration import pruning_plan

        return pruning_plan(self.config, node, pruning, build_engine)

    def _shard(
        self, node: Mapping[str, Any], plan: PruningPlan | None, quant: QuantMethod
    ) -> Shard | None:
        """The part of a model that this rank loads; None: the whole model.

        Raises:
            BadInput: the ranks cannot share the model.
        """
        ranks = self.context.build.ranks
        if ranks.size == 1:
            return None
        if node["_target_"] not in OPTIONS:
            raise BadInput(
                f"parallel.tensor={ranks.size}: {node['_target_']} is a model class of your own, "
                "which loads itself whole: use parallel.tensor=1"
            )
        from minivllm.passes.shard import Shard
        from minivllm.passes.shard_sizes import require_shares

        source = resolve(dict(node), allow_random=False)[1]
        whole = source.config if plan is None else plan.config
        require_shares(whole, ranks.size, quant, source.is_gguf)
        return Shard(whole, ranks, plan)

    def draft(
        self,
        model: Mapping[str, Any] | None,
        quant: Mapping[str, Any] | None,
        pruning: Mapping[str, Any] | None = None,
    ) -> LoadedModel:
        """A drafting model; what is None is the target's, but a model of its own is whole. One that
        shares the target's keys and values computes in the target's dtype."""
        config = self.config
        whole = {"_target_": NOT_PRUNING} if model is not None else config["pruning"]
        nodes = {
            "model": model or config["model"],
            "quant": quant or config["quant"],
            "pruning": pruning or whole,
        }
        if model is None and pruning is None and "dtype" in config["quant"]:
            nodes["quant"] = {**nodes["quant"], "dtype": config["quant"]["dtype"]}
        require_memory_for_weights(nodes, self.context.device)
        return self.model(nodes["model"], build(nodes["quant"]), nodes["pruning"])

    def backend(self, loaded: LoadedModel, kv: KVCache) -> AttentionBackend:
        """The attention of a model over a cache."""
        specs = loaded.model.attention_specs
        backend: AttentionBackend = build(self.attention, self.offered, specs=specs, kv=kv)
        return backend


def _engine(
    config: Config,
    loaded: LoadedModel,
    policies: tuple[BatchingPolicy, Preemption],
    runner: ModelRunner,
    memory: tuple[KVCache, BlockTransfers],
    encoder: Encoder | None,
) -> Engine:
    """The engine of these parts, before the passes that need it."""
    invariant = config.runtime.determinism == "batch"
    model, tokenizer, (policy, preemption) = loaded.config, loaded.tokenizer, policies
    cache = CacheManager(memory[0].layout, memory[1].disk)
    scheduler = make_scheduler(policy, cache, preemption, restarts_at=model.rope.restarts_at)
    extras = RequestExtras(model.vocab_size, invariant, tokenizer, model.eos_token_ids, encoder)
    scheduler.rules = (*scheduler.rules, *([] if encoder is None else [encoder]))
    return Engine(
        loaded,
        tokenizer,
        scheduler,
        Launcher(runner, scheduler.cache, extras, invariant),
        *memory,
        seed=config.measure.seed if "measure" in config else 0,
        overlap=config.runtime.overlap,
    )


def _settle(config: Config, local_rank: int) -> torch.device:
    """Give this process its cores and threads, its kind of kernels, and its device."""
    ranks = config.parallel.tensor
    device = select_device(config.runtime.device, local_rank, ranks)
    if local_rank == 0:
        require_memory_for_weights(config, device)
    pin(config["runtime"])
    torch.set_num_threads(thread_count(config["runtime"], ranks))
    only = config.runtime.determinism != "off"
    if only or torch.are_deterministic_algorithms_enabled():  # for an engine that may be gone
        from minivllm.passes.determinism import deterministic_kernels

        deterministic_kernels(only)
    return device


def _encoder(
    config: Config, loaded: LoadedModel, policy: BatchingPolicy, cache: CachePolicy
) -> Encoder | None:
    """What computes the images of a model that takes them; None for other models. Raises BadInput,
    see `make_encoder`."""
    if loaded.vision is None:
        require_no_vision(config.vision)
        return None
    from minivllm.extras.vision.encoder import make_encoder

    return make_encoder(config.vision, loaded.vision, loaded.max_model_len, policy, cache)


def _keep_graphs(config: Config, engine: Engine, drafting: Proposer | None) -> None:
    """Let an engine replay CUDA graphs where `runtime.cuda_graphs` and its device have them. Raises
    BadInput, see `keep_graphs`."""
    chosen = config.runtime.cuda_graphs
    if chosen is True or (chosen == "auto" and engine.runner.device.type == "cuda"):
        from minivllm.extras.capture import keep_graphs

        keep_graphs(engine, chosen, build(config["decoding"]), drafting)


def build_part(
    config: Mapping[str, Any],
    join: Join = alone,
    local_rank: int = 0,
    progress: Progress | None = None,
) -> tuple[Engine, Proposer | None]:
    """Load the model, apply the passes and put the engine together; of several ranks each calls
    this for its part.

    Args:
        config: as `minivllm.config.compose.compose()` returns it, or the view of it.
        join: gives this rank among all.
        local_rank: its number among those of this machine.
        progress: called with the progress of the weights, as (done, total), by a model option that
            takes it.

    Returns:
        The engine, and what drafts for it.

    Raises:
        BadInput: an option cannot be used with this model or on this machine.
        MemoryError: see `require_memory_for_weights`.
    """
    config = Config.of(config)
    runtime = config.runtime
    device = _settle(config, local_rank)
    policy = build(config["batching"])
    cache = build(config["cache"])
    attention = _attention(config["attention"], runtime.determinism, device)
    quant = build(config["quant"])
    own = _own_passes(runtime.passes)
    cpu, missing = library.choose("off" if runtime.compile else runtime.cpu_kernels, device)
    invariant = runtime.determinism == "batch"
    context = BuildContext(device, cpu, invariant, runtime.moe, join(device))
    passes = PassContext(context, config["runtime"])
    before, after = wanted(BEFORE_ENGINE, passes), wanted(AFTER_ENGINE, passes)
    offered = {"context": context, "device": device, "progress": progress}
    require_fit(config)
    parts = _Parts(config, attention, [*before, *own], passes, offered)
    loaded = parts.model(config["model"], quant, config["pruning"])
    if missing is not None:
        loaded.warnings.append(missing)
    drafting: Proposer | None = None
    if config.target("speculative") != NOT_SPECULATING:
        drafting = build(config["speculative"])
    draft_bytes = 0 if drafting is None else drafting.load(parts.draft)
    preemption = make_preemption(policy.preemption)
    encoder = _encoder(config, loaded, policy, cache)
    kv, transfers = _cache_memory(
        loaded, cache, preemption, policy.max_num_seqs, context, draft_bytes, encoder
    )
    backend = parts.backend(loaded, kv)
    ops = sampler_ops(loaded.kernels, any(one.name == "fuse" for one in before))
    runner = ModelRunner(loaded.model, backend, device, ops, kv.layout.eviction)
    engine = _engine(config, loaded, (policy, preemption), runner, (kv, transfers), encoder)
    apply_passes(after, loaded, replace(passes, engine=engine))
    if drafting is not None:
        drafting.attach(engine, parts.backend)
    _keep_graphs(config, engine, drafting)
    return engine, drafting


def build_engine(
    config: Mapping[str, Any], progress: Progress | None = None, team: Team | None = None
) -> Engine:
    """An engine, on as many ranks as `parallel.tensor` asks for.

    Args:
        config, progress: see `build_part`.
        team: the other ranks, which serve no engine now and outlive this one; None starts some.

    Raises:
        BadInput, MemoryError: see `build_part`.
        Crashed: another rank has died.
    """
    config = Config.of(config)
    require_one_engine(config)
    if config.parallel.tensor == 1:
        engine, drafting = build_part(config, progress=progress)
    else:
        from minivllm.extras.ranked_steps import build_with_team

        require_shares_fit(config)
        build_own = partial(build_part, config, progress=progress)
        engine, drafting = build_with_team(config, build_own, team)
    if drafting is not None:
        from minivllm.extras.speculative.speculation import speculate

        speculate(engine, drafting)
    return engine
