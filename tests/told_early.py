"""What is wrong is told before a worker and before weights: by the preflight and by an engine."""

from __future__ import annotations

from typing import Any

import pytest

from minivllm import assembly
from minivllm.assembly import build_engine
from minivllm.errors import BadInput
from minivllm.experiments.preflight import check


def assert_told_before_weights(
    config: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both reject the configuration in these words, a regular expression, and load nothing."""
    with pytest.raises(BadInput, match=words):
        check(config)

    def load(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(assembly._Parts, "model", load)
    with pytest.raises(BadInput, match=words):
        build_engine(config)
