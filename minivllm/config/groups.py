"""The config groups and sections, the option dataclass of each, found in the `options.py` of its
room, and the view of a configuration that has them as objects.

A configuration is a plain dictionary where it is written, sent to another process, masked or read
from a record. Code that runs on a validated one in the same process reads it through `Config`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from minivllm.config.options import RootOptions, RuntimeOptions
from minivllm.platform.options import knobs_of, make_options

GROUPS: dict[str, str] = {
    "task": "what to do",
    "model": "which model; model=hf model.path=... takes any checkpoint folder or hub id",
    "quant": "how weights are stored",
    "pruning": "what of the model is left out",
    "attention": "attention kernel",
    "batching": "which requests share a step",
    "cache": "where keys and values are kept",
    "decoding": "how tokens are chosen",
    "speculative": "which tokens are guessed ahead and verified together",
    "vision": "images of prompts, for models that take them",
    "workload": "what is asked",
    "arrival": "when it is asked",
    "engine": "what is measured",
    "runtime": "device and threads",
    "parallel": "how many engines and devices serve together",
    "measure": "repeats, seeds, timeouts, SLOs, prices",
    "tracker": "who else is told of a record",
}
# The names of the root configurations, and the groups of the second.
ROOT, LLM_ROOT = "config", "llm"
# These say which requests an engine gets and how it is measured; every engine is given them.
HARNESS = ("task", "workload", "arrival", "engine", "measure", "tracker")
LLM_GROUPS = tuple(group for group in GROUPS if group not in HARNESS)
SECTIONS = ("quality", "sweep", "report", "view")  # settings below a key of the root configuration


PACKAGE = Path(__file__).resolve().parents[1]
# Packages with the options of what has no class, or whose class lies in another one.
_PACKAGES = {
    "ablation": "experiments",
    "measure": "bench",
    "parallel": "parallel",
    "quality": "bench",
    "report": "report",
    "runtime": "config",
    "sweep": "experiments",
    "view": "tasks",
    "vision": "extras.vision",
    **dict.fromkeys(
        (
            f"minivllm.extras.scheduling.batching.{policy}"
            for policy in ("Dynamic", "Sequential", "Static")
        ),
        "engine",
    ),
    "minivllm.tasks.serve.run": "serving",
}


def conf_dir() -> Path:
    """The folder of option files: inside the installed package, or beside it in a source
    checkout."""
    return next(
        c for c in (PACKAGE / "conf", PACKAGE.parent / "conf") if (c / "config.yaml").exists()
    )


class _Declared(Mapping[str, type]):
    """Option dataclasses by the names that they give. The `options.py` of one is imported when it
    is looked up; all are where the names are listed.

    Args:
        with_class: whether its names are `_target_`s, or groups and sections without one.
    """

    def __init__(self, with_class: bool) -> None:
        self.with_class = with_class

    def __getitem__(self, name: str) -> type:
        own = isinstance(name, str) and ("." in name) is self.with_class
        if (found := _declared(name) if own else None) is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return (name for name in _all_names() if ("." in name) is self.with_class)

    def __len__(self) -> int:
        return sum(1 for _ in self)


# By `_target_`. A class of the user's own is not here: it is checked against its constructor when
# it is built.
OPTIONS: Mapping[str, type] = _Declared(with_class=True)
# Groups and sections whose options are plain settings and name no class; `ablation` is there only
# where it is added.
TARGETLESS: Mapping[str, type] = _Declared(with_class=False)


def is_current(node: Any) -> bool:
    """Whether what a configuration has names no class, or one of minivllm's own as it is named
    today."""
    target = node.get("_target_") if isinstance(node, Mapping) else None
    return target is None or target in OPTIONS


@cache
def _declared(name: str) -> type | None:
    """The option dataclass of a name, in the nearest `options.py` of the packages above its
    class."""
    if package := _PACKAGES.get(name):
        return _names_in(f"{PACKAGE.name}.{package}.options").get(name)
    first, *packages = name.split(".")[:-1] or [""]
    while first == PACKAGE.name and packages:
        if PACKAGE.joinpath(*packages, "options.py").is_file():
            return _names_in(".".join((first, *packages, "options"))).get(name)
        packages.pop()
    return None


@cache
def _names_in(module: str) -> dict[str, type]:
    """The option dataclasses of a module by the names that they give."""
    classes = (cls for cls in vars(import_module(module)).values() if isinstance(cls, type))
    return {name: cls for cls in classes for name in vars(cls).get("names", ())}


@cache
def _all_names() -> tuple[str, ...]:
    """Every name that an `options.py` of the package gives a class."""
    files = sorted(PACKAGE.rglob("options.py"))
    modules = (
        ".".join((PACKAGE.name, *file.relative_to(PACKAGE).with_suffix("").parts)) for file in files
    )
    return tuple(name for module in modules for name in _names_in(module))


ROOT_SETTINGS = tuple(item.name for item in fields(RootOptions))  # outside every group


class Config(Mapping[str, Any]):
    """A validated configuration whose groups and sections are attributes: typed options, made once.

    The options of a user's own class, which has no dataclass, are an object with its knobs. As a
    mapping it is the plain dictionary.

    Args:
        tree: as `minivllm.config.compose.compose()` returns it. What is missing has its defaults.
    """

    runtime: RuntimeOptions

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.tree = dict(tree)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Config:
        """The view of a configuration, which may be one already."""
        return config if isinstance(config, Config) else cls(config)

    def __getitem__(self, key: str) -> Any:
        return self.tree[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)

    def __getattr__(self, name: str) -> Any:
        """The options of a group or section, or a setting outside all of them; kept once made."""
        node = {} if name == "tree" else self.tree.get(name, {})
        if (cls := TARGETLESS.get(name)) is not None:
            options: Any = make_options(cls, node, name, name)
        elif name in ROOT_SETTINGS:
            present = {key: self.tree[key] for key in ROOT_SETTINGS if key in self.tree}
            options = getattr(make_options(RootOptions, present, "", None), name)
        elif name not in self.tree:
            raise AttributeError(f"the configuration has no {name}")
        elif name not in GROUPS:
            options = node
        elif (cls := OPTIONS.get(str(node.get("_target_")))) is not None:
            options = make_options(cls, knobs_of(node), name, name)
        else:
            options = SimpleNamespace(**knobs_of(node))
        setattr(self, name, options)
        return options

    def target(self, group: str) -> str:
        """The `_target_` of a group."""
        return str(self.tree[group].get("_target_"))
