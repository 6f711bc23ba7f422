"""record.json: the typed source of its schema. One record is one measurement of one cell."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from minivllm.bench.hardware.readings import Energy, Roofline
from minivllm.bench.records.encoder_figures import EncoderFigures
from minivllm.bench.records.recorded_parts import Provenance, RecordedConfig
from minivllm.redaction import shown

SCHEMA_VERSION = 2
KERNELS_VERSION = 1  # of kernels.json, which is no Record
STATUSES = ("ok", "oom", "error", "timeout", "crashed", "invalid")
# Why a record of a server that runs already has no memory.
SERVERS_MEMORY = "the server's memory is not known; that of the process that asks it is not its"
DESIGNS = ("leave_one_out", "add_one_in", "pairs", "factorial")
# Annotations say more of a type than Python's own can: texts to choose from, or the fields of an
# object; schema.py reads them.


@dataclass
class Percentiles:
    """Distribution of one metric; a percentile is null where fewer than 1/(1 - p) samples exist."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    n: int = 0


@dataclass
class Window:
    """Throughput over one span of time."""

    duration_s: float | None = None
    output_tokens_per_s: float | None = None
    total_tokens_per_s: float | None = None
    requests_per_s: float | None = None


@dataclass
class Attainment:
    """Share of the requests that meet each objective of `measure.slo`; null for one that is not
    set."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    all: float | None = None  # of those that are set


@dataclass
class RequestCounts:
    """Which requests the figures count; see the metric `counted`."""

    due: int = 0  # within the window, those that failed among them
    ended: int = 0  # of these, within it
    good: int | None = None  # of these, that meet every objective; null where goodput is
    steady: int | None = None  # of those that ended, within the steady window
    served_s: float | None = None  # from the first arrival to the end of the last that was due


@dataclass
class Metrics:
    """What the requests saw. Times in milliseconds; definitions in metrics.py."""

    ttft_ms: Percentiles = field(default_factory=Percentiles)
    ttfo_ms: Percentiles | None = None  # of requests that think first
    itl_ms: Percentiles = field(default_factory=Percentiles)
    tpot_ms: Percentiles = field(default_factory=Percentiles)
    e2e_ms: Percentiles = field(default_factory=Percentiles)
    queue_ms: Percentiles = field(default_factory=Percentiles)
    output_tokens_per_s: float | None = None
    total_tokens_per_s: float | None = None
    requests_per_s: float | None = None
    goodput_requests_per_s: float | None = None
    goodput_tokens_per_s: float | None = None
    attainment: Attainment | None = None
    duration_s: float | None = None
    num_requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int | None = None
    steady: Window = field(default_factory=Window)
    counted: RequestCounts = field(default_factory=RequestCounts)
    own: dict[str, Any] = field(default_factory=dict)  # of `measure.metrics`: numbers, Percentiles


@dataclass
class Memory:
    """Bytes. Device figures are null on a CPU; there the weights and the pool lie in host
    memory."""

    weights: int | None = None  # as stored by the quantisation method
    weights_16bit: int | None = None  # the same tensors at two bytes an element
    linear: int | None = None  # the quantisable linear layers alone, as stored
    linear_16bit: int | None = None
    kv_pool: int | None = None
    kv_waste: float | None = None  # mean fraction of allocated cache slots that hold no token
    device_peak_allocated: int | None = None
    device_peak_reserved: int | None = None
    device_process: int | None = None  # the driver's figure for the worker (NVML)
    host_rss_peak: int | None = None
    reason: str | None = None  # why none of them is known


@dataclass
class Cost:
    """Money, from `measure.price`."""

    currency: str | None = None
    per_million_output_tokens: float | None = None


@dataclass
class DeviceFigures:
    """What one of several devices took. Memory in bytes, at its greatest."""

    name: str | None = None
    memory_used: int | None = None  # by all processes (NVML)
    memory_process: int | None = None  # by the worker's
    joules: float | None = None
    mean_watts: float | None = None
    cost_per_million_output_tokens: float | None = None  # its part of it


@dataclass
class Devices:
    """Several devices: their number, throughput by device, and what each took."""

    count: int = 0
    output_tokens_per_s: float | None = None
    total_tokens_per_s: float | None = None
    requests_per_s: float | None = None
    each: list[DeviceFigures] = field(default_factory=list)


@dataclass
class Breakdown:
    """Mean milliseconds a step, by phase."""

    steps: int = 0
    schedule_ms: float | None = None
    draft_ms: float | None = None
    prepare_ms: float | None = None
    forward_ms: float | None = None
    sample_ms: float | None = None
    emit_ms: float | None = None
    gap_ms: float | None = None
    collective_ms: float | None = None  # of forward_ms, what collectives took; null on GPUs
    collective_share: float | None = None  # of the whole step, the gap after it included


@dataclass
class Cold:
    """What happens once, before the steady state, in seconds."""

    load_s: float | None = None
    compile_s: float | None = None
    first_batch_s: float | None = None
    packed_weights: str | None = None  # "hit" | "written" | "off", with the reason
    packed_write_s: float | None = None  # of load_s, where they were written


@dataclass
class SpeculationFigures:
    """What drafts did to the decoding of a window, in vLLM's names; definitions in
    metrics/speculation.py."""

    proposer: str = ""
    num_speculative_tokens: int = 0  # most draft tokens of a request in a step
    adaptive: bool = False
    verify: str = ""
    # Rates by position at which drafts were accepted whatever they were; None: drafts were judged.
    given_acceptance: list[float] | None = None
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    draft_acceptance_rate: float | None = None
    mean_acceptance_length: float | None = None  # tokens that a draft's step gave its request
    acceptance_by_position: list[float] = field(default_factory=list)
    acceptance_by_length: dict[str, float] = field(default_factory=dict)  # by tokens of the draft
    tokens_per_step: float | None = None  # of a decoding request, with a draft or without
    draft_ms: float | None = None
    verify_ms: float | None = None
    plain_ms: float | None = None
    # Of a draft token if those before it are accepted; from which value on drafts pay.
    token_acceptance: float | None = None
    break_even_acceptance: float | None = None


@dataclass
class JobFigures:
    """The sessions of an agentic workload, each of which is a job; definitions in
    metrics/jobs.py."""

    sessions: int = 0
    num_jobs: int = 0  # sessions that ran from their beginning to their end
    latency_s: Percentiles = field(default_factory=Percentiles)
    jobs_per_hour: float | None = None
    jobs_per_hour_per_device: float | None = None
    jobs_per_hour_per_user: float | None = None
    hit_rate: float | None = None  # share of prompt tokens that the prefix cache had
    optimal_hit_rate: float | None = None
    session_hit_rate: Percentiles = field(default_factory=Percentiles)
    live_tokens: int | None = None  # most that sessions under way had in the cache, if it kept all
    joules_per_job: float | None = None
    cost_per_job: float | None = None
    token_cost_per_job: float | None = None
    cache_state: str = ""  # of the prefix cache at the start: "cold" | "primed" | "warm" | "kept"
    primed_tokens: int = 0  # prompt tokens that were run before the window
    client_lag_ms: Percentiles = field(default_factory=Percentiles)


@dataclass
class Quality:
    """What is left of the model's quality, against a reference precision; definitions in
    quality.py."""

    perplexity: float | None = None
    bits_per_byte: float | None = None
    tokens: int = 0  # predicted ones, which perplexity and top-1 are over
    kl_mean: float | None = None  # KL(reference || candidate), nats a token
    kl_p99: float | None = None
    kl_tokens: int = 0  # the first so many of `tokens`, whose reference distributions are stored
    # share of tokens whose likeliest successor is the reference's
    top1_agreement: float | None = None
    # greedy tokens identical with the reference's, mean over prompts
    prefix_mean: float | None = None
    prefix_min: int | None = None
    prefix_of: int = 0  # greedy tokens of each prompt
    prompts: int = 0
    reference: str = ""  # an option of quant
    reference_id: str = ""  # figures of one id may be compared
    reference_perplexity: float | None = None


@dataclass
class RecordedEvents:
    """What events.jsonl.zst beside the record holds."""

    bundles: int
    left_out: int = 0  # later ones, that measure.events_mb had no room for
    # Unix time at which the clock of the events and of telemetry was 0; None: it was simulated
    unix_s: float | None = None


@dataclass
class Validity:
    """Whether the measurement may be quoted, and why not."""

    ok: bool = True
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # worth knowing, but not invalidating
    # of the processor time of the cores that the run uses, what other processes took
    cpu_taken: float | None = None


@dataclass
class Failure:
    """What went wrong in a cell that did not end well."""

    type: str = ""
    message: str = ""
    log_tail: str = ""


@dataclass
class Ablation:
    """Where a measurement stands in an ablation; all that the analysis needs besides the
    figures."""

    design: Annotated[str, DESIGNS]
    metric: str  # below `metrics`: what the verdicts are about
    optimisations: list[str]  # all of the ablation, in order
    requires: dict[str, list[str]]  # of those that require others
    on: list[str]  # those that this arm has
    order: int = 0  # of the arm within its block, which is shuffled
    seed: int = 0  # of the shuffling
    lossless: list[str] = field(default_factory=list)  # those that are declared to change no output
    # whether the command asked for the metric; else the records decide what ranks
    named: bool = False


@dataclass
class Record:
    """One measurement: one cell, one block."""

    run_id: str
    cell_id: str
    sweep: str  # the record folder under runs/
    arm: str  # the cell's name within its sweep
    block: int
    status: Annotated[str, STATUSES]
    config: Annotated[dict[str, Any], RecordedConfig]
    position: int = 0  # of the arm within its sweep
    ablation: Ablation | None = None
    workload_hash: str | None = None
    weights: str | None = None  # "checkpoint" | "random"
    attention_backend: str | None = None
    served_model: str | None = None  # a server's name of what it serves
    # settings of the configuration that the engine supports; the others of its groups say nothing
    # of it. None: all
    supported: list[str] | None = None
    schema_version: int = SCHEMA_VERSION
    error: Failure | None = None
    provenance: Annotated[dict[str, Any], Provenance] = field(default_factory=dict)
    cold: Cold = field(default_factory=Cold)
    metrics: Metrics = field(default_factory=Metrics)
    memory: Memory = field(default_factory=Memory)
    energy: Energy = field(default_factory=Energy)
    cost: Cost = field(default_factory=Cost)
    devices: Devices | None = None  # where there are several; else it is left out
    roofline: Roofline = field(default_factory=Roofline)
    breakdown: Breakdown = field(default_factory=Breakdown)
    speculation: SpeculationFigures | None = None
    encoder: EncoderFigures | None = None
    jobs: JobFigures | None = None
    quality: Quality | None = None
    liveness: dict[str, dict[str, float | str]] = field(default_factory=dict)
    validity: Validity = field(default_factory=Validity)
    events: RecordedEvents | None = None  # with measure.events
    digests: dict[str, str] | None = None  # SHA-256 of each table beside it, by file name
    slimmed: list[str] | None = None  # tables that an archive has left out

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

    Where those lie says nothing on another machine: what is in a model's folder is told by the
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
