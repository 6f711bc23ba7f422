"""scripts/gpu_suite.sh without a GPU: what it keeps, whatever fails or ends it."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest

from minivllm.bench.hardware.readings import Roofline
from tests.engines.servers.waiting import wait_until
from tests.scripts.gpu_suite import (
    PARTS,
    SUITE,
    SUITES_OWN,
    copied,
    limits,
    places,
    read_pieces,
    suite,
)
from tests.scripts.load import load_script


def test_its_parts_are_those_that_it_says() -> None:
    text = SUITE.read_text()
    described = re.findall(r"^#   ([\w-]+) {2,}(?=\S)(?!\d+ s: )", text, re.MULTILINE)
    assert tuple(described) == PARTS
    assert f'ALL="{" ".join(PARTS)}"' in text


@pytest.mark.parametrize("parts", [["kernelz"], ["ceilings", "kernelz"], ["ceilings", "kernel"]])
def test_a_part_that_is_none_is_refused(parts: list[str], tmp_path: Path) -> None:
    """Before anything runs, wherever it stands: the time of those before it would be lost."""
    assert suite(tmp_path, *parts) == (2, [])
    assert not (tmp_path / "out").exists()


def test_a_missing_package_ends_the_suite(tmp_path: Path) -> None:
    """Every other part would fail in the same way, and the time would be gone."""
    missing = 'echo "python scripts/gpu_wheels.py"; exit 1'
    then = f'case "$1" in scripts/gpu_environment.py) {missing};; esac'
    code, commands = suite(tmp_path, "first", then=then)
    assert code == 1 and len(commands) == 1
    said = (tmp_path / "out" / "suite.log").read_text()
    assert "python scripts/gpu_wheels.py" in said
    assert said.count("left out: something is missing") == len(limits("first")) - 1


def test_wheels_are_installed_where_they_lie(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "demo-1.0-py3-none-any.whl").touch()
    script = copied(tmp_path)
    wheels = {"WHEELS": str(tmp_path / "wheels")}
    then = "echo $PYTHONPATH"
    code, commands = suite(tmp_path, "environment", script=script, then=then, **wheels)
    assert code == 0 and commands[0][:3] == ["-m", "pip", "install"]
    assert commands[0][-1].endswith("demo-1.0-py3-none-any.whl")
    site = commands[0][commands[0].index("--target") + 1]
    assert f":{script.parents[1] / site}" in (tmp_path / "work" / "environment.log").read_text()


def test_what_is_large_comes_back_in_pieces(tmp_path: Path) -> None:
    """And whole again where it has become small."""
    script = copied(tmp_path)
    folder = script.parents[1] / "runs" / "gpu-many"
    folder.mkdir(parents=True)
    noise = os.urandom(40_000)
    (folder / "steps.parquet").write_bytes(noise)
    (folder / "trace.json.gz").write_bytes(noise)
    assert suite(tmp_path, "many", script=script, MOST_BYTES="30000")[0] == 0
    out = tmp_path / "out"
    pieces = sorted(out.glob("results.tar.gz*"))
    assert len(pieces) == 2 and all(piece.stat().st_size <= 30_000 for piece in pieces)
    joined = b"".join(piece.read_bytes() for piece in pieces)
    with tarfile.open(fileobj=io.BytesIO(joined)) as archive:
        names = archive.getnames()
    assert "runs/gpu-many/steps.parquet" in names and not any("trace" in name for name in names)
    with tarfile.open(fileobj=io.BytesIO(read_pieces(out, "traces.tar.gz"))) as traces:
        assert traces.getnames() == ["runs/gpu-many/trace.json.gz"]
    assert len([*out.iterdir()]) <= 8
    assert suite(tmp_path, "many", script=script)[0] == 0
    assert [path.name for path in out.glob("results*")] == ["results.tar.gz"]


def test_what_is_known_is_kept_after_each_command(tmp_path: Path) -> None:
    """Also where a command fails, and where the whole is killed with the last one still running."""
    script = copied(tmp_path)
    then = (
        "ls $OUT/results.tar.gz >> $OUT/seen 2>/dev/null\n"
        "echo begun; cat $WORK/waits.log > $OUT/meanwhile\n"
        "case $* in *batch1*) exit 3;; esac\n"
        "mkdir -p runs/gpu-8b-waits runs/gpu-other && echo {} > runs/gpu-8b-waits/record.json; "
        "echo measured; echo $PYTHONPATH"
    )
    code, commands = suite(tmp_path, "waits", script=script, then=then)
    out = tmp_path / "out"
    assert (code, len(commands)) == (1, 3)
    assert (out / "seen").read_text().count(
        "results.tar.gz"
    ) == 2  # when the second and the third command began
    with tarfile.open(out / "results.tar.gz") as archive:
        assert "runs/gpu-8b-waits/record.json" in archive.getnames()
        assert any(name.endswith("work/waits.log") for name in archive.getnames())
        assert not any("other" in name for name in archive.getnames())  # only what is the call's
    log = (tmp_path / "work" / "waits.log").read_text()
    assert "measured" in log and "failed (exit code 3)" in log
    # also of the command that is still running
    assert (out / "meanwhile").read_text().count("begun") == 3
    # scripts and workers find the package, which is not installed
    assert str(script.parents[1]) in log
    assert {path.name for path in out.iterdir()} == {
        *("meanwhile", "seen", "suite.log", "results.tar.gz"),
    }


def test_an_archive_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    script, out = copied(tmp_path), tmp_path / "out"
    (script.parents[1] / "runs" / "gpu-scaling").mkdir(parents=True)
    assert suite(tmp_path, "scaling", script=script)[0] == 0  # also where there is no report
    good = (out / "results.tar.gz").read_bytes()
    failing = tmp_path / "bin" / "tar"
    failing.parent.mkdir()
    failing.write_text("#!/bin/sh\necho torn > $2\nexit 2\n")
    failing.chmod(0o755)
    path = f"{failing.parent}:{os.environ['PATH']}"
    assert suite(tmp_path, "scaling", script=script, PATH=path)[0] == 1
    assert "could not be archived" in (tmp_path / "work" / "scaling.log").read_text()
    assert (out / "results.tar.gz").read_bytes() == good and not [*out.glob(".results*")]


def started(tmp_path: Path, then: str, **variables: str) -> subprocess.Popen[bytes]:
    """The suite's part `waits` in a process group of its own, in a copy of its folder."""
    script, recorder = copied(tmp_path), tmp_path / "python"
    recorder.write_text(f'#!/bin/sh\ncase "$1" in scripts/*) exit 0;; esac\n{then}\n')
    recorder.chmod(0o755)
    known = {name: value for name, value in os.environ.items() if name not in SUITES_OWN}
    environment = {**known, **places(tmp_path), "PYTHON": str(recorder), **variables}
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
    archive = tmp_path / "out" / "results.tar.gz"
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
    log = (tmp_path / "work" / "waits.log").read_text()
    assert "failed (exit code" in log and log.count("left out: the time is over") == 2
    assert not (tmp_path / "work" / "peer.log").exists()  # no part begins


