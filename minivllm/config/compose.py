"""From overrides to one checked, plain dictionary: the only way to configure anything.

The command line, sweeps, presets and `LLM(...)` all end in `finish()`. Nothing here imports torch;
Hydra is imported by what composes, since a worker only validates and builds.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm import redaction
from minivllm.attention.options import SCORING, require_invariant
from minivllm.cache.options import PagedOptions
from minivllm.cache.spec import require_unscored
from minivllm.config.groups import (
    GROUPS,
    LLM_GROUPS,
    OPTIONS,
    ROOT,
    SECTIONS,
    TARGETLESS,
    conf_dir,
    is_current,
)
from minivllm.config.moved import present, with_targets
from minivllm.config.options import RootOptions
from minivllm.config.overrides import given_knobs, quoted
from minivllm.errors import BadInput
from minivllm.extras.speculative.options import NOT_SPECULATING, DraftOptions, require_compatible
from minivllm.parallel.options import OWN_ENGINE, require_prefixes, require_tensor
from minivllm.platform.options import knobs_of, make_options, plain
from minivllm.platform.plug_ins import arguments_of, constructor, names_class
from minivllm.platform.untrusted import place

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from minivllm.cache.eviction.policies import Eviction

__all__ = [
    "GROUPS",
    "OPTIONS",
    "TARGETLESS",
    "build",
    "compose",
    "conf_dir",
    "finish",
    "load",
    "validate",
]

BENCH, CAPACITY = "minivllm.tasks.bench.run", "minivllm.tasks.capacity.run"
SERVE = "minivllm.tasks.serve.run"
# Tasks whose decoding parameters a checkpoint may decide, where the user sets none.
ANSWERING = (
    "minivllm.tasks.chat.run",
    "minivllm.tasks.generate.run",
    SERVE,
)
_composing = threading.RLock()  # Hydra's state


def compose(
    overrides: Sequence[str] = (), config_dir: str | Path | None = None, root: str = ROOT
) -> dict[str, Any]:
    """Compose, resolve and check a configuration from Python.

    Args:
        overrides: as on the command line, e.g. ["model=tiny", "cache.block_size=32"].
        config_dir: a further folder of option files, as `--config-dir`.
        root: LLM_ROOT leaves out what an engine alone does not have: the groups beside LLM_GROUPS,
            presets, and the plain settings.

    Returns:
        The resolved configuration: each group a dictionary with `_target_` and its knobs, the plain
        settings, and `choices`, the name of the option chosen in each group; where values came from
        the environment also `as_written`, see `minivllm.config.interpolation`.

    Raises:
        BadInput: an override or a value is wrong.
    """
    try:
        loaded = load(overrides, config_dir, root)
    except Exception as error:
        from minivllm.config.explain import explain, is_config_error

        if not is_config_error(error):
            raise
        raise explain(error, overrides, lambda chosen: load(chosen, config_dir, root)) from error
    return finish(loaded, groups=GROUPS if root == ROOT else LLM_GROUPS)


def load(
    overrides: Sequence[str], config_dir: str | Path | None = None, root: str = ROOT
) -> DictConfig:
    """Compose alone, with Hydra's own node; whatever Hydra raises comes through."""
    from hydra import compose as hydra_compose

    extra = [] if config_dir is None else [_search_path(config_dir)]
    with _hydra():
        return hydra_compose(root, [*extra, *overrides], return_hydra_config=True)


def _search_path(config_dir: str | Path) -> str:
    """The override that adds a folder of option files."""
    from minivllm.config.option_files import SCHEME

    folder = place(config_dir, f"config directory {str(config_dir)!r}").resolve()
    if not folder.is_dir():
        raise BadInput(f"config directory {str(config_dir)!r} not found")
    return f"hydra.searchpath=[{quoted(f'{SCHEME}://{folder}')}]"


@contextlib.contextmanager
def _hydra() -> Iterator[None]:
    """Hydra's compose API, also from within a Hydra application, whose own state is put back
    afterwards.

    That state is the process's, so one thread composes at a time.
    """
    with _composing, _cleared():
        yield


