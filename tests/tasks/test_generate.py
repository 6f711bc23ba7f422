"""task=generate where there is more to print than one stream."""

from __future__ import annotations

import pytest

from minivllm.config import compose
from minivllm.tasks.generate import run


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
