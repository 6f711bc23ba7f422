"""Option files and interpolations are parsed once in a process: thousands of tests compose the same
ones.

What is remembered goes by the text, never by the name or time of a file: one that changes is read
anew.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import hydra._internal.config_loader_impl
import hydra._internal.defaults_list
import hydra._internal.hydra
import hydra.version
import omegaconf._utils
import omegaconf.base
import yaml
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.defaults_list import DefaultsList
from hydra.core.default_element import InputDefault
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from minivllm.config.loader import OptionLoader, OptionRepository


def parse_once(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Remember what OmegaConf parses: YAML, and the trees of its interpolations, which it only
    reads. Every command composes as the arms of a sweep do. Nothing where it is done already."""
    if isinstance(hydra._internal.config_loader_impl.create_defaults_list, _DefaultsLists):
        return
    loader: Callable[[], type] = cache(omegaconf._utils.get_yaml_loader)
    put(omegaconf._utils, "get_yaml_loader", loader)
    put(yaml, "load", _remembering(yaml.load, loader))
    parse = cache(omegaconf.base.parse)
    put(omegaconf.base, "parse", parse)
    put(omegaconf._utils, "parse", parse)
    put(hydra.version, "_get_version", cache(hydra.version._get_version))  # at every option file
    put(hydra._internal.hydra, "ConfigLoaderImpl", OptionLoader)
    put(hydra._internal.defaults_list, "_create_interpolation_map", _choices_if_needed)
    put(hydra._internal.config_loader_impl, "create_defaults_list", _DefaultsLists())


_create_interpolation_map = hydra._internal.defaults_list._create_interpolation_map


def _choices_if_needed(
    overrides: Any, defaults: list[InputDefault], self_added: bool
) -> DictConfig | None:
    """What interpolations in a list of defaults may name, which Hydra makes for each option
    file."""
    if any(default.is_interpolation() for default in defaults):
        return _create_interpolation_map(overrides, defaults, self_added)
    return None


class _DefaultsLists:
    """Hydra's `create_defaults_list`, which walks through all option files again for the same
    choices of options."""

    def __init__(self) -> None:
        self._make = hydra._internal.defaults_list.create_defaults_list
        self._known: dict[Any, tuple[dict[str, Any], bytes]] = {}  # option files, and the list

    def __call__(
        self,
        repo: CachingConfigRepository,
        config_name: str,
        overrides_list: list[Override],
        prepend_hydra: bool,
        skip_missing: bool,
    ) -> DefaultsList:
        made_of = (repo, config_name, overrides_list, prepend_hydra, skip_missing)
        files = repo.delegate
        if not isinstance(files, OptionRepository):
            return self._make(*made_of)
        given = [one for one in overrides_list if not one.is_sweep_override()]
        knobs = [
            one
            for one in given
            if isinstance(one.value(), dict) or not repo.group_exists(one.key_or_group)
        ]
        choices = tuple(one.input_line for one in given if one not in knobs)
        places = tuple((source.path, source.provider) for source in repo.get_sources())
        asked = (config_name, choices, places, prepend_hydra, skip_missing)
        read, pickled = self._known.get(asked, ({}, b""))
        if not pickled or any(files.key(path) != key for path, key in read.items()):
            made = self._make(*made_of)
            pickled = pickle.dumps(replace(made, config_overrides=[], defaults_tree=None))
            paths = [name.removeprefix("config_path=") for name in repo.cache]
            self._known[asked] = {path: files.key(path) for path in paths}, pickled
            return made
        known: DefaultsList = pickle.loads(pickled)
        return replace(known, config_overrides=knobs)


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
