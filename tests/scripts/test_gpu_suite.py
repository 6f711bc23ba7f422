"""scripts/gpu_suite.sh without a GPU: what it would run can be composed, and what it names is
there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from minivllm.bench.hardware.readings import Roofline
from minivllm.config.compose import compose
from tests.engines.servers.waiting import wait_until
from tests.scripts.load import load_script

ROOT = Path(__file__).resolve().parents[2]
SUITE = ROOT / "scripts" / "gpu_suite.sh"
PARTS = (
    *(
        "ceilings",
        "kernel-tests",
        "table",
        "precision",
        "activations",
        "batching",
        "peer",
        "scaling",
        "kernels",
        "experts",
        "correctness",
    ),
    *("waits", "ablation", "backends", "speculation", "studies"),
)
MEASURING = [part for part in PARTS if part not in ("ceilings", "kernel-tests", "correctness")]
SEPARATOR = "\x1e"
SUITES_OWN = (
    "AZURE_TRACE",
    "CALL_S",
    "TORCHINDUCTOR_COMPILE_THREADS",
)  # variables that are the tests' to set

Cli = Callable[..., Any]


def suite(
    tmp_path: Path, *parts: str, script: Path = SUITE, then: str = "", **variables: str
) -> tuple[int, list[list[str]]]:
    """The exit code and the commands of some parts, which a stand-in for Python writes down; `then`
    it runs this.

    What collates after each part is written down beside them, and fails.
    """
    recorder, log = tmp_path / "python", tmp_path / "commands"
    collating = (
        f'case "$1" in scripts/gpu_targets.py) echo "$@" >> {tmp_path / "collated"}; exit 1;; esac'
    )
    recorder.write_text(
        "#!/bin/sh\n"
        f"{collating}\n"
        f"printf '%s\\037' \"$@\" >> {log}\n"
        f"printf '\\036' >> {log}\n"
        f"{then}\n"
    )
    recorder.chmod(0o755)
    log.touch()
    known = {name: value for name, value in os.environ.items() if name not in SUITES_OWN}
    environment = {**known, "PYTHON": str(recorder), "OUT": str(tmp_path / "out"), **variables}
    done = subprocess.run(
        ["bash", str(script), *parts], env=environment, capture_output=True, text=True
    )
    commands = log.read_text().split(SEPARATOR)[:-1]
    return done.returncode, [command.split("\x1f")[:-1] for command in commands]


def test_its_parts_are_those_that_it_says() -> None:
    text = SUITE.read_text()
    described = re.findall(r"^#   ([\w-]+) {2,}", text, re.MULTILINE)
    assert tuple(described) == PARTS
    assert f'ALL="{" ".join(PARTS)}"' in text


@pytest.mark.parametrize("parts", [["kernelz"], ["ceilings", "kernelz"], ["ceilings", "kernel"]])
def test_a_part_that_is_none_is_refused(parts: list[str], tmp_path: Path) -> None:
    """Before anything runs, wherever it stands: the time of those before it would be lost."""
    assert suite(tmp_path, *parts) == (2, [])
    assert not (tmp_path / "out").exists()


def test_the_calls_that_its_head_proposes_fit_half_an_hour() -> None:
    calls = re.findall(
        r"^#   CALL_S=(\d+) scripts/gpu_suite.sh ([\w -]+)$", SUITE.read_text(), re.MULTILINE
    )
    named = [part for _, parts in calls for part in parts.split()]
    assert len(named) == len(set(named)) and {*named} < {*PARTS}
    seconds = [int(call_s) for call_s, _ in calls]
    assert sum(seconds) <= 1800 - 180 - 10 * len(calls)  # what a call needs beyond its time, mostly
    assert max(seconds) + 20 + 20 + 40 <= 600  # at worst: to end, to collate, and what is before it


def test_tests_and_scripts_that_it_runs_are_there(tmp_path: Path) -> None:
    code, commands = suite(tmp_path, "kernel-tests", "correctness", "ceilings")
    assert code == 0 and len(commands) == 4
    assert all(words[words.index("-n") + 1] == "8" for words in commands if "pytest" in words)
    paths = [
        word for words in commands for word in words if word.startswith(("tests/", "scripts/"))
    ]
    assert paths and [path for path in paths if not (ROOT / path).exists()] == []


def copied(tmp_path: Path) -> Path:
    """A copy of the script, which works in the folder above its own."""
    script = tmp_path / "copy" / "scripts" / "gpu_suite.sh"
    script.parent.mkdir(parents=True)
    script.write_text(SUITE.read_text())
    return script


def test_what_is_known_is_kept_after_each_command(tmp_path: Path) -> None:
    """Also where a command fails, and where the whole is killed with the last one still running."""
    script = copied(tmp_path)
    then = (
        "ls $OUT/waits.tar.gz >> $OUT/seen 2>/dev/null\n"
        "echo begun; cat $OUT/waits.log > $OUT/meanwhile\n"
        "case $* in *batch1*) exit 3;; esac\n"
        "mkdir -p runs/gpu-8b-waits runs/gpu-other && echo {} > runs/gpu-8b-waits/record.json; "
        "echo measured; echo $PYTHONPATH"
    )
    code, commands = suite(tmp_path, "waits", script=script, then=then)
    out = tmp_path / "out"
    assert (code, len(commands)) == (1, 3)
    assert (out / "seen").read_text().count(
        "waits.tar.gz"
    ) == 2  # when the second and the third command began
    with tarfile.open(out / "waits.tar.gz") as archive:
        assert "runs/gpu-8b-waits/record.json" in archive.getnames()
        assert not any("other" in name for name in archive.getnames())  # only what is the part's
    log = (out / "waits.log").read_text()
    assert "measured" in log and "failed (exit code 3)" in log
    # also of the command that is still running
    assert (out / "meanwhile").read_text().count("begun") == 3
    # scripts and workers find the package, which is not installed
    assert str(script.parents[1]) in log
    assert sorted(path.name for path in out.iterdir()) == [
        "meanwhile",
        "seen",
        "waits.log",
        "waits.tar.gz",
    ]


def test_an_archive_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    script, out = copied(tmp_path), tmp_path / "out"
    (script.parents[1] / "runs" / "gpu-scaling").mkdir(parents=True)
    assert suite(tmp_path, "scaling", script=script)[0] == 0  # also where there is no report
    good = (out / "scaling.tar.gz").read_bytes()
    failing = tmp_path / "bin" / "tar"
    failing.parent.mkdir()
    failing.write_text("#!/bin/sh\necho torn > $2\nexit 2\n")
    failing.chmod(0o755)
    path = f"{failing.parent}:{os.environ['PATH']}"
    assert suite(tmp_path, "scaling", script=script, PATH=path)[0] == 1
    assert "could not be archived" in (out / "scaling.log").read_text()
    assert (out / "scaling.tar.gz").read_bytes() == good and not (out / ".records").exists()


def started(tmp_path: Path, then: str, **variables: str) -> subprocess.Popen[bytes]:
    """The suite's part `waits` in a process group of its own, in a copy of its folder."""
    script, recorder = copied(tmp_path), tmp_path / "python"
    recorder.write_text(f'#!/bin/sh\ncase "$1" in scripts/*) exit 0;; esac\n{then}\n')
    recorder.chmod(0o755)
    known = {name: value for name, value in os.environ.items() if name not in SUITES_OWN}
    environment = {**known, "PYTHON": str(recorder), "OUT": str(tmp_path / "out"), **variables}
    output = subprocess.DEVNULL
    return subprocess.Popen(
        ["bash", str(script), "waits", "peer"],
        env=environment,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


MEASURES = (
    "mkdir -p runs/gpu-8b-waits && echo {} > runs/gpu-8b-waits/record.json; touch $OUT/measuring\n"
)


def archived(tmp_path: Path) -> bool:
    archive = tmp_path / "out" / "waits.tar.gz"
    if not archive.exists():
        return False
    with tarfile.open(archive) as found:
        return "runs/gpu-8b-waits/record.json" in found.getnames()


def test_what_is_measured_is_kept_while_a_command_runs(tmp_path: Path) -> None:
    """Also where all is killed at once, which leaves no time for anything."""
    process = started(tmp_path, MEASURES + "exec sleep 60", KEEP_S="1")
    try:
        assert wait_until(lambda: archived(tmp_path))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert archived(tmp_path)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP])
