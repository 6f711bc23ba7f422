"""A user's own classes are checked before anything waits for a device: imported, and their knobs
held against their types; of an engine's it is found out what it supports.

Such a class may need torch, which the process that plans does without, so a child process looks at
them.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from types import UnionType
from typing import Any, Union, get_args, get_origin

from minivllm.config.groups import GROUPS, OPTIONS
from minivllm.errors import BadInput, first_line, last_frame, nearest
from minivllm.platform.options import convert
from minivllm.platform.plug_ins import locate, names_class
from minivllm.platform.processes.children import module_path
from minivllm.platform.support import EngineOptions, Support

ANSWER = "minivllm plug-ins: "  # begins the line with the answer: what is imported may print, too
SECONDS = 120.0  # for importing all of them
# knobs of other types are the class's own matter
KINDS = frozenset((int, float, str, bool, type(None)))
# the type of an argument without an annotation, by that of its default
BY_DEFAULT: dict[type, Any] = {
    bool: bool | None,
    int: int | float | None,
    float: float | None,
    str: str | bool | None,  # as of a knob that is "auto" or a switch
}
Node = Mapping[str, Any]

# The problem, or None, of classes that were looked at: their nodes as JSON, and where modules lie.
_known: dict[tuple[str, str], str | None] = {}
# What engines' classes declare, by their names and where modules lie.
_declared: dict[tuple[str, str], Support | str | None] = {}


def check(settings: Mapping[str, Any]) -> None:
    """Check every class that is none of minivllm's own: those of a configuration's groups and
    knobs, and the studies.

    Raises:
        BadInput: the class cannot be imported, or a knob is none of its arguments or has another
            type.
    """
    if (nodes := _nodes(settings)) is not None and (problem := _problem(nodes, module_path())):
        raise BadInput(problem)


def declared(target: str) -> Support | str | None:
    """What the class of an engine declares that it supports (`declaration`), without importing it
    into this process.

    Raises:
        BadInput: see `check`.
    """
    if target.rpartition(".")[0] in sys.modules:  # as where it is built
        return declaration(locate(target))
    place = target, module_path()
    if place not in _declared:
        check({"engine": {"_target_": target}})
    return _declared.get(place)


def is_looked_up(target: str) -> bool:
    """Whether `declared` starts no process for a class."""
    place = target, module_path()
    return target.rpartition(".")[0] in sys.modules or place in _declared


def declaration(factory: Any) -> Support | str | None:
    """What a class declares as its `support`, or inherits: that of the nearest of its bases that
    has one. Where that is one of the project's engines, whose options declare it, its `_target_`.
    None: it supports no knob of other groups.

    Raises:
        BadInput: `support` is something else.
    """
    for base in getattr(factory, "__mro__", (factory,)):
        if (support := vars(base).get("support")) is not None:
            if not isinstance(support, Support):
                raise BadInput(
                    f"{base.__module__}.{base.__qualname__}.support must be a "
                    "minivllm.platform.support.Support"
                )
            return support
        name = f"{base.__module__}.{base.__qualname__}"
        if issubclass(OPTIONS.get(name, object), EngineOptions):
            return name
    return None


def look_at(configurations: Iterable[Mapping[str, Any]]) -> None:
    """Look at the classes of several configurations in one process, so that `check` of each starts
    none. Where that process does not answer, each has a process of its own."""
    path = module_path()
    named = dict.fromkeys(filter(None, map(_nodes, configurations)))
    unknown = [nodes for nodes in named if (nodes, path) not in _known]
    if len(unknown) > 1 and isinstance(answers := _answers(unknown, path), list):
        _known.update(
            ((nodes, path), answer) for nodes, answer in zip(unknown, answers, strict=True)
        )


def _nodes(settings: Mapping[str, Any]) -> str | None:
    """The nodes of a configuration that name a user's class, as JSON of nodes by key; None where it
    has none."""
    nodes = {group: node for group, node in settings.items() if group in GROUPS and _is_users(node)}
    nodes |= studies(settings)
    nodes |= _in_knobs(settings)
    return json.dumps(nodes, default=str) if nodes else None


def studies(settings: Mapping[str, Any]) -> dict[str, Node]:
    """The studies of a report that a resolved configuration adds, by the keys of their knobs."""
    named = (settings.get("report") or {}).get("studies") or {}
    return {f"report.studies.{name}": node for name, node in named.items()}


def _in_knobs(settings: Mapping[str, Any]) -> dict[str, Node]:
    """The user's classes that knobs of groups name, by the knobs' keys: as a value, or in a list or
    a dictionary."""
    nodes: dict[str, Node] = {}
    for group in filter(settings.__contains__, GROUPS):
        for name, value in settings[group].items():
            key = f"{group}.{name}"
            if isinstance(value, list):
                nodes |= {f"{key}[{i}]": node for i, node in enumerate(value)}
            elif names_class(value):
                nodes[key] = value
            elif isinstance(value, Mapping):
                nodes |= {f"{key}.{part}": node for part, node in value.items()}
    return {key: node for key, node in nodes.items() if names_class(node) and _is_users(node)}


def _is_users(node: Node) -> bool:
    target = str(node.get("_target_", ""))
    return "." in target and target not in OPTIONS


def _problem(nodes: str, path: str) -> str | None:
    """The first thing that is wrong with these nodes; `path` is where their modules lie."""
    if (nodes, path) not in _known:
        answers = _answers([nodes], path)
        if isinstance(answers, str):
            named = json.loads(nodes).items()
            names = ", ".join(f"{key}: {node['_target_']}" for key, node in named)
            answers = [f"{names}: {answers}"]
        (_known[nodes, path],) = answers
    return _known[nodes, path]


def _answers(unknown: Sequence[str], path: str) -> list[str | None] | str:
    """What another process finds wrong with each of several nodes, or why it found nothing out.
    What it finds engines to support is kept."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=f"[{','.join(unknown)}]",
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        return f"importing took more than {SECONDS:g} s"
    lines = [
        line.removeprefix(ANSWER) for line in done.stdout.splitlines() if line.startswith(ANSWER)
    ]
    if done.returncode or not lines:
        last_line = (done.stderr.strip() or "nothing").splitlines()[-1]
        return f"importing ended the process with exit code {done.returncode}: {last_line}"
    problems: list[str | None]
    problems, supported = json.loads(lines[-1])
    for target, found in supported.items():
        support = Support.from_plain(found) if isinstance(found, dict) else found
        _declared[target, path] = support
    return problems


