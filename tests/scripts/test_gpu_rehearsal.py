"""A rehearsal of scripts/gpu_suite.sh without a GPU: how long each part of a call may take, that
all commands can be composed and what they name is there, and the first ones measured on a CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm.config.compose import compose
from tests.scripts.gpu_suite import (
    CALLS,
    MEASURING,
    ROOT,
    SHORT,
    START_S,
    SUITE,
    SUITES_OWN,
    TESTING,
    copied,
    limits,
    places,
    suite,
)

Cli = Callable[..., Any]


def test_the_calls_fit_a_quarter_of_an_hour() -> None:
    """With the start of the machine, and the time to end and to collate what is cut off."""
    described = re.findall(r"^#   (\w+) +(\d+) s: ", SUITE.read_text(), re.MULTILINE)
    assert {name: int(seconds) for name, seconds in described} == CALLS
    allotted = {call: sum(limits(call).values()) for call in CALLS}
    assert all(allotted[call] <= seconds - 5 for call, seconds in CALLS.items())
    assert sum(CALLS.values()) + START_S <= 800
    assert tuple(dict.fromkeys(part for call in CALLS for part in limits(call))) == SHORT
    for call, seconds in CALLS.items():
        print(f"{call}: {allotted[call]} of {seconds} s, {limits(call)}")


def test_the_first_figure_is_there_within_three_minutes() -> None:
    first = limits("first")
    before = list(first)[: list(first).index("mission") + 1]
    assert before == ["environment", "compile", "logits", "mission"]
    assert sum(first[part] for part in before) <= 180


def test_a_call_is_its_parts_in_their_order(tmp_path: Path) -> None:
    code, commands = suite(tmp_path, "first")
    assert code == 0
    scripts = [words[0] for words in commands]
    assert scripts[:2] == ["scripts/gpu_environment.py", "scripts/gpu_compile.py"]
    assert scripts[3:6] == ["run.py"] * 3 and scripts[2] == scripts[6] == "-m"  # pytest
    mission = commands[3]
    assert {"model=qwen3", "quant=nf4", "batching=continuous"} <= {*mission}
    said = (tmp_path / "out" / "suite.log").read_text()
    assert [int(n) for n in re.findall(r", at most (\d+) s\)", said)] == pytest.approx(
        [*limits("first").values()], abs=2
    )


def test_tests_and_scripts_that_it_runs_are_there(tmp_path: Path) -> None:
    code, commands = suite(tmp_path, *TESTING)
    assert code == 0 and len(commands) == len(TESTING)
    assert all(words[words.index("-n") + 1] == "8" for words in commands if "-n" in words)
    paths = [
        word for words in commands for word in words if word.startswith(("tests/", "scripts/"))
    ]
    assert paths and [path for path in paths if not (ROOT / path).exists()] == []


def test_what_is_traced_comes_last(tmp_path: Path) -> None:
    """What comes last is most likely to be cut off, and a trace is worth less than a figure."""
    trace = tmp_path / "azure.csv"
    trace.touch()
    _, commands = suite(tmp_path, "batching", AZURE_TRACE=str(trace))
    assert [("runtime.profile=true" in words) for words in commands] == [False, False, True]


def test_experts_and_the_compiler_are_measured(tmp_path: Path) -> None:
    _, commands = suite(tmp_path, "experts", "kernels", "waits")
    assert sum("model=qwen3_30b_a3b" in words for words in commands) == 2
    assert any("runtime.moe=loop,grouped" in words for words in commands)
    assert any("runtime.compile:" in word for words in commands for word in words)


def test_what_needs_the_trace_is_left_out_without_it(tmp_path: Path) -> None:
    code, commands = suite(tmp_path, "batching")
    assert code == 0 and not any("azure" in word for words in commands for word in words)
    assert (
        "gpu-8b-batching-azure: left out, since AZURE_TRACE is not set"
        in (tmp_path / "work" / "batching.log").read_text()
    )


def test_every_test_that_takes_a_gpu_where_there_is_one_is_in_a_part(tmp_path: Path) -> None:
    _, commands = suite(tmp_path, "logits", "kernel-tests", "tests")
    run = {word for words in commands for word in words if word.startswith("tests/")}
    here = Path(__file__).resolve()
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if path != here]
    takes = {path for path in files if '"cuda" if torch.cuda.is_available()' in path.read_text()}
    takes |= set((ROOT / "tests" / "gpu").glob("test_*.py"))
    assert len(takes) > 8 and {str(path.relative_to(ROOT)) for path in takes} <= run


@pytest.mark.parametrize("part", MEASURING)
def test_its_commands_are_valid(part: str, tmp_path: Path, cli: Cli) -> None:
    """Each sweep is planned as with sweep.dry_run=true, every arm composed; nothing is measured."""
    trace = tmp_path / "azure.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    )
    code, commands = suite(tmp_path, part, AZURE_TRACE=str(trace))
    assert code == 0 and commands
    names = []
    for script, *words in commands:
        assert script == "run.py"
        names += [word for word in words if word.startswith(("name=", "sweep.name="))]
        if "-m" not in words and part == "kernels":
            assert compose(words)["choices"]["task"] == "kernels"
            continue
        if "-m" not in words:  # by itself it asks for a device that is here
            words = ["runtime.device=cpu" if w == "runtime.device=cuda" else w for w in words]
        done = cli(*words, "sweep.dry_run=true")
        assert done.code == 0, done.err
        if "-m" not in words:
            assert "2 measurements into runs/gpu-mission/" in done.out, done.out
            continue
        planned = re.search(r"(\d+) of (\d+) measurements? to make", done.out)
        assert planned, done.out
        assert "cannot be composed" not in done.out and "invalid" not in done.out, done.out
    assert len(names) == len(set(names)) == len(commands)
    assert all("=gpu-" in name for name in names)  # what the archive at the end takes along


def test_every_decoding_step_of_the_gap_is_of_64_requests(tmp_path: Path, cli: Cli) -> None:
    """Simulated with the same numbers of requests and tokens."""
    import pandas

    _, commands = suite(tmp_path, "batching")
    (words,) = (words for words in commands if "sweep.name=gpu-gap" in words)
    same = [
        word
        for word in words
        if word.startswith(("batching.", "workload.", "model.max_model_len="))
    ]
    machine = ("engine=simulated", "engine.bandwidth_gb_s=1000", "engine.tflops=100")
    done = cli(*machine, "model=qwen3", "model.weights=random", "name=gap", *same)
    assert done.code == 0, done.err
    (path,) = Path("runs/gap").glob("*/steps.parquet")
    steps = pandas.read_parquet(path)
    assert set(steps["num_requests"]) == {64}
    assert list(steps["num_prefill_tokens"] > 0) == [True] + [False] * 256


# The mission's line and its neighbours, small enough for a CPU.
SMALL = {
    "runtime.device=cuda": "runtime.device=cpu",
    "model=qwen3": "model=tiny",
    "model.weights=random": "runtime.threads=1",
    "measure.timeout_s=240": "measure.roofline=false",
    "workload.num_requests=512": "workload.num_requests=2",
    "workload.num_requests=64": "workload.num_requests=2",
    "workload.input_len=128": "workload.input_len=8",
    "workload.output_len=256": "workload.output_len=4",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.real  # whole measurements, in processes of their own
def test_a_rehearsal_on_a_cpu(tmp_path: Path) -> None:
    """The commands of the first call measure, and their pages and records come back."""
    script, stand_in = copied(tmp_path), tmp_path / "python"
    stand_in.write_text(
        f"#!{sys.executable}\nimport os, sys\nsmall = {SMALL!r}\n"
        "words = [small.get(word, word) for word in sys.argv[1:]]\n"
        "if words[0] != 'run.py': sys.exit(0)\n"
        f"words[0] = {str(ROOT / 'run.py')!r}\n"
        f"os.environ['PYTHONPATH'] = {str(ROOT)!r}\n"
        f"os.execv({sys.executable!r}, [{sys.executable!r}, *words])\n"
    )
    stand_in.chmod(0o755)
    known = {name: value for name, value in os.environ.items() if name not in SUITES_OWN}
    parts = [f"{part}:200" for part in ("environment", "compile", "mission", "formats", "plain")]
    done = subprocess.run(
        ["bash", str(script), *parts],
        # with a lock of its own: others measure on this device, too
        env={**known, **places(tmp_path), "PYTHON": str(stand_in), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    with tarfile.open(tmp_path / "out" / "results.tar.gz") as archive:
        names = archive.getnames()
        for name in (one for one in names if one.endswith("/record.json")):
            member = archive.extractfile(name)
            assert member is not None
            record = json.load(member)  # a machine that is busy with something else is no failure
            assert record["status"] == "ok" or "other process" in str(record["validity"]), record
    for name, count in (("gpu-mission", 2), ("gpu-formats", 2), ("gpu-plain", 1)):
        records = [one for one in names if re.fullmatch(rf"runs/{name}/[^/]+/record\.json", one)]
        assert len(records) == count and f"reports/{name}/index.html" in names, done.stdout
