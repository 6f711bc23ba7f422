"""How many threads: a knob, a variable, the cores; and that torch has them before an engine is built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from minivllm import assembly, threads
from minivllm.config import compose
from minivllm.errors import BadInput
from minivllm.threads import thread_count, usable_cores


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_threads_default_to_physical_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINIVLLM_THREADS", raising=False)
    assert 1 <= thread_count({"threads": None}) <= usable_cores()
    monkeypatch.setattr("psutil.cpu_count", lambda logical=True: 16 if logical else 8)
    monkeypatch.setattr(threads, "usable_cores", lambda: 4)
    assert thread_count({}) == 4
    assert thread_count({"threads": 6}) == 6
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # as launchers set it
    assert thread_count({}) == 4
    monkeypatch.setenv("MINIVLLM_THREADS", "3")
    assert thread_count({"threads": None}) == 3 and thread_count({"threads": 6}) == 6
    for wrong in ("0", "all"):
        monkeypatch.setenv("MINIVLLM_THREADS", wrong)
        with pytest.raises(BadInput, match=f"MINIVLLM_THREADS='{wrong}' must be a number"):
            thread_count({})


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize(("overrides", "wanted"), [([], 3), (["runtime.threads=2"], 2)])
def test_an_engine_is_built_with_the_threads_that_it_runs_with(
    overrides: list[str], wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are packed and layers compiled for so many."""
    monkeypatch.setenv("MINIVLLM_THREADS", "3")
    torch.set_num_threads(1)
    seen: list[int] = []
    build = assembly.build

    def spy(node: dict[str, Any], *args: Any, **given: Any) -> Any:
        seen.append(torch.get_num_threads())
        return build(node, *args, **given)

    monkeypatch.setattr(assembly, "build", spy)
    assembly.build_engine(compose(["runtime.device=cpu", *overrides]))
    assert seen and set(seen) == {wanted} and torch.get_num_threads() == wanted
