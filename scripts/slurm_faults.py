"""Sweeps on a real Slurm whose jobs or commands are ended in every way: 20 of them.

    eval "$(scripts/one_node_slurm.sh start)"
    python scripts/slurm_faults.py --output reports/examples/cpu/slurm_faults.json
    python scripts/slurm_faults.py --kinds memory two_commands

Each sweep has three arms of an engine that waits until the fault has happened. After every run each
planned measurement has one record with the status that the fault gives it, none was measured twice,
and no private file of a job is left. A run in which that is not so is printed with the reason, and
the exit code is 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from program import exit_code, new_parser

from minivllm.bench.records.identity import code_hash
from minivllm.platform import files

ROOT = Path(__file__).resolve().parents[1]
NAME = "fates"
MOST_S = 900.0  # for anything, on a busy machine
DELAYS = ("0.001", "0.002", "0.003")  # the arms
ARMS = f"engine.delay_s={','.join(DELAYS)}"
OK = ("ok", "invalid", "invalid Invalid")  # a machine that others fill makes a record invalid
SETTINGS = (
    *("model=mine", "engine=logged", f"sweep.name={NAME}", "measure.roofline=false"),
    *("runtime.device=cpu", "measure.warmup_requests=0", "workload.num_requests=2"),
    *("workload.output_len=4", "hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=10"),
    *("hydra.launcher.cpus_per_task=1", "hydra.launcher.mem_gb=1"),
)
ADDITIONAL = "hydra.launcher.additional_parameters"


def slurm(*command: str) -> str:
    """What a program of Slurm prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def states() -> dict[str, str]:
    """Job, or element of an array -> its state."""
    lines = slurm("squeue", "-h", "-r", "-n", "minivllm", "-o", "%i %t").splitlines()
    return {line.split()[0]: line.split()[1] for line in lines}


class Sweep:
    """Commands of one sweep, in a folder of its own, whose engines wait in their second step.

    Args:
        folder: empty.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meeting = folder / "meet"
        self._commands: list[subprocess.Popen[str]] = []
        engine = f"tests.experiments.logged.LoggedEngine\ndelay_s: 0.001\nmeeting: {self.meeting}\n"
        for group, name, text in (
            ("engine", "logged", engine),
            ("model", "mine", "tests.experiments.models.load\npath: nowhere\n"),
        ):
            path = folder / "conf" / group / f"{name}.yaml"
            path.parent.mkdir(parents=True)
            path.write_text(f"_target_: {text}")
        self.meeting.mkdir()

    def start(self, *overrides: str) -> subprocess.Popen[str]:
        """Start a command."""
        words = [sys.executable, str(ROOT / "run.py"), "--config-dir", "conf", "-m"]
        command = subprocess.Popen(
            [*words, *SETTINGS, *overrides],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(self.folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._commands.append(command)
        return command

    def until(self, what: Callable[[], object]) -> None:
        """Wait until it is so, as long as the last command runs."""
        end, command = time.monotonic() + MOST_S, self._commands[-1]
        while not what():
            assert command.poll() is None, command.communicate()[0]
            assert time.monotonic() < end, f"nothing changes: {states()}"
            time.sleep(0.2)

    def begun(self) -> str:
        """Wait until the first job to measure is in its second step; its array."""
        self.until((self.meeting / "begun").exists)
        found = states()
        # In the queue no time of theirs is used up.
        assert sorted(found.values()) == ["PD"] * (len(DELAYS) - 1) + ["R"], found
        return next(iter(found)).partition("_")[0]

    def go(self) -> None:
        """Let all engines go on."""
        (self.meeting / "go").touch()

    def end(self, code: int | None = None, command: subprocess.Popen[str] | None = None) -> str:
        """The output of a command, by default the last, which ends without a traceback.

        Args:
            code: its exit code; None: what its records make it.
            command: which.
        """
        command = command or self._commands[-1]
        out = command.communicate(timeout=MOST_S)[0]
        if code is None:
            code = int(any(record["status"] != "ok" for record in self.records().values()))
        assert command.returncode == code and "Traceback" not in out, out
        return out

    def records(self) -> dict[str, dict[str, Any]]:
        """Every record, by its value of engine.delay_s."""
        paths = [*(self.folder / "runs" / NAME).glob("*/record.json")]
        found = [json.loads(path.read_text()) for path in paths]
        assert len({record["run_id"] for record in found}) == len(found)
        return {f"{record['config']['engine']['delay_s']:g}": record for record in found}

    def measured(self) -> Counter[str]:
        """How often the engines have made the measurement of each arm to its end."""
        log = self.folder / "engine.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return Counter(line.split()[1] for line in lines if line.startswith("measured"))

    def close(self) -> None:
        """Cancel its jobs, and end its commands."""
        subprocess.run(["scancel", "-n", "minivllm"], check=False)
        for command in self._commands:
            if command.poll() is None:
                os.killpg(command.pid, signal.SIGKILL)
            command.communicate()


@contextlib.contextmanager
def sweep_in(folder: Path) -> Iterator[Sweep]:
    """A sweep, of which nothing goes on afterwards."""
    sweep = Sweep(folder)
    try:
        yield sweep
    finally:
        sweep.close()


def jobs_of(array: str, index: str) -> list[psutil.Process]:
    """The processes of an element of an array that are submitit's."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "submitit.core._submit" in (process.info["cmdline"] or []):
            with contextlib.suppress(psutil.Error):
                own = process.environ()
                if (own.get("SLURM_ARRAY_JOB_ID"), own.get("SLURM_ARRAY_TASK_ID")) == (
                    *(array, index),
                ):
                    found.append(process)
    return found


