"""Recording CUDA graphs, and what stands in the way of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from minivllm.attention.base import AttentionBackend, GraphBackend
from minivllm.cache.spec import CacheLayout
from minivllm.engine.engine import Engine
from minivllm.engine.executor import ModelRunner
from minivllm.engine.options import SamplingParams
from minivllm.errors import BadInput
from minivllm.extras.graphs import Capture, GraphExecutor, why_failed
from minivllm.extras.speculative.proposer import Proposer
from minivllm.extras.speculative.proposers.model_drafts import ModelDrafts
from minivllm.models.config import ModelConfig
from minivllm.models.load.loading import LoadedModel

READ = ["logits", "greedy"]  # kinds of graphs whose logits are read, but where steps are measured


class CudaCapture:
    """Records with torch.cuda.CUDAGraph; all graphs take their memory from one pool.

    What is computed between a replay's inputs and outputs shares that memory with other graphs, and
    so do outputs: they hold until the next replay.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        # One stream for all recordings of this engine alone: cuBLAS keeps a workspace for every
        # stream that it was called on (32 MiB on Hopper), and newer releases of torch free it when
        # any graph that was recorded on the stream goes.
        self.stream = torch.cuda.Stream(device)
        self.num_bytes = 0  # device memory of all of them

    def __call__(
        self, step: Callable[[], tuple[Tensor, ...]]
    ) -> tuple[tuple[Tensor, ...], Callable[[], None]]:
        """The first run compiles kernels and makes workspaces, which must not happen
        while recording."""
        current, graph = torch.cuda.current_stream(self.device), torch.cuda.CUDAGraph()
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                step()
        finally:
            current.wait_stream(self.stream)
        # as recording begins with; what is missing afterwards is the graph's, the driver's part too
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(self.device)[0]
        # A recording that fails leaves its own stream the current one.
        with (
            torch.cuda.stream(current),
            torch.cuda.graph(graph, pool=self.pool, stream=self.stream),
        ):
            outputs = step()
        self.num_bytes += max(0, free - torch.cuda.mem_get_info(self.device)[0])
        return outputs, graph.replay


def unrecordable(
    attention: AttentionBackend, model: nn.Module, config: ModelConfig, layout: CacheLayout
) -> str | None:
    """Why steps of such an engine could not be recorded on any device, or None."""
    if not (isinstance(attention, GraphBackend) and attention.supports_graphs):
        return f"attention={attention.name} lays each step out on the host; use attention=triton"
    if waiting := {type(module).__name__ for module in _limited(model, "waits")}:
        return f"{', '.join(sorted(waiting))} waits for the device within a step"
    if any(rope.depends_on_length for rope in config.ropes):
        return "the model's rope scaling goes by lengths that the host knows"
    if not layout.retains_kv:
        return "cache=none computes whole sequences in every step"
    if layout.eviction is not None and layout.eviction.scored:
        return f"cache.eviction={layout.eviction.name} asks after every step where attention went"
    return None


def _limited(model: nn.Module, in_graphs: str) -> list[nn.Module]:
    """The modules with this limit: "waits" for the device within a step, or "untried" on a GPU."""
    return [one for one in model.modules() if getattr(one, "in_graphs", None) == in_graphs]


def keep_graphs(
    engine: Engine, chosen: bool | str, params: SamplingParams, proposer: Proposer | None = None
) -> None:
    """Let the engine replay graphs, as `runtime.cuda_graphs` has it: true, false, or "auto" where
    it can be done.

    Args:
        engine: loaded.
        chosen: the option.
        params: of the requests that are expected; their graphs are recorded now.
        proposer: attached to the engine; None: nothing drafts.

    Raises:
        BadInput: true, and it cannot be done.
    """
    if chosen is False:
        return
    runner, loaded, layout = engine.runner, engine.loaded, engine.cache.layout
    reason = _obstacle(runner, loaded, layout, chosen)
    if reason is None:
        reason = record_all(engine, CudaCapture(runner.device), params, proposer)
    if reason is None and isinstance(proposer, ModelDrafts):
        reason = _obstacle(proposer.runner, proposer.loaded, layout, chosen)
        reason = reason or record_drafts(engine, params, proposer)
        reason = reason and f"the drafting model: {reason}"
    if reason is not None and chosen is True:
        raise BadInput(
            f"runtime.cuda_graphs=true: {reason}; runtime.cuda_graphs=auto records what it can"
        )
    if reason is not None and runner.device.type == "cuda":
        loaded.warnings.append(f"no CUDA graphs: {reason}")


def _obstacle(
    runner: ModelRunner, loaded: LoadedModel, layout: CacheLayout, chosen: bool | str
) -> str | None:
    """Why steps of a model are not recorded, or None."""
    if runner.device.type != "cuda":
        return f"the device is {runner.device.type}"
    reason = unrecordable(runner.attention, loaded.model, loaded.config, layout)
    if reason is None and chosen == "auto" and _limited(loaded.model, "untried"):
        reason = "no GPU has replayed grouped experts yet; runtime.cuda_graphs=true records them"
    return reason


def record_all(
    engine: Engine, capture: Capture, params: SamplingParams, proposer: Proposer | None = None
) -> str | None:
    """Record the graphs that are needed at start and let the engine replay them; the reason if it
    cannot. With a proposer steps that verify its drafts are recorded, too."""
    queries, kinds_of = 1, {}
    if proposer is not None:
        queries += proposer.options.num_speculative_tokens
        if proposer.options.verify == "rejection":
            kinds_of[queries] = READ
    graphs = GraphExecutor(
        engine.runner,
        engine.launcher.one_by_one,
        engine.cache.layout.block_size,
        engine.scheduler.policy.max_num_seqs,
        engine.max_model_len,
        capture,
        engine.loaded.warnings,
        queries,
    )
    try:
        graphs.capture_all(params, kinds_of)
    except RuntimeError as error:
        return why_failed(error)
    engine.launcher.executor = graphs
    return None


def record_drafts(engine: Engine, params: SamplingParams, proposer: ModelDrafts) -> str | None:
    """Record the steps of a drafting model, beside the engine's graphs, and let the proposer replay
    them; the reason if it cannot.

    A drafting model with a cache of its own computes two tokens for its first draft where all
    drafts of the step before were right: the last one of them, and the one that followed it.
    """
    graphs = engine.launcher.executor
    assert isinstance(graphs, GraphExecutor)
    kinds_of = {2: ["logits"]} if proposer.own_cache else {}
    if proposer.keeps_logits:
        kinds_of[1] = READ
    own = graphs.beside(proposer.runner, 2 if proposer.own_cache else 1)
    try:
        own.capture_all(params, kinds_of)
    except RuntimeError as error:
        return why_failed(error)
    graphs.others.append(own)
    proposer.executor = own
    return None
