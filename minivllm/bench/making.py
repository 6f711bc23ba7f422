"""Making the engine of a configuration, and a workload for it: its tokenizer and chat template turn
text into token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from minivllm.bench.workloads.generator import Generator
from minivllm.bench.workloads.workload import Workload
from minivllm.config.compose import build
from minivllm.engines.base import BenchEngine, SeeingEngine
from minivllm.engines.replicas.replicated import ReplicatedEngine, is_replicated
from minivllm.engines.simulated.cluster import (
    SimulatedCluster,
    is_simulated_cluster,
)
from minivllm.engines.supported_knobs import require_supported
from minivllm.errors import BadInput
from minivllm.models.load.reserved_ids import reserved_ids
from minivllm.models.load.tokenizer import chat_renderer
from minivllm.platform.plug_ins import locate


class WorkloadMaker:
    """Makes workloads for one engine, each once for all measurements in a row that ask for it."""

    def __init__(self) -> None:
        self._made: tuple[str, Workload] | None = None  # the last workload, and what it was made of

    def make(self, engine: BenchEngine, node: dict[str, Any], seed: int) -> Workload:
        """The requests, with text where there is a tokenizer.

        Args:
            engine: to be measured.
            node: the configuration's `workload`.
            seed: of lengths and prompts.

        Raises:
            BadInput: see `Generator.generate`; or there are no requests.
        """
        key = json.dumps([node, seed], sort_keys=True, default=repr)
        if self._made is not None and self._made[0] == key:
            return self._made[1]
        info, generator = engine.info, build(node)
        tokenizer = engine.text([0]) is not None
        # A user's own generator may not take it.
        chat = (
            {
                "render_chat": chat_renderer(getattr(engine, "tokenizer", None)),
                "takes_chat": info.takes_chat,
                "pictures": engine.pictures if isinstance(engine, SeeingEngine) else None,
                "reserved": reserved_ids(
                    getattr(engine, "tokenizer", None), info.eos_token_ids, info.vocab_size
                ),
            }
            if isinstance(generator, Generator)
            else {}
        )
        workload: Workload = generator.generate(
            engine.encode if tokenizer else None,
            info.vocab_size,
            info.max_model_len,
            seed,
            engine.text if tokenizer else None,
            **chat,
        )
        if not len(workload):
            raise BadInput("the workload has no requests: nothing to measure")
        self._made = key, workload
        return workload


def build_target(config: Mapping[str, Any], progress: Callable[[int, int], None]) -> BenchEngine:
    """The engine that `engine` names, or several of them behind a router (`parallel.replicas`).

    Args:
        config: the resolved configuration.
        progress: called with how far the weights are, as (done, total).

    Raises:
        BadInput: it cannot be built as configured, or does not support a knob that is set.
    """
    locate(str(config["engine"]["_target_"]))  # which declares what it supports
    require_supported(config)
    if is_replicated(config):
        return ReplicatedEngine(config, progress)
    if is_simulated_cluster(config):
        return SimulatedCluster(config)
    engine: BenchEngine = build(config["engine"], {"progress": progress}, config=config)
    return engine