@contextlib.contextmanager
def _cleared() -> Iterator[None]:
    """Hydra's state as in a fresh process, put back afterwards."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    from minivllm.config import option_files

    option_files.register()
    shared, config = GlobalHydra.instance(), HydraConfig.instance()
    running, cfg = shared.hydra, config.cfg
    shared.clear()
    try:
        with initialize_config_dir(str(conf_dir()), job_name="minivllm", version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = running
        HydraConfig.instance().cfg = cfg


def finish(
    cfg: DictConfig, choices: Mapping[str, Any] | None = None, groups: Iterable[str] = GROUPS
) -> dict[str, Any]:
    """Resolve what Hydra composed into plain data, check it and fill in defaults.

    Args:
        cfg: the composed configuration, with or without Hydra's own node.
        choices: group -> option; read from Hydra's node where not given.
        groups: that it must have; GROUPS, or LLM_GROUPS without the sections.

    Raises:
        BadInput: a value is missing or wrong.
    """
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from minivllm.config import interpolation

    if choices is None:
        choices = (
            OmegaConf.select(cfg, "hydra.runtime.choices") or HydraConfig.get().runtime.choices
        )
        for group in sorted({*groups} & {*cfg} - {*choices}):  # Hydra merged a list of options
            from minivllm.config.explain import several

            raise several(group)
    chosen = {
        str(k): None if v is None else str(v) for k, v in choices.items() if "/" not in str(k)
    }
    names = {group: chosen[group] for group in [*GROUPS, *chosen] if group in chosen}
    try:
        with _without_hydra(cfg):
            plain, written = interpolation.resolve(cfg)
    except OmegaConfBaseException as error:
        from minivllm.config.explain import omegaconf_line

        raise BadInput(omegaconf_line(error)) from error
    finished = {str(key): value for key, value in plain.items()}
    if written:
        finished[redaction.AS_WRITTEN] = written
    redaction.learn(finished)  # before anything of it is printed
    checked = validate(finished, names, groups)
    if "task" in checked and checked["task"].get("_target_") in ANSWERING:
        overrides = OmegaConf.select(cfg, "hydra.overrides.task")
        if overrides is None and HydraConfig.initialized():
            overrides = HydraConfig.get().overrides.task
        checked["decoding_given"] = given_knobs("decoding", overrides or ())
    return checked


@contextlib.contextmanager
def _without_hydra(cfg: DictConfig) -> Iterator[None]:
    """While it is open, `cfg` lacks Hydra's own node. OmegaConf's masked copy takes longer than
    everything else that is done to a configuration."""
    content: dict[Any, Any] = cfg.__dict__["_content"]
    node = content.pop("hydra", None)
    try:
        yield
    finally:
        if node is not None:
            content["hydra"] = node


# ---- validation


def validate(
    config: dict[str, Any], choices: Mapping[str, str | None], required: Iterable[str] = GROUPS
) -> dict[str, Any]:
    """Check a plain configuration against the option dataclasses and fill in defaults.

    Options whose `_target_` is not in OPTIONS are a user's own and pass as they are.

    Args:
        config: the configuration.
        choices: group -> option.
        required: the groups that it must have; with a task it has sections of settings, too.

    Raises:
        BadInput: names the key, the group and the nearest valid name.
    """
    if not all(map(is_current, config.values())):
        config = with_targets(config, present)  # classes may have moved
    groups = {key: value for key, value in config.items() if key in GROUPS or key in choices}
    apart = ("choices", redaction.AS_WRITTEN, *SECTIONS)
    rest = {key: value for key, value in config.items() if key not in groups and key not in apart}
    checked: dict[str, Any] = {}
    for group in required:
        if not isinstance(groups.get(group), dict):
            raise BadInput(
                f"{group}={groups.get(group)!r}: choose an option, e.g. "
                f"{group}={_some_option(group)}"
            )
    for group, node in groups.items():
        if group == "speculative":
            node = _with_checked_draft(node)
        checked[group] = _check_group(group, node, choices.get(group))
    if "task" in checked:
        _require_fitting_task(checked, choices)
    cache = checked["cache"]  # what a class of the user's own keeps is not known
    caching = cache.get("prefix_caching") or not cache["_target_"].startswith("minivllm.")
    require_prefixes(checked["parallel"], bool(caching))
    require_tensor(checked)
    attention = str(checked["attention"]["_target_"])
    require_invariant(attention, checked["runtime"]["determinism"])
    eviction = _eviction(cache)
    if attention in OPTIONS and attention not in SCORING:  # a user's own backend says so itself
        require_unscored(str(choices.get("attention")), eviction)
    if checked["speculative"]["_target_"] != NOT_SPECULATING:
        require_compatible(
            str(choices.get("speculative")),
            cache,
            checked["decoding"],
            checked["runtime"]["overlap"],
        )
    root = _root_settings(rest)
    sections = {
        name: plain(make_options(TARGETLESS[name], config.get(name, {}), name, name))
        for name in SECTIONS
        if "task" in checked
    }
    written = {key: config[key] for key in (redaction.AS_WRITTEN,) if key in config}
    return {**checked, **root, **sections, "choices": dict(choices), **written}


def _root_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings outside every group and section, checked."""
    known = [*GROUPS, "preset", *(item.name for item in fields(RootOptions)), *SECTIONS]
    root = plain(make_options(RootOptions, settings, "", None, known))
    for key in ("runs_dir", "reports_dir"):
        root[key] = os.path.expanduser(root[key])  # not every shell does so behind an equals sign
        folder = place(root[key] or ".", f"{key}={root[key]}")
        # false where it may not be looked into
        if any(map(os.path.isfile, (folder, *folder.parents))):
            raise BadInput(f"{key}={folder} is, or is below, a file; give a folder")
    return root


