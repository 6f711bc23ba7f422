"""The parts of a record that are plain dictionaries: those values whose types readers go by."""

from __future__ import annotations

from typing import Any, TypedDict


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
    """Those facts about code and machine whose types the readers go by; see provenance.py."""

    code_hash: str | None
    git_sha: str | None
    dirty_hash: str | None
    packages: dict[str, str | None]
    peer_packages: dict[str, str | None] | None
    device: Device
    driver: str | None
    clocks: dict[str, float | None]
    cpu: dict[str, Any]
    threads: int | None
    weights_digest: str | None
    started_at: str | None
    host: str | None
