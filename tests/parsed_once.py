"""Option files and interpolations are parsed once in a process: thousands of tests compose the same
ones.

What is remembered goes by the text, never by the name or time of a file: one that changes is read
anew.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import omegaconf._utils
import omegaconf.base
import pytest
import yaml


def parse_once(patch: pytest.MonkeyPatch) -> None:
    """Remember what OmegaConf parses: YAML, and the trees of its interpolations, which it only
    reads."""
    loader: Callable[[], type] = cache(omegaconf._utils.get_yaml_loader)
    patch.setattr("omegaconf._utils.get_yaml_loader", loader)
    patch.setattr("yaml.load", _remembering(yaml.load, loader))
    parse = cache(omegaconf.base.parse)
    patch.setattr("omegaconf.base.parse", parse)
    patch.setattr("omegaconf._utils.parse", parse)


def _remembering(load: Callable[..., Any], loader: Callable[[], type]) -> Callable[..., Any]:
    @cache
    def parsed(text: str) -> Any:
        return load(text, Loader=loader())

    def remembering(stream: Any, Loader: type) -> Any:
        if Loader is not loader():
            return load(stream, Loader=Loader)
        text = stream if isinstance(stream, str) else stream.read()
        try:
            return deepcopy(parsed(text))
        except yaml.YAMLError:
            if text is not stream:
                stream.seek(0)  # so that the message names the file
            return load(stream, Loader=Loader)

    return remembering