def _eviction(cache: Mapping[str, Any]) -> Eviction | None:
    """What a cache evicts by, where cache and policy are ours; others are imported by the worker.
    Raises BadInput, see `make_eviction`."""
    if OPTIONS.get(cache["_target_"]) is not PagedOptions or names_class(cache["eviction"]):
        return None
    if cache["eviction"] == "none":
        return None
    from minivllm.cache.eviction.policies import make_eviction

    return make_eviction(PagedOptions(**knobs_of(cache)))


def _require_fitting_task(checked: Mapping[str, Any], choices: Mapping[str, str | None]) -> None:
    """Raise BadInput for what a task would ignore. A task of the user's own may measure."""
    target, task = checked["task"].get("_target_"), choices.get("task")
    own = target in OPTIONS
    if checked["runtime"]["profile"] and own and target != BENCH:
        raise BadInput(
            "runtime.profile=true is for task=bench, whose measurement it traces: leave it out "
            f"with task={task}"
        )
    if checked["measure"]["events"] and own and target not in (BENCH, CAPACITY):
        raise BadInput(
            "measure.events=true is for task=bench, whose steps it records: leave it out with "
            f"task={task}"
        )
    replicas = checked["parallel"]["replicas"]
    if replicas > 1 and own and target not in (BENCH, CAPACITY, SERVE):
        raise BadInput(
            f"parallel.replicas={replicas} is for task=bench, task=capacity and task=serve: leave "
            f"it out with task={task}"
        )
    if target in ANSWERING and checked["engine"]["_target_"] != OWN_ENGINE:
        raise BadInput(
            f"engine={choices.get('engine')} is for benchmarks: task={task} answers with "
            "engine=minivllm"
        )


def _check_group(group: str, node: Any, choice: str | None) -> Any:
    if group not in GROUPS and group not in TARGETLESS:
        return node  # a group of the user's own, from a folder of theirs
    owner = f"{group}={choice}" if choice else group
    if group in TARGETLESS:
        return plain(make_options(TARGETLESS[group], node, group, owner))
    target = node.get("_target_")
    if not isinstance(target, str) or "." not in target:
        raise BadInput(
            f"{group}._target_={target!r}: {owner} must name its class, e.g. my_package.MyClass"
        )
    if target not in OPTIONS:
        return dict(node)
    return _checked(node, group, owner)


def _checked(node: Mapping[str, Any], path: str, owner: str) -> dict[str, Any]:
    """A node of one of minivllm's own options, with its defaults."""
    target = str(node["_target_"])
    options: Any = make_options(OPTIONS[target], knobs_of(node), path, owner)
    return {"_target_": target, **plain(options)}


def _with_checked_draft(speculative: Mapping[str, Any]) -> dict[str, Any]:
    """The node of `speculative`, whose drafting model is one of other groups' options."""
    checked = dict(speculative)
    if OPTIONS.get(str(checked.get("_target_"))) is not DraftOptions:
        return checked
    for group in ("model", "quant", "pruning"):
        node = checked.get(group)
        if isinstance(node, str):
            raise BadInput(
                f"speculative.{group}={node}: choose an option with its group, as "
                f"{group}@speculative.{group}={node}"
            )
        if isinstance(node, Mapping) and str(node.get("_target_")) in OPTIONS:
            path = f"speculative.{group}"
            checked[group] = _checked(node, path, path)
    return checked


def _some_option(group: str) -> str:
    return next((path.stem for path in sorted((conf_dir() / group).glob("*.yaml"))), "...")


# ---- building


def build(
    node: Mapping[str, Any], offered: Mapping[str, Any] | None = None, /, **runtime: Any
) -> Any:
    """Import the class (or function) that an option names in `_target_` and call it with its knobs.

    One of minivllm's own that needs more than its knobs takes them as one object, `options`.

    Args:
        node: one group of a resolved configuration.
        offered: arguments that it is given if it takes them, e.g. a callback for progress.
        runtime: arguments that are not configuration, e.g. the device.

    Raises:
        BadInput: there is no such class, or it does not take these knobs.
    """
    target, knobs = str(node.get("_target_")), knobs_of(node)
    if target in OPTIONS and "options" in arguments_of(target):
        cls = OPTIONS[target]
        knobs = {"options": make_options(cls, knobs, getattr(cls, "group", ""), target)}
    more = offered or {}
    factory, taken = constructor(target, [*knobs], [*more], [*runtime])
    return factory(**{**{name: more[name] for name in taken}, **knobs, **runtime})
