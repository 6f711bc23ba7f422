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

import hydra._internal.defaults_list
import omegaconf._utils
import omegaconf.base
import pytest
import yaml
from hydra.core.default_element import InputDefault
from omegaconf import DictConfig

from minivllm.config.loader import OptionLoader


def parse_once(patch: pytest.MonkeyPatch) -> None:
    """Remember what OmegaConf parses: YAML, and the trees of its interpolations, which it only
    reads. Every command composes as the arms of a sweep do."""
    loader: Callable[[], type] = cache(omegaconf._utils.get_yaml_loader)
    patch.setattr("omegaconf._utils.get_yaml_loader", loader)
    patch.setattr("yaml.load", _remembering(yaml.load, loader))
    parse = cache(omegaconf.base.parse)
    patch.setattr("omegaconf.base.parse", parse)
    patch.setattr("omegaconf._utils.parse", parse)
    patch.setattr("hydra._internal.hydra.ConfigLoaderImpl", OptionLoader)
    patch.setattr(hydra._internal.defaults_list, "_create_interpolation_map", _choices_if_needed)


_create_interpolation_map = hydra._internal.defaults_list._create_interpolation_map


def _choices_if_needed(
    overrides: Any, defaults: list[InputDefault], self_added: bool
) -> DictConfig | None:
    """What interpolations in a list of defaults may name, which Hydra makes for each option
    file."""
    if any(default.is_interpolation() for default in defaults):
        return _create_interpolation_map(overrides, defaults, self_added)
    return None


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
