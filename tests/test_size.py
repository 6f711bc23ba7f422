"""A clone is light: what git tracks, and what the examples take of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MB = 1_000_000
TREE = 39.5 * MB
EXAMPLES, EXAMPLE_FILES = 10.5 * MB, 300


def tracked() -> dict[str, int]:
    """Bytes of each file that git tracks."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    names = [name for name in done.stdout.decode().split("\0") if name and (ROOT / name).is_file()]
    if "pyproject.toml" not in names:
        pytest.skip("not this project's git checkout")
    return {name: (ROOT / name).stat().st_size for name in names}


def test_what_git_tracks_is_bounded() -> None:
    sizes = tracked()
    examples = {name: size for name, size in sizes.items() if name.startswith("reports/examples/")}
    assert 0 < sum(examples.values()) < EXAMPLES and len(examples) < EXAMPLE_FILES
    assert sum(sizes.values()) < TREE
