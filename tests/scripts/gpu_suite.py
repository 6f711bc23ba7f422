"""scripts/gpu_suite.sh without a GPU: a stand-in for Python writes down what it would run."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUITE = ROOT / "scripts" / "gpu_suite.sh"
CALLS = {"first": 240, "second": 280, "third": 160}  # seconds
START_S = 120  # of a machine
TESTING = ("environment", "compile", "logits", "kernel-tests", "tests", "ceilings")
SHORT = (
    *("environment", "compile", "logits", "mission", "formats", "plain", "kernel-tests", "tests"),
    *("batch1", "leave-out", "ladder", "many", "fp8", "graphs"),
)
LONG = (
    *("ceilings", "table", "precision", "activations", "batching", "peer", "scaling", "kernels"),
    *("experts", "waits", "ablation", "backends", "speculation", "studies"),
)
PARTS = SHORT + LONG
MEASURING = [part for part in PARTS if part not in TESTING]
SEPARATOR = "\x1e"
SUITES_OWN = (
    "AZURE_TRACE",
    "CALL_S",
    "TORCHINDUCTOR_COMPILE_THREADS",
)  # variables that are the tests' to set


def places(tmp_path: Path) -> dict[str, str]:
    """The folders that the suite writes to; of wheels there is none."""
    names = {"OUT": "out", "WORK": "work", "WHEELS": "none"}
    return {variable: str(tmp_path / name) for variable, name in names.items()}


def limits(call: str) -> dict[str, int]:
    """The seconds of each part of a call."""
    (text,) = re.findall(rf'^{call.upper()}="(.*)"$', SUITE.read_text(), re.MULTILINE)
    return {part: int(seconds) for part, seconds in (one.split(":") for one in text.split())}


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
    done = subprocess.run(
        ["bash", str(script), *parts],
        env={**known, **places(tmp_path), "PYTHON": str(recorder), **variables},
        capture_output=True,
        text=True,
    )
    commands = log.read_text().split(SEPARATOR)[:-1]
    return done.returncode, [command.split("\x1f")[:-1] for command in commands]


def copied(tmp_path: Path) -> Path:
    """A copy of the script, which works in the folder above its own."""
    script = tmp_path / "copy" / "scripts" / "gpu_suite.sh"
    script.parent.mkdir(parents=True)
    script.write_text(SUITE.read_text())
    return script


def read_pieces(out: Path, name: str) -> bytes:
    return b"".join(piece.read_bytes() for piece in sorted(out.glob(f"{name}*")))
