"""What a record of task=kernels comes to, in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minivllm.analysis.format import count, sig
from minivllm.analysis.rows import Row
from minivllm.bench.metrics.telemetry_validity import OTHERS_PERCENT

MOST_TOLD = 4  # kernels in a headline
ABOVE = 1.05  # of the measured limit, which has its own noise


def shares_by_kernel(record: dict[str, Any]) -> dict[str, list[float]]:
    """The share of the measured limit that each case of a kernel reaches, in per cent."""
    shares: dict[str, list[float]] = {}
    for row in record["rows"]:
        if row.get("of_floor"):
            shares.setdefault(row["kernel"], []).append(100 * row["of_floor"])
    return shares


def answer(record: dict[str, Any]) -> str:
    """How near the kernels come to the limit, in one sentence; "" where no limit is known, or an
    output is wrong, which comes first."""
    if any(row.get("reference") is not None and not row.get("ok") for row in record["rows"]):
        return ""
    parts = [f"{kernel} {_span(shares)} %" for kernel, shares in shares_by_kernel(record).items()]
    more = f" and {len(parts) - MOST_TOLD} more" if len(parts) > MOST_TOLD else ""
    return f"Of the measured limit: {', '.join(parts[:MOST_TOLD])}{more}." if parts else ""


def findings(record: dict[str, Any]) -> list[str]:
    """What the rows come to: outputs, and for each kernel where it stands."""
    rows = [row for row in record["rows"] if "error" not in row]
    compared = [row for row in rows if row["reference"] is not None]
    wrong = [case_name(row) for row in compared if not row["ok"]]
    lines = ["No output was compared with a reference's."]
    if compared:
        sentences = (
            f"{len(wrong)} of them WRONG: {_listed(wrong)}."
            if wrong
            else "all of them equal or close (within twice the rounding error of bfloat16)."
        )
        lines = [
            f"{count(len(compared), 'output')} compared with the reference's "
            f"before timing, {sentences}"
        ]
    kernels = dict.fromkeys(row["kernel"] for row in rows)
    for kernel in kernels:
        shares = [
            100 * row["of_floor"] for row in rows if row["kernel"] == kernel and row["of_floor"]
        ]
        gains = [
            row["speedup"]["median"] for row in rows if row["kernel"] == kernel and row["speedup"]
        ]
        parts = [f"{_span(shares)} % of the limit"] if shares else []
        parts += [f"{_span(gains)} times as fast as the reference"] if gains else []
        lines.append(f"{kernel}: {', '.join(parts)}" if parts else f"{kernel}: no limit is known")
    slower = [
        case_name(row)
        for row in rows
        if row["speedup"] and (row["speedup"]["high"] or row["speedup"]["median"]) < 1
    ]
    if slower:
        lines.append(f"slower than the reference: {_listed(slower)}")
    above = [case_name(row) for row in rows if (row["of_floor"] or 0) > ABOVE]
    if above:
        lines.append(
            f"above the limit, so it is not one: {_listed(above)}. Something else used the "
            "machine while the limit was probed, or the inputs came from a cache"
        )
    lines += [f"{row['kernel']} failed: {row['error']}" for row in record["rows"] if "error" in row]
    if record.get("interrupted"):
        lines.append(
            f"Interrupted after {count(len(record['rows']), 'case')}: others were not measured"
        )
    if (others := record.get("others_percent", 0.0)) > OTHERS_PERCENT:
        lines.append(
            f"Other processes used {others:.0f} % of a core meanwhile: times may be worse for "
            "it, many times where threads wait for one that has no core (runtime.threads), and "
            "the limit lower than it is"
        )
    return lines


def _span(values: Sequence[float]) -> str:
    low, high = sig(min(values)), sig(max(values))
    return low if low == high else f"{low} to {high}"


def _listed(names: list[str], limit: int = 5) -> str:
    """`a; b; and 3 more`: the names themselves hold commas."""
    more = [f"and {len(names) - limit} more"] if len(names) > limit else []
    return "; ".join(names[:limit] + more)


def case_name(row: Row) -> str:
    """A kernel, what it was timed on, and its rows."""
    return f"{row['kernel']}, {row['part']}, {count(row['rows'], 'row')}"
