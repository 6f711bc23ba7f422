"""Where the figures of a page come from: facts of the records, every record, and every knob."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minivllm.analysis.cell import DEVICE, Cell
from minivllm.analysis.cells import IGNORED, PACKAGES
from minivllm.analysis.format import MISSING, show, sig
from minivllm.analysis.rows import Row, below, distinct, met_others, number, status_of
from minivllm.bench.records.storage import OPERATIONS
from minivllm.report.sections import MAX_ROWS, anchor, devices, link
from minivllm.report.spreadsheet import csv_table

# Of a record, in the list of all of them.
RECORD_FIGURES = ("metrics.output_tokens_per_s", "metrics.ttft_ms.p50", "metrics.itl_ms.p50")


def provenance(rows: list[Row], cells: list[Cell], out_dir: Path) -> dict[str, Any]:
    """Where the numbers come from: facts, every record, and every knob of the first cell."""
    shown = every_record(cells, out_dir)
    return {
        "facts": facts(rows),
        "records": shown,
        "unshown": sum(len(cell.rows) for cell in cells) - len(shown),
        "knobs": knobs(cells),
    }


def facts(rows: list[Row]) -> list[tuple[str, str]]:
    """Where records come from, name and value; several values where they differ."""
    names = {
        "provenance.git_sha": "Commit",
        "provenance.dirty_hash": "Uncommitted changes",
        "provenance.code_hash": "Code hash",
        "provenance.host": "Host",
        DEVICE: "Device",
        "provenance.driver": "Driver",
        "provenance.power_limit": "Power limit, W",
        "provenance.cpu.model": "CPU",
        "provenance.cpu.physical_cores": "Physical cores",
        "provenance.cpu.usable_cores": "Usable cores",
        "provenance.threads": "Threads",
        "provenance.seed": "Seed",
        "workload_hash": "Workload",
        "roofline.matrix_dtype": "Matrix-rate dtype",
    }
    known = {key: distinct(rows, key) for key in names} | {DEVICE: devices(rows)}
    lines = [
        (title, ", ".join(show(v) for v in known[key][:6]))
        for key, title in names.items()
        if known[key]
    ]
    for key, title, scale, unit in (
        ("roofline.bandwidth_bytes_per_s", "Bandwidth, measured", 1e-9, "GB/s"),
        ("roofline.matrix_flops_per_s", "Matrix rate, measured", 1e-12, "TFLOP/s"),
    ):
        values = [v for row in rows if (v := number(row.get(key))) is not None]
        if values:
            low, high = sig(min(values) * scale), sig(max(values) * scale)
            lines.append((title, f"{low} {unit}" if low == high else f"{low}–{high} {unit}"))
    for kind, whose in PACKAGES.items():
        packages = {name: None for row in rows for name in below(row, f"provenance.{kind}")}
        versions = {name: distinct(rows, f"provenance.{kind}.{name}") for name in packages}
        package_versions = [
            f"{name} {' and '.join(map(show, held))}" for name, held in versions.items()
        ]
        if package_versions or not whose:
            lines.append((f"{whose}packages".capitalize(), ", ".join(package_versions) or MISSING))
    lines.append(("Record schema", ", ".join(show(v) for v in distinct(rows, "schema_version"))))
    return lines


def every_record(cells: list[Cell], out_dir: Path) -> list[dict[str, Any]]:
    """A line a record, with the figures before they were averaged; of thousands the first of each
    cell."""
    each = (
        max(1, MAX_ROWS // len(cells)) if sum(len(cell.rows) for cell in cells) > MAX_ROWS else None
    )
    return [
        {
            "label": cell.label,
            "block": show(row.get("block")),
            "status": status_of(row) + ", busy" * met_others(row),
            "figures": [
                sig(number(row.get(key))) if status_of(row) == "ok" else MISSING
                for key in RECORD_FIGURES
            ],
            "record": link(row, out_dir),
            "operations": link(row, out_dir, OPERATIONS),
            "run_id": str(row.get("run_id") or ""),
            "anchor": anchor(index) if row is cell.rows[0] else None,
        }
        for index, cell in enumerate(cells[:MAX_ROWS])
        for row in cell.rows[:each]
    ]


def records_csv(cells: list[Cell]) -> str:
    """records.csv, for which the page has no room: a line a record; empty where the page has them
    all."""
    rows = [(cell, row) for cell in cells for row in cell.rows]
    if len(rows) <= MAX_ROWS:
        return ""
    words = ("run_id", "block")
    return csv_table(
        ["label", *words, "status", *RECORD_FIGURES, "directory"],
        (
            [
                *(cell.label, *(row.get(key) for key in words), status_of(row)),
                *(number(row.get(key)) for key in RECORD_FIGURES),
                row.get("directory"),
            ]
            for cell, row in rows
        ),
    )


def knobs(cells: list[Cell]) -> list[tuple[str, str]]:
    """Every knob of the first cell's resolved configuration, for those who want all of it."""
    config = {
        k.removeprefix("config."): v for k, v in cells[0].rows[0].items() if k.startswith("config.")
    }
    return [
        (k, show(v))
        for k, v in sorted(config.items())
        if k.split(".")[0] not in IGNORED and "architecture" not in k
    ]