# ---- the faults: each returns the status and the error that it gives to arms


Expected = dict[str, tuple[str, ...]]


def time_limit(sweep: Sweep, number: int) -> Expected:
    """A job that Slurm kills at its limit, and one that it warns before."""
    # submitit hears the one signal and not the other, which may come a minute early.
    minutes, warning = (3, "USR2@20") if number else (1, "CONT@5")
    sweep.start(ARMS, f"hydra.launcher.timeout_min={minutes}", f"+{ADDITIONAL}.signal={warning}")
    array = sweep.begun()
    sweep.until(lambda: f"{array}_0" not in states())
    sweep.go()
    sweep.end()
    return {DELAYS[0]: ("timeout TIMEOUT",)}


def scancel_running(sweep: Sweep, number: int) -> Expected:
    sweep.start(ARMS)
    array = sweep.begun()
    slurm("scancel", f"{array}_0")
    sweep.until(lambda: f"{array}_0" not in states())
    sweep.go()
    sweep.end()
    return {DELAYS[0]: ("crashed CANCELLED",)}


def scancel_waiting(sweep: Sweep, number: int) -> Expected:
    """An element that has not begun, which accounting leaves out: when the queue has forgotten it,
    nobody knows why it ended."""
    sweep.start(ARMS)
    array = sweep.begun()
    index = 1 + number % 2
    slurm("scancel", f"{array}_{index}")
    sweep.go()
    sweep.end()
    return {DELAYS[index]: ("crashed CANCELLED", "crashed Killed")}


def kill(sweep: Sweep, number: int) -> Expected:
    """SIGKILL of a job's process, which Slurm calls either, by what it sees first."""
    sweep.start(ARMS)
    array = sweep.begun()
    victims = jobs_of(array, "0")
    assert victims
    for process in victims:
        process.kill()
    sweep.until(lambda: f"{array}_0" not in states())
    sweep.go()
    sweep.end()
    return {DELAYS[0]: ("crashed FAILED", "crashed CANCELLED")}


def memory(sweep: Sweep, number: int) -> Expected:
    """More memory than the job has asked for: the kernel kills the worker, or Slurm, where it
    enforces memory without control groups, the step."""
    sweep.go()
    sweep.start(ARMS, "+engine.fault=allocate", "workload.output_len=180")
    sweep.end()
    says = ("oom MemoryError", "oom OUT_OF_MEMORY", "crashed FAILED", "crashed CANCELLED")
    return dict.fromkeys(DELAYS, says)


def suspension(sweep: Sweep, number: int) -> Expected:
    """Of a running job, so short that the command does not see it, or longer."""
    sweep.start(ARMS)
    array = sweep.begun()
    slurm("scontrol", "suspend", f"{array}_0")
    sweep.until(lambda: states().get(f"{array}_0") == "S")
    time.sleep(100 * number)
    sweep.go()
    slurm("scontrol", "resume", f"{array}_0")
    sweep.end()
    return {}


def ctrl_c(sweep: Sweep, number: int) -> Expected:
    """Of a command whose first job runs, or whose jobs all wait; and the same command again."""
    waiting = (f"+{ADDITIONAL}.begin=now+1hour",) if number == 0 else ()
    command = sweep.start(ARMS, *waiting)
    if waiting:
        sweep.until(lambda: [*states().values()] == ["PD"] * len(DELAYS))
    else:
        sweep.begun()
    first = [*states()]
    os.killpg(command.pid, signal.SIGINT)
    out = sweep.end(130)
    assert f"scancel {first[0].partition('_')[0]} ends them" in out, out
    sweep.start(ARMS)
    time.sleep(20 * number)
    for job in first if waiting else ():
        slurm("scontrol", "update", f"jobid={job}", "starttime=now")
    sweep.go()
    sweep.end()
    return {}


