"""One engine and the measurements made on it, within the worker."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from minivllm.bench import observation, profile
from minivllm.bench.cache_probe import undeclared_cache
from minivllm.bench.driver import (
    PROGRESS_INTERVAL_S,
    Drive,
    DriveProgress,
    prime,
    prompt_for,
    require_priming,
    warm_up,
)
from minivllm.bench.engine_hardware import EngineHardware
from minivllm.bench.hardware.clock import Clock, Reading, tick_s
from minivllm.bench.hardware.energy import per_token
from minivllm.bench.hardware.readings import Energy
from minivllm.bench.making import WorkloadMaker, build_target
from minivllm.bench.metrics import validity
from minivllm.bench.metrics.jobs import JobContext, cache_state, job_figures
from minivllm.bench.metrics.price import by_device, cost, remarks
from minivllm.bench.metrics.request_trace import RequestTrace
from minivllm.bench.metrics.rows import Rows, breakdown, recorded_requests
from minivllm.bench.metrics.speculation import (
    SpeculationReport,
    acceptance_notes,
    require_trained,
    speculation,
)
from minivllm.bench.offered_load import OfferedLoad
from minivllm.bench.options import MeasureOptions
from minivllm.bench.quality import Reference
from minivllm.bench.quality_evaluator import QualityEvaluator
from minivllm.bench.records.feature_figures import EncoderFigures
from minivllm.bench.records.identity import quality_alone
from minivllm.bench.records.measurement import SIMULATED, Measurement
from minivllm.bench.records.record import Record
from minivllm.config.compose import build
from minivllm.config.groups import Config
from minivllm.engine.options import SamplingParams
from minivllm.engines.base import BenchEngine, CheckingEngine, SpeculatingEngine
from minivllm.engines.supported_knobs import require_line_sampling
from minivllm.errors import BadInput
from minivllm.models.load.content import content_digest
from minivllm.platform.threads import crowded, pin, thread_count

TELL_S = 0.2  # between two words on how far the loading is


@dataclass(frozen=True)
class SessionResult:
    """What one measurement gave."""

    record: Record  # complete but for provenance, telemetry, and the judgement of the telemetry
    requests: Rows  # of requests.parquet
    steps: Rows  # of steps.parquet
    events: list[bytes]  # of events.jsonl.zst
    # first arrival and last token, monotonic seconds; None: simulated
    window_s: tuple[float, float] | None


class Session:
    """Builds the engine for the first measurement and keeps it for the next ones.

    Args:
        config: the resolved configuration; measurements may differ from it in workload, arrival and
            measure.
        emit: tells the supervisor what goes on.
    """

    def __init__(self, config: dict[str, Any], emit: Callable[..., None]) -> None:
        self.usable = True  # whether another measurement may be made after a failure
        self._config = config
        self._emit = emit
        self._engine: BenchEngine | None = None
        self._rejection: BadInput | None = None
        self._hardware: EngineHardware
        self._notes: list[str] = []
        self._tell_s = 0.0  # when to speak of loading again
        self._cold = True
        self._jumped: str | None = None  # what is wrong with the clocks of the last window
        self._tick_s: float | None = None
        self._has_steps = False  # whether the engine has reported a step
        self._quality = QualityEvaluator(emit)
        self._maker = WorkloadMaker()

    @property
    def engine(self) -> BenchEngine:
        """The engine under test, built when first used.

        Raises:
            BadInput: it cannot be built as configured; the same again for each later measurement.
        """
        if self._rejection is not None:
            raise self._rejection
        if self._engine is None:
            self._emit("loading")
            self.usable = False
            try:
                self._load()
            except BadInput as error:
                self._rejection = error
                self.usable = True
                raise
            self.usable = True
        assert self._engine is not None
        return self._engine

    def _load(self) -> None:
        runtime, parallel = self._config["runtime"], Config.of(self._config).parallel
        if Config.of(self._config).target("engine") != SIMULATED:
            pin(runtime)
            self._notes += crowded(runtime, parallel.replicas * parallel.tensor)
        self._engine = build_target(self._config, self._tell_loading)
        if watched := self._engine.info.watched:
            self._emit("loading", **watched)
        self._digest = content_digest(self._engine.info.weights_from)
        self._notes += undeclared_cache(self._engine, self._engine.info.clock)
        if "torch" in sys.modules:  # for classes of users; where it is not there, it stays so
            sys.modules["torch"].set_num_threads(thread_count(runtime, parallel.tensor))
        import pyarrow.parquet  # noqa: F401  # here, so that its memory is not counted in a measurement

        self._hardware = EngineHardware(self._engine, self._config, self._emit)

    def _tell_loading(self, done: int, total: int) -> None:
        """Pass on how far the weights are, now and then: the display needs no more."""
        if (now := time.monotonic()) >= self._tell_s:
            self._tell_s = now + TELL_S
            self._emit("loading", loaded=done, to_load=total)

    def measure(self, measurement: Measurement) -> SessionResult:
        """Make one measurement.

        Raises:
            BadInput: this workload cannot be run on this engine.
            Exception: whatever the engine raises; `usable` says whether it can go on.
        """
        config = measurement.config
        profile.validate(config)
        observation.validate(config)
        reference = self._quality.find_reference(measurement)  # before the engine is built
        engine = self.engine
        if reference is not None:
            self._quality.require_quality(engine.info, reference, self._check_submit)
        if quality_alone(config):
            return self._measure_quality(measurement, reference)
        load = self._load_of(measurement)
        self._validate_longest(load)
        # Content-addressed: all cells that use it share one file.
        load.workload.save(measurement.path.parent.parent / "workloads")
        self._hardware.probe_once()
        self.usable = False  # from here on the engine holds requests
        first_batch = self._warm_up(load, measurement.settings.measure)
        prime(self.engine, load.workload, load.arrival, load.params, load.seed)
        traces, energy, recorder = self._run(load, measurement.settings.measure)
        self._emit("finishing")
        self._validate_traces(traces)
        steps = engine.steps()
        record = self._account(measurement, load, traces, steps, energy, first_batch)
        if recorder is not None:
            record.events = recorder.recorded(simulated=engine.info.clock is not None)
            record.validity.notes.append(recorder.note)
        drafts = self._drafts()
        rows = recorded_requests(
            traces,
            engine.info.clock is None,
            None if drafts is None else drafts.counters,
            load.until_s(traces),
        )
        start = min(trace.scheduled_s for trace in traces)
        end = max((t.ended_s for t in traces if t.ended_s is not None), default=start)
        window = (start, end)
        engine.reset()
        self._quality.fill(record, engine, reference)
        self._cold, self.usable = False, True
        virtual = engine.info.clock is not None
        events = [] if recorder is None else recorder.lines
        return SessionResult(record, rows, steps, events, None if virtual else window)

    def _load_of(self, measurement: Measurement) -> OfferedLoad:
        config, measure = measurement.config, measurement.settings.measure
        workload = self._maker.make(self.engine, config["workload"], measure.seed)
        require_line_sampling(config, workload)
        require_priming(self.engine, workload)
        arrival, params = build(config["arrival"]), build(config["decoding"])
        return OfferedLoad.of(workload, arrival, params, measure)

    def _warm_up(self, load: OfferedLoad, measure: MeasureOptions) -> float | None:
        """Seconds of the first batch, after which the engine is as empty as before; None where none
        was run."""
        self._emit("warmup")
        setting, info = measure.warmup_requests, self.engine.info
        warmed = 0 if info.clock is not None else None if setting == "auto" else int(setting)
        warm = measure.prefix_cache == "warm"
        if warm:  # every prompt has been seen
            warmed = max(warmed or 0, len(load.workload.openings))
        others = (info.keeps_prefixes or info.warms_with_others) and not warm
        timing = info.clock or Clock(), warmed, load.seed, others
        about = self.engine, load.workload, load.arrival, load.params
        first_batch = self._hardware.warmed_up(partial(warm_up, *about, *timing))
        self._has_steps = self._has_steps or bool(self.engine.steps())
        self.engine.reset()
        gc.collect()
        return first_batch

    def _run(
        self, load: OfferedLoad, measure: MeasureOptions
    ) -> tuple[list[RequestTrace], Energy, observation.EventRecorder | None]:
        """The measured window."""
        clock = self.engine.info.clock
        tick = self._ticker(load)
        if clock is not None:
            gc.disable()  # objects by the million, none of them in a cycle
        try:
            # Made before the window, whose energy the making of a thousand prompts is not.
            drive = Drive(
                self.engine,
                load.workload,
                load.arrival,
                load.params,
                clock or Clock(),
                tick,
                load.seed,
                load.stopping,
            )
            self._emit("measuring", tokens=0, total_tokens=load.most_tokens, elapsed_s=0.0)
            self._tick_s = tick_s() if clock is None else None
            self._hardware.begin_window()
            before = Reading.take()
            with observation.observed(self.engine, measure) as recorder:
                traces = drive.run()
            self._jumped = before.jumped(Reading.take()) if clock is None else None
        finally:
            gc.enable()
        return traces, self._hardware.end_window(), recorder

    def _account(
        self,
        measurement: Measurement,
        load: OfferedLoad,
        traces: list[RequestTrace],
        steps: Rows,
        energy: Energy,
        first_batch: float | None,
    ) -> Record:
        """All that a measured window says, but for quality."""
        measure, info = measurement.settings.measure, self.engine.info
        liveness = self.engine.liveness()
        overlapped = validity.overlap_steps(liveness) > 0
        whole, figures = load.figures(traces, info.max_num_seqs)
        drafts = self._drafts()
        record = self._record(
            measurement,
            workload_hash=load.workload.hash,
            cold=info.cold(first_batch if self._cold else None),
            metrics=figures,
            memory=self._hardware.memory(steps),
            energy=energy,
            roofline=self._hardware.reached(steps, overlapped, whole.duration_s),
            breakdown=breakdown(steps),
            speculation=None if drafts is None else speculation(drafts, steps),
            encoder=EncoderFigures.of(liveness),
            liveness=liveness,
        )
        require_trained(record.speculation, info.weights)
        energy.joules_per_output_token = per_token(energy, whole.output_tokens)
        each, price = self._hardware.each(), vars(measure.price)
        record.cost = cost(price, whole, energy, max(1, len(each)))
        record.devices = by_device(each, figures, whole, price)
        state = cache_state(info.keeps_prefixes, measure.prefix_cache)
        context = JobContext(whole, energy, price, liveness, state, max(1, len(each)))
        record.jobs = job_figures(traces, load.workload, context)
        evidence = validity.Evidence(
            *(traces, load.sent(traces), whole),
            energy=energy,
            roofline=record.roofline,
            liveness=liveness,
            cold=measure.prefix_cache != "warm",
            max_concurrency=load.arrival.max_concurrency,
            stopping=load.stopping,
            steps=steps,
            has_steps=self._has_steps,
            tick_s=self._tick_s,
            jumped=self._jumped,
            writes_text=info.clock is None and info.weights != "random",
        )
        record.validity = validity.check(evidence, load.checks)
        record.validity.notes += [
            *info.warnings,
            *acceptance_notes(record.speculation, info.weights),
            *self._notes,
            *self._hardware.notes,
            *load.notes(traces),
            *remarks(price, energy),
        ]
        return record

    def _drafts(self) -> SpeculationReport | None:
        """What the drafts of the window did; None without speculation."""
        return self.engine.speculation() if isinstance(self.engine, SpeculatingEngine) else None

    def profile(self, measurement: Measurement) -> None:
        """Trace some steps of what was just measured; see `profile.trace`."""
        load = self._load_of(measurement)
        profile.trace(
            *(self.engine, load.workload, load.arrival, load.params, load.seed),
            *(self._hardware.device, measurement.path),
        )

    def _record(self, measurement: Measurement, **fields: Any) -> Record:
        """A record of an ok measurement, with what is known of every one."""
        info = self.engine.info
        return measurement.record(
            "ok",
            weights=info.weights,
            attention_backend=info.attention_backend,
            served_model=info.served_model,
            provenance={"weights_digest": self._digest, "assembler": self._hardware.assembler},
            **fields,
        )

    def _measure_quality(
        self, measurement: Measurement, reference: Reference | None
    ) -> SessionResult:
        """task=quality: a record without a load, without steps, and so without any time."""
        begin, info = time.monotonic(), self.engine.info
        if reference is None:
            raise BadInput(
                f"task=quality needs logits, which engine={info.name} does not give: use "
                "engine=minivllm"
            )
        self.usable = False
        record = self._record(
            measurement,
            cold=info.cold(),
            memory=self._hardware.memory([]),
            energy=Energy(reason="task=quality measures no speed"),
            liveness=self.engine.liveness(),
        )
        record.validity.notes += info.warnings
        self._quality.fill(record, self.engine, reference)
        self._emit("finishing")  # there is no load whose memory would be counted instead
        self._cold, self.usable = False, True
        return SessionResult(record, [], [], [], (begin, time.monotonic()))

    def _validate_longest(self, load: OfferedLoad) -> None:
        """Offer the engine the longest request before any time is spent on the others."""
        longest = max(load.workload.requests, key=lambda request: request.length)
        fitted = replace(load.params, max_tokens=longest.max_tokens, ignore_eos=longest.ignore_eos)
        self._check_submit(longest.request_id, prompt_for(self.engine, longest.stand_in), fitted)

    def _check_submit(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        """Raise BadInput if the engine can never serve the request."""
        if isinstance(self.engine, CheckingEngine):
            self.engine.require_servable(request_id, prompt, params)
            return
        self.usable = False
        try:
            self.engine.submit(request_id, prompt, params)
        finally:
            self.engine.reset()
            self.usable = True

    def _validate_traces(self, traces: Sequence[RequestTrace]) -> None:
        for trace in traces:
            if trace.finish_reason == "refused":
                self.engine.reset()
                self.usable = True
                raise BadInput(f"request {trace.request_id}: {trace.error}")

    def _ticker(self, load: OfferedLoad) -> Callable[[DriveProgress], None]:
        last = 0.0

        def tick(progress: DriveProgress) -> None:
            nonlocal last
            if time.monotonic() - last < PROGRESS_INTERVAL_S and progress.done < progress.total:
                return  # virtual seconds may pass by the thousand
            last = time.monotonic()
            tokens, elapsed_s = progress.output_tokens, progress.elapsed_s
            total = load.tokens_expected(tokens, elapsed_s)
            self._emit("measuring", tokens=tokens, total_tokens=total, elapsed_s=elapsed_s)

        return tick

    def close(self) -> None:
        """Release the engine."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