def test_a_suite_that_is_ended_interrupts_its_command_and_keeps_the_records(
    how: signal.Signals, tmp_path: Path
) -> None:
    interrupted = "trap 'touch $OUT/interrupted; exit 130' INT\n"
    process = started(tmp_path, interrupted + MEASURES + "sleep 60 & wait")
    try:
        assert wait_until((tmp_path / "out" / "measuring").exists)
        process.send_signal(how)
        assert process.wait(30) == 1
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert archived(tmp_path) and (tmp_path / "out" / "interrupted").exists()
    log = (tmp_path / "out" / "waits.log").read_text()
    assert "failed (exit code" in log and log.count("left out: the time is over") == 2
    assert not (tmp_path / "out" / "peer.log").exists()  # no part begins


def test_a_part_that_runs_again_begins_its_log_anew(tmp_path: Path) -> None:
    for then in ("echo first", "echo second"):
        suite(tmp_path, "correctness", then=then)
    log = (tmp_path / "out" / "correctness.log").read_text()
    assert "second" in log and "first" not in log and log.count("== correctness") == 1


def test_a_part_ends_when_its_time_is_over(tmp_path: Path) -> None:
    code, commands = suite(tmp_path, "waits", "peer", then="exec sleep 30", PART_S="1")
    # the second of the first part is left out, the next part begins
    assert code == 1 and len(commands) == 2
    assert "left out" in (tmp_path / "out" / "waits.log").read_text()
    assert "failed (exit code 124)" in (tmp_path / "out" / "peer.log").read_text()


