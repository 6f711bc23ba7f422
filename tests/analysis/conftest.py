"""Tests of statistics share with tests of sweeps what keeps the corrections quick."""

from tests.experiments.conftest import _no_collecting

__all__ = ["_no_collecting"]
