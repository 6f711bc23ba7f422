"""Classes that a configuration names in `_target_`: found and made. Torch-free."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection, Mapping
from typing import Any

from minivllm.errors import BadInput, nearest
from minivllm.platform.options import knobs_of


def names_class(node: Any) -> bool:
    """Whether a value is a dictionary whose `_target_` names a class with its package."""
    return isinstance(node, Mapping) and "." in str(node.get("_target_"))


def locate(target: str) -> Any:
    """The class or function that a `_target_` names. Raises BadInput if there is none."""
    module_name, _, attribute = target.rpartition(".")
    if not module_name:
        raise BadInput(
            f"_target_={target!r} must name a class with its package, e.g. my_package.MyClass"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise BadInput(
            f"cannot import {target} ({error}); is its package installed or on PYTHONPATH?"
        ) from error
    if not callable(factory := getattr(module, attribute, None)):
        public = [name for name in vars(module) if not name.startswith("_")]
        raise BadInput(f"{module_name} has no class {attribute}; {nearest(attribute, public)}")
    return factory


def arguments_of(target: str) -> dict[str, inspect.Parameter]:
    """The arguments by name that a class takes. Raises BadInput if it has no signature."""
    factory = locate(target)
    try:
        return dict(inspect.signature(factory).parameters)
    except (TypeError, ValueError) as error:
        raise BadInput(f"{target} cannot be built from options: {error}") from error


def constructor(
    target: str,
    knobs: Collection[str],
    offered: Collection[str] = (),
    runtime: Collection[str] = (),
) -> tuple[Any, list[str]]:
    """A class (or function) that takes arguments of these names, and which of `offered` it takes.

    Args:
        target: its dotted name.
        knobs: arguments from the configuration.
        offered: arguments that it need not take, e.g. a callback for progress.
        runtime: arguments that are not configuration, e.g. the device.

    Raises:
        BadInput: there is no such class, or it does not take these knobs.
    """
    parameters = arguments_of(target).values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = [p.name for p in named]
    for name in [] if open_ended else [*knobs, *runtime]:
        if name not in names:
            what = "is passed by minivllm" if name in runtime else "is set"
            raise BadInput(
                f"{name} {what}, but {target} takes no such argument; {nearest(name, names)}"
            )
    taken = [name for name in offered if name in names]
    given = {*taken, *knobs, *runtime}
    missing = [p.name for p in named if p.default is p.empty and p.name not in given]
    if missing:
        raise BadInput(
            f"{target} needs {', '.join(missing)}: set it in its option file or on the command line"
        )
    return locate(target), taken


def make_own(key: str, node: Mapping[str, Any], kind: Any, otherwise: str, **runtime: Any) -> Any:
    """An object of a class of the user's own, for a knob that takes one.

    Args:
        key: of the knob, for messages.
        node: what the knob is set to.
        kind: what the object must be; a protocol is checked by its names.
        otherwise: what another object is, for messages, and what to do about it.
        runtime: arguments that are not configuration; each counts before a knob of its name.

    Raises:
        BadInput: see `constructor`; or it is another kind of object.
    """
    knobs = knobs_of(node)
    factory, _ = constructor(str(node["_target_"]), [*knobs], runtime=[*runtime])
    instance = factory(**{**knobs, **runtime})  # as `build` does
    if not isinstance(instance, kind):
        raise BadInput(f"{key}: {node['_target_']} is {otherwise}")
    return instance
