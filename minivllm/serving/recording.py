"""The record of what a server served, as a benchmark writes it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from minivllm.bench.hardware.gpu import device_of, open_gpu
from minivllm.bench.hardware.readings import Energy
from minivllm.bench.hardware.telemetry import Telemetry
from minivllm.bench.metrics import metrics
from minivllm.bench.metrics.objectives import unknown_objective
from minivllm.bench.metrics.price import cost
from minivllm.bench.metrics.request_trace import RequestTrace
from minivllm.bench.metrics.rows import recorded_requests
from minivllm.bench.records import identity, storage
from minivllm.bench.records.figures import Cold, Memory
from minivllm.bench.records.lock import run_folder
from minivllm.bench.records.provenance import provenance
from minivllm.bench.records.record import Validity
from minivllm.config.groups import Config
from minivllm.errors import BadInput
from minivllm.experiments.ending import conclude, require_writable_reports
from minivllm.models.load.source import Source
from minivllm.processes.messages import Step
from minivllm.serving.processes.engine_client import EngineClient
from minivllm.serving.processes.token_stream import TokenStream
from minivllm.serving.service import EngineService

MOST_REQUESTS = 200_000  # that a record has; later ones are counted
MOST_TOKENS = 20_000_000
LEAST_INTERVAL_S = 1.0  # between two samples of telemetry: a server runs for days
SERVED = "minivllm.bench.workloads.served.Served"


class Recorder:
    """Traces every request that the engine gets, and writes the record at the end.

    Args:
        config: the resolved configuration.
        source: of the model.

    Raises:
        BadInput: the record's workload would be that of a benchmark, or there is no place for it.
    """

    def __init__(self, config: dict[str, Any], source: Source) -> None:
        # What the user has set of `decoding` is no setting that two records could differ in.
        config = {name: value for name, value in config.items() if name != "decoding_given"}
        self._config, self._source, self._view = config, source, Config.of(config)
        if self._view.target("workload") != SERVED:
            raise BadInput("task.record=true records what clients ask: add workload=served")
        require_writable_reports(config)
        self._facts = provenance(config, identity.code_hash())
        self._traces: dict[tuple[str, int], RequestTrace] = {}
        self._num_tokens = 0
        self._num_left_out = 0

    def attach(self, client: EngineClient, load_s: float) -> None:
        """Begin to trace what `client` serves, whose engine took `load_s` seconds to load."""
        self._client, self._load_s, self._begin_s = client, load_s, time.monotonic()
        gpu = open_gpu(device_of(self._config))
        interval = max(self._view.measure.telemetry_interval_s, LEAST_INTERVAL_S)
        first, *others = client.replicas.pids or [os.getpid()]
        self._telemetry = Telemetry(first, gpu, interval)
        self._telemetry.adopt(others)
        self._telemetry.start()
        self._telemetry.phase = "measuring"
        client.submitted.append(self._note_request)
        client.listeners.append(self._note_step)

    def _note_request(self, stream: TokenStream) -> None:
        if len(self._traces) >= MOST_REQUESTS or self._num_tokens >= MOST_TOKENS:
            self._num_left_out += 1
            return
        for completion in range(stream.num_completions):
            self._traces[stream.request_id, completion] = RequestTrace(
                f"{stream.request_id}.{completion}",
                stream.num_prompt_tokens,
                stream.arrived_s,
                stream.arrived_s,
            )

    def _note_step(self, step: Step) -> None:
        for request_id, time_s in step.begun:
            completion = 0
            while (trace := self._traces.get((request_id, completion))) is not None:
                trace.started_s = time_s
                completion += 1
        for piece in step.pieces:
            trace = self._traces.get((piece.request_id, piece.completion))
            if trace is None:
                continue
            if piece.token_id is not None:
                self._num_tokens += 1
                trace.token_ids.append(piece.token_id)
                trace.token_times.append(step.time_s)
            if piece.finish_reason is not None:
                trace.finish_reason, trace.finished_s = piece.finish_reason, step.time_s
                trace.error = piece.error

    def write(self, service: EngineService) -> Path | None:
        """Write the record and its report; its folder, or None where nothing was served."""
        self._telemetry.stop()
        rows = self._telemetry.rows(self._begin_s)
        traces = list(self._traces.values())
        for trace in traces:
            trace.finish_reason = trace.finish_reason or "abort"
        if not any(trace.completed for trace in traces):
            print("nothing was served: there is no record", file=sys.stderr)
            return None
        view, root = self._view, Path(self._view.runs_dir)
        with run_folder(root, view.name) as name:
            arm = identity.cell_name(self._config)
            (measurement,) = identity.expand(
                self._config, name, arm, root, self._source.fingerprint, blocks=1
            )
            record = measurement.record("ok", **self._fields(service, traces, rows))
            storage.prepare(measurement.path, self._config)
            storage.write_record(measurement.path, record, recorded_requests(traces), [], rows)
            conclude(root / name, Path(view.reports_dir) / name, self._config)
        return measurement.path

    def _fields(
        self, service: EngineService, traces: list[RequestTrace], rows: list[dict[str, Any]]
    ) -> dict[str, Any]:
        measure, info = self._view.measure, service.info
        figures = metrics.compute(traces, vars(measure.slo), info.max_num_seqs)
        notes = [
            *info.warnings,
            *unknown_objective(traces, vars(measure.slo)),
            "served traffic: prompts and arrivals are those of clients; TTFT begins where the "
            "server has the prompt's tokens, and ends where the engine has the first one",
        ]
        for count, what in (
            (service.counts["requests_refused"], "requests were refused: the queue was full"),
            (self._num_left_out, "later requests are not in the record, which has its limit"),
        ):
            notes += [f"{count} {what}"] if count else []
        client = service.client
        routing: dict[str, Any] = client.routing.report()
        peaks = [row["rss"] for row in rows if row.get("rss")]
        return {
            "weights": self._source.weights,
            "provenance": self._facts,
            "cold": Cold(load_s=self._load_s),
            "metrics": figures,
            "memory": Memory(host_rss_peak=max(peaks, default=None)),
            "cost": cost(vars(measure.price), figures, Energy()),
            "liveness": {
                "served": dict(client.replicas.counters),
                **({"parallel": routing} if routing["replicas"] > 1 else {}),
            },
            "validity": Validity(notes=notes),
        }