def problem_of(group: str, node: Node) -> str | None:
    """What is wrong with a group's class or knobs, as one line; None where nothing is."""
    target = str(node["_target_"])
    try:
        factory = locate(target)
        parameters = inspect.signature(factory).parameters
        if group == "engine":
            declaration(factory)
    except BadInput as error:
        return f"{group}: {error}"
    except Exception as error:  # a user's module may raise anything
        return (
            f"{group}: importing {target} raises {type(error).__name__}: {first_line(error)} "
            f"({last_frame(error)})"
        )
    hints = _hints(factory, parameters)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name, value in node.items():
        if name == "_target_":
            continue
        if name not in parameters and not open_ended:
            return (
                f"{group}.{name}: {target} takes no such argument; {nearest(name, [*parameters])}"
            )
        try:
            if name in hints:
                convert(value, hints[name])
        except TypeError as error:
            return f"{group}.{name}={value!r} must be {error}, says {target}"
    return None


def _hints(
    factory: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]
) -> dict[str, Any]:
    """The plain types of its arguments: the annotation, or without one the default's type or null.

    Other types, annotations that cannot be read, and arguments with neither are left out.
    """
    names = vars(sys.modules.get(factory.__module__, object))
    hints = {}
    for name, parameter in parameters.items():
        hint = parameter.annotation
        if hint is parameter.empty:
            hint = BY_DEFAULT.get(type(parameter.default), hint)
        with suppress(Exception):  # a name that exists for type checkers alone
            hint = eval(hint, dict(names)) if isinstance(hint, str) else hint
            if {*_parts(hint)} <= KINDS:
                hints[name] = hint
    return hints


def _parts(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a type: itself, or those of a union."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _main() -> None:
    problems: list[str | None] = []
    supported: dict[str, Any] = {}
    for nodes in json.load(sys.stdin):
        found = (problem_of(key, node) for key, node in nodes.items())
        problems.append(next(filter(None, found), None))
        if problems[-1] is None and "engine" in nodes:
            target = str(nodes["engine"]["_target_"])
            support = declaration(locate(target))
            supported[target] = asdict(support) if isinstance(support, Support) else support
    print("\n" + ANSWER + json.dumps([problems, supported]))


if __name__ == "__main__":
    _main()
