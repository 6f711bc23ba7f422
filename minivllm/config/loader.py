"""Hydra's loader of configurations for processes that compose many: what two of them have in common
is read and merged once.

What is remembered goes by the content of option files, never by their names or times: a file that
changes is read anew.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository, IConfigRepository
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig

T = TypeVar("T")

MOST = 1 << 12  # files, and configurations, that are remembered

_read: dict[Any, bytes] = {}  # pickled, because unpickling is a tenth of copying and of parsing
_merged: dict[Any, bytes] = {}


def remembering(loader: ConfigLoader) -> OptionLoader:
    """A loader of the same configurations that remembers."""
    return OptionLoader(loader.get_search_path())


class OptionRepository(ConfigRepository):
    """The option files of a search path, each parsed once in a process; other sources are Hydra's
    own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OptionRepository:
        """A copy whose sources can be replaced, which is all that Hydra does with it."""
        return copy.copy(self)

    def load_config(self, config_path: str) -> ConfigResult | None:
        """One option file; see Hydra's class."""
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if source is None or source.scheme() != "file":
            return super().load_config(config_path)
        load = super().load_config
        try:
            content = Path(source.path, source._normalize_file_name(config_path)).read_bytes()
        except OSError:  # Hydra reports the error
            return load(config_path)
        key = (source.path, source.provider, config_path, content)
        return _remembered(_read, key, lambda: load(config_path))


class OptionLoader(ConfigLoaderImpl):
    """Hydra's loader, for which the same choices of options are merged once in a process."""

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        self.config_search_path = config_search_path
        self.repository = OptionRepository(config_search_path)

    def _compose_config_from_defaults_list(
        self, defaults: list[ResultDefault], repo: IConfigRepository
    ) -> DictConfig:
        """The configuration before the overrides of single knobs; see Hydra's class."""
        merge = super()._compose_config_from_defaults_list
        try:
            parts = [(repr(item), pickle.dumps(repo.load_config(_path(item)))) for item in defaults]
            return _remembered(_merged, tuple(parts), lambda: merge(defaults, repo))
        except pickle.PicklingError:  # a launcher's class, in some of the processes that it starts
            return merge(defaults, repo)


def _path(default: ResultDefault) -> str:
    assert default.config_path is not None
    return default.config_path


def _remembered(known: dict[Any, bytes], key: Any, make: Callable[[], T]) -> T:
    """What was made for a key before, as an object of its own."""
    if (pickled := known.get(key)) is None:
        if len(known) >= MOST:
            known.clear()
        pickled = known[key] = pickle.dumps(make())
    made: T = pickle.loads(pickled)
    return made
