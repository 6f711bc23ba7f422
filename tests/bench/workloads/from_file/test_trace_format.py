"""Traces of no named format: columns under usual or given names, and a unit that is not guessed."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from minivllm.bench.workloads.from_file.trace import Trace
from minivllm.bench.workloads.workload import Workload
from minivllm.errors import BadInput


def made(path: Path, **knobs: Any) -> Workload:
    trace = Trace(str(path), **knobs)
    trace.check_lengths(400)
    return trace.generate(None, 1000, 400, seed=0)


def seen(work: Workload) -> list[tuple[float | None, int, int]]:
    return [(r.due_s, len(r.prompt_token_ids), r.max_tokens) for r in work.requests]


EXPECTED = [(0.0, 10, 3), (1.5, 20, 4)]


@pytest.mark.parametrize(
    ("head", "lines", "knobs"),
    [
        (
            "arrival_time,prompt_tokens,completion_tokens",
            "1000,10,3 2500,20,4",
            {"time_unit": "ms"},
        ),
        ("ts,isl,osl,model", "7,10,3,x 8.5,20,4,y", {"time_unit": "s"}),
        (
            "timestamp,input_len,output_len",
            "2024-05-01T00:00:00Z,10,3 2024-05-01T00:00:01.5Z,20,4",
            {},
        ),
        (
            "sent,ctx,reply,input_len",
            "1000000,10,3,1 2500000,20,4,1",
            {
                "time_unit": "us",
                "columns": {"timestamp": "sent", "input_len": "ctx", "output_len": "reply"},
            },
        ),
    ],
)
def test_columns_are_known_by_usual_or_given_names(
    tmp_path: Path, head: str, lines: str, knobs: dict[str, Any]
) -> None:
    table = tmp_path / "trace.csv"
    table.write_text("\r\n".join((head, *lines.split())) + "\r\n")
    assert seen(made(table, **knobs)) == EXPECTED
    names = head.split(",")
    rows = [dict(zip(names, line.split(","), strict=True)) for line in lines.split()]
    for row in rows:
        row.update({k: float(v) for k, v in row.items() if v.replace(".", "").isdigit()})  # type: ignore[misc]
    listed = tmp_path / "trace.jsonl"
    listed.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert seen(made(listed, **knobs)) == EXPECTED


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "jsonl", "json", "parquet"])
@pytest.mark.parametrize("time", [0.0, datetime(2024, 5, 1, tzinfo=UTC)])
def test_a_trace_may_be_any_table(tmp_path: Path, kind: str, time: Any) -> None:
    is_date = isinstance(time, datetime)
    times = [time, time + (timedelta(seconds=1.5) if is_date else 1.5)]
    path, knobs = tmp_path / f"trace.{kind}", {} if is_date else {"time_unit": "s"}
    rows = [
        {"timestamp": when, "input_len": prompt, "output_len": answer}
        for when, (prompt, answer) in zip(times, [(10, 3), (20, 4)], strict=True)
    ]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif "csv" in kind:
        lines = [
            ",".join(map(str, row.values())) for row in ({name: name for name in rows[0]}, *rows)
        ]
        content = "\n".join(lines).encode()
        path.write_bytes(gzip.compress(content) if kind.endswith("gz") else content)
    else:
        texts = [json.dumps(row, default=str) for row in rows]
        path.write_text(f"[{', '.join(texts)}]" if kind == "json" else "\n".join(texts))
    assert seen(made(path, **knobs)) == EXPECTED
    with pytest.raises(BadInput, match=r"which workload\.columns names as the input_len"):
        made(path, **knobs, columns={"input_len": "gone"})


def test_hash_ids_are_shared_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"time": t, "prompt_len": 20, "max_tokens": 2, "blocks": [1, t]} for t in (1, 2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    work = made(path, time_unit="s", block_tokens=10, columns={"hash_ids": "blocks"})
    first, second = (list(r.prompt_token_ids) for r in work.requests)
    assert first[:10] == second[:10] and first[10:] != second[10:]


@pytest.mark.parametrize(
    ("text", "knobs", "message"),
    [
        (
            "ts,isl,osl\n1,2,3\n",
            {},
            r":2: ts='1': the unit of times .*workload\.time_unit",
        ),
        ("ts,isl,osl\nnow,2,3\n", {}, r":2: ts='now' is not a date, or a number"),
        ("ts,isl,osl\nnow,2,3\n", {"time_unit": "s"}, r":2: ts='now' is not a time in s"),
        ("ts,isl,osl\n1,2.5,3\n", {"time_unit": "s"}, r":2: isl='2.5' is not a number of tokens"),
        ("ts,isl,osl\n1,2\n", {"time_unit": "s"}, r":2: 2 of 3 columns; is the file cut off"),
        ("ts,isl\n1,2\n", {"time_unit": "s"}, r"which column is the output_len .* none of the col"),
        (
            "ts,isl,input_len,osl\n1,2,2,3\n",
            {"time_unit": "s"},
            r"which column is the input_len of a request\? isl and input_len may be it",
        ),
        (
            "ts,isl,osl\n1,2,3\n",
            {"time_unit": "s", "columns": {"input_len": "gone"}},
            r"no column gone, which workload\.columns names as the input_len; the columns are ts",
        ),
        ("a,b,c\n1,2,3\n", {}, r":1: neither a header .*; name its columns with workload\.columns"),
        (
            '{"ts": 1, "isl": 2, "osl": 3}\n[]\n',
            {"time_unit": "s"},
            r":2: a value is missing; is the file cut off",
        ),
    ],
)
def test_what_is_not_told_is_not_guessed(
    tmp_path: Path, text: str, knobs: dict[str, Any], message: str
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(BadInput, match=message):
        made(path, **knobs)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"columns": {"prompt": "x"}}, "some of timestamp, input_len, output_len, hash_ids"),
        ({"format": "azure", "time_unit": "s"}, r"is of workload\.format=columns, not azure"),
    ],
)
def test_wrong_knobs_are_named(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Trace("trace.csv", **knobs)
