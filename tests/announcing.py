"""What a run of the tests says before the first of them: what is installed, what is not, how many
there are."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "triton", "transformers", "bitsandbytes", "hypothesis")
# Extras, by a package of each, whose tests are skipped without it.
EXTRAS = {
    "joblib": "joblib",
    "ray": "ray",
    "slurm": "submitit",
    "optuna": "optuna",
    "eval": "lm-eval",
    "mlflow": "mlflow-skinny",
}
# What tests take that pip does not install, by what is skipped without it.
PROGRAMS = {
    "of C++ kernels": ("c++",),
}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def environment() -> list[str]:
    """The versions of what matters, and a line for each kind of tests that is skipped here."""
    found = [f"{name} {_version(name) or 'missing'}" for name in PACKAGES]
    lines = [", ".join([f"Python {sys.version.split()[0]}", *found])]
    if missing := [extra for extra, package in EXTRAS.items() if not _version(package)]:
        lines.append(f"without extras {', '.join(missing)}: their tests are skipped")
    lines += [
        f"no {names[0]}: tests {tests} are skipped"
        for tests, names in PROGRAMS.items()
        if not any(map(shutil.which, names))
    ]
    if not Path("/dev/nvidiactl").exists():
        lines.append("no GPU: tests/gpu is skipped, but for what a pretended GPU can do")
    return lines


def announcement(tests: int, processes: int) -> Sequence[str]:
    """What is said once all tests are found."""
    return [*environment(), f"{tests:,} tests; processes: {processes}"]
