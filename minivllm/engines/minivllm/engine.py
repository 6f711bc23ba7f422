"""engine=minivllm: this project's engine behind the interface every engine under test has."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.profiler import record_function

from minivllm.assembly import build_engine
from minivllm.attention.base import CountingBackend, LibraryBackend
from minivllm.bench.metrics.speculation import SpeculationReport
from minivllm.config.groups import Config
from minivllm.engine.engine import Engine
from minivllm.engine.events import StateChanged, StepTimed
from minivllm.engine.options import SamplingParams
from minivllm.engine.request import RequestState
from minivllm.engines.base import Adapter, EngineInfo, EngineOutput
from minivllm.engines.engine_pictures import EnginePictures, TakesImages
from minivllm.engines.minivllm.liveness import (
    Counters,
    draft_counters,
    pass_counters,
    pruning_counters,
    scheduling_counters,
    since,
)
from minivllm.engines.minivllm.rank_use import RankUse
from minivllm.errors import BadInput
from minivllm.extras.cached_blocks import put_prefix, take_prefix
from minivllm.extras.extensions import RequestExtras
from minivllm.extras.graphs import GraphExecutor
from minivllm.extras.observation.bundle import StepBundle
from minivllm.extras.observation.observer import StepObserver
from minivllm.extras.ranked_steps import LeadingExecutor
from minivllm.extras.scoring import sequence_logits
from minivllm.extras.speculative.speculation import Speculator
from minivllm.extras.vision.encoder import Encoder
from minivllm.extras.vision.pictures import Pictures
from minivllm.models.costs import model_costs
from minivllm.models.load.weights import Progress
from minivllm.models.vision.inputs import RequestInputs
from minivllm.parallel.handover import Content
from minivllm.passes.base import linear_layers
from minivllm.passes.compile import CompileLayers
from minivllm.passes.determinism import close_engine
from minivllm.passes.order import OWN_NAMES
from minivllm.quant.base import kernel_name, matrix_dtype


class MinivllmEngine(TakesImages, Adapter):
    """Adapter of `Engine` to `BenchEngine`; listens to its events for step records and first steps.

    Args:
        config: the resolved configuration; the engine is built from its groups.
        progress: called with how far the weights are, as (done, total).

    Raises:
        BadInput: an option cannot serve this model here, or asks for several samples a request.
        MemoryError: a host cannot hold the weights.
    """

    def __init__(self, config: Mapping[str, Any], progress: Progress | None = None) -> None:
        view = Config.of(config)
        decoding: SamplingParams = view.decoding
        if decoding.n > 1 and decoding.beam_width == 1:
            raise BadInput(
                f"decoding.n={decoding.n}: a benchmark counts one completion a request; use "
                "decoding.n=1 and more requests"
            )
        begin = time.monotonic()
        self.engine: Engine = build_engine(view, progress)
        self.tokenizer = self.engine.tokenizer
        vision = self.engine.loaded.vision
        self.processor = None if vision is None else vision.processor
        self.pictures = EnginePictures.of(Pictures(self.processor, self.tokenizer, view.vision))
        self._keep_prefixes = view.measure.prefix_cache == "warm"
        self._steps: list[StepTimed] = []
        self._started: dict[str, float | None] = {}  # until it is reported
        self._ranks = RankUse(self.engine, view["runtime"])
        self._collective_ms: list[float | None] = []  # of each step
        self.engine.events.subscribe(self._note_step, StepTimed)
        self.engine.events.subscribe(self._note_start, StateChanged)
        self._base = self._counters()
        kinds = Counter(map(kernel_name, linear_layers(self.engine.loaded)))
        self._kernels = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        self.info = self._describe(time.monotonic() - begin)

    def _describe(self, load_s: float) -> EngineInfo:
        engine, loaded = self.engine, self.engine.loaded
        config, dtype = loaded.model.config, loaded.model.dtype  # of several ranks: of its part
        # Parameters that no forward pass reads: the embedding's, unless it is the head as well.
        idle = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
        narrow = map(matrix_dtype, linear_layers(loaded))
        return EngineInfo(
            name="minivllm",
            weights=loaded.weights,
            fingerprint=loaded.fingerprint,
            weights_from=loaded.folder,
            vocab_size=loaded.config.vocab_size,
            max_model_len=engine.max_model_len,
            eos_token_ids=config.eos_token_ids,
            max_num_seqs=engine.scheduler.policy.max_num_seqs,
            load_s=load_s - (self._compile_s() or 0.0),
            memory={**self._ranks.memory},
            model=model_costs(
                vars(config),
                loaded.weight_bytes_16bit // 2 - idle,
                loaded.weight_bytes - loaded.lookup_bytes,
                str(dtype).removeprefix("torch."),
                self._ranks.devices,
                loaded.model.expert_bytes,
                engine.kv.bytes_per_token,
                config.windows,
                trims=engine.loaded.model.trims,
                matrix_dtype=next(filter(None, narrow), None),
            ),
            compile_s=self._compile_s(),
            packed_weights=loaded.packed_cache,
            packed_write_s=loaded.packed_write_s,
            attention_backend=engine.runner.attention.name,
            warnings=loaded.warnings,  # not a copy: serving may add to them
        )

    @property
    def _graphs(self) -> GraphExecutor | None:
        executor = self.engine.launcher.executor
        if isinstance(executor, LeadingExecutor):
            executor = executor.inner
        return executor if isinstance(executor, GraphExecutor) else None

    @property
    def _speculator(self) -> Speculator | None:
        speculation = self.engine.launcher.speculation
        return speculation if isinstance(speculation, Speculator) else None

    @property
    def _encoder(self) -> Encoder | None:
        extensions = self.engine.launcher.extensions
        return extensions.encoder if isinstance(extensions, RequestExtras) else None

    def _compile_s(self) -> float | None:
        """Seconds of compiling kernels and layers and of recording graphs; None where there are
        none of these."""
        kernels, graphs = self.engine.loaded.kernels, self._graphs
        times = [kernels.compile_s] if kernels is not None else []
        times += [graphs.capture_s] if graphs is not None else []
        times += [
            report.seconds
            for report in self.engine.loaded.passes
            if report.name == CompileLayers.name
        ]
        return sum(times) if times else None

    def _note_step(self, event: StepTimed) -> None:
        self._steps.append(event)
        self._collective_ms.append(self._ranks.take_ms())

    def _note_start(self, event: StateChanged) -> None:
        if event.state is RequestState.PREFILL:
            self._started.setdefault(event.request.request_id, event.time_s)

    def submit(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        inputs: RequestInputs | None = None,
    ) -> None:
        """See BenchEngine. `inputs` are images that another process has put into the prompt."""
        if inputs is None and self.pictures is not None:
            inputs = self.pictures.take(request_id, prompt_token_ids)
        self.engine.add_request(request_id, prompt_token_ids, params, False, inputs)

    def poll(self, timeout_s: float | None = None) -> list[EngineOutput]:
        """One step; see BenchEngine."""
        outputs = []
        for output in self.engine.step(math.inf if timeout_s is None else timeout_s):
            request = output.request
            token_ids = () if output.token_id is None else (output.token_id,)
            started = self._started.get(request.request_id)
            # reported once, even if it is preempted and starts again
            self._started[request.request_id] = None
            if output.finish_reason is not None:
                del self._started[request.request_id]
            outputs.append(
                EngineOutput(
                    request.request_id,
                    token_ids,
                    output.finish_reason,
                    started,
                    None if request.error is None else str(request.error),
                    cached_tokens=request.cache.num_reused,
                )
            )
        return outputs

    def take_prefix(self, token_ids: list[int]) -> bytes:
        """The keys and values of a prompt, for another engine of the same configuration."""
        return take_prefix(self.engine.cache, self.engine.transfers, token_ids)

    def put_prefix(self, token_ids: list[int], content: Content) -> None:
        """Take the keys and values of a prompt that another engine has computed."""
        put_prefix(self.engine.cache, self.engine.transfers, token_ids, content)

    def reset(self) -> None:
        self.engine.abort_all()
        if not self._keep_prefixes:
            self.engine.cache.reset_prefix_cache()
            if self._encoder is not None and self.pictures is not None:
                self._encoder.clear()
                self.pictures.reset()
        self.recount()

    def recount(self) -> None:
        self.engine.abort_all()
        if self._speculator is not None:
            self._speculator.reset()
        self._steps.clear()
        self._collective_ms.clear()
        self._ranks.take_ms()
        self._started.clear()
        self._base = self._counters()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def steps(self) -> list[dict[str, Any]]:
        rows = [step._asdict() for step in self._steps]
        if self._ranks.size > 1:
            for row, ms in zip(rows, self._collective_ms, strict=True):
                row["collective_ms"] = ms
        return rows

    def speculation(self) -> SpeculationReport | None:
        if (speculator := self._speculator) is None:
            return None
        proposer = speculator.proposer
        name = proposer.name or type(proposer).__name__
        return SpeculationReport(name, proposer.options, speculator.counters)

    def _counters(self) -> Counters:
        counters = scheduling_counters(self.engine.scheduler, self.engine.cache)
        launcher = self.engine.launcher
        counts = {**vars(launcher.counters), **launcher.extensions.counters()}
        decoding = {name: float(count) for name, count in counts.items()}
        backend = self.engine.runner.attention
        launches = backend.counters if isinstance(backend, CountingBackend) else {}
        attention = {name: float(count) for name, count in launches.items()}
        overlap = self.engine.overlap
        runtime = {
            "rows_trimmed": float(self.engine.runner.rows_trimmed),
            "overlap_steps": float(overlap.steps),
            "overlap_wasted_tokens": float(overlap.wasted_tokens),
        }
        graphs = self._graphs
        replays = {} if graphs is None else graphs.counters
        runtime |= {
            name: float(replays.get(name, 0)) for name in ("graph_replays", "graph_captures")
        }
        encoder = self._encoder
        vision = {"vision": encoder.counts()} if encoder is not None else {}
        groups = {"decoding": decoding, "attention": attention, "runtime": runtime}
        return {**counters, **groups, **vision, "parallel": self._ranks.counters()}

    def liveness(self) -> dict[str, dict[str, float | str]]:
        loaded, kv, attention = self.engine.loaded, self.engine.kv, self.engine.runner.attention
        library = {"library": attention.library} if isinstance(attention, LibraryBackend) else {}
        graphs = self._graphs
        counts = since(self._base, self._counters())
        batches = [step.num_requests for step in self._steps]
        model: dict[str, float | str] = {}
        parallel: dict[str, float | str] = {
            "ranks": float(self._ranks.size),
            "placed_at": self._ranks.placed_at,
            **counts["parallel"],
        }
        if loaded.config.num_experts:
            model["experts_run"] = float(sum(step.experts_run for step in self._steps))
        if loaded.stored_bytes:
            model["stored"] = ", ".join(f"{k} {v} bytes" for k, v in loaded.stored_bytes.items())
            model["stored_bytes"] = float(sum(loaded.stored_bytes.values()))
        return {
            **({"model": model} if model else {}),
            **({"parallel": parallel} if self._ranks.size > 1 else {}),
            "quant": {
                "kernels": self._kernels,
                "dtype": str(loaded.model.dtype).removeprefix("torch."),
                "layers_quantised": float(loaded.quantized_layers),
                "linear_bytes": float(loaded.linear_bytes),
            },
            **pruning_counters(loaded.passes, loaded.linear_bytes, loaded.linear_bytes_16bit // 2),
            "attention": {"kernel": attention.name, **library, **counts["attention"]},
            "runtime": {
                "cpu_kernels": "off" if loaded.kernels is None else "on",
                **pass_counters(loaded.passes, OWN_NAMES, bool(loaded.config.num_experts)),
                **counts["runtime"],
                "graph_bytes": float(graphs.num_bytes) if graphs is not None else 0.0,
            },
            "batching": {**counts["batching"], "largest_batch": float(max(batches, default=0))},
            "decoding": {**counts["decoding"]},
            "speculative": draft_counters(self._speculator),
            **({"vision": {**counts["vision"]}} if "vision" in counts else {}),
            "cache": {
                **counts["cache"],
                "block_size": float(self.engine.cache.layout.block_size),
                "kv_dtype": kv.kv_dtype if kv.compressed else str(kv.dtype).removeprefix("torch."),
                "kv_bytes_per_token": float(kv.bytes_per_token),
            },
        }

    def logits(self, token_ids: list[int]) -> NDArray[np.float32]:
        return sequence_logits(self.engine, token_ids).cpu().numpy()

    def observe(self, sink: Callable[[StepBundle], None]) -> StepObserver:
        return StepObserver(self.engine.scheduler, sink)

    def phases(self) -> AbstractContextManager[None]:
        return phase_ranges(self.engine)

    def close(self) -> None:
        if engine := self.__dict__.pop("engine", None):
            close_engine(engine)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class _Ranges:
    """One open range at a time."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._name = ""

    def mark(self, phase: str) -> float:
        """Let the range of this phase begin, and the one before end; see `phase_begins`."""
        if phase != self._name:
            self._open.close()
            self._name = phase
            if phase:
                self._open.enter_context(record_function(phase))
        return time.perf_counter()


@contextmanager
def phase_ranges(engine: Engine) -> Iterator[None]:
    """While it is open, a step is the ranges schedule, prepare, forward, sample and emit, one after
    the other.

    They begin where the engine takes the times of its breakdown. With `runtime.overlap` the first
    step of all reads no tokens, so its `sample` goes on to its end; the last one computes nothing,
    so it has no `prepare` and `forward`.
    """
    ranges, usual = _Ranges(), engine.runner.mark
    engine.runner.mark = ranges.mark
    try:
        yield
    finally:
        engine.runner.mark = usual
        ranges.mark("")
