"""The record of served traffic is one like any other, and its times are those that clients see."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minivllm import load_records
from tests.forked import fork_known
from tests.later import Later
from tests.serving.running import ROOT, serving

openai = Later("openai")


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of run.py are forks."""
    fork_known(monkeypatch)


def test_what_was_served_is_a_record_and_a_report(tmp_path: Path) -> None:
    places = (f"runs_dir={tmp_path}/runs", f"reports_dir={tmp_path}/reports", "name=served")
    with serving("task.record=true", *places) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        begin = time.perf_counter()
        for n in (1, 2):
            client.completions.create(
                model="tiny", prompt="x", max_tokens=20, n=n, extra_body={"ignore_eos": True}
            )
        seconds = time.perf_counter() - begin
        left = client.completions.create(model="tiny", prompt="x", max_tokens=900, stream=True)
        next(left)
        left.close()
        assert server.stop() == 0
    (path,) = (tmp_path / "runs").rglob("record.json")
    record = json.loads(path.read_text())
    assert record["status"] == "ok" and record["validity"]["ok"]
    assert record["config"]["workload"]["_target_"].endswith("Served")
    assert "decoding_given" not in record["config"], "as in the record of a benchmark"
    assert record["metrics"]["num_requests"] == 3, (
        "three completions; the one that was left is none"
    )
    assert record["metrics"]["output_tokens"] == 60
    assert 0 < record["metrics"]["duration_s"] <= seconds
    assert record["memory"]["host_rss_peak"] > 1e8
    (row,) = load_records(tmp_path / "runs" / "served").to_dict("records")
    assert row["cell_id"] == record["cell_id"]
    assert (tmp_path / "reports" / "served" / "index.html").exists()


def test_a_record_needs_a_workload_that_no_benchmark_has(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), "task=serve", "task.record=true"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr == "error: task.record=true records what clients ask: add workload=served\n"


@pytest.mark.parametrize("flags", [[], ["sweep.dry_run=true"]])
def test_no_benchmark_makes_this_workload(tmp_path: Path, flags: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), "workload=served", f"runs_dir={tmp_path}", *flags],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "choose another one" in done.stderr
    assert not list(tmp_path.iterdir())
