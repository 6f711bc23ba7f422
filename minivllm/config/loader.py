"""Hydra's loader of configurations for processes that compose many: what two of them have in common
is read and merged once.

It extends classes that Hydra keeps to itself, since the public ones have no place for this: of 223
ms that Hydra took for a composition of this project's options (processor time, two cores), 80 were
left. The source of option files (`option_files.py`), which is a plug-in, could save the parsing
alone, a third; lists of defaults and merging take the rest. Sweepers use it; a process that
composes once gains nothing by it.

What is remembered goes by the content of option files, never by their names or times: a file that
changes is read again.
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
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from minivllm.config.option_files import SCHEME

T = TypeVar("T")
Key = tuple[str, str, str, object]

MOST = 1 << 12  # files, and configurations, that are remembered

_read: dict[Any, bytes] = {}  # pickled, because unpickling is a tenth of copying and of parsing
_placed: dict[Any, bytes] = {}
_merged: dict[Any, bytes] = {}
_begun: dict[Any, bytes] = {}  # what lists of defaults begin with that go on differently
_last: list[Any] = []  # the list that was merged before
_stored: dict[int, object] = {}  # options of Hydra's store by their id, which none gets again
# Whether an installed package, whose files do not change, has an option file or a group.
_packaged: dict[tuple[str, str, ObjectType | None], bool] = {}
PACKAGE = "pkg"
HAS_DEFAULTS = "HYDRA_REMOVE_TOP_LEVEL_DEFAULTS"  # a flag of Hydra's


def remembering(loader: ConfigLoader) -> OptionLoader:
    """A loader of the same configurations that remembers."""
    return OptionLoader(loader.get_search_path())


class OptionRepository(ConfigRepository):
    """The option files of a search path, each parsed once in a process."""

    _keys: dict[str, Key | None] | None = None  # of one configuration, for which Hydra copies this

    def __deepcopy__(self, memo: dict[int, Any]) -> OptionRepository:
        """A copy whose sources can be replaced, which is all that Hydra does with it."""
        copied = copy.copy(self)
        copied._keys = {}
        return copied

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        """Look for option files in other places; see Hydra's class."""
        super().initialize_sources(config_search_path)
        if self._keys:
            self._keys = {}

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
        if self._keys is None:
            return self._key(config_path)
        if config_path not in self._keys:
            self._keys[config_path] = self._key(config_path)
        return self._keys[config_path]

    def _key(self, config_path: str) -> Key | None:
        for source in self.sources:
            content: object = None  # of an installed package, it does not change
            name = source._normalize_file_name(config_path)
            if source.scheme() in ("file", SCHEME):
                try:
                    content = Path(source.path, name).read_bytes()
                except (FileNotFoundError, IsADirectoryError, NotADirectoryError, ValueError):
                    continue  # no path has a character 0
                except OSError:  # Hydra reports the error
                    return None
            elif not _has(source, config_path, ObjectType.CONFIG):
                continue
            elif source.scheme() != PACKAGE:
                node = ConfigStore.instance()._load(name)
                content = id(_stored.setdefault(id(node), node))
            return source.path, source.provider, config_path, content
        return None

    def _find_object_source(
        self, config_path: str, object_type: ObjectType | None
    ) -> ConfigSource | None:
        """The first source that has an option file or a group; see Hydra's class."""
        for source in self.sources:
            if _has(source, config_path, object_type):
                return source
        return None


def _has(source: ConfigSource, config_path: str, object_type: ObjectType | None) -> bool:
    """Whether a source has an option file or a group."""
    key = source.path, config_path, object_type
    if source.scheme() == PACKAGE and key in _packaged:
        return _packaged[key]
    look = source.is_config if object_type is ObjectType.CONFIG else source.is_group
    found = look(config_path)
    if source.scheme() == PACKAGE:
        _packaged[key] = found
    return found


class OptionLoader(ConfigLoaderImpl):
    """Hydra's loader, for which the same choices of options are merged once in a process."""

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        self.config_search_path = config_search_path
        self.repository = OptionRepository(config_search_path)

    def _compose_config_from_defaults_list(
        self, defaults: list[ResultDefault], repo: IConfigRepository
    ) -> DictConfig:
        """The configuration before the overrides of single knobs; see Hydra's class."""
        parts = tuple(_part(item, repo) for item in defaults)
        try:
            return _remembered(_merged, parts, lambda: self._merge(defaults, parts, repo))
        except (pickle.PicklingError, OmegaConfBaseException):  # Hydra names the file
            return super()._compose_config_from_defaults_list(defaults, repo)

    def _merge(
        self, defaults: list[ResultDefault], parts: tuple[Any, ...], repo: IConfigRepository
    ) -> DictConfig:
        """What Hydra makes of a list, from where it differs from one that was merged before."""
        differs = [one != other for one, other in zip(parts, _last, strict=False)]
        shared = differs.index(True) if True in differs else 0
        _last[:] = parts
        known = next((n for n in range(shared, 0, -1) if parts[:n] in _begun), 0)
        cfg = pickle.loads(_begun[parts[:known]]) if known else OmegaConf.create()
        for begin, end in ((known, shared), (shared, len(parts))):
            with flag_override(cfg, "no_deepcopy_set_nodes", True):
                loaded = (self._load_single_config(item, repo) for item in defaults[begin:end])
                cfg.merge_with(*(one.config for one in loaded))
            if known < end == shared:
                _keep(_begun, parts[:shared], cfg)
        _strip_defaults(cfg)
        return cfg

    def _load_single_config(self, default: ResultDefault, repo: IConfigRepository) -> ConfigResult:
        """An option file at its place in the configuration; see Hydra's class."""
        load = super()._load_single_config
        try:
            return _remembered(_placed, _part(default, repo), lambda: load(default, repo))
        except pickle.PicklingError:
            return load(default, repo)


def _strip_defaults(node: Any) -> None:
    """Remove the lists of defaults that option files had, as Hydra does."""
    if not isinstance(node, DictConfig) or node._is_missing() or node._is_none():
        return
    with flag_override(node, ["readonly", "struct"], False):
        if node._get_flag(HAS_DEFAULTS):
            node._set_flag(HAS_DEFAULTS, None)
            node.pop("defaults", None)
    for _, value in node.items_ex(resolve=False):
        _strip_defaults(value)


def _part(default: ResultDefault, repo: IConfigRepository) -> tuple[str, Key | None]:
    """What decides what an item of a list of defaults adds to a configuration."""
    files: Any = getattr(repo, "delegate", repo)
    assert default.config_path is not None
    return repr(default), files.key(default.config_path)


def _remembered(known: dict[Any, bytes], key: Any, make: Callable[[], T]) -> T:
    """What was made for a key before, as an object of its own."""
    if key not in known:
        _keep(known, key, make())
    made: T = pickle.loads(known[key])
    return made


def _keep(known: dict[Any, bytes], key: Any, made: object) -> None:
    if len(known) >= MOST:
        known.clear()
    known[key] = pickle.dumps(made)
