"""Quality within a session: after the measured window, once for all repeats, and never a surprise
at its end."""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable

from minivllm.bench import quality_reference
from minivllm.bench.quality import Reference, evaluate
from minivllm.bench.records.feature_figures import Quality
from minivllm.bench.records.identity import quality_wanted
from minivllm.bench.records.measurement import Measurement
from minivllm.bench.records.record import Record
from minivllm.config.groups import Config
from minivllm.engine.options import SamplingParams
from minivllm.engines.base import BenchEngine, EngineInfo, LogitsEngine
from minivllm.errors import BadInput
from minivllm.platform.plug_ins import locate

SubmitCheck = Callable[[str, list[int], SamplingParams], None]


class QualityEvaluator:
    """Fills in the quality of a session's records.

    Args:
        emit: tells the supervisor what goes on.
    """

    def __init__(self, emit: Callable[..., None]) -> None:
        self._emit = emit
        # by reference: an engine's quality is the same at every repeat
        self._known: dict[str, Quality] = {}

    def find_reference(self, measurement: Measurement) -> Reference | None:
        """What quality is compared with; None where none is wanted or the engine gives no logits.

        To be called before the engine is built: the reference may have to be computed, and two
        models might not fit the memory together.

        Raises:
            BadInput, MemoryError, RuntimeError: see `reference.ensure`.
        """
        config = measurement.config
        if not quality_wanted(config) or not hasattr(
            locate(Config.of(config).target("engine")), "logits"
        ):
            return None
        root = measurement.path.parent.parent
        return quality_reference.ensure(config, root, lambda: self._emit("reference"))

    @staticmethod
    def require_quality(info: EngineInfo, reference: Reference, check_submit: SubmitCheck) -> None:
        """Raise BadInput, before anything is measured, if quality cannot be measured afterwards.

        Args:
            info: of the engine.
            reference: what it will be compared with.
            check_submit: raises BadInput for a request that can never be served.
        """
        quality_reference.require_trained_weights(info.weights)
        try:
            check_submit(
                "quality", reference.token_ids[: reference.window - 1], SamplingParams(max_tokens=1)
            )
        except BadInput as error:
            raise BadInput(f"quality.window={reference.window}: {error}") from error

    def fill(self, record: Record, engine: BenchEngine, reference: Reference | None) -> None:
        """Measure, when all else has been measured and taken down; the engine is at rest before and
        after."""
        if not quality_wanted(record.config):
            return
        if reference is None or not isinstance(engine, LogitsEngine):
            record.validity.notes.append(
                f"engine={engine.info.name} gives no logits: quality was not measured"
            )
            return
        if reference.id not in self._known:
            self._known[reference.id] = self._evaluate(engine, reference)
        record.quality = self._known[reference.id]
        if not math.isfinite(record.quality.perplexity or math.nan):
            record.validity.ok = False
            record.validity.reasons.append(
                "the engine's logits are not finite, so neither is its perplexity"
            )

    def _evaluate(self, engine: LogitsEngine, reference: Reference) -> Quality:
        began = time.monotonic()

        def tick(done: int, total: int) -> None:
            self._emit(
                "quality", tokens=done, total_tokens=total, elapsed_s=time.monotonic() - began
            )

        self._emit("quality")
        quality = evaluate(engine, reference, tick)
        engine.reset()
        gc.collect()
        if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # the peaks of a later measurement are its own
        return quality
