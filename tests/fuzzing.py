"""Limits for a long run of the property tests of what comes from outside, and counts of what they
were given.

FUZZ_INPUTS=2000 python -m pytest -m fuzz --hypothesis-profile=fuzz
"""

from __future__ import annotations

import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest

ADDRESS_SPACE = 8 << 30  # bytes of the whole test process, libraries included
INPUT_S = 20.0  # of this process alone: a machine that is busy with others is no failure
WAIT_S = 10 * INPUT_S  # of a clock
TEST_S = 1800  # also ends code that is not Python's


class Fuzz:
    """A pytest plug-in: every input has INPUT_S seconds of the processor and WAIT_S of a clock, and
    the process ADDRESS_SPACE bytes."""

    def __init__(self) -> None:
        self.inputs: Counter[str] = Counter()
        self.longest = (0.0, "")
        for number in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(number, self._too_long)
        resource.setrlimit(
            resource.RLIMIT_AS, (ADDRESS_SPACE, resource.getrlimit(resource.RLIMIT_AS)[1])
        )

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Put the limits around each input of each marked test."""
        for item in items:
            if (mark := item.get_closest_marker("fuzz")) is not None and isinstance(
                item, pytest.Function
            ):
                handle = item.obj.hypothesis
                handle.inner_test = self._limited(handle.inner_test, mark.args[0], item.name)
                item.add_marker(pytest.mark.timeout(TEST_S, method="thread"))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say how many inputs of each kind were tried, and what they took."""
        write = terminalreporter.write_line
        terminalreporter.section("inputs tried")
        for kind, count in sorted(self.inputs.items()):
            write(f"{kind:24}{count:>8,}")
        write(f"{'in all':24}{sum(self.inputs.values()):>8,}")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1 if sys.platform == "darwin" else 1024
        )
        write(
            f"longest {self.longest[0]:.2f} s ({self.longest[1]}); peak memory {peak / 1e6:,.0f} MB"
        )

    def _limited(self, test: Callable[..., Any], kind: str, name: str) -> Callable[..., Any]:
        """The test of one input, ended when it takes too long."""

        @wraps(test)
        def limited(*args: Any, **kwargs: Any) -> Any:
            self.inputs[kind] += 1
            started = time.perf_counter()
            signal.setitimer(signal.ITIMER_PROF, INPUT_S)
            signal.setitimer(signal.ITIMER_REAL, WAIT_S)
            try:
                return test(*args, **kwargs)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.setitimer(signal.ITIMER_REAL, 0)
                self.longest = max(self.longest, (time.perf_counter() - started, name))

        return limited

    @staticmethod
    def _too_long(number: int, _: object) -> None:
        seconds = INPUT_S if number == signal.SIGPROF else WAIT_S
        raise TimeoutError(f"one input took more than {seconds:.0f} s")
