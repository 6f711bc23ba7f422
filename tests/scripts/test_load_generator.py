"""scripts/load_generator.py compares the server's record with what a load generator says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.forked import fork_known
from tests.scripts.load import load_script

# Stands for guidellm: asks for two completions, one after the other, and says what it measured.
CLIENT = """#!{python}
import json, re, sys, urllib.request
if "--version" in sys.argv:
    sys.exit(print("guidellm version: 0"))
words = " ".join(sys.argv)
url, output = re.search("target=([^,]+)", words)[1], re.search("path=([^ ]+)", words)[1]
body = {{"prompt": "x", "max_tokens": 16, "ignore_eos": True, "stream": True}}
for _ in range(2):
    headers = {{"Content-Type": "application/json"}}
    asked = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)
    urllib.request.urlopen(asked).read()
figures = ("output_tokens_per_second", "inter_token_latency_ms", "time_to_first_token_ms")
metrics = {{name: {{"successful": {{"mean": 50.0}}}} for name in figures}}
open(output, "w").write(json.dumps({{"benchmarks": [{{"metrics": metrics}}]}}))
"""


def test_it_compares_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_known(monkeypatch)
    script = load_script("load_generator")
    program = tmp_path / "guidellm"
    program.write_text(CLIENT.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(script, "STREAMS", (1,))
    cores = {"runtime.cores=0", "task.cores=1"}  # a machine may have one
    monkeypatch.setattr(script, "SERVE", [word for word in script.SERVE if word not in cores])
    monkeypatch.setattr(script.os, "sched_setaffinity", lambda pid, cores: None)
    output = tmp_path / "made.json"
    monkeypatch.setattr(sys, "argv", ["load_generator.py", str(program), "--output", str(output)])
    script.main()
    made = json.loads(output.read_text())
    (row,) = made["figures"]
    assert row["requests"] == 2 and made["load_generator"] == "guidellm version: 0"
    for name in ("output_tokens_per_s", "itl_mean_ms", "ttft_mean_ms"):
        assert row[name]["ratio"] == pytest.approx(50.0 / row[name]["server"])


def test_a_program_that_is_not_there_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script("load_generator")
    monkeypatch.setattr(sys, "argv", ["load_generator.py", str(tmp_path / "none")])
    with pytest.raises(SystemExit):
        script.main()
    assert "pip install guidellm" in capsys.readouterr().err
