"""What the report says of a search for capacity is what its records say."""

from __future__ import annotations

from pathlib import Path

from minivllm.bench.capacity import TASK
from minivllm.bench.storage import write_record
from minivllm.report import capacity
from minivllm.report.rows import read_rows
from tests.report.synthetic import make_record


def test_rates_with_their_shares_and_verdicts(tmp_path: Path) -> None:
    """At 1 request/s all of 100 meet their objective, at 2 one in two."""
    for rate, slow in ((1.0, 0), (2.0, 50)):
        record = make_record(run_id=f"rate{rate:g}", cell_id=f"c{rate:g}")
        record.config |= {"arrival": {"rate": rate}, "measure": {"repeats": 1, "slo": {"ttft_ms": 200.0}}}
        record.config["task"] = {
            "_target_": TASK,
            "attainment": 0.9,
            "confidence": 0.95,
            "max_blocks": 1,
            "tolerance": 0.05,
            "max_rates": 4,
        }
        requests = [{"status": "ok", "ttft_ms": 300.0 if i % 100 < slow else 100.0} for i in range(100)]
        write_record(tmp_path / "s" / record.run_id, record, requests=requests)
    rows, _ = read_rows(tmp_path)
    found = capacity.find(rows)
    assert found is not None
    plot = capacity.figure(found)
    shown = capacity.section(found, rows, [])
    assert plot is not None and shown is not None
    assert [(row["rate"], row["share"], row["verdict"]) for row in shown["rows"]] == [
        ("1", "100", "holds"),
        ("2", "50.0", "fails"),
    ]
    assert shown["objectives"] == "TTFT ≤ 200 ms"
    assert "1 requests/s is the highest rate tried that holds" in plot.alt
    assert [item["label"] for item in plot.legend] == ["wanted", "interval", "holds", "fails"]


def test_records_of_other_tasks_are_no_search(tmp_path: Path) -> None:
    write_record(tmp_path / "s" / "r", make_record())
    rows, _ = read_rows(tmp_path)
    assert (
        capacity.find(rows) is None
        and capacity.figure(None) is None
        and capacity.section(None, rows, []) is None
    )
