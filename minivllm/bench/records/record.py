"""record.json: the typed source of its schema. One record is one measurement of one cell."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypedDict

from minivllm.bench.hardware.readings import Energy, Roofline
from minivllm.bench.records.feature_figures import (
    EncoderFigures,
    JobFigures,
    Quality,
    SpeculationFigures,
)
from minivllm.bench.records.figures import Breakdown, Cold, Cost, Devices, Memory, Metrics
from minivllm.redaction import shown

SCHEMA_VERSION = 2
KERNELS_VERSION = 1  # of kernels.json, which is no Record
STATUSES = ("ok", "oom", "error", "timeout", "crashed", "invalid")
# Why a record of a server that runs already has no memory.
SERVERS_MEMORY = "the server's memory is not known; that of the process that asks it is not its"
DESIGNS = ("leave_one_out", "add_one_in", "pairs", "factorial")
# Annotations say more of a type than Python's own can: texts to choose from, or the fields of an
# object; schema.py reads them.


class RecordedMeasure(TypedDict, total=False):
    """Those settings of a measurement whose types the readers go by."""

    repeats: int | None
    seed: int | None
    slo: dict[str, float | None] | None
    timeout_s: float | None


class RecordedWorkload(TypedDict, total=False):
    """Those knobs of a workload whose types the readers go by."""

    num_requests: int | None


class RecordedConfig(TypedDict, total=False):
    """Those parts of a resolved configuration whose types the readers go by."""

    choices: dict[str, str | None]
    model: dict[str, Any]
    quant: dict[str, Any]
    cache: dict[str, Any]
    engine: dict[str, Any]
    runtime: dict[str, Any]
    workload: RecordedWorkload
    arrival: dict[str, Any]
    measure: RecordedMeasure
    task: dict[str, Any]


class Device(TypedDict, total=False):
    """Those facts about the device whose types the readers go by."""

    name: str | None
    kind: str | None


class Provenance(TypedDict, total=False):
    """Facts about the code, the command and the machine."""

    git_sha: str | None
    """Commit of a source checkout."""
    dirty_hash: str | None
    """Hash of uncommitted changes."""
    code_hash: str | None
    """Hash of the package's Python and C++ sources."""
    command: str | None
    """The whole command line, including the interpreter; for a sweep the sweep's; where submitit or
    Ray runs the jobs, the job's."""
    packages: dict[str, str | None]
    """Versions by name; null where one is absent."""
    peer_packages: dict[str, str | None] | None
    """The same for `engine.python`, the interpreter of a peer."""
    device: Device
    """Name, and for a GPU its UUID, driver, memory, power limit and maximum clocks."""
    driver: str | None
    """GPU driver."""
    clocks: dict[str, float | None]
    """`cpu_mhz` at the start; `cpu_max_mhz`, the maximum of any core, and those of the GPU: null
    where the system does not report them."""
    power_limit: float | None
    """Power limit of the device, in watts."""
    cpu: dict[str, Any]
    """Model, cores, memory, relevant instruction sets."""
    threads: int | None
    """Threads of the worker."""
    seed: int | None
    """`measure.seed`."""
    weights_digest: str | None
    """XXH3 over all bytes of the weight files; null for random weights and for a server that
    somebody else started."""
    assembler: str | None
    """Release of ptxas; null without Triton's kernels."""
    started_at: str | None
    """UTC, so that the text sorts: `2026-01-31T12:00:00+0000`."""
    host: str | None
    """Name of the machine."""


@dataclass
class RecordedEvents:
    """What events.jsonl.zst beside the record holds."""

    bundles: int
    """Lines of the file: one per step, and some between steps."""
    left_out: int = 0
    """Later ones that exceeded `measure.events_mb`."""
    unix_s: float | None = None
    """Unix time at which the clock of the file's times was 0; null for a simulation."""


@dataclass
class Validity:
    """Whether the measurement may be quoted, and why not."""

    ok: bool = True
    """False makes the status `invalid`."""
    reasons: list[str] = field(default_factory=list)
    """One sentence each, with numbers."""
    notes: list[str] = field(default_factory=list)
    """Remarks that leave the record valid."""
    cpu_taken: float | None = None
    """Share of the processor time of the run's cores that other processes took, 0 to 1."""


@dataclass
class Failure:
    """What went wrong in a cell that did not end well."""

    type: str = ""
    """Name of the exception or signal; `Invalid` for failed validity checks."""
    message: str = ""
    """One line."""
    log_tail: str = ""
    """The last 30 lines of `run.log`, at most 8,000 characters."""


