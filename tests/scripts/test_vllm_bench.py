"""scripts/vllm_bench.py drives one server with both clients, and compares what they say."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.fake_server import in_thread
from tests.forked import fork_known
from tests.scripts.load import load_script

REQUESTS, INPUT_LEN, OUTPUT_LEN = 4, 5, 6
# Stands for an interpreter with vLLM: it reads the prompts that it is given, and writes the
# detailed result of `vllm bench serve` on them. Asked for versions of packages it fails.
PYTHON = """#!{python}
import json, pathlib, sys
words = sys.argv
after = lambda name: words[words.index(name) + 1]
lines = pathlib.Path(after("--dataset-path")).read_text().splitlines()
prompts = [json.loads(line)["prompt"] for line in lines]
wanted = json.loads(after("--extra-body"))["max_tokens"]
assert after("--num-prompts") == str(len(prompts)) and "--ignore-eos" in words
result = {{
    "completed": len(prompts) - {missing},
    "total_input_tokens": sum(map(len, prompts)),
    "total_output_tokens": wanted * len(prompts),
    "output_throughput": 100.0,
    "ttfts": [0.010, 0.020, 0.030, 0.060],
    "latencies": [0.035, 0.045, 0.055, 0.085],
    "itls": [[0.001] * (wanted - 1)] * 3 + [[0.005] * (wanted - 1)],
}}
folder = pathlib.Path(after("--result-dir"))
(folder / after("--result-filename")).write_text(json.dumps(result))
"""


@pytest.fixture
def url() -> Iterator[str]:
    """The base URL of a server that speaks the completions API."""
    server, address = in_thread()
    with server:
        yield address
        server.shutdown()


def interpreter(folder: Path, missing: int = 0) -> Path:
    """The stand-in, as a program; so many of its requests have failed."""
    program = folder / "python"
    program.write_text(PYTHON.format(python=sys.executable, missing=missing))
    program.chmod(0o755)
    return program


def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script with a small load."""
    script = load_script("vllm_bench")
    sizes = {"REQUESTS": REQUESTS, "INPUT_LEN": INPUT_LEN, "OUTPUT_LEN": OUTPUT_LEN, "STREAMS": 2}
    for name, size in sizes.items():
        monkeypatch.setattr(script, name, size)
    return script


def test_it_compares_and_adds_to_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    fork_known(monkeypatch)
    script, output = small(monkeypatch), tmp_path / "made.json"
    words = ["vllm_bench.py", "--url", url, "--python", str(interpreter(tmp_path))]
    monkeypatch.setattr(sys, "argv", [*words, "--blocks", "1", "--output", str(output)])
    script.main()  # the harness runs against the server, in a process
    (block,) = json.loads(output.read_text())["blocks"]
    theirs, ours = block["vllm_bench"], block["engine_openai"]
    assert theirs["ttft_mean_ms"] == pytest.approx(30.0)
    assert theirs["ttft_p50_ms"] == pytest.approx(25.0)
    assert theirs["itl_mean_ms"] == pytest.approx(2.0)
    assert theirs["itl_p50_ms"] == pytest.approx(1.0)
    assert theirs["tpot_mean_ms"] == pytest.approx(5.0)
    assert theirs["itl_samples"] == 20

    monkeypatch.setattr(script, "engine_openai", lambda *_: {k: 2 * ours[k] for k in ours})
    script.main()
    made = json.loads(output.read_text())
    assert len(made["blocks"]) == 2 and made["blocks"][0] == block
    rows = made["figures"]
    assert rows["output_tokens_per_s"]["n"] == 2
    first = ours["output_tokens_per_s"] / 100.0
    assert rows["output_tokens_per_s"]["ratio"] == pytest.approx(first * 2**0.5)
    assert made["load"]["streams"] == 2


def test_a_failed_request_is_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    script = small(monkeypatch)
    script.write_prompts(tmp_path / "prompts.jsonl")
    with pytest.raises(SystemExit, match=r"\(3, 20, 24\), not \(4, 20, 24\)"):
        script.vllm_bench(str(interpreter(tmp_path, missing=1)), url, tmp_path)


@pytest.mark.parametrize(("bundled", "tpot_ms"), [(1, 10.0), (0, 8.0), (2, None)])
def test_tpot_is_of_requests_whose_first_chunk_is_known_to_hold_one_token(
    monkeypatch: pytest.MonkeyPatch, bundled: int, tpot_ms: float | None
) -> None:
    """As many requests have a chunk of several tokens, which is the first one for all that the
    result says."""
    script = small(monkeypatch)
    monkeypatch.setattr(script, "REQUESTS", 2)
    gaps = [0.01] * (OUTPUT_LEN - 1)
    result = {
        "completed": 2,
        "total_input_tokens": 2 * INPUT_LEN,
        "total_output_tokens": 2 * OUTPUT_LEN,
        "output_throughput": 100.0,
        "ttfts": [0.02, 0.02],
        "latencies": [0.02 + 5 * 0.01, 0.02 + 5 * 0.006],
        "itls": [gaps[: len(gaps) - (bundled > 1)], gaps[: len(gaps) - (bundled > 0)]],
    }
    if tpot_ms is None:
        with pytest.raises(SystemExit, match="no request had a chunk for each token"):
            script.bench_figures(result)
        return
    assert script.bench_figures(result)["tpot_mean_ms"] == pytest.approx(tpot_ms)


def test_it_needs_an_interpreter_that_has_vllm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = small(monkeypatch)
    monkeypatch.delenv("MINIVLLM_VLLM_PYTHON", raising=False)
    monkeypatch.setattr(sys, "argv", ["vllm_bench.py", "--url", "http://127.0.0.1:1/v1"])
    with pytest.raises(SystemExit):
        script.main()
    assert "MINIVLLM_VLLM_PYTHON" in capsys.readouterr().err
