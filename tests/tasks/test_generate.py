"""task=generate where there is more to print than one stream."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from minivllm.config.compose import compose
from minivllm.tasks.generate import run
from tests.forked import popen

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("decoding", "scored"), [("beam", True), ("sample", False)])
def test_several_completions_are_all_printed(
    decoding: str, scored: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    knobs = ["decoding.n=2", "decoding.max_tokens=4", "task.prompt=zq", "runtime.device=cpu"]
    assert run(compose(["task=generate", f"decoding={decoding}", *knobs])) == 0
    shown = capsys.readouterr()
    assert shown.out.count("zq") == 2
    assert shown.err.count("4 tokens") == 2
    assert (shown.err.count("score -") == 2) == scored


def test_a_reader_that_has_seen_enough_ends_it_quietly(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "run.py"),
        "preset=generate",
        "task.prompt=zq",
        "decoding.max_tokens=400",
    ]
    with popen()(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        assert child.stdout.read(2) == "zq"
        child.stdout.close()
        told = child.stderr.read()
    assert child.returncode == 1 and "Error" not in told, told