def test_a_part_that_runs_again_begins_its_log_anew(tmp_path: Path) -> None:
    for then in ("echo first", "echo second"):
        suite(tmp_path, "tests", then=then)
    log = (tmp_path / "work" / "tests.log").read_text()
    assert "second" in log and "first" not in log and log.count("== tests") == 1


def test_a_part_ends_when_its_time_is_over(tmp_path: Path) -> None:
    code, commands = suite(tmp_path, "waits", "peer", then="exec sleep 30", PART_S="1")
    # the second of the first part is left out, the next part begins
    assert code == 1 and len(commands) == 2
    assert "left out" in (tmp_path / "work" / "waits.log").read_text()
    assert "failed (exit code 124)" in (tmp_path / "work" / "peer.log").read_text()


def test_a_call_ends_when_its_time_is_over(tmp_path: Path) -> None:
    code, commands = suite(tmp_path, "waits", "peer", then="exec sleep 30", CALL_S="2")
    assert code == 1 and len(commands) == 1
    assert "left out: the time is over" in (tmp_path / "work" / "waits.log").read_text()
    # Of a part that could not begin nothing is written, and what is known has been collated.
    assert not (tmp_path / "work" / "peer.log").exists()
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
        part: (tmp_path / "work" / f"{part}.log").read_text() for part in ("kernel-tests", "peer")
    }
    assert (
        "compiling with 2\n" in message["kernel-tests"]
        and "compiling with all\n" in message["peer"]
    )


def test_targets_are_collated_after_each_part_and_fail_none(tmp_path: Path) -> None:
    code, commands = suite(tmp_path, "waits", "peer")
    assert code == 0 and len(commands) == 4
    line = f"scripts/gpu_targets.py --output {tmp_path / 'out' / 'targets.md'}"
    assert (tmp_path / "collated").read_text().splitlines() == [line, line]


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
