"""Interpolations are resolved by resolvers of the process."""

from __future__ import annotations

import pickle

from minivllm.config import interpolation


def test_the_resolver_is_pickled_by_its_name() -> None:
    """A launcher pickles the resolvers of the process for its jobs."""
    assert pickle.loads(pickle.dumps(interpolation._env)) is interpolation._env
