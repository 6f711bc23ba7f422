"""What a device can do at most: read and copy bandwidth, and the matrix rate of each dtype, as
JSON.

    python scripts/ceilings.py --device cuda --output ceilings.json

Read bandwidth and matrix rates are the probes that every benchmark starts with; a copy reads and
writes as many bytes, and both are counted. Bytes and operations per second.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from program import new_parser, write_record

from minivllm.bench.hardware.limits import GPU_CALLS, PROBE_BYTES, best_seconds, probe
from minivllm.bench.records.identity import code_hash
from minivllm.bench.records.provenance import provenance
from minivllm.kernels.device import select_device

DTYPES = ("bfloat16", "float16", "float32", "int8")


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Bytes read and written per second by a copy of `size` bytes on the device."""
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    cuda = device.type == "cuda"
    synchronise = torch.cuda.synchronize if cuda else lambda: None
    calls = GPU_CALLS if cuda else 1
    return 2 * size / best_seconds(lambda: target.copy_(source), synchronise, calls=calls)


def ceilings(device: torch.device, size: int, dtypes: tuple[str, ...] = DTYPES) -> dict[str, Any]:
    """The limits of a device: read and copy bandwidth, and the matrix rate of each dtype.

    Args:
        device: which.
        size: bytes that are copied.
        dtypes: of the matrix products.
    """
    found: dict[str, Any] = {
        "copy_bytes_per_s": copy_bandwidth(device, size),
        "matrix_flops_per_s": {},
    }
    notes: list[str] = []
    for dtype in dtypes:
        limits, probe_notes = probe(str(device), dtype)
        best = max(found.get("read_bytes_per_s") or 0.0, limits.bandwidth_bytes_per_s or 0.0)
        found["read_bytes_per_s"] = best or None
        found["matrix_flops_per_s"][dtype] = limits.matrix_flops_per_s
        notes += [note for note in probe_notes if note not in notes]
    return {**found, "notes": notes}


def main() -> None:
    """Measure, print and write."""
    parser = new_parser(__doc__, help="also write them to this file")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=None, help="of the CPU; default: torch's")
    arguments = parser.parse_args()
    device = select_device(arguments.device)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    runtime = {"device": str(device), "threads": arguments.threads}
    result = {
        "ceilings": ceilings(device, PROBE_BYTES),
        "provenance": provenance({"runtime": runtime}, code_hash()),
    }
    print(json.dumps(result["ceilings"], indent=1))
    write_record(arguments.output, result)


if __name__ == "__main__":
    main()