@dataclass
class Ablation:
    """Where a measurement stands in an ablation; all that the analysis needs besides the
    figures."""

    design: Annotated[str, DESIGNS]
    """`leave_one_out`, `add_one_in`, `pairs` or `factorial`."""
    metric: str
    """The metric of the verdicts, a field below `metrics`."""
    optimisations: list[str]
    """All of the ablation, in order."""
    requires: dict[str, list[str]]
    """The required optimisations of each optimisation that has some."""
    on: list[str]
    """The optimisations of this arm."""
    order: int = 0
    """Of the arm within its block, which is shuffled, from 0."""
    seed: int = 0
    """Of the shuffling."""
    lossless: list[str] = field(default_factory=list)
    """The optimisations declared to change no output."""
    named: bool = False
    """Whether the command named the metric; else the records determine the ranking metric."""


@dataclass
class Record:
    """One measurement: one cell, one block."""

    run_id: str
    """Identity of this measurement."""
    cell_id: str
    """Identity of the cell."""
    sweep: str
    """The folder under `runs/`."""
    arm: str
    """The cell's name within its sweep, such as `quant=nf4 batching=continuous`."""
    block: int
    """Number of the repeat, from 0."""
    status: Annotated[str, STATUSES]
    """How the measurement ended."""
    config: Annotated[dict[str, Any], RecordedConfig]
    """The resolved configuration, with the names of the options in `choices`; of a model's folder,
    the name alone."""
    position: int = 0
    """Of the arm within its sweep: the report keeps this order, and the first arm is the
    baseline."""
    ablation: Ablation | None = None
    """Its place in an ablation."""
    workload_hash: str | None = None
    """Of every request's token ids, length and `ignore_eos`; names the file in
    `runs/workloads/`."""
    weights: str | None = None
    """`checkpoint` or `random`."""
    attention_backend: str | None = None
    """The backend that ran, also with `attention=auto`."""
    served_model: str | None = None
    """A server's name of what it serves, where only the server knows (`engine=openai`); stands for
    the option of `model` in rows, labels and titles."""
    supported: list[str] | None = None
    """Settings of the configuration that the engine supports: an option ("quant"), a knob
    ("quant.dtype"), every knob of a group ("batching.*"). The other settings of its groups are at
    their defaults and say nothing of it: `load_records`, pages and trackers leave them out. null:
    all."""
    schema_version: int = SCHEMA_VERSION
    """Of this schema: 2."""
    error: Failure | None = None
    """Null without an error."""
    provenance: Annotated[dict[str, Any], Provenance] = field(default_factory=dict)
    """Code, machine and command, as in Provenance; empty where no machine was involved."""
    cold: Cold = field(default_factory=Cold)
    """One-time costs."""
    metrics: Metrics = field(default_factory=Metrics)
    """Latency and throughput."""
    memory: Memory = field(default_factory=Memory)
    """Bytes."""
    energy: Energy = field(default_factory=Energy)
    """Of the measured window."""
    cost: Cost = field(default_factory=Cost)
    """From `measure.price`."""
    devices: Devices | None = None
    """Of several devices; missing where there is one."""
    roofline: Roofline = field(default_factory=Roofline)
    """Use of the limits measured at the start."""
    breakdown: Breakdown = field(default_factory=Breakdown)
    """Time of each part of a step."""
    speculation: SpeculationFigures | None = None
    """What drafts did; null without speculation, and for engines that do not report it."""
    encoder: EncoderFigures | None = None
    """Images of prompts; null where there were none, and for engines that do not report them."""
    jobs: JobFigures | None = None
    """The sessions of `workload=agentic`; null for other workloads."""
    quality: Quality | None = None
    """Null where it was not requested, or the engine has no logits (a note says so)."""
    liveness: dict[str, dict[str, float | str]] = field(default_factory=dict)
    """Counters of each knob's own work by group, such as `liveness.quant.layers_quantised`."""
    validity: Validity = field(default_factory=Validity)
    """Whether the measurement may be quoted."""
    events: RecordedEvents | None = None
    """With `measure.events=true`: what `events.jsonl.zst` holds."""
    digests: dict[str, str] | None = None
    """SHA-256 of each table (and the events) beside it, by file name; null for a record of schema
    1."""
    slimmed: list[str] | None = None
    """Tables that an archive leaves out; null for a record in its folder."""

    def __post_init__(self) -> None:
        self.config = portable(self.config)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dictionary, ready for JSON."""
        plain = asdict(self)
        if self.devices is None:
            del plain["devices"]
        return plain


def portable(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration as it is stored: without secrets, and with files and folders by their
    names.

    Where those lie says nothing on another machine: what is in a model's folder is known by the
    fingerprint within `cell_id`, a text's content by `reference_id`.
    """
    config = shown(config)
    places = (("model", ("path", "weights")), ("quality", ("text",)), ("engine", ("python",)))
    for group, keys in places:
        node = config.get(group)
        if not isinstance(node, dict):
            continue
        named = {
            key: Path(node[key]).name
            for key in keys
            if isinstance(node.get(key), str) and node[key].startswith(("/", "~"))
        }
        config = {**config, group: {**node, **named}} if named else config
    return config
