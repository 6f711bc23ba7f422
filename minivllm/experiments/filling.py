"""The number of requests that fill `workload.fill_s` (workload.num_requests=auto): one for all arms
of a sweep, found by a pilot on the arm that should be the fastest."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minivllm.bench.records import identity
from minivllm.bench.records.reading import record_in
from minivllm.bench.supervisor import Supervisor
from minivllm.bench.workloads.arrivals import Arrival
from minivllm.bench.workloads.lengths import MOST_REQUESTS
from minivllm.bench.workloads.options import AUTO
from minivllm.config.compose import OPTIONS, build
from minivllm.config.groups import Config
from minivllm.errors import BadInput
from minivllm.platform.untrusted import MAX_TEXT, read_object

FIELD = "filled"  # of a sweep's plan
# Windows of a pilot: the first is of so many full batches; a shorter one than LEAST_S is repeated
# with more requests.
BATCHES, LEAST_S, MOST_WINDOWS, MOST_GROWTH = 2, 1.0, 4, 16
# What a pilot leaves out.
ALONE = {
    "repeats": 1,
    "target_ci": None,
    "isolation": "cell",
    "quality": False,
    "roofline": False,
    "events": False,
}
# Options that make an engine slow, the slowest first.
SLOW = (
    ("cache", ("none",)),
    ("batching", ("sequential",)),
    ("attention", ("eager",)),
    ("batching", ("static",)),
)
OFF = (False, "off")  # values of the switches below
SWITCHES = ("cuda_graphs", "fused_kernels", "cpu_kernels")


@dataclass(frozen=True)
class PilotResult:
    """What a pilot found, as the plan of a sweep keeps it."""

    num_requests: int
    arm: str  # on which
    requests_per_s: float | None  # of the pilot; None: the arrivals alone decide


def is_auto(config: dict[str, Any]) -> bool:
    """Whether a configuration leaves the number of requests to a pilot."""
    return (config.get("workload") or {}).get("num_requests") == AUTO


def with_number(config: dict[str, Any], num_requests: int) -> dict[str, Any]:
    """The configuration with this number of requests in place of auto."""
    if not is_auto(config):
        return config
    return {**config, "workload": {**config["workload"], "num_requests": num_requests}}


def at_once(config: dict[str, Any]) -> int:
    """Most requests in a batch, as far as a configuration tells."""
    batching, arrival = config.get("batching") or {}, config.get("arrival") or {}
    limits = (batching.get("max_num_seqs"), arrival.get("concurrency"))
    known = [int(limit) for limit in limits if isinstance(limit, int)]
    sequential = (config.get("choices") or {}).get("batching") == "sequential"
    return 1 if sequential else max(1, min(known, default=1))


def slowness(config: dict[str, Any]) -> tuple[float, ...]:
    """A key by which the arm that should be the fastest comes first."""
    choices, runtime = config.get("choices") or {}, config.get("runtime") or {}
    options = tuple(float(choices.get(group) in names) for group, names in SLOW)
    off = sum(runtime.get(switch) in OFF for switch in SWITCHES)
    return (*options, float(off), -float(at_once(config)))


def known(plan: Path) -> PilotResult | None:
    """What the plan of a sweep says that a pilot found; None where it says nothing."""
    with suppress(BadInput, TypeError):
        node = read_object(plan, str(plan), limit=MAX_TEXT).get(FIELD)
        if isinstance(node, dict) and isinstance(node.get("num_requests"), int):
            return PilotResult(**node)
    return None


def field(filled: PilotResult | None) -> dict[str, Any]:
    """The part of a plan that says it."""
    return {} if filled is None else {FIELD: asdict(filled)}


def find(arms: Sequence[tuple[str, dict[str, Any], str]], root: Path, name: str) -> PilotResult:
    """Find the number for all arms.

    Args:
        arms: those with auto: name, checked configuration, fingerprint of the weights.
        root: the folder of all records.
        name: of the sweep or run.

    Raises:
        BadInput: the pilot did not end well; give a number.
    """
    arm, config, fingerprint = min(arms, key=lambda one: slowness(one[1]))
    seconds = float(config["workload"]["fill_s"])
    view = Config.of(config)
    if view.target("arrival") in OPTIONS:
        due = _due_within(build(config["arrival"]), seconds, view.measure.seed)
        if due is not None:
            return PilotResult(due, arm, None)
    print(f"pilot: how many requests fill {seconds:g} s, on {arm}", file=sys.stderr, flush=True)
    rate, least = _rate(config, fingerprint, root, name)
    number = min(MOST_REQUESTS, max(least, math.ceil(rate * seconds)))
    print(f"pilot: {rate:.4g} requests/s, so {number:,} requests", file=sys.stderr, flush=True)
    return PilotResult(number, arm, rate)


def _due_within(arrival: Arrival, seconds: float, seed: int) -> int | None:
    """How many requests of an open loop are due within so many seconds; None of a closed one."""
    number = 64
    while (times := arrival.schedule(number, seed))[-1] < seconds:
        if times[-1] == 0 or number >= MOST_REQUESTS:
            return None
        number *= 2
    return sum(time < seconds for time in times)


def _rate(config: dict[str, Any], fingerprint: str, root: Path, name: str) -> tuple[float, int]:
    """Requests a second, by one engine, and the requests of a full batch. Raises BadInput."""
    measure = {**config["measure"], **ALONE}
    runtime = {**config["runtime"], "profile": False}
    config = {**config, "measure": measure, "runtime": runtime}
    folder, batch = f".pilot-{name}", at_once(config)
    count = BATCHES * batch
    try:
        with Supervisor(lone=True) as supervisor:
            for _ in range(MOST_WINDOWS):
                (one,) = identity.expand(
                    with_number(config, count), folder, "pilot", root, fingerprint
                )
                outcome = supervisor.measure(one)
                metrics = (record_in(one.path) or {}).get("metrics") or {}
                rate = float(metrics.get("requests_per_s") or 0)
                if outcome.status not in ("ok", "invalid") or not rate:  # a busy machine will do
                    raise BadInput(
                        f"workload.num_requests=auto: the pilot ended as {outcome.status} "
                        f"({outcome.message or 'without a rate'}); give a number"
                    )
                lasted = count / rate
                if lasted >= LEAST_S:
                    break
                count = min(MOST_REQUESTS, math.ceil(count * min(MOST_GROWTH, 2 / lasted)))
    finally:
        shutil.rmtree(root / folder, ignore_errors=True)
    return rate, batch
