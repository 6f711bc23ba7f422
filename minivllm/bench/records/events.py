"""Step bundles of a measured window beside its record: a JSON object a line, under zstd."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from minivllm.bench.records import archive
from minivllm.bench.records.storage import EVENTS, TELEMETRY
from minivllm.bench.records.tables import read_table
from minivllm.errors import BadInput
from minivllm.extras.observation.bundle import VERSION
from minivllm.platform.files import write_bytes

Item = dict[str, Any]  # a StepBundle as JSON gives it back, or {"gauges": {...}}
CODEC = "zstd"
LEVEL = 15  # of its compression
LARGEST = 1 << 30  # bytes of text that are read
GAUGES = ("t_s", "phase", "rss", "gpu_process_memory", "gpu_power_w")


def write_events(directory: Path, lines: Sequence[bytes]) -> None:
    """Write events.jsonl.zst atomically.

    Args:
        directory: of the record.
        lines: a JSON object each, without its line feed.
    """
    import pyarrow

    text = b"".join(line + b"\n" for line in lines)
    packed = pyarrow.Codec(CODEC, compression_level=LEVEL).compress(text, asbytes=True)
    write_bytes(directory / EVENTS, packed)


def has_events(directory: Path) -> bool:
    """Whether there are events beside a record."""
    return archive.exists(directory / EVENTS)


def read_events(directory: Path, digests: Mapping[str, str] | None = None) -> list[Item]:
    """The bundles of a record, and what telemetry saw of memory and power between them.

    Args:
        directory: of the record.
        digests: of its files, by name, as the record has them.

    Returns:
        Items in the order of their time. Gauges are `{"gauges": {"time_s", "memory_bytes",
        "watts"}}`: the memory of the process on the GPU, on a CPU its resident memory; watts where
        they were read.

    Raises:
        BadInput: there are none, or they are torn, of another version, or not those that were
            recorded; the line names the file.
    """
    path, digests = directory / EVENTS, digests or {}
    if not archive.exists(path):
        raise BadInput(
            f"{directory} has no events: measure it with measure.events=true, which keeps them"
        )
    content = archive.read_bytes(path, LARGEST, str(path))
    if EVENTS in digests and hashlib.sha256(content).hexdigest() != digests[EVENTS]:
        raise BadInput(f"{path} is not what was recorded: its digest is another")
    bundles = _parsed(_unpacked(content, path), path)
    if not bundles or bundles[0].get("engine", {}).get("version") != VERSION:
        raise BadInput(f"{path} does not begin with the state of an engine in version {VERSION}")
    gauges = []
    if archive.exists(directory / TELEMETRY):
        start_s, end_s = bundles[0]["time_s"], bundles[-1]["end_s"]
        gauges = [
            one
            for one in _gauges(directory, digests.get(TELEMETRY))
            if start_s <= one["gauges"]["time_s"] <= end_s
        ]
    return sorted([*bundles, *gauges], key=_time_of)  # stable: bundles stay in their order


def _unpacked(content: bytes, path: Path) -> bytes:
    import pyarrow

    try:
        with pyarrow.CompressedInputStream(pyarrow.BufferReader(content), CODEC) as stream:
            text: bytes = stream.read(LARGEST + 1)
    except (OSError, pyarrow.ArrowException) as error:
        raise BadInput(f"{path} is torn ({error})") from None
    if len(text) > LARGEST:
        raise BadInput(f"{path} has more than {LARGEST >> 20} MB of text")
    return text


def _parsed(text: bytes, path: Path) -> list[Item]:
    try:
        items = [json.loads(line) for line in text.splitlines()]
        if not all(item["time_s"] <= item["end_s"] for item in items):
            raise ValueError("a step ends before it begins")
    except (ValueError, TypeError, KeyError) as error:
        raise BadInput(f"{path} holds no events ({error!r})") from None
    return items


def _gauges(directory: Path, digest: str | None) -> Iterator[Item]:
    """What telemetry saw, a row each. Raises BadInput as `read_table`, naming the file."""
    try:
        rows = read_table(directory, TELEMETRY, digest, GAUGES).to_pylist()
    except BadInput as error:
        raise BadInput(f"{directory / TELEMETRY} {error}") from None
    for row in rows:
        gauges = {"time_s": row["t_s"], "memory_bytes": row.get("gpu_process_memory") or row["rss"]}
        if row.get("gpu_power_w") is not None:
            gauges["watts"] = row["gpu_power_w"]
        yield {"gauges": gauges}


def _time_of(item: Item) -> float:
    """When it was known."""
    time_s: float = item["gauges"]["time_s"] if "gauges" in item else item["end_s"]
    return time_s
