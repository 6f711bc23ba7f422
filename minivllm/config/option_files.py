"""Option files as Hydra reads them here: an option that names one of minivllm's classes has all
knobs of that class, each with its default where the file sets nothing.

Hydra finds a source of option files by the scheme of a place in its search path. A plug-in gives
this one's to the places of a command of minivllm's; those of other programs stay as they are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from minivllm.config.groups import GROUPS, OPTIONS, ROOT, SECTIONS, TARGETLESS, conf_dir
from minivllm.config.moved import present
from minivllm.config.options import RootOptions
from minivllm.platform.options import filled

SCHEME = "options"
HEADER = 512  # characters of a file that may hold its package

_further: list[str] = []  # the folder of the command's --config-dir


def register() -> None:
    """Have Hydra read option files so."""
    for plugin in (OptionSource, OptionSearchPath):
        Plugins.instance().register(plugin)


def also_read(config_dir: str | None) -> None:
    """Have Hydra read those of the command's `--config-dir` so, too; None: there is none."""
    _further[:] = [] if config_dir is None else [os.path.abspath(config_dir)]


def option_class(group: str, values: Mapping[Any, Any]) -> type | None:
    """The option dataclass of what a file of a group holds; None where it has none, or starts from
    another option of its group, which has the knobs."""
    bases = values.get("defaults")
    if isinstance(bases, list) and any(isinstance(b, str) and b != "_self_" for b in bases):
        return None
    target = values.get("_target_")
    if target is None:
        return TARGETLESS.get(group)
    return OPTIONS.get(target) or OPTIONS.get(present(str(target)))


class OptionSource(ConfigSource):
    """A folder of option files."""

    @staticmethod
    def scheme() -> str:
        """The scheme of its places; see Hydra's class."""
        return SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        """One option file, with the defaults of its class; see Hydra's class."""
        path = self._path(self._normalize_file_name(config_path))
        if not os.path.isfile(path):
            raise ConfigLoadError(f"Config not found : {path}")
        with open(path, encoding="utf-8") as file:
            header = self._get_header_dict(file.read(HEADER))
            file.seek(0)
            config = OmegaConf.load(file)
        own_place = os.path.dirname(config_path).replace("/", ".")
        if isinstance(config, DictConfig) and header["package"] in (None, own_place):
            config = OmegaConf.create(_filled(config_path, config))
        return ConfigResult(self.provider, self.full_path(), config, header)

    def available(self) -> bool:
        """Whether the folder is there; see Hydra's class."""
        return self.is_group("")

    def is_group(self, config_path: str) -> bool:
        """Whether there is a folder of this name; see Hydra's class."""
        return os.path.isdir(self._path(config_path))

    def is_config(self, config_path: str) -> bool:
        """Whether there is a file of this name; see Hydra's class."""
        return os.path.isfile(self._path(self._normalize_file_name(config_path)))

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """The groups or options of a group; see Hydra's class."""
        inside = [*Path(self._path(config_path)).iterdir()]
        groups = {path.name for path in inside if path.is_dir()}
        options = {path.stem for path in inside if path.suffix == ".yaml"}
        if results_filter is None:
            return sorted(groups | options)
        return sorted(groups if results_filter is ObjectType.GROUP else options)

    def _path(self, name: str) -> str:
        return os.path.join(self.path, name)


def _filled(config_path: str, config: DictConfig) -> dict[str, Any]:
    """What a file holds, with the defaults of the knobs that it does not set."""
    values: Any = OmegaConf.to_container(config, resolve=False)
    if config_path == ROOT:
        sections = {name: filled(TARGETLESS[name], values.get(name, {})) for name in SECTIONS}
        return filled(RootOptions, values) | sections
    group = os.path.dirname(config_path)
    cls = option_class(group, values) if group in GROUPS else None
    if cls is None:
        return values
    above = _placed_before(values.get("defaults"))
    knobs = filled(cls, values)
    return {name: knob for name, knob in knobs.items() if name in values or name not in above}


def _placed_before(defaults: Any) -> set[str]:
    """Names at which a file's list of defaults places options of other groups, such as `quant` for
    `/quant@quant: int8`, before what the file itself holds, which would replace them."""
    names: set[str] = set()
    for entry in defaults or ():
        if entry == "_self_":
            break
        if isinstance(entry, Mapping):
            names |= {str(key).rpartition("@")[2] for key in entry}
    return names


class OptionSearchPath(SearchPathPlugin):
    """Option files of the project, and of a folder beside them, are read by `OptionSource`."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Give places of minivllm's the scheme; see Hydra's class."""
        ours = str(conf_dir())
        for element in search_path.get_path():
            if element.path == ours:
                element.path = f"{SCHEME}://{ours}"
                for folder in filter(os.path.isdir, _further):
                    search_path.append("command-line", f"{SCHEME}://{folder}")
                return