def two_commands(sweep: Sweep, number: int) -> Expected:
    """A second command of the same name beside the first."""
    first = sweep.start(ARMS)
    sweep.begun()
    sweep.start(ARMS)
    out = sweep.end(2)
    assert "sweep fates is running in another process" in out and len(out.splitlines()) == 1, out
    sweep.go()
    sweep.end(command=first)
    return {}


KINDS: dict[Callable[[Sweep, int], Expected], int] = {  # and how often each
    time_limit: 2,
    scancel_running: 3,
    scancel_waiting: 3,
    kill: 3,
    memory: 2,
    suspension: 2,
    ctrl_c: 3,
    two_commands: 2,
}


def run(kind: Callable[[Sweep, int], Expected], number: int, folder: Path) -> dict[str, str]:
    """One sweep with its fault; what each arm's record says. Raises AssertionError."""
    with sweep_in(folder) as sweep:
        expected = kind(sweep, number)
        end = time.monotonic() + MOST_S
        while states():
            assert time.monotonic() < end, f"jobs are left: {states()}"
            time.sleep(0.2)
        records, measured = sweep.records(), sweep.measured()
        says = {
            arm: f"{record['status']} {(record['error'] or {}).get('type', '')}".strip()
            for arm, record in sorted(records.items())
        }
        assert set(says) == set(DELAYS), f"rows of {sorted(says)} of {DELAYS}"
        for arm, found in says.items():
            assert found in expected.get(arm, OK), f"{arm} is {found}: {records[arm]['error']}"
            assert measured[arm] == (found in OK), f"{arm} was measured {measured[arm]} times"
        left = folder / "runs" / NAME / ".jobs"
        assert not left.exists(), f"files of jobs are left: {[*left.iterdir()]}"
    return says


def row_of(kind: Callable[[Sweep, int], Expected], number: int) -> dict[str, Any]:
    """A run as a row: what the arms' records say, or what was not so as its `failure`."""
    row: dict[str, Any] = {"kind": kind.__name__, "number": number}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            row["says"] = run(kind, number, Path(folder))
        except (AssertionError, subprocess.SubprocessError) as error:
            row["failure"] = " ".join(str(error).split())
    row["seconds"] = round(time.monotonic() - begin, 1)
    return {**row, "load": round(os.getloadavg()[0], 1), "code_hash": code_hash()}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of each kind, and of all: its runs, and how many had every row and none measured twice."""
    found = {}
    for name in (*dict.fromkeys(row["kind"] for row in rows), "all"):
        own = [row for row in rows if name in (row["kind"], "all")]
        found[name] = {"runs": len(own), "right": sum("failure" not in row for row in own)}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's docstring."""
    kinds = {kind.__name__: kind for kind in KINDS}
    parser = new_parser(
        __doc__, help="where to keep the record, as JSON; one that is there keeps its other rows"
    )
    parser.add_argument("--kinds", nargs="*", choices=[*kinds], default=[*kinds])
    args = parser.parse_args(arguments)
    # A shell starts background jobs with Ctrl-C ignored, which commands would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kept: dict[str, dict[str, Any]] = {}
    if args.output is not None and args.output.exists():
        kept = json.loads(args.output.read_text(encoding="utf-8"))["rows"]
    runs = [(kinds[name], number) for name in args.kinds for number in range(KINDS[kinds[name]])]
    rows = []
    print(f"{'run':>3}  {'fault':18}{'rows':>6}  what they say", flush=True)
    for index, (kind, number) in enumerate(runs, 1):
        rows.append(row := row_of(kind, number))
        says = row.get("says")
        count, line = "?", f"WRONG: {row.get('failure')}"
        if says is not None:
            count, line = f"{len(says)}/{len(DELAYS)}", "; ".join(says.values())
        print(f"{index:3}  {kind.__name__:18}{count:>6}  {line}", flush=True)
        kept[f"{kind.__name__}-{number}"] = row
        if args.output is not None:
            files.write_json(args.output, {"summary": summary([*kept.values()]), "rows": kept})
    right = summary(rows)["all"]["right"]
    print(f"{right} of {len(rows)} with every row, none measured twice")
    return int(right < len(rows))


if __name__ == "__main__":
    sys.exit(exit_code(main))
