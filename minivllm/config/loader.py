"""Hydra's loader of configurations for processes that compose many: what two of them have in common
is read and merged once.

What is remembered goes by the content of option files, never by their names or times: a file that
changes is read anew.
"""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository, IConfigRepository
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig

T = TypeVar("T")
Key = tuple[str, str, str, object]

MOST = 1 << 12  # files, and configurations, that are remembered

_read: dict[Any, bytes] = {}  # pickled, because unpickling is a tenth of copying and of parsing
_merged: dict[Any, bytes] = {}
_stored: dict[int, object] = {}  # options of Hydra's store by their id, which none gets again
# Whether an installed package, whose files do not change, has an option file or a group.
_packaged: dict[tuple[str, str, ObjectType | None], bool] = {}
PACKAGE = "pkg"


def remembering(loader: ConfigLoader) -> OptionLoader:
    """A loader of the same configurations that remembers."""
    return OptionLoader(loader.get_search_path())


class OptionRepository(ConfigRepository):
    """The option files of a search path, each parsed once in a process."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OptionRepository:
        """A copy whose sources can be replaced, which is all that Hydra does with it."""
        return copy.copy(self)

    def load_config(self, config_path: str) -> ConfigResult | None:
        """One option file; see Hydra's class."""
        load = super().load_config
        if (key := self.key(config_path)) is None:
            return load(config_path)
        try:
            return _remembered(_read, key, lambda: load(config_path))
        except pickle.PicklingError:  # a launcher's class, in some of the processes it starts
            return load(config_path)

    def key(self, config_path: str) -> Key | None:
        """What decides whether an option file is the one that was read; None if there is none, or
        it cannot be read."""
        if (source := self._find_object_source(config_path, ObjectType.CONFIG)) is None:
            return None
        content: object = None  # of an installed package, it does not change
        name = source._normalize_file_name(config_path)
        if source.scheme() == "file":
            try:
                content = Path(source.path, name).read_bytes()
            except OSError:  # Hydra reports the error
                return None
        elif source.scheme() != PACKAGE:
            node = ConfigStore.instance()._load(name)
            content = id(_stored.setdefault(id(node), node))
        return source.path, source.provider, config_path, content

    def _find_object_source(
        self, config_path: str, object_type: ObjectType | None
    ) -> ConfigSource | None:
        """The first source that has an option file or a group; see Hydra's class."""
        is_there = operator.methodcaller(
            "is_config" if object_type is ObjectType.CONFIG else "is_group", config_path
        )
        for source in self.sources:
            if source.scheme() != PACKAGE:
                found = is_there(source)
            elif (found := _packaged.get(key := (source.path, config_path, object_type))) is None:
                found = _packaged[key] = is_there(source)
            if found:
                return source
        return None


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
        files: Any = getattr(repo, "delegate", repo)
        parts = tuple((repr(item), files.key(_path(item))) for item in defaults)
        try:
            return _remembered(_merged, parts, lambda: merge(defaults, repo))
        except pickle.PicklingError:
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