def test_a_call_ends_when_its_time_is_over(tmp_path: Path) -> None:
    code, commands = suite(tmp_path, "waits", "peer", then="exec sleep 30", CALL_S="2")
    assert code == 1 and len(commands) == 1
    assert "left out: the time is over" in (tmp_path / "out" / "waits.log").read_text()
    # Of a part that could not begin nothing is written, and what is known has been collated.
    assert not (tmp_path / "out" / "peer.log").exists()
    assert len((tmp_path / "collated").read_text().splitlines()) == 1


def test_only_tests_compile_with_few_processes(tmp_path: Path) -> None:
    """How long compiling takes is one of the figures."""
    suite(
        tmp_path,
        "kernel-tests",
        "peer",
        then="echo compiling with ${TORCHINDUCTOR_COMPILE_THREADS-all}",
    )
    message = {
        part: (tmp_path / "out" / f"{part}.log").read_text() for part in ("kernel-tests", "peer")
    }
    assert (
        "compiling with 2\n" in message["kernel-tests"]
        and "compiling with all\n" in message["peer"]
    )


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
        in (tmp_path / "out" / "batching.log").read_text()
    )


def test_targets_are_collated_after_each_part_and_fail_none(tmp_path: Path) -> None:
    code, commands = suite(tmp_path, "waits", "peer")
    assert code == 0 and len(commands) == 4
    line = f"scripts/gpu_targets.py --output {tmp_path / 'out' / 'targets.md'}"
    assert (tmp_path / "collated").read_text().splitlines() == [line, line]


def test_every_test_that_takes_a_gpu_where_there_is_one_is_in_a_part(tmp_path: Path) -> None:
    _, commands = suite(tmp_path, "kernel-tests", "correctness")
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
        if "-m" not in words:
            assert compose(words)["choices"]["task"] == "kernels"
            continue
        done = cli(*words, "sweep.dry_run=true")
        assert done.code == 0, done.err
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


def test_ceilings_are_the_best_that_the_probes_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    script = load_script("ceilings")
    probes = iter([(Roofline(2e9, 5e10), ["small"]), (Roofline(3e9, 1e10), ["small"])])
    monkeypatch.setattr(script, "probe", lambda device, dtype: next(probes))
    found = script.ceilings(torch.device("cpu"), 1 << 20, ("bfloat16", "float32"))
    assert found.pop("copy_bytes_per_s") > 0
    assert found == {
        "read_bytes_per_s": 3e9,
        "matrix_flops_per_s": {"bfloat16": 5e10, "float32": 1e10},
        "notes": ["small"],
    }
